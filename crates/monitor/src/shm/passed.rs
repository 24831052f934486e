//! Kernel connections that processes pass to each other: one of them may go over to shared memory only while a
//! single process has it, because the others would go on with the kernel's.
//!
//! The kernel does not say how many descriptors a socket has. So each process with the library says what it sends,
//! receives and closes; what nobody says (a message that is never received, a process without the library) leaves a
//! socket where it is. See ADR 52.

use crate::ConnId;
use fsocket_proto::passed;
use std::collections::{BTreeSet, HashMap};

/// Sockets that are remembered; of those that nobody holds any more some were never received.
const MOST: usize = 1 << 14;

/// Passed sockets, by the user that passes them and their number (SO_COOKIE). A number is not proof of holding the
/// socket, so what one user says concerns its own processes only.
#[derive(Default)]
pub struct Passed(HashMap<(u32, u64), Socket>);

#[derive(Default)]
struct Socket {
    /// Sent and not received; below zero while the receiver is heard first, or where the sender says nothing.
    in_flight: i64,
    holders: BTreeSet<ConnId>,
    /// Who sent it last.
    by: Option<ConnId>,
    /// Others have it whom nobody counts.
    is_shared: bool,
}

impl Passed {
    pub fn note(&mut self, key: (u32, u64), by: ConnId, what: u64) {
        if self.0.len() >= MOST && !self.0.contains_key(&key) {
            self.0.retain(|_, s| !s.holders.is_empty());
            if self.0.len() >= MOST {
                return;
            }
        }
        let s = self.0.entry(key).or_default();
        match what {
            passed::SENT => {
                s.in_flight += 1;
                s.holders.insert(by);
                s.by = Some(by);
            }
            passed::NOT_SENT => s.in_flight -= 1,
            passed::ARRIVED => {
                s.in_flight -= 1;
                // Twice in one process, which does not know that they are the same.
                s.is_shared |= !s.holders.insert(by);
            }
            passed::RELEASED => drop(s.holders.remove(&by)),
            _ => s.is_shared = true,
        }
        if s.in_flight == 0 && s.holders.is_empty() && !s.is_shared {
            self.0.remove(&key);
        }
    }

    /// Is this process the only one that has it? Then who has sent it.
    pub fn alone(&self, key: (u32, u64), id: ConnId) -> Option<Option<ConnId>> {
        let s = self.0.get(&key)?;
        let alone = !s.is_shared && s.in_flight == 0 && s.holders.iter().eq([&id]);
        alone.then_some(s.by)
    }

    /// A process is gone, or has other credentials from now on and keeps what it has (`goes_on`).
    pub fn leave(&mut self, id: ConnId, goes_on: bool) {
        self.0.retain(|_, s| {
            if s.holders.remove(&id) {
                s.is_shared |= goes_on;
            }
            s.in_flight != 0 || s.is_shared || !s.holders.is_empty()
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const KEY: (u32, u64) = (1, 77);

    fn after(steps: &[(ConnId, u64)]) -> Passed {
        let mut p = Passed::default();
        steps.iter().for_each(|(by, what)| p.note(KEY, *by, *what));
        p
    }

    #[test]
    fn only_the_last_holder_is_alone() {
        use passed::*;
        let way = [(1, SENT), (2, ARRIVED), (1, RELEASED)];
        assert_eq!(after(&way).alone(KEY, 2), Some(Some(1)));
        assert_eq!(after(&way).alone(KEY, 1), None);
        assert_eq!(after(&way).alone((2, 77), 2), None);
        // Whichever is heard first.
        assert_eq!(after(&[(2, ARRIVED), (1, SENT), (1, RELEASED)]).alone(KEY, 2), Some(Some(1)));
        for part in [&way[..2], &way[1..2], &way[..1]] {
            assert_eq!(after(part).alone(KEY, 2), None, "{part:?}");
        }
        assert_eq!(after(&[(1, SENT), (1, SENT), (2, ARRIVED), (1, RELEASED)]).alone(KEY, 2), None);
        assert_eq!(
            after(&[(1, SENT), (1, NOT_SENT), (1, SENT), (2, ARRIVED), (1, RELEASED)]).alone(KEY, 2),
            Some(Some(1))
        );
        assert_eq!(after(&[(1, SENT), (2, ARRIVED), (1, SHARED), (1, RELEASED)]).alone(KEY, 2), None);
        // A process that sends itself what it keeps.
        assert_eq!(after(&[(1, SENT), (1, ARRIVED)]).alone(KEY, 1), None);
        assert_eq!(after(&[(1, SENT), (1, RELEASED), (1, ARRIVED)]).alone(KEY, 1), Some(Some(1)));
    }

    #[test]
    fn who_ends_has_nothing_and_nothing_is_left_of_it() {
        use passed::*;
        let mut p = after(&[(1, SENT), (2, ARRIVED)]);
        p.leave(1, false);
        assert_eq!(p.alone(KEY, 2), Some(Some(1)));
        p.leave(2, false);
        assert!(p.0.is_empty());
        let mut p = after(&[(1, SENT), (2, ARRIVED)]);
        p.leave(1, true);
        assert_eq!(p.alone(KEY, 2), None);
        assert!(after(&[(1, SENT), (2, ARRIVED), (1, RELEASED), (2, RELEASED)]).0.is_empty());
    }

    #[test]
    fn what_is_never_received_does_not_pile_up() {
        let mut p = Passed::default();
        for cookie in 0..3 * MOST as u64 {
            p.note((1, cookie), 1, passed::SENT);
            p.note((1, cookie), 1, passed::RELEASED);
        }
        assert!(p.0.len() <= MOST);
    }
}
