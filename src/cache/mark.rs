//! A checkpoint that one session comes back to: the end of its last prompt.
//!
//! It is kept as long as there is room. Under pressure the longest unused mark makes room like the longest unused prefix,
//! so that a session's need of memory stays that of its windows, states and blocks.
#![forbid(unsafe_code)]

use std::sync::Arc;

use super::manager::CacheManager;
use super::prefix::Checkpoint;

/// A session's hold on its checkpoint; dropping it drops the checkpoint.
pub struct Mark {
    manager: Arc<CacheManager>,
    id: u64,
    position: usize,
}

impl Mark {
    /// Keeps `checkpoint`.
    pub fn new(manager: &Arc<CacheManager>, checkpoint: Checkpoint) -> Self {
        let position = checkpoint.state.position();
        Self { manager: Arc::clone(manager), id: manager.add_mark(checkpoint), position }
    }

    /// Tokens that it stands behind.
    pub fn position(&self) -> usize {
        self.position
    }

    /// The checkpoint, if it is still there.
    pub fn checkpoint(&self) -> Option<Checkpoint> {
        self.manager.mark(self.id)
    }
}

impl Drop for Mark {
    fn drop(&mut self) {
        self.manager.remove_mark(self.id);
    }
}
