//! Tells an event loop that there is something to do: a flag that threads can wait for, and a descriptor that can be read
//! while it is set.
//!
//! The descriptor is the reading end of a pipe that holds one byte at most, so nobody ever waits in writing or reading.
#![forbid(unsafe_code)]

use std::io::{PipeReader, PipeWriter, Read, Write, pipe};
use std::sync::{Mutex, MutexGuard, PoisonError};

use crate::error::{Error, ErrorKind, Result};

/// A flag with a descriptor, once somebody asked for that.
#[derive(Default)]
pub(crate) struct Bell {
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    is_rung: bool,
    pipe: Option<(PipeReader, PipeWriter)>,
}

impl Bell {
    /// Sets the flag.
    pub(crate) fn ring(&self) {
        let mut state = self.state();
        if !state.is_rung {
            state.is_rung = true;
            state.write();
        }
    }

    /// Takes the flag back.
    pub(crate) fn silence(&self) {
        let mut state = self.state();
        if std::mem::take(&mut state.is_rung)
            && let Some((reader, _)) = &mut state.pipe
        {
            // the byte is there: it was written under this lock
            drop(reader.read_exact(&mut [0]));
        }
    }

    /// What `look` sees of the descriptor that can be read while the flag is set. It is made at the first call and lives as
    /// long as the bell.
    ///
    /// # Errors
    /// `Io` if the system gives none.
    #[cfg_attr(
        not(any(unix, test)),
        expect(dead_code, reason = "event loops of other systems wait for no descriptors")
    )]
    pub(crate) fn descriptor<T>(&self, look: impl FnOnce(&PipeReader) -> T) -> Result<T> {
        let mut state = self.state();
        if state.pipe.is_none() {
            let made = pipe();
            state.pipe = Some(made.map_err(|e| Error::new(ErrorKind::Io, format!("a pipe for the event loop: {e}")))?);
            if state.is_rung {
                state.write();
            }
        }
        let (reader, _) = state.pipe.as_ref().expect("it was made above");
        Ok(look(reader))
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl State {
    fn write(&mut self) {
        if let Some((_, writer)) = &mut self.pipe {
            // both ends are here, and there is room for a byte
            drop(writer.write_all(&[1]));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_descriptor_holds_one_byte_while_the_flag_is_set() {
        let bell = Bell::default();
        bell.ring();
        bell.descriptor(|_| ()).unwrap();
        for _ in 0..100_000 {
            // more than a pipe has room for
            bell.ring();
        }
        bell.silence();
        bell.silence();
        bell.ring();
        bell.silence();
        let mut state = bell.state();
        assert!(!state.is_rung);
        state.write();
        let (mut reader, writer) = state.pipe.take().expect("it was asked for");
        drop(writer);
        let mut rest = Vec::new();
        reader.read_to_end(&mut rest).unwrap();
        assert_eq!(rest, [1], "nothing was left but the byte above");
    }
}
