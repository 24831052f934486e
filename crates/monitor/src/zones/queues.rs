//! The queues of a listener group: their lengths, which of them are busy, and steals. ADR 26.
//!
//! The counters are in a BPF array that the workers map, too. This code compares them with the
//! kernel's facts about each listen socket.

use crate::foreign::ForeignFd;
use crate::knobs::Knobs;
use crate::memory::Mapping;
use fsocket_abi::balance::{self as abi, Queue, BALANCE_SIZE, ONE, QUEUES};
use fsocket_reuseport::listener;
use fsocket_sync::atomic::{AtomicU32, AtomicU64, Ordering};
use fsocket_sync::idle;
use rustix::fd::{AsFd, AsRawFd};
use std::collections::BTreeMap;
use std::mem::{offset_of, size_of};
use std::rc::Rc;
use std::time::{Duration, Instant};

/// A worker is overloaded if at least one in this many of its connections is stolen. It stays
/// marked for this many looks after the last such look.
const OVERLOADED_SHARE: u64 = 20;
const OVERLOADED_LOOKS: u32 = 20;
/// A zone has lost most of its connections if at least one in this many was stolen since the last
/// look, and at least [`MOST`] of them.
const MOST_SHARE: u64 = 4;
const MOST: u64 = 4;
/// A handshake that takes longer than this is assumed never to end. Until then the monitor stays
/// awake, because no event tells when a handshake ends.
const HANDSHAKE: Duration = Duration::from_secs(3);

/// A worker's local listen socket, and the state of its queue at the last look.
pub struct Shared {
    pub(super) socket: Rc<ForeignFd>,
    pub(super) added: u64,
    pub(super) looked: u64,
    pub(super) length: u64,
    /// `added - taken - length`: handshakes in progress. `open_since`: since when it has this
    /// value. `lost`: the value when none was in progress.
    pub(super) open: u64,
    pub(super) open_since: Instant,
    pub(super) lost: u64,
    /// The number of looks after which it is no longer marked as overloaded.
    pub(super) overloaded: u32,
    /// The worker's steals from each queue, up to the last look.
    pub(super) stolen: [u32; QUEUES],
}

pub struct Balance {
    pub(super) mem: Mapping,
    /// The shared sockets by place.
    pub(super) shared: BTreeMap<u32, Shared>,
    /// The monitor sleeps, and the BPF program wakes it when a connection comes.
    pub(super) parked: bool,
}

/// The result of a look at a group.
#[derive(Default)]
pub struct Found {
    /// A connection waits, and its worker has not looked since the last look of the monitor.
    pub(super) stuck: bool,
    /// At least one connection waits.
    pub(super) waits: bool,
    pub(super) moves: Vec<Stolen>,
}

/// A zone that is not busy has stolen more from this zone than from any other.
pub struct Stolen {
    /// The CPU of the robbed zone, and the CPU of the zone that has stolen.
    pub(super) from: u32,
    pub(super) to: u32,
    /// The robbed zone is busy.
    pub(super) busy: bool,
    /// The robbed zone has lost most of its new connections.
    pub(super) most: bool,
}

pub(super) fn bit(place: u32) -> u64 {
    1 << (place - 1)
}

impl Balance {
    pub fn new(mem: impl AsFd) -> std::io::Result<Balance> {
        let mem = Mapping::new(mem, BALANCE_SIZE)?;
        Ok(Balance { mem, shared: BTreeMap::new(), parked: false })
    }

    /// The places of the workers that share connections.
    pub fn places(&self) -> impl Iterator<Item = &u32> {
        self.shared.keys()
    }

    /// Whether the monitor waits for the BPF program to wake it.
    pub fn is_parked(&self) -> bool {
        self.parked
    }

    pub(super) fn word(&self, off: usize) -> &AtomicU32 {
        self.mem.at(off)
    }
    fn bits(&self, off: usize) -> &AtomicU64 {
        self.mem.at(off)
    }
    pub(super) fn busy(&self) -> &AtomicU64 {
        self.bits(offset_of!(abi::Balance, busy))
    }
    fn overloaded(&self) -> &AtomicU64 {
        self.bits(offset_of!(abi::Balance, overloaded))
    }
    fn gone(&self) -> &AtomicU64 {
        self.bits(offset_of!(abi::Balance, gone))
    }
    pub(super) fn queue(&self, place: u32) -> &Queue {
        self.mem.at(offset_of!(abi::Balance, queue) + (place as usize - 1) % QUEUES * size_of::<Queue>())
    }
    pub(super) fn stolen(&self, thief: u32) -> [u32; QUEUES] {
        let row = offset_of!(abi::Balance, stolen) + (thief as usize - 1) % QUEUES * QUEUES * 4;
        std::array::from_fn(|v| self.word(row + v * 4).load(Ordering::Relaxed))
    }

