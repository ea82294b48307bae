//! Numbers on the command line, with words for what is wrong with one.

#![forbid(unsafe_code)]

/// A whole number of type `T`.
pub(crate) fn whole<T: TryFrom<u64>>(text: &str) -> Result<T, String> {
    let too_large = |_| format!("larger than {}", u64::MAX >> (64 - 8 * size_of::<T>()));
    number(text)?.try_into().map_err(too_large)
}

/// A whole number from the first to the second of `bounds`.
pub(crate) fn between(bounds: [u64; 2]) -> impl Fn(&str) -> Result<u64, String> + Clone + Send + Sync + 'static {
    move |text| match number(text) {
        Ok(n) if (bounds[0]..=bounds[1]).contains(&n) => Ok(n),
        _ => Err(format!("it must be a whole number from {} to {}", bounds[0], bounds[1])),
    }
}

fn number(text: &str) -> Result<u64, String> {
    let is_number = !text.is_empty() && text.bytes().all(|b| b.is_ascii_digit());
    match text.parse() {
        Ok(n) if is_number => Ok(n),
        _ if is_number => Err(format!("larger than {}", u64::MAX)),
        _ => Err("it must be a whole number from 0".to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_no_count_is_refused_in_words() {
        assert_eq!(whole::<u32>("4294967295"), Ok(u32::MAX));
        assert_eq!(whole::<u64>("18446744073709551615"), Ok(u64::MAX));
        assert_eq!(whole::<u32>("4294967296").unwrap_err(), "larger than 4294967295");
        assert_eq!(whole::<u64>("18446744073709551616").unwrap_err(), "larger than 18446744073709551615");
        for text in ["-1", "", "x", "1.5", "+3", " 1"] {
            assert_eq!(whole::<usize>(text).unwrap_err(), "it must be a whole number from 0", "{text:?}");
        }
        assert_eq!(between([1, 9])("9"), Ok(9));
        assert_eq!(between([1, 9])("0").unwrap_err(), "it must be a whole number from 1 to 9");
    }
}
