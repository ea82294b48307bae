//! JSON as the official encoder sees it: Python's `json.loads` and `json.dumps`.
//!
//! Numbers keep their literal, so that a 30-digit id in a tool call is not rounded on its way
//! through a float, and output is spaced and ordered as the models were trained on: `", "`,
//! `": "`, insertion order, non-ASCII text as it is.

use std::collections::HashMap;

use crate::alloc;
use crate::error::{Error, ErrorKind, Result, bail, beginning};

/// Nesting beyond this is refused; it would be Python's recursion limit there.
const MAX_DEPTH: usize = 128;

/// Bytes that a value and its key take at most, with the tables they are in.
/// (`tests/tokenizer_memory.rs` measures it.)
const VALUE_COST: usize = 320;

/// A JSON value.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Json {
    Null,
    Bool(bool),
    /// As Python prints it: an integer of any length, or the shortest decimal of a float64.
    Number(String),
    String(String),
    Array(Vec<Json>),
    /// In insertion order; keys are unique.
    Object(Vec<(String, Json)>),
}

impl Json {
    /// Parses a complete JSON text.
    ///
    /// # Errors
    /// `Chat` with the byte offset, also for a key that an object has twice; `OutOfMemory`.
    pub(super) fn parse(text: &str) -> Result<Self> {
        Self::read(text, true)
    }

    /// As [`Json::parse`], but of a key that an object has twice the last value counts, as in Python: what a model
    /// wrote is not refused for that.
    pub(super) fn parse_as_python(text: &str) -> Result<Self> {
        Self::read(text, false)
    }

    fn read(text: &str, unique_keys: bool) -> Result<Self> {
        let structure = text.bytes().filter(|b| matches!(b, b'[' | b'{' | b',' | b':')).count();
        alloc::probe("JSON text", text.len().saturating_mul(4).saturating_add(structure.saturating_mul(VALUE_COST)))?;
        let mut reader = Reader { text, at: 0, unique_keys };
        let value = reader.value(0)?;
        reader.skip_space();
        if reader.at < text.len() {
            return reader.fail("text after the end of the JSON value");
        }
        Ok(value)
    }

    /// Member of an object.
    pub(super) fn get(&self, key: &str) -> Option<&Json> {
        let Self::Object(members) = self else { return None };
        members.iter().find(|(name, _)| name == key).map(|(_, value)| value)
    }

    pub(super) fn as_str(&self) -> Option<&str> {
        match self {
            Self::String(text) => Some(text),
            _ => None,
        }
    }

    /// What the value is, for messages.
    pub(super) fn kind(&self) -> &'static str {
        match self {
            Self::Null => "null",
            Self::Bool(_) => "a boolean",
            Self::Number(_) => "a number",
            Self::String(_) => "a string",
            Self::Array(_) => "an array",
            Self::Object(_) => "an object",
        }
    }

    /// Whether both are the same value, however it is written: objects have no order, and `1.0` is `1`. Integers are
    /// compared in all their digits.
    pub(super) fn is_same(&self, other: &Json) -> bool {
        match (self, other) {
            (Self::Number(a), Self::Number(b)) => a == b || (is_float(a) || is_float(b)) && as_f64(a) == as_f64(b),
            (Self::Array(a), Self::Array(b)) => a.len() == b.len() && a.iter().zip(b).all(|(a, b)| a.is_same(b)),
            (Self::Object(a), Self::Object(b)) => {
                let theirs: HashMap<&str, &Json> = b.iter().map(|(key, value)| (key.as_str(), value)).collect();
                a.len() == b.len()
                    && a.iter().all(|(key, value)| theirs.get(key.as_str()).is_some_and(|other| value.is_same(other)))
            }
            _ => self == other,
        }
    }

    /// `json.dumps(value, ensure_ascii=False)`.
    pub(super) fn dump(&self) -> String {
        let mut out = String::new();
        self.write(&mut out);
        out
    }

    fn write(&self, out: &mut String) {
        match self {
            Self::Null => out.push_str("null"),
            Self::Bool(true) => out.push_str("true"),
            Self::Bool(false) => out.push_str("false"),
            Self::Number(literal) => out.push_str(literal),
            Self::String(text) => write_string(text, out),
            Self::Array(items) => {
                out.push('[');
                for (index, item) in items.iter().enumerate() {
                    out.push_str(if index == 0 { "" } else { ", " });
                    item.write(out);
                }
                out.push(']');
            }
            Self::Object(members) => {
                out.push('{');
                for (index, (key, value)) in members.iter().enumerate() {
                    out.push_str(if index == 0 { "" } else { ", " });
                    write_string(key, out);
                    out.push_str(": ");
                    value.write(out);
                }
                out.push('}');
            }
        }
    }
}

