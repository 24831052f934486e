//! Processes with unread messages. Users take turns, independently of how many processes each has
//! and how many messages they send. So if another user floods the monitor, a request waits for at
//! most one turn of each user.

use crate::by_user::ByUser;
use crate::ConnId;
use std::collections::BTreeSet;
use std::time::Duration;

/// How long the loop handles requests of one user before others have their turns. (The last
/// request of a turn may take longer.)
pub const TURN: Duration = Duration::from_micros(200);

/// Processes with unread messages, by user. A user's processes wait in the order in which their
/// messages came.
#[derive(Default)]
pub struct Turns {
    waiting: ByUser<ConnId>,
    all: BTreeSet<ConnId>,
}

impl Turns {
    /// Adds a process behind the user's others, unless it waits already.
    pub fn add(&mut self, uid: u32, id: ConnId) {
        if self.all.insert(id) {
            self.waiting.add(uid, id);
        }
    }

    /// Users with a waiting process.
    pub fn users(&self) -> impl Iterator<Item = u32> + '_ {
        self.waiting.users()
    }

    /// Number of this user's processes that wait.
    pub fn waiting(&self, uid: u32) -> usize {
        self.waiting.waiting(uid)
    }

    pub fn take(&mut self, uid: u32) -> Option<ConnId> {
        self.waiting.take(uid).inspect(|id| _ = self.all.remove(id))
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
