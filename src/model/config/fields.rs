//! Reading keys of a JSON object one by one, with errors that name key, value and what is allowed.
//!
//! Invariant: no key is read by guess: a missing key, `null`, another type or a value out of range is an error.

#![forbid(unsafe_code)]

use std::cell::RefCell;
use std::fmt;
use std::ops::RangeInclusive;

use serde::Deserialize;
use serde::de::{Deserializer, Error as _, MapAccess, SeqAccess, Visitor};

use crate::error::{Result, bail};

/// A JSON value whose objects keep their order and have no key twice.
#[derive(Clone, Debug)]
pub(super) enum Json {
    Null,
    Bool(bool),
    Number(serde_json::Number),
    Text(String),
    List(Vec<Json>),
    Object(Object),
}

/// The keys and values of a JSON object, in the order of the file.
#[derive(Clone, Debug, Default)]
pub(super) struct Object(Vec<(String, Json)>);

impl Object {
    /// The value of `key`.
    pub(super) fn get(&self, key: &str) -> Option<&Json> {
        self.0.iter().find(|(k, _)| k == key).map(|(_, value)| value)
    }

    /// Whether `key` is there, with whatever value.
    pub(super) fn has(&self, key: &str) -> bool {
        self.get(key).is_some()
    }
}

/// An object whose keys are taken one by one.
pub(super) struct Fields<'a> {
    object: &'a Object,
    /// What stands before a key in messages: empty or such as `rope_scaling.`.
    prefix: &'static str,
    known: RefCell<Vec<&'static str>>,
}

impl<'a> Fields<'a> {
    pub(super) fn new(object: &'a Object, prefix: &'static str) -> Self {
        Self { object, prefix, known: RefCell::new(Vec::new()) }
    }

    /// A whole number within `range`.
    pub(super) fn count(&self, key: &'static str, range: RangeInclusive<usize>) -> Result<usize> {
        self.count_of(key, self.required(key)?, &range)
    }

    /// A whole number within `range`, or `None` if the key is absent or `null`.
    pub(super) fn optional_count(&self, key: &'static str, range: RangeInclusive<usize>) -> Result<Option<usize>> {
        self.optional(key).map(|value| self.count_of(key, value, &range)).transpose()
    }

    /// A list of whole numbers, each within `range`.
    pub(super) fn counts(&self, key: &'static str, range: RangeInclusive<usize>) -> Result<Vec<usize>> {
        let value = self.required(key)?;
        let Json::List(list) = value else { return self.wrong(key, value, "a list of whole numbers") };
        let mut counts = crate::alloc::with_capacity(key, list.len())?;
        for (i, value) in list.iter().enumerate() {
            counts.push(self.count_of(&format!("{key}[{i}]"), value, &range)?);
        }
        Ok(counts)
    }

    /// A finite number for which `is_possible` holds; `what` says which those are.
    pub(super) fn number(&self, key: &'static str, what: &str, is_possible: impl Fn(f64) -> bool) -> Result<f64> {
        let value = self.required(key)?;
        match value {
            Json::Number(number) => match number.as_f64().filter(|n| n.is_finite() && is_possible(*n)) {
                Some(number) => Ok(number),
                None => self.wrong(key, value, what),
            },
            _ => self.wrong(key, value, what),
        }
    }

    /// As [`Self::number`], for a constant that is used in float32: the condition must hold for the rounded value too.
    pub(super) fn number_f32(&self, key: &'static str, what: &str, is_possible: impl Fn(f32) -> bool) -> Result<f32> {
        let possible = |n: f64| (n as f32).is_finite() && is_possible(n as f32);
        self.number(key, what, possible).map(|n| n as f32)
    }

    /// Refuses any value but the text `expected`.
    pub(super) fn must_be_text(&self, key: &'static str, expected: &str) -> Result<()> {
        let value = self.required(key)?;
        match value {
            Json::Text(text) if text == expected => Ok(()),
            _ => self.wrong(key, value, &format!("{expected:?}, the only one DeepSeek-V4 has")),
        }
    }

    /// Refuses any value but the truth value `expected`.
    pub(super) fn must_be(&self, key: &'static str, expected: bool) -> Result<()> {
        let value = self.required(key)?;
        match value {
            Json::Bool(flag) if *flag == expected => Ok(()),
            _ => self.wrong(key, value, &format!("{expected}, as in every DeepSeek-V4 model")),
        }
    }

    /// As [`Self::must_be`], if the key is there and not `null`.
    pub(super) fn may_be(&self, key: &'static str, expected: bool) -> Result<()> {
        self.optional(key).map_or(Ok(()), |_| self.must_be(key, expected))
    }