/// Whether a number's literal is that of a float.
fn is_float(literal: &str) -> bool {
    literal.contains(['.', 'e', 'E'])
}

fn as_f64(literal: &str) -> Option<f64> {
    literal.parse().ok()
}

/// Appends a quoted JSON string, escaping only what must be.
pub(super) fn write_string(text: &str, out: &mut String) {
    out.push('"');
    write_string_body(text, out);
    out.push('"');
}

/// Appends the inside of a JSON string.
pub(super) fn write_string_body(text: &str, out: &mut String) {
    for c in text.chars() {
        match c {
            '"' => out.push_str("\\\""),
            '\\' => out.push_str("\\\\"),
            '\n' => out.push_str("\\n"),
            '\r' => out.push_str("\\r"),
            '\t' => out.push_str("\\t"),
            '\u{8}' => out.push_str("\\b"),
            '\u{c}' => out.push_str("\\f"),
            '\0'..='\u{1f}' => out.push_str(&format!("\\u{:04x}", u32::from(c))),
            _ => out.push(c),
        }
    }
}

/// Recursive descent over `text`; `at` is always a character boundary.
struct Reader<'a> {
    text: &'a str,
    at: usize,
    unique_keys: bool,
}

impl Reader<'_> {
    fn value(&mut self, depth: usize) -> Result<Json> {
        if depth > MAX_DEPTH {
            return self.fail("nested more than 128 deep");
        }
        self.skip_space();
        match self.peek() {
            Some(b'{') => self.object(depth),
            Some(b'[') => self.array(depth),
            Some(b'"') => self.string().map(Json::String),
            Some(b'-' | b'0'..=b'9') => self.number(),
            _ if self.take("true") => Ok(Json::Bool(true)),
            _ if self.take("false") => Ok(Json::Bool(false)),
            _ if self.take("null") => Ok(Json::Null),
            _ => self.fail("expected a JSON value"),
        }
    }

    fn object(&mut self, depth: usize) -> Result<Json> {
        let mut members: Vec<(String, Json)> = Vec::new();
        let mut places = HashMap::new();
        self.at += 1;
        self.skip_space();
        if self.take("}") {
            return Ok(Json::Object(members));
        }
        loop {
            self.skip_space();
            if self.peek() != Some(b'"') {
                return self.fail("expected a key");
            }
            let start = self.at;
            let key = self.string()?;
            if self.unique_keys && places.contains_key(&key) {
                self.at = start;
                return self.fail(&format!("the object has the key {:?} twice", beginning(&key, 100)));
            }
            self.skip_space();
            if !self.take(":") {
                return self.fail("expected ':'");
            }
            let value = self.value(depth + 1)?;
            // A repeated key keeps its first place and its last value, as in a Python dict.
            let place = *places.entry(key.clone()).or_insert(members.len());
            match members.get_mut(place) {
                Some(member) => member.1 = value,
                None => members.push((key, value)),
            }
            self.skip_space();
            if self.take("}") {
                return Ok(Json::Object(members));
            }
            if !self.take(",") {
                return self.fail("expected ',' or '}'");
            }
        }
    }

    fn array(&mut self, depth: usize) -> Result<Json> {
        let mut items = Vec::new();
        self.at += 1;
        self.skip_space();
        if self.take("]") {
            return Ok(Json::Array(items));
        }
        loop {
            items.push(self.value(depth + 1)?);
            self.skip_space();
            if self.take("]") {
                return Ok(Json::Array(items));
            }
            if !self.take(",") {
                return self.fail("expected ',' or ']'");
            }
        }
    }

    fn string(&mut self) -> Result<String> {
        let mut out = String::new();
        self.at += 1;
        loop {
            let rest = &self.text[self.at..];
            let Some(c) = rest.chars().next() else { return self.fail("a string has no end") };
            match c {
                '"' => {
                    self.at += 1;
                    return Ok(out);
                }
                '\\' => out.push(self.escape()?),
                '\0'..='\u{1f}' => return self.fail("a control character inside a string"),
                _ => {
                    out.push(c);
                    self.at += c.len_utf8();
                }
            }
        }
    }

    fn escape(&mut self) -> Result<char> {
        let escaped = self.text.as_bytes().get(self.at + 1).copied();
        let c = match escaped {
            Some(c @ (b'"' | b'\\' | b'/')) => char::from(c),
            Some(b'n') => '\n',
            Some(b'r') => '\r',
            Some(b't') => '\t',
            Some(b'b') => '\u{8}',
            Some(b'f') => '\u{c}',
            Some(b'u') => return self.unicode_escape(),
            _ => return self.fail("unknown escape"),
        };
        self.at += 2;
        Ok(c)
    }

    fn unicode_escape(&mut self) -> Result<char> {
        let Some(first) = self.hex(self.at) else { return self.fail("bad \\u escape") };
        let second = if (0xd800..0xdc00).contains(&first) { self.hex(self.at + 6) } else { None };
        let units = [first, second.unwrap_or(0)];
        let used = 1 + usize::from(second.is_some());
        match char::decode_utf16(units.into_iter().take(used)).next() {
            Some(Ok(c)) => {
                self.at += 6 * used;
                Ok(c)
            }
            _ => self.fail("half a surrogate pair"),
        }
    }

    /// The four digits of the `\uXXXX` at byte `at`.
    fn hex(&self, at: usize) -> Option<u16> {
        let escape = self.text.as_bytes().get(at..at + 6)?;
        let (start, digits) = escape.split_at(2);
        if start != b"\\u" || !digits.iter().all(u8::is_ascii_hexdigit) {
            return None;
        }
        u16::from_str_radix(std::str::from_utf8(digits).ok()?, 16).ok()
    }

    fn number(&mut self) -> Result<Json> {
        let start = self.at;
        self.take("-");
        if !self.take("0") && self.digits() == 0 {
            return self.fail("expected a digit");
        }
        let mut is_float = false;
        if self.take(".") {
            is_float = true;
            if self.digits() == 0 {
                return self.fail("expected a digit after the point");
            }
        }
        if self.take("e") || self.take("E") {
            is_float = true;
            if !self.take("+") {
                self.take("-");
            }
            if self.digits() == 0 {
                return self.fail("expected a digit in the exponent");
            }
        }
        let literal = &self.text[start..self.at];
        if !is_float {
            // Python's integer has no negative zero.
            return Ok(Json::Number(if literal == "-0" { "0" } else { literal }.to_owned()));
        }
        match literal.parse::<f64>() {
            Ok(value) if value.is_finite() => Ok(Json::Number(float_repr(value))),
            _ => self.fail("a number beyond float64"),
        }
    }

    fn digits(&mut self) -> usize {
        let rest = &self.text.as_bytes()[self.at..];
        let count = rest.iter().take_while(|byte| byte.is_ascii_digit()).count();
        self.at += count;
        count
    }

    fn peek(&self) -> Option<u8> {
        self.text.as_bytes().get(self.at).copied()
    }

    fn take(&mut self, token: &str) -> bool {
        let found = self.text[self.at..].starts_with(token);
        self.at += if found { token.len() } else { 0 };
        found
    }

    fn skip_space(&mut self) {
        let rest = &self.text.as_bytes()[self.at..];
        self.at += rest.iter().take_while(|b| matches!(b, b' ' | b'\t' | b'\r' | b'\n')).count();
    }

    fn fail<T>(&self, what: &str) -> Result<T> {
        bail!(Chat, "JSON byte {}: {what}", self.at)
    }
}