    /// Sets the limits. A queue's limit is the application's backlog divided by the number of
    /// zones (section 3.3.1 of the paper).
    pub(super) fn set_limits(&self, knobs: &Knobs, guests: bool) {
        let limit = match self.shared.values().next() {
            Some(first) if self.shared.len() > 1 || guests => {
                let backlog = listener::backlog(first.socket.as_fd().as_raw_fd()).map_or(0, |(limit, _)| limit);
                (backlog / self.shared.len() as u32).clamp(1, 0x7fff)
            }
            // There is no queue from which to steal, so nothing is counted.
            _ => 0,
        };
        let share = |percent: u32| u64::from(limit) * u64::from(percent.min(100));
        self.word(offset_of!(abi::Balance, high)).store((share(knobs.busy) / 100).max(1) as u32, Ordering::Relaxed);
        let low = share(knobs.idle) * u64::from(ONE) / 100;
        self.word(offset_of!(abi::Balance, low)).store(low.max(1) as u32, Ordering::Relaxed);
        self.word(offset_of!(abi::Balance, ratio)).store(knobs.ratio.clamp(1, 1 << 16), Ordering::Relaxed);
        let patience = knobs.patience.as_micros().clamp(1, 10_000_000) as u32;
        self.word(offset_of!(abi::Balance, patience)).store(patience, Ordering::Relaxed);
        self.word(offset_of!(abi::Balance, limit)).store(limit, Ordering::Release);
    }

    /// Starts to measure the socket of a new worker at this place.
    pub(super) fn enter(&mut self, place: u32, socket: Rc<ForeignFd>) {
        let q = self.queue(place);
        let waiting = listener::backlog(socket.as_fd().as_raw_fd()).map_or(0, |(_, n)| u64::from(n));
        let added = q.added.load(Ordering::Relaxed);
        let open = added.wrapping_sub(q.taken.load(Ordering::Relaxed)).wrapping_sub(waiting);
        q.drift.store(open, Ordering::Relaxed);
        q.average.store(0, Ordering::Relaxed);
        let looked = q.looked.load(Ordering::Relaxed);
        self.gone().fetch_and(!bit(place), Ordering::Relaxed);
        self.busy().fetch_and(!bit(place), Ordering::Relaxed);
        self.overloaded().fetch_and(!bit(place), Ordering::Relaxed);
        let stolen = self.stolen(place);
        let (length, lost, open_since) = (waiting, open, Instant::now());
        let shared = Shared { socket, added, looked, length, open, open_since, lost, overloaded: 0, stolen };
        self.shared.insert(place, shared);
    }

    /// Forgets the worker at a place. True: its socket was shared.
    pub(super) fn leave(&mut self, place: u32) -> bool {
        let was = self.shared.remove(&place).is_some();
        if was {
            self.gone().fetch_or(bit(place), Ordering::Relaxed);
            self.busy().fetch_and(!bit(place), Ordering::Relaxed);
        }
        was
    }

    /// Measures every queue and compares it with the last look.
    pub(super) fn look(&mut self, now: Instant, cpu: impl Fn(u32) -> Option<u32>) -> Found {
        let mut found = Found::default();
        let low = self.word(offset_of!(abi::Balance, low)).load(Ordering::Relaxed);
        let high = self.word(offset_of!(abi::Balance, high)).load(Ordering::Relaxed);
        let mut shared = std::mem::take(&mut self.shared);
        let mut lost = [0u64; QUEUES];
        let mut most = [false; QUEUES];
        for (&place, s) in &shared {
            for (n, (now, before)) in lost.iter_mut().zip(self.stolen(place).iter().zip(s.stolen)) {
                *n += u64::from(now.wrapping_sub(before));
            }
        }
        for (&place, s) in &shared {
            let at = (place as usize - 1) % QUEUES;
            let came = self.queue(place).added.load(Ordering::Relaxed).wrapping_sub(s.added);
            most[at] = lost[at] >= MOST && lost[at] * MOST_SHARE >= came;
        }
        for (&place, s) in &mut shared {
            let q = self.queue(place);
            let (added, taken) = (q.added.load(Ordering::Relaxed), q.taken.load(Ordering::Relaxed));
            let length = listener::backlog(s.socket.as_fd().as_raw_fd()).map_or(0, |(_, n)| u64::from(n));
            let open = added.wrapping_sub(taken).wrapping_sub(length);
            q.drift.store(open, Ordering::Relaxed);
            if open != s.open {
                (s.open, s.open_since) = (open, now);
            } else if now.saturating_duration_since(s.open_since) >= HANDSHAKE {
                s.lost = open;
            }
            let mut average = q.average.load(Ordering::Relaxed);
            if added == s.added {
                // No new connections come that would update the average.
                average = (length.min(0x7fff) as u32) * ONE;
                q.average.store(average, Ordering::Relaxed);
            }
            if length > u64::from(high) {
                self.busy().fetch_or(bit(place), Ordering::Relaxed);
            } else if average < low {
                self.busy().fetch_and(!bit(place), Ordering::Relaxed);
            }
            let lost = lost[(place as usize - 1) % QUEUES];
            if lost > 0 && lost * OVERLOADED_SHARE >= added.wrapping_sub(s.added) {
                s.overloaded = OVERLOADED_LOOKS;
                self.overloaded().fetch_or(bit(place), Ordering::Relaxed);
            } else if s.overloaded > 0 {
                s.overloaded -= 1;
                if s.overloaded == 0 {
                    self.overloaded().fetch_and(!bit(place), Ordering::Relaxed);
                }
            }
            let looked = q.looked.load(Ordering::Relaxed);
            found.waits |= length > 0;
            found.stuck |= length > 0 && s.length > 0 && looked == s.looked;
            (s.added, s.looked, s.length) = (added, looked, length);
            // Section 3.3.2: each zone that is not busy takes from the zone from which it has
            // stolen most.
            let now = self.stolen(place);
            let from = (0..QUEUES).map(|v| (now[v].wrapping_sub(s.stolen[v]), v)).max().filter(|(n, _)| *n > 0);
            s.stolen = now;
            let busy = self.busy().load(Ordering::Relaxed);
            let victim = from.map(|(_, v)| v as u32 + 1).filter(|_| busy & bit(place) == 0);
            if let Some((victim, from, to)) = victim.and_then(|v| Some((v, cpu(v)?, cpu(place)?))) {
                if from != to {
                    let most = most[(victim as usize - 1) % QUEUES];
                    found.moves.push(Stolen { from, to, busy: busy & bit(victim) != 0, most });
                }
            }
        }
        self.shared = shared;
        found
    }

