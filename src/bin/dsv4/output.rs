//! Writing to the two standard streams, and numbers for people.

#![forbid(unsafe_code)]

use std::fmt;
use std::io::{self, IsTerminal, Write};

use dsv4::{Error, ErrorKind, file};

use crate::failure::Result;

/// A line on standard error. If that is closed there is nobody to tell.
pub(crate) fn note(text: impl fmt::Display) {
    drop(writeln!(io::stderr(), "{text}"));
}

/// A line on standard output.
pub(crate) fn line(text: impl fmt::Display) -> Result {
    Ok(writeln!(io::stdout(), "{text}")?)
}

/// A piece of a stream on standard output, seen at once.
pub(crate) fn piece(text: &str) -> Result {
    let mut out = io::stdout().lock();
    out.write_all(text.as_bytes())?;
    Ok(out.flush()?)
}

/// A JSON document on standard output.
pub(crate) fn json(value: &serde_json::Value) -> Result {
    line(format_args!("{value:#}"))
}

/// Whether standard output is a terminal, where dimmed text and an echo help.
pub(crate) fn is_terminal() -> bool {
    io::stdout().is_terminal()
}

/// `text` dimmed. Each piece switches the colour back, so that an interrupt leaves the terminal as it was.
pub(crate) fn dimmed(text: &str) -> String {
    format!("\x1b[2m{text}\x1b[22m")
}

/// A size such as `1.50 GB` (powers of 1000, as disks and links are sold).
pub(crate) fn size(bytes: u64) -> String {
    let units = ["B", "kB", "MB", "GB", "TB"];
    let mut value = bytes as f64;
    let mut unit = 0;
    while value >= 999.5 && unit + 1 < units.len() {
        value /= 1000.0;
        unit += 1;
    }
    if unit == 0 { format!("{bytes} B") } else { format!("{value:.*} {}", precision(value), units[unit]) }
}

/// A rate such as `18.4`: three significant digits.
pub(crate) fn rate(value: f64) -> String {
    format!("{value:.*}", precision(value))
}

fn precision(value: f64) -> usize {
    match value {
        v if v >= 100.0 => 0,
        v if v >= 10.0 => 1,
        _ => 2,
    }
}

/// A whole text: of a file, of a pipe that the user names, or of standard input for `-`.
pub(crate) fn read_text(path: &std::path::Path) -> Result<String> {
    let (bytes, name) = if path.as_os_str() == "-" {
        let name = "standard input";
        (file::read_to_end(io::stdin().lock(), name, 0, file::TEXT)?, name.to_owned())
    } else {
        (file::read_any(path, file::TEXT)?, path.display().to_string())
    };
    let text = String::from_utf8(bytes)
        .map_err(|e| Error::new(ErrorKind::InvalidArgument, format!("{name}: not UTF-8: {}", e.utf8_error())))?;
    Ok(text)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_have_three_digits_and_a_unit() {
        let sizes = [0, 999, 1000, 12_345, 999_499, 999_500, 5_047_400_000].map(size);
        assert_eq!(sizes, ["0 B", "999 B", "1.00 kB", "12.3 kB", "999 kB", "1.00 MB", "5.05 GB"]);
    }
}
