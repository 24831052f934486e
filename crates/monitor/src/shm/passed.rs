//! Kernel sockets that processes pass to each other in messages. A connection may move to shared
//! memory only while a single process has its socket: other holders would go on with the kernel
//! socket.
//!
//! The kernel does not tell how many processes have a socket. So each process with the library
//! reports which sockets it sends, receives and closes. Some events are never reported: a message
//! may stay unreceived, and a process without the library reports nothing. In these cases the
//! connection stays in the kernel. See ADR 52.

use crate::{shares, ConnId};
use fsocket_proto::values::Passing;
use std::collections::{BTreeSet, HashMap};

/// Sockets of all users that are remembered ([`shares`]). A single user gets half of them.
const MOST: usize = 1 << 15;
/// Holders of one socket that are distinguished.
const HOLDERS: usize = 16;
/// Room for new sockets is searched only once for this many that found no room.
const SELDOM: usize = 1024;

/// Passed sockets, by the sender's user and the socket's cookie. A cookie does not prove that a
/// process holds the socket. So the reports of a user count only for processes of the same user.
#[derive(Default)]
pub struct Passed {
    users: HashMap<u32, User>,
    all: usize,
}

#[derive(Default)]
struct User {
    sockets: HashMap<u64, Socket>,
    /// Sockets that found no room since the last search.
    refused: usize,
}

#[derive(Default)]
struct Socket {
    /// Number of messages sent minus messages received. Below zero if the receiver reports first,
    /// or if the sender reports nothing.
    in_flight: i64,
    holders: BTreeSet<ConnId>,
    /// The process that has sent it last.
    by: Option<ConnId>,
    /// The socket has further holders that are unknown or not counted.
    is_shared: bool,
}

impl Socket {
    /// Adds a holder. False: the process has the socket already.
    fn add_holder(&mut self, id: ConnId) -> bool {
        if self.holders.len() == HOLDERS && !self.holders.contains(&id) {
            self.is_shared = true;
            return true;
        }
        self.holders.insert(id)
    }

    fn is_over(&self) -> bool {
        self.in_flight == 0 && self.holders.is_empty() && !self.is_shared
    }
}

impl User {
    /// Forgets sockets that no process holds; some were never received. Returns their number.
    fn forget_unheld(&mut self) -> usize {
        let before = self.sockets.len();
        if self.refused == 0 {
            self.sockets.retain(|_, s| !s.holders.is_empty());
        }
        let forgotten = before - self.sockets.len();
        self.refused = if forgotten < SELDOM { (self.refused + 1) % SELDOM } else { 0 };
        forgotten
    }
}

impl Passed {
    pub fn note(&mut self, (uid, cookie): (u32, u64), by: ConnId, what: Passing) {
        let user = self.users.entry(uid).or_default();
        if !user.sockets.contains_key(&cookie) {
            let admits = |own: usize, all: usize| shares::admits(own as u64, all as u64, 1, MOST as u64);
            if !admits(user.sockets.len(), self.all) {
                self.all -= user.forget_unheld();
                if !admits(user.sockets.len(), self.all) {
                    return;
                }
            }
            self.all += 1;
        }
        let s = user.sockets.entry(cookie).or_default();
        match what {
            Passing::Sent => {
                s.in_flight += 1;
                s.add_holder(by);
                s.by = Some(by);
            }
            Passing::NotSent => s.in_flight -= 1,
            Passing::Arrived => {
                s.in_flight -= 1;
                // The process now has two descriptors of the socket without knowing that they are
                // the same.
                s.is_shared |= !s.add_holder(by);
            }
            Passing::Released => drop(s.holders.remove(&by)),
            Passing::Shared => s.is_shared = true,
        }
        if s.is_over() {
            user.sockets.remove(&cookie);
            self.all -= 1;
        }
    }

    /// Whether this process is the only holder. If so, returns the process that has sent the
    /// socket.
    pub fn alone(&self, (uid, cookie): (u32, u64), id: ConnId) -> Option<Option<ConnId>> {
        let s = self.users.get(&uid)?.sockets.get(&cookie)?;
        let alone = !s.is_shared && s.in_flight == 0 && s.holders.iter().eq([&id]);
        alone.then_some(s.by)
    }

    /// Whether the monitor knows that another process has the socket, too.
    pub fn has_others(&self, (uid, cookie): (u32, u64), id: ConnId) -> bool {
        let known = self.users.get(&uid).and_then(|user| user.sockets.get(&cookie));
        known.is_some_and(|s| s.is_shared || s.holders.iter().any(|holder| *holder != id))
    }

    /// Removes a holder that has ended. With `goes_on`, the process has only changed its
    /// credentials and keeps its sockets.
    pub fn leave(&mut self, uid: u32, id: ConnId, goes_on: bool) {
        let Some(user) = self.users.get_mut(&uid) else { return };
        let before = user.sockets.len();
        user.sockets.retain(|_, s| {
            if s.holders.remove(&id) {
                s.is_shared |= goes_on;
            }
            !s.is_over()
        });
        self.all -= before - user.sockets.len();
    }

