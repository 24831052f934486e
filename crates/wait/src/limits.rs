//! The reasons why a sleep ends before its deadline.
//!
//! A sleep has a limit if this thread may have to do something about which nobody can wake it.
//! [`LIMITS`] lists these reasons: which calls must look, how long they may sleep, and why. A
//! subsystem with such a reason has a function that returns the longest sleep allowed *now*
//! (None: no limit), and a row in the list. A higher crate is called through
//! [`fsocket_fdtable::upcalls`].

use crate::call::{Call, Sleep};
use crate::{unjoined, word};
use fsocket_fdtable::ctl;
use fsocket_fdtable::upcalls::upcalls;
use fsocket_runtime::signals;
use fsocket_shm::{chan, idle, stuck};

/// The first sleep on a word without a monitor is at most this long, nanoseconds. After that the
/// library uses a sleep that ends with the peer's process; if the kernel has no such sleep, all
/// sleeps are this long.
const ALONE_NS: u64 = 80_000_000;

/// A reason to end a sleep early.
struct Limit {
    /// The calls to which the reason applies: bits of [`Call`].
    calls: u16,
    /// The longest sleep that this reason allows now, nanoseconds.
    ns: fn(&mut Sleep) -> Option<u64>,
}

const WORDS: u16 = Call::Stream.bit() | Call::PollOne.bit();
const EPOLL: u16 = Call::Epoll.bit();
/// SETS: calls that sleep on descriptors. LISTENS: those of them that accept connections or
/// report them.
const SETS: u16 = LISTENS | Call::Candidate.bit();
const LISTENS: u16 = Call::Poll.bit() | Call::Accept.bit() | Call::Zones.bit();

/// The order does not matter: the smallest limit counts.
static LIMITS: [Limit; 9] = [
    // Without a monitor, nobody reports that a peer has ended, or that a new monitor has come.
    Limit { calls: WORDS, ns: |_| ctl::unwatched().map(|ns| ns.min(ALONE_NS)) },
    Limit { calls: Call::Poll.bit() | EPOLL | Call::EpollZones.bit(), ns: |_| ctl::unwatched() },
    // (A listener has no peer yet.)
    Limit { calls: Call::Accept.bit(), ns: |_| ctl::may_come().then(ctl::unwatched).flatten() },
    // A sleep on one word must end for a signal handler without SA_RESTART, and for the death of
    // the monitor. (`poll` always has a limit, because the kernel does not restart a limited
    // sleep on a word after a signal.)
    Limit { calls: WORDS, ns: |s| word::piece(s.long, s.left.is_some()) },
    // The TCP_USER_TIMEOUT of a connection may be over.
    Limit { calls: WORDS | SETS | EPOLL, ns: |_| stuck::sleep_limit() },
    // The first ring of a peer comes through the monitor, and may be late.
    Limit { calls: SETS | EPOLL, ns: |s| if s.has_waker { chan::sleep_limit() } else { None } },
    // The monitor did not answer a worker, which has to ask again.
    Limit { calls: SETS | EPOLL, ns: |_| unjoined::sleep_limit() },
    // Connections wait in the queues of other workers.
    Limit { calls: LISTENS | EPOLL, ns: |_| (upcalls().sleep_limit)() },
    // No peer could be asked to ring the waker.
    Limit { calls: SETS | EPOLL, ns: |s| s.unarmed.as_mut().map(|u| u.piece()) },
];

/// If nothing happens for long enough, sleeps of these calls free memory that is kept for speed
/// ([`idle`]). (A sleep on a word does so only if no signal can end it: see [`word::piece`].)
const GIVES_BACK: u16 = Call::PollOne.bit() | Call::Poll.bit() | EPOLL;

/// The limits of one sleep.
pub(crate) struct Limited {
    /// The limit by [`LIMITS`] and by the caller. None: no limit.
    pub(crate) cut: Option<u64>,
    /// The limit by the deadline, and by [`idle`].
    pub(crate) left: Option<u64>,
    /// If nothing happens until this limit, [`idle::give_back`] is called.
    pub(crate) idle: bool,
}

fn least(a: Option<u64>, b: Option<u64>) -> Option<u64> {
    match (a, b) {
        (Some(a), Some(b)) => Some(a.min(b)),
        (a, b) => a.or(b),
    }
}

impl Limited {
    pub(crate) fn of(s: &mut Sleep) -> Limited {
        let bit = s.call.bit();
        let rows = LIMITS.iter().filter(|row| row.calls & bit != 0);
        let cut = rows.fold(s.own, |least_so_far, row| least(least_so_far, (row.ns)(s)));
        let gives_back = bit & GIVES_BACK != 0 && (bit & WORDS == 0 || signals::handlers().none());
        let (left, idle) = match gives_back {
            false => (s.left, false),
            true => match idle::cut(least(s.left, cut)) {
                (limit, true) => (limit, true),
                _ => (s.left, false),
            },
        };
        Limited { cut, left, idle }
    }
    pub(crate) fn at_most(&self) -> Option<u64> {
        least(self.left, self.cut)
    }
}
