//! How a command ends when it does not succeed.

#![forbid(unsafe_code)]

use std::io;
use std::process::ExitCode;

use dsv4::{Error, ErrorKind};

use crate::output::note;

/// Result of a command.
pub(crate) type Result<T = (), E = Failure> = std::result::Result<T, E>;

/// Why a command ends early.
#[derive(Debug)]
pub(crate) enum Failure {
    /// Something went wrong: one line on standard error, exit code 1.
    Error(Error),
    /// The options make no sense together: exit code 2.
    Usage(String),
    /// What was looked for was found and is printed already: exit code 1.
    Findings,
    /// Ctrl-C; what was done stays printed: exit code 130, as shells expect.
    Interrupted,
    /// Nobody reads standard output any more (`dsv4 run .. | head`): the end, quietly.
    Closed,
}

impl Failure {
    /// Tells the user and gives the exit code.
    pub(crate) fn report(self) -> ExitCode {
        match self {
            Self::Error(e) => {
                note(format_args!("error: {}", one_line(e.message())));
                ExitCode::from(1)
            }
            Self::Usage(message) => {
                note(format_args!("error: {}\n\nFor more information, try '--help'.", one_line(&message)));
                ExitCode::from(2)
            }
            Self::Findings => ExitCode::from(1),
            Self::Interrupted => ExitCode::from(130),
            Self::Closed => ExitCode::SUCCESS,
        }
    }
}

impl From<Error> for Failure {
    fn from(e: Error) -> Self {
        Self::Error(e)
    }
}

/// Errors of writing to standard output; files have their own conversion with the path.
impl From<io::Error> for Failure {
    fn from(e: io::Error) -> Self {
        if e.kind() == io::ErrorKind::BrokenPipe {
            return Self::Closed;
        }
        Self::Error(Error::new(ErrorKind::Io, format!("standard output: {e}")))
    }
}

/// Text with line breaks and other control characters escaped: names from files may contain them.
pub(crate) fn one_line(text: &str) -> String {
    text.chars().fold(String::with_capacity(text.len()), |mut line, c| {
        if c.is_control() {
            line.extend(c.escape_default());
        } else {
            line.push(c);
        }
        line
    })
}
