//! The broker's memory of descriptors that clients have shown.

use std::collections::{BTreeMap, VecDeque};

/// Entries kept of each kind. Beyond this number the oldest one is dropped.
const REMEMBERED: usize = 1 << 16;

/// Facts about descriptors that clients have shown. The oldest fact is dropped first.
pub struct Shown<K, V>(BTreeMap<K, V>, VecDeque<K>);

impl<K: Ord + Clone, V> Shown<K, V> {
    pub fn new() -> Shown<K, V> {
        Shown(BTreeMap::new(), VecDeque::new())
    }

    pub fn insert(&mut self, key: K, value: V) {
        if self.0.insert(key.clone(), value).is_none() {
            self.1.push_back(key);
            if self.1.len() > REMEMBERED {
                let oldest = self.1.pop_front();
                oldest.map(|key| self.0.remove(&key));
            }
        }
    }

    pub fn get(&self, key: &K) -> Option<&V> {
        self.0.get(key)
    }
}