    /// Forgets all sockets of a user that has no process any more.
    pub fn forget(&mut self, uid: u32) {
        self.all -= self.users.remove(&uid).map_or(0, |user| user.sockets.len());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const KEY: (u32, u64) = (1, 77);

    fn after(steps: &[(ConnId, Passing)]) -> Passed {
        let mut p = Passed::default();
        steps.iter().for_each(|(by, what)| p.note(KEY, *by, *what));
        p
    }

    #[test]
    fn only_the_last_holder_is_alone() {
        use Passing::*;
        let way = [(1, Sent), (2, Arrived), (1, Released)];
        assert_eq!(after(&way).alone(KEY, 2), Some(Some(1)));
        assert_eq!(after(&way).alone(KEY, 1), None);
        assert_eq!(after(&way).alone((2, 77), 2), None);
        // The order in which the reports arrive does not matter.
        assert_eq!(after(&[(2, Arrived), (1, Sent), (1, Released)]).alone(KEY, 2), Some(Some(1)));
        for part in [&way[..2], &way[1..2], &way[..1]] {
            assert_eq!(after(part).alone(KEY, 2), None, "{part:?}");
        }
        assert_eq!(after(&[(1, Sent), (1, Sent), (2, Arrived), (1, Released)]).alone(KEY, 2), None);
        assert_eq!(
            after(&[(1, Sent), (1, NotSent), (1, Sent), (2, Arrived), (1, Released)]).alone(KEY, 2),
            Some(Some(1))
        );
        assert_eq!(after(&[(1, Sent), (2, Arrived), (1, Shared), (1, Released)]).alone(KEY, 2), None);
        // A process sends a socket to itself and also keeps its first descriptor.
        assert_eq!(after(&[(1, Sent), (1, Arrived)]).alone(KEY, 1), None);
        assert_eq!(after(&[(1, Sent), (1, Released), (1, Arrived)]).alone(KEY, 1), Some(Some(1)));
        assert!(after(&way[..2]).has_others(KEY, 2) && !after(&way).has_others(KEY, 2));
        assert!(!after(&way[..1]).has_others(KEY, 1) && !after(&way[..2]).has_others((2, 77), 2));
    }

    #[test]
    fn a_process_that_ends_has_nothing_and_nothing_is_left_of_it() {
        use Passing::*;
        let mut p = after(&[(1, Sent), (2, Arrived)]);
        p.leave(1, 1, false);
        assert_eq!(p.alone(KEY, 2), Some(Some(1)));
        p.leave(1, 2, false);
        assert_eq!(p.all, 0);
        let mut p = after(&[(1, Sent), (2, Arrived)]);
        p.leave(1, 1, true);
        assert_eq!(p.alone(KEY, 2), None);
        assert!(after(&[(1, Sent), (2, Arrived), (1, Released), (2, Released)]).all == 0);
    }

    #[test]
    fn what_is_never_received_does_not_pile_up() {
        let mut p = Passed::default();
        for cookie in 0..3 * MOST as u64 {
            p.note((1, cookie), 1, Passing::Sent);
            p.note((1, cookie), 1, Passing::Released);
        }
        assert!(p.all <= MOST / 2);
        p.note((1, 7 * MOST as u64), 1, Passing::Sent);
        assert!(p.users[&1].sockets.contains_key(&(7 * MOST as u64)), "there is room again");
    }

    /// A user that holds its full share takes no room from others, and its sockets are not
    /// searched for each new one.
    #[test]
    fn a_user_fills_its_own_share() {
        use Passing::*;
        let mut p = Passed::default();
        let mut looks = 0;
        for cookie in 0..2 * MOST as u64 {
            p.note((1, cookie), 1, Sent);
            looks += usize::from(p.users[&1].refused == 1);
        }
        assert_eq!(p.all, MOST / 2);
        assert!((1..=2 * MOST / SELDOM).contains(&looks), "{looks}");
        for (by, what) in [(3, Sent), (4, Arrived), (3, Released)] {
            p.note((2, 77), by, what);
        }
        assert_eq!(p.alone((2, 77), 4), Some(Some(3)));
        p.leave(2, 4, false);
        p.forget(1);
        assert_eq!(p.all, 0);
    }

    #[test]
    fn a_socket_of_very_many_is_shared() {
        let mut p = after(&[(1, Passing::Sent)]);
        for id in 2..100 {
            p.note(KEY, id, Passing::Sent);
        }
        assert_eq!(p.users[&1].sockets[&77].holders.len(), HOLDERS);
        for id in 1..100 {
            p.note(KEY, id, Passing::Released);
            p.note(KEY, 100, Passing::NotSent);
        }
        p.note(KEY, 100, Passing::Sent);
        p.note(KEY, 100, Passing::NotSent);
        assert_eq!(p.alone(KEY, 100), None);
    }
}
