//! Records in host memory, in order of their last use.
#![forbid(unsafe_code)]

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use super::{Record, RecordKey};

/// A record with what is known about it.
pub(super) struct Item {
    pub(super) record: Arc<Record>,
    /// It came from a file, so it need not be written to one.
    pub(super) is_on_disk: bool,
    tick: u64,
}

/// The records. Not thread-safe by itself.
#[derive(Default)]
pub(super) struct Host {
    items: HashMap<RecordKey, Item>,
    by_use: BTreeMap<u64, RecordKey>,
    bytes: u64,
    clock: u64,
}

impl Host {
    pub(super) fn len(&self) -> usize {
        self.items.len()
    }

    pub(super) fn bytes(&self) -> u64 {
        self.bytes
    }

    pub(super) fn contains(&self, key: RecordKey) -> bool {
        self.items.contains_key(&key)
    }

    /// A record, and whether it came from a file.
    pub(super) fn get(&self, key: RecordKey) -> Option<(Arc<Record>, bool)> {
        self.items.get(&key).map(|item| (Arc::clone(&item.record), item.is_on_disk))
    }

    /// Marks a record as used now; false if it is not here.
    pub(super) fn touch(&mut self, key: RecordKey) -> bool {
        let Some(item) = self.items.get_mut(&key) else { return false };
        self.by_use.remove(&item.tick);
        self.clock += 1;
        item.tick = self.clock;
        self.by_use.insert(self.clock, key);
        true
    }

    pub(super) fn insert(&mut self, key: RecordKey, record: Arc<Record>, is_on_disk: bool) {
        self.remove(key);
        self.clock += 1;
        self.bytes += record.bytes();
        self.by_use.insert(self.clock, key);
        self.items.insert(key, Item { record, is_on_disk, tick: self.clock });
    }

    pub(super) fn remove(&mut self, key: RecordKey) -> Option<Item> {
        let item = self.items.remove(&key)?;
        self.by_use.remove(&item.tick);
        self.bytes -= item.record.bytes();
        Some(item)
    }

    /// Takes the record out that was used longest ago.
    pub(super) fn pop_oldest(&mut self) -> Option<(RecordKey, Item)> {
        let (_, key) = self.by_use.pop_first()?;
        self.remove(key).map(|item| (key, item))
    }
}
