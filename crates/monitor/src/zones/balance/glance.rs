//! Glances: while much comes, the queues are looked at every few milliseconds, because workers
//! that have enough to do are not told by the kernel of what waits for others.

use super::Balance;
use crate::Monitor;
use fsocket_abi::balance as abi;
use fsocket_sync::atomic::Ordering;
use fsocket_zones::listener;
use rustix::fd::AsRawFd;
use std::mem::offset_of;
use std::time::{Duration, Instant};

/// Connections a second from which on the monitor glances.
const MUCH: u128 = 1000;

impl Balance {
    /// Whether it is worth while to glance at the queues, `came` connections after the last
    /// measurement. True: no longer, and workers rely on it.
    pub(super) fn glance_or_not(&mut self, came: u64, now: Instant, interval: Duration) -> bool {
        let elapsed = now.saturating_duration_since(self.measured);
        if elapsed < interval / 2 && !self.napping {
            return false;
        }
        self.measured = now;
        let much = self.shared.len() > 1 && u128::from(came) * 1000 >= MUCH * elapsed.as_millis().max(1);
        self.set_glances(much && !self.napping)
    }

    /// True: they end.
    fn set_glances(&mut self, on: bool) -> bool {
        self.word(offset_of!(abi::Balance, glances)).store(on.into(), Ordering::Relaxed);
        std::mem::replace(&mut self.glances, on) && !on
    }

    /// Does a connection wait for a worker that did not look between this glance and the one before
    /// the last?
    fn glance(&mut self) -> bool {
        let mut stuck = false;
        let mut shared = std::mem::take(&mut self.shared);
        for (&place, s) in &mut shared {
            let looked = self.queue(place).looked.load(Ordering::Relaxed);
            if looked != s.glanced {
                (s.glanced, s.waits) = (looked, 0);
            } else if listener::backlog(s.socket.as_raw_fd()).is_ok_and(|(_, n)| n > 0) {
                s.waits += 1;
                stuck |= s.waits >= 2;
            } else {
                s.waits = 0;
            }
        }
        self.shared = shared;
        stuck
    }
}

impl Monitor {
    pub(super) fn glance_if_due(&mut self, now: Instant) {
        if self.zones.glance_next.is_none_or(|at| at > now) {
            return;
        }
        let mut nudges = Vec::new();
        let mut again = false;
        for g in self.zones.all.values_mut() {
            let Some(b) = g.balance.as_mut().filter(|b| b.glances) else { continue };
            let deserted = b.napping && b.set_glances(false);
            again |= b.glances;
            if deserted || b.glance() {
                nudges.extend(g.conns_that_share().into_iter().map(|conn| (g.id, conn)));
            }
        }
        self.nudge(nudges);
        self.zones.glance_next = again.then(|| now + self.config.balance.glance());
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::{Watched, TURN};
    use super::*;
    use std::net::TcpStream;
    use std::rc::Rc;

    #[test]
    fn who_waits_at_two_glances_is_stuck_unless_the_worker_looked() {
        let mut w = Watched::new();
        assert!(!w.balance.glance() && !w.balance.glance(), "nothing waits");
        let _client = TcpStream::connect(w.listener.local_addr().unwrap()).unwrap();
        assert!(!w.balance.glance(), "it has just come");
        assert!(w.balance.glance());
        w.balance.queue(1).looked.fetch_add(1, Ordering::Relaxed);
        assert!(!w.balance.glance() && !w.balance.glance());
        assert!(w.balance.glance(), "it did not look again");
        w.accept();
        assert!(!w.balance.glance());
    }

    #[test]
    fn glances_while_much_comes() {
        let mut w = Watched::new();
        let mut at = w.balance.measured;
        let mut look = |w: &mut Watched, came, after| {
            at += after;
            let deserted = w.balance.glance_or_not(came, at, TURN);
            (w.balance.glances, deserted)
        };
        assert_eq!(look(&mut w, 1000, TURN), (false, false), "one worker has nobody to look after");
        let other = w.listener.try_clone().unwrap();
        w.balance.enter(2, Rc::new(other.into()));
        assert_eq!(look(&mut w, 99, TURN), (false, false));
        assert_eq!(look(&mut w, 100, TURN), (true, false));
        assert_eq!(look(&mut w, 1, TURN / 10), (true, false), "rung just after");
        assert_eq!(look(&mut w, 400, TURN), (true, false));
        assert_eq!(look(&mut w, 1, TURN), (false, true));
        assert_eq!(look(&mut w, 0, TURN), (false, false), "they were told once");
    }
}
