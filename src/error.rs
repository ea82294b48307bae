//! The one error type of the library.
//!
//! An [`Error`] is a kind that programs branch on and a message that people read. Messages are lower
//! case, have no final period, and name the file, key, tensor or value that is at fault.

use std::fmt;

/// What went wrong, for programs. The C API maps each kind to one `dsv4_status` number.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum ErrorKind {
    /// An argument is out of its documented range, or a call is not possible in this state.
    InvalidArgument,
    /// A file, folder, tensor or entry that was named does not exist.
    NotFound,
    /// The operating system refused to read, map or write a file.
    Io,
    /// A checkpoint or session file is damaged, truncated or contradicts itself.
    Corrupt,
    /// A session file was written with another model, numerics or cache format than it is used with.
    Mismatch,
    /// `config.json` has a known key with a wrong type or an impossible value.
    Config,
    /// A model of another architecture; never loaded by guess.
    UnsupportedModel,
    /// A valid request that this build or device cannot serve.
    Unsupported,
    /// A device or library that was asked for is not there; the message says the remedy.
    Unavailable,
    /// An allocation sized by model, context, batch or file was refused; the message has the bytes.
    OutOfMemory,
    /// The session's context is full; the session is unchanged.
    ContextFull,
    /// The cache's byte limit is reached by pages in use; the message has the counts. As after `Cancelled`, the chunks of
    /// a feed that were complete stay in the session; free or clear something and feed the rest to go on.
    NoBlocks,
    /// The call was cancelled; what was computed before stays usable.
    Cancelled,
    /// The object is in use by another thread.
    Busy,
    /// Logits or activations became NaN or infinite.
    Numeric,
    /// `tokenizer.json` cannot be read, or text or ids do not fit it.
    Tokenizer,
    /// A chat message list does not follow the expected form.
    Chat,
    /// A panic or a sticky device error broke this object earlier; it can only be freed.
    Poisoned,
    /// A defect of this library: a panic stopped at its boundary.
    Panic,
}

/// Error of every fallible call: a kind and a message.
///
/// ```
/// use dsv4::{ErrorKind, Model};
/// match Model::open("no/such/folder") {
///     Ok(model) => println!("{} layers", model.config().num_hidden_layers),
///     Err(error) if error.kind() == ErrorKind::NotFound => eprintln!("is it downloaded? {error}"),
///     Err(error) => eprintln!("{error}"),
/// }
/// ```
#[derive(Clone, PartialEq, Eq, thiserror::Error)]
#[error("{message}")]
pub struct Error {
    kind: ErrorKind,
    message: String,
}

/// Result with the library's [`Error`].
pub type Result<T, E = Error> = std::result::Result<T, E>;

impl Error {
    /// Makes an error from its kind and a message (lower case, no final period, names the culprit).
    pub fn new(kind: ErrorKind, message: impl Into<String>) -> Self {
        Self { kind, message: shortened(message.into()) }
    }

    /// What went wrong, for programs.
    pub fn kind(&self) -> ErrorKind {
        self.kind
    }

    /// What went wrong, for people.
    pub fn message(&self) -> &str {
        &self.message
    }

    /// The same error with `context: ` in front of its message.
    #[must_use]
    pub fn context(self, context: impl fmt::Display) -> Self {
        Self::new(self.kind, format!("{context}: {}", self.message))
    }

    /// An operating system error about `path`.
    pub fn io(path: impl AsRef<std::path::Path>, source: &std::io::Error) -> Self {
        let kind = match source.kind() {
            std::io::ErrorKind::NotFound => ErrorKind::NotFound,
            std::io::ErrorKind::OutOfMemory => ErrorKind::OutOfMemory,
            _ => ErrorKind::Io,
        };
        Self::new(kind, format!("{}: {source}", path.as_ref().display()))
    }

    /// A refused allocation of `bytes` bytes for `what`.
    pub fn out_of_memory(what: impl fmt::Display, bytes: u64) -> Self {
        Self::new(ErrorKind::OutOfMemory, format!("cannot allocate {bytes} bytes for {what}"))
    }
}

impl fmt::Debug for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}: {}", self.kind, self.message)
    }
}

/// Most bytes of a message: whatever a file has for a name or a value, the whole fits into a `dsv4_error`.
const MAX_MESSAGE: usize = 999;
/// Bytes of the end that a message too long keeps.
const TAIL: usize = 320;
/// What stands for the middle of such a message.
const OMITTED: &str = " [...] ";

/// A message that is not too long: the beginning names the culprit, the end says what is wrong with it.
fn shortened(message: String) -> String {
    if message.len() <= MAX_MESSAGE {
        return message;
    }
    let head = beginning(&message, MAX_MESSAGE - TAIL - OMITTED.len());
    let mut end = message.len() - TAIL;
    while !message.is_char_boundary(end) {
        end += 1;
    }
    [head, OMITTED, &message[end..]].concat()
}

/// The beginning of a text, at most so many bytes: for a message, whose formatting then takes no memory to speak of.
pub(crate) fn beginning(text: &str, most: usize) -> &str {
    let mut end = text.len().min(most);
    while !text.is_char_boundary(end) {
        end -= 1;
    }
    &text[..end]
}

/// A number of things in words: `1 byte`, `2 bytes`.
pub(crate) fn plural(n: u64, thing: &str) -> String {
    format!("{n} {thing}{}", if n == 1 { "" } else { "s" })
}

/// Shorthand used all over the crate: `bail!(Config, "index_topk is {k}")`.
macro_rules! bail {
    ($kind:ident, $($message:tt)+) => {
        return Err($crate::error::Error::new($crate::error::ErrorKind::$kind, format!($($message)+)))
    };
}
pub(crate) use bail;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_long_message_keeps_its_beginning_and_its_end() {
        let value = "é".repeat(500_000);
        let e = Error::new(ErrorKind::Corrupt, format!("tensor x has dtype {value}, which is unknown"));
        let e = e.context("p".repeat(2000)).context("m/model.safetensors");
        assert!(e.message().len() <= MAX_MESSAGE, "{} bytes", e.message().len());
        assert!(e.message().starts_with("m/model.safetensors: ppp"), "{e}");
        assert!(e.message().ends_with("é, which is unknown"), "{e}");
        let short = "x".repeat(MAX_MESSAGE);
        assert_eq!(Error::new(ErrorKind::Io, short.clone()).message(), short);
    }
}