/// Python's `repr` of a float: shortest digits, an exponent below 1e-4 and from 1e16.
fn float_repr(value: f64) -> String {
    let shortest = format!("{value:e}");
    let (digits, exponent) = shortest.split_once('e').unwrap_or((&shortest, "0"));
    let exponent: i32 = exponent.parse().unwrap_or(0);
    if (-4..16).contains(&exponent) {
        let plain = format!("{value}");
        return if plain.contains('.') { plain } else { plain + ".0" };
    }
    let sign = if exponent < 0 { '-' } else { '+' };
    format!("{digits}e{sign}{:02}", exponent.unsigned_abs())
}

/// An error about a place in the messages: `messages[2].content: …`.
pub(super) fn fail<T>(place: &str, what: impl std::fmt::Display) -> Result<T> {
    Err(Error::new(ErrorKind::Chat, format!("{place}: {what}")))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn dumped(text: &str) -> String {
        Json::parse_as_python(text).unwrap().dump()
    }

    #[test]
    fn values_are_printed_as_python_prints_them() {
        for (text, printed) in [
            ("{\"a\":1,\"b\":[true,null,{}],\"a\":2}", "{\"a\": 2, \"b\": [true, null, {}]}"),
            (" [ ] ", "[]"),
            ("\"\\u00e9\\u4e2d\\ud83d\\ude00\\/\\b\\u001f\\u007f\"", "\"é中😀/\\b\\u001f\u{7f}\""),
            ("123456789012345678901234567890", "123456789012345678901234567890"),
            ("-0", "0"),
            ("-0.0", "-0.0"),
            ("1E5", "100000.0"),
            ("1e16", "1e+16"),
            ("1e15", "1000000000000000.0"),
            ("0.0001", "0.0001"),
            ("0.00001", "1e-05"),
            ("1.5e300", "1.5e+300"),
            ("3.0", "3.0"),
            ("0.1", "0.1"),
        ] {
            assert_eq!(dumped(text), printed);
        }
    }

    #[test]
    fn values_are_the_same_whatever_their_order_spacing_and_literals() {
        let same = |a: &str, b: &str| Json::parse(a).unwrap().is_same(&Json::parse(b).unwrap());
        for (a, b) in [
            ("{\"a\":[1,{\"b\":2,\"c\":3}]}", "{ \"a\" : [1.0, {\"c\": 3e0, \"b\": 2}] }"),
            ("\"\\u00e9\"", "\"é\""),
            ("-0.0", "0"),
        ] {
            assert!(same(a, b) && same(b, a), "{a} {b}");
        }
        for (a, b) in [
            ("{\"a\":1}", "{\"a\":1,\"b\":1}"),
            ("{\"a\":1}", "{\"b\":1}"),
            ("[1,2]", "[2,1]"),
            ("9007199254740993", "9007199254740992"),
            ("1", "\"1\""),
            ("0", "false"),
        ] {
            assert!(!same(a, b) && !same(b, a), "{a} {b}");
        }
    }

    #[test]
    fn what_is_not_json_is_refused_with_its_place() {
        for text in [
            "",
            "{",
            "[1,]",
            "{\"a\" 1}",
            "{a: 1}",
            "01",
            "1.",
            ".5",
            "-",
            "1e",
            "+1",
            "NaN",
            "\"",
            "\"\n\"",
            "\"\\x\"",
            "\"\\u12\"",
            "\"\\ud800\"",
            "\"\\ud800\\u0041\"",
            "tru",
            "1 2",
            "1e999",
            "'a'",
            "\"\\u+123\"",
            "\u{feff}1",
        ] {
            let e = Json::parse(text).unwrap_err();
            assert_eq!(e.kind(), ErrorKind::Chat);
            assert!(e.message().starts_with("JSON byte "), "{text:?}: {e}");
        }
        let twice = Json::parse("{\"a\": 1, \"b\": {\"c\": 1, \"c\": 1}}").unwrap_err();
        assert_eq!(twice.message(), "JSON byte 23: the object has the key \"c\" twice");
        let deep = "[".repeat(100_000);
        assert!(Json::parse(&deep).unwrap_err().message().contains("128"));
    }
}
