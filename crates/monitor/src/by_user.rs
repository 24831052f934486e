//! Queues by user, and their lengths.

use std::collections::{BTreeMap, VecDeque};

/// A queue for each user that has one.
pub struct ByUser<T>(BTreeMap<u32, VecDeque<T>>);

impl<T> Default for ByUser<T> {
    fn default() -> Self {
        ByUser(BTreeMap::new())
    }
}

impl<T> ByUser<T> {
    /// The users with a queue.
    pub fn users(&self) -> impl Iterator<Item = u32> + '_ {
        self.0.keys().copied()
    }

    /// Number of entries of this user.
    pub fn waiting(&self, uid: u32) -> usize {
        self.0.get(&uid).map_or(0, VecDeque::len)
    }

    /// Adds an entry behind the user's other entries.
    pub fn add(&mut self, uid: u32, what: T) {
        self.0.entry(uid).or_default().push_back(what);
    }

    /// Adds an entry before the user's other entries.
    pub fn put_back(&mut self, uid: u32, what: T) {
        self.0.entry(uid).or_default().push_front(what);
    }

    pub fn take(&mut self, uid: u32) -> Option<T> {
        let waiting = self.0.get_mut(&uid)?;
        let first = waiting.pop_front();
        if waiting.is_empty() {
            self.0.remove(&uid);
        }
        first
    }

    /// The users with a queue: first those with numbers above `last`, then all of them.
    pub fn users_after(&self, last: u32) -> impl Iterator<Item = u32> + '_ {
        let after = last.checked_add(1).into_iter().flat_map(|next| self.0.range(next..));
        after.chain(self.0.range(..)).map(|(uid, _)| *uid)
    }
}

/// A count for each key. A count of zero takes no memory.
pub struct Counts<K>(BTreeMap<K, u64>);

impl<K> Default for Counts<K> {
    fn default() -> Self {
        Counts(BTreeMap::new())
    }
}

impl<K: Ord + Copy> Counts<K> {
    pub fn of(&self, key: K) -> u64 {
        self.0.get(&key).copied().unwrap_or(0)
    }

    pub fn change(&mut self, key: K, more: i64) {
        let n = self.of(key).saturating_add_signed(more);
        match n {
            0 => self.0.remove(&key),
            n => self.0.insert(key, n),
        };
    }

    pub fn iter(&self) -> impl Iterator<Item = (K, u64)> + '_ {
        self.0.iter().map(|(key, n)| (*key, *n))
    }
}
