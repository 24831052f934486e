//! What the broker remembers of descriptors that it was shown.

use std::collections::{BTreeMap, VecDeque};

/// Of each kind that is remembered; then the oldest is forgotten.
const REMEMBERED: usize = 1 << 16;

/// What clients have shown, oldest first out.
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
