//! Whose turn it is. Users take turns, however many processes each has and however much they ask for:
//! somebody else's flood costs a request one turn of each user.

use crate::ConnId;
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::time::Duration;

/// How long requests of one user are handled before others have their turn; the last one of them
/// may take longer.
pub const TURN: Duration = Duration::from_micros(200);

/// Processes that have sent something, in the order in which they did, by user.
#[derive(Default)]
pub struct Turns {
    waiting: BTreeMap<u32, VecDeque<ConnId>>,
    all: BTreeSet<ConnId>,
}

impl Turns {
    /// Behind the user's others, if it does not wait already.
    pub fn add(&mut self, uid: u32, id: ConnId) {
        if self.all.insert(id) {
            self.waiting.entry(uid).or_default().push_back(id);
        }
    }

    /// Users of whom somebody waits now.
    pub fn users(&self) -> impl Iterator<Item = u32> + '_ {
        self.waiting.keys().copied()
    }

    /// How many of this user's processes wait.
    pub fn waiting(&self, uid: u32) -> usize {
        self.waiting.get(&uid).map_or(0, VecDeque::len)
    }

    pub fn take(&mut self, uid: u32) -> Option<ConnId> {
        let waiting = self.waiting.get_mut(&uid)?;
        let id = waiting.pop_front()?;
        if waiting.is_empty() {
            self.waiting.remove(&uid);
        }
        self.all.remove(&id);
        Some(id)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nobody_waits_twice_and_nobody_is_forgotten() {
        let mut t = Turns::default();
        for id in [1, 2, 1, 3] {
            t.add(id as u32 % 2, id);
        }
        assert!(t.users().eq([0, 1]));
        assert_eq!((t.take(1), t.take(1), t.take(1)), (Some(1), Some(3), None));
        assert_eq!((t.take(0), t.take(7)), (Some(2), None));
        assert_eq!(t.users().count(), 0);
        t.add(0, 2);
        assert_eq!(t.take(0), Some(2));
    }
}