    /// A text, or `None` if the key is absent or `null`.
    pub(super) fn optional_text(&self, key: &'static str) -> Result<Option<&'a str>> {
        match self.optional(key) {
            None => Ok(None),
            Some(Json::Text(text)) => Ok(Some(text)),
            Some(value) => self.wrong(key, value, "a text"),
        }
    }

    /// A nested object; `prefix` stands before its keys in messages.
    pub(super) fn object(&self, key: &'static str, prefix: &'static str) -> Result<Fields<'a>> {
        let value = self.required(key)?;
        match value {
            Json::Object(object) => Ok(Fields::new(object, prefix)),
            _ => self.wrong(key, value, "an object"),
        }
    }

    /// The value of `key`, if it is there and not `null`.
    pub(super) fn optional(&self, key: &'static str) -> Option<&'a Json> {
        self.known.borrow_mut().push(key);
        self.object.get(key).filter(|value| !matches!(value, Json::Null))
    }

    /// The value of `key`.
    pub(super) fn required(&self, key: &'static str) -> Result<&'a Json> {
        self.known.borrow_mut().push(key);
        match self.object.get(key) {
            Some(value) => Ok(value),
            None => bail!(Config, "{}{key} is missing", self.prefix),
        }
    }

    /// The error for a value that is not `expected`.
    pub(super) fn wrong<T>(&self, key: &str, value: &Json, expected: &str) -> Result<T> {
        bail!(Config, "{}{key} is {value}; it must be {expected}", self.prefix)
    }

    /// Logs the keys that nobody asked for, except those in `harmless`.
    pub(super) fn log_unknown(&self, harmless: &[&str]) {
        let known = self.known.borrow();
        let unknown: Vec<_> = self.object.0.iter().map(|(key, _)| key.as_str()).collect();
        let unknown: Vec<_> =
            unknown.into_iter().filter(|key| !known.contains(key) && !harmless.contains(key)).collect();
        if !unknown.is_empty() {
            tracing::info!(count = unknown.len(), keys = ?unknown, within = self.prefix, "unknown configuration keys are ignored");
        }
    }

    fn count_of(&self, key: &str, value: &Json, range: &RangeInclusive<usize>) -> Result<usize> {
        let number = match value {
            Json::Number(number) => number.as_u64().and_then(|n| usize::try_from(n).ok()),
            _ => None,
        };
        match number.filter(|n| range.contains(n)) {
            Some(number) => Ok(number),
            None if range.start() == range.end() => self.wrong(key, value, &range.start().to_string()),
            None => self.wrong(key, value, &format!("a whole number from {} to {}", range.start(), range.end())),
        }
    }
}

impl fmt::Display for Json {
    /// The value as it would be in the file, shortened.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        const LIMIT: usize = 60;
        match self {
            Self::Null => f.write_str("null"),
            Self::Bool(flag) => flag.fmt(f),
            Self::Number(number) => number.fmt(f),
            Self::Text(text) if text.chars().count() > LIMIT => {
                write!(f, "{:?}..", text.chars().take(LIMIT).collect::<String>())
            }
            Self::Text(text) => write!(f, "{text:?}"),
            Self::List(list) if list.len() > 8 => write!(f, "a list of {} values", list.len()),
            Self::List(list) => {
                f.write_str("[")?;
                for (i, value) in list.iter().enumerate() {
                    write!(f, "{}{value}", if i == 0 { "" } else { ", " })?;
                }
                f.write_str("]")
            }
            Self::Object(object) => write!(f, "an object of {} keys", object.0.len()),
        }
    }
}

impl<'de> Deserialize<'de> for Json {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct JsonVisitor;

        impl<'de> Visitor<'de> for JsonVisitor {
            type Value = Json;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a JSON value")
            }

            fn visit_unit<E>(self) -> Result<Json, E> {
                Ok(Json::Null)
            }

            fn visit_bool<E>(self, flag: bool) -> Result<Json, E> {
                Ok(Json::Bool(flag))
            }

            fn visit_i64<E>(self, number: i64) -> Result<Json, E> {
                Ok(Json::Number(number.into()))
            }

            fn visit_u64<E>(self, number: u64) -> Result<Json, E> {
                Ok(Json::Number(number.into()))
            }

            fn visit_f64<E: serde::de::Error>(self, number: f64) -> Result<Json, E> {
                serde_json::Number::from_f64(number)
                    .map(Json::Number)
                    .ok_or_else(|| E::custom("the number is not finite"))
            }

            fn visit_str<E>(self, text: &str) -> Result<Json, E> {
                Ok(Json::Text(text.to_owned()))
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Json, A::Error> {
                let mut list = Vec::new();
                while let Some(value) = seq.next_element()? {
                    list.push(value);
                }
                Ok(Json::List(list))
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Json, A::Error> {
                let mut object = Object::default();
                while let Some(key) = map.next_key::<String>()? {
                    if object.has(&key) {
                        return Err(A::Error::custom(format!("key {key:?} occurs twice")));
                    }
                    let value = map.next_value().map_err(|e| A::Error::custom(format!("at key {key:?}: {e}")))?;
                    object.0.push((key, value));
                }
                Ok(Json::Object(object))
            }
        }

        deserializer.deserialize_any(JsonVisitor)
    }
}
