//! After `fork()` the child has an engine's memory, but not its threads, and locks as they were at that moment. So calls
//! there end with an error before they take any lock.
#![forbid(unsafe_code)]

use crate::error::{Result, bail};

/// The process that something was made in.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Process(u32);

impl Process {
    /// This one.
    pub(crate) fn current() -> Self {
        Self(std::process::id())
    }

    /// Whether this is another process than the one it was made in.
    pub(crate) fn is_other(self) -> bool {
        self.0 != std::process::id()
    }

    /// `Unavailable` in another process; `what` was made in this one.
    pub(crate) fn check(self, what: &str) -> Result<()> {
        if self.is_other() {
            bail!(
                Unavailable,
                "{what} was made in process {}, of which this one, {}, is a fork without its threads: make an engine here",
                self.0,
                std::process::id()
            );
        }
        Ok(())
    }
}