    /// If no connection waits and none has come, lets the BPF program wake the monitor for the
    /// next one.
    pub(super) fn park(&mut self) {
        let quiet =
            self.shared.values().all(|s| s.length == 0 && s.open == s.lost) && self.busy().load(Ordering::Relaxed) == 0;
        let all = |b: &Balance| -> bool {
            b.shared.iter().any(|(place, s)| b.queue(*place).added.load(Ordering::SeqCst) != s.added)
        };
        self.parked = quiet && idle::park(self.word(offset_of!(abi::Balance, idle)), || all(self));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory::memfd;
    use rustix::fs::SealFlags;
    use std::net::{Ipv4Addr, TcpListener, TcpStream};

    /// One queue of a listener, which the test measures about every tenth of a second.
    pub(super) struct Watched {
        pub(super) balance: Balance,
        pub(super) listener: TcpListener,
        now: Instant,
    }

    impl Watched {
        pub(super) fn new() -> Watched {
            let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
            let mem = memfd("balance", BALANCE_SIZE, SealFlags::SHRINK).unwrap();
            let mut balance = Balance::new(mem).unwrap();
            balance.enter(1, Rc::new(ForeignFd::new(listener.try_clone().unwrap().into(), 0)));
            balance.set_limits(&Knobs::default(), false);
            Watched { balance, listener, now: Instant::now() }
        }
        /// Counts a SYN, as the BPF program does.
        fn syn(&self) {
            self.balance.queue(1).added.fetch_add(1, Ordering::SeqCst);
        }
        pub(super) fn accept(&self) {
            self.listener.accept().unwrap();
            self.balance.queue(1).taken.fetch_add(1, Ordering::SeqCst);
        }
        /// Measures the queue. Returns whether it is stuck, and whether the monitor sleeps
        /// afterwards.
        fn look(&mut self, after: Duration) -> (bool, bool) {
            self.now += after;
            let stuck = self.balance.look(self.now, |_| None).stuck;
            self.balance.park();
            (stuck, self.balance.parked)
        }
    }

    pub(super) const TURN: Duration = Duration::from_millis(100);

    #[test]
    fn a_handshake_that_is_open_keeps_the_monitor_awake() {
        let mut w = Watched::new();
        assert_eq!(w.look(TURN), (false, true));
        w.syn();
        assert_eq!(w.look(TURN), (false, false));
        assert_eq!(w.look(TURN), (false, false), "nothing has come since, but it will");
        let address = w.listener.local_addr().unwrap();
        let _client = TcpStream::connect(address).unwrap();
        assert_eq!(w.look(TURN), (false, false));
        assert_eq!(w.look(TURN), (true, false), "nobody looks at it");
        w.accept();
        assert_eq!(w.look(TURN), (false, true));
    }

    #[test]
    fn not_for_ever() {
        let mut w = Watched::new();
        w.syn();
        assert_eq!(w.look(TURN), (false, false));
        assert_eq!(w.look(HANDSHAKE - TURN), (false, false));
        assert_eq!(w.look(TURN), (false, true));
        w.syn();
        assert_eq!(w.look(TURN), (false, false), "another one");
        assert_eq!(w.look(HANDSHAKE), (false, true));
    }
}
