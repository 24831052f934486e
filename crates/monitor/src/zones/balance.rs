//! The balance of a listener group: who may steal from whom, how long the queues
//! are, who is busy. See ADR 26.
//!
//! The counts lie in a BPF array that the workers map, too; here they are compared with
//! what the kernel says of each listen socket, ten times a second while anything
//! comes, never while nothing does: then the BPF program rings.

use super::{reply, Answer, Group, GroupId};
use crate::broker::clone::listening;
use crate::clients::Outgoing;
use crate::descriptor::{self, Attached};
use crate::knobs::Knobs;
use crate::shm::Mapping;
use crate::steer::Move;
use crate::{ConnId, Monitor};
use fsocket_abi::balance::{self as abi, Queue, BALANCE_SIZE, ONE, QUEUES};
use fsocket_proto::{kind, report, Msg};
use fsocket_sync::atomic::{AtomicU32, AtomicU64, Ordering};
use fsocket_sync::idle;
use fsocket_zones::listener;
use rustix::event::epoll::{self, EventData, EventFlags};
use rustix::fd::{AsFd, AsRawFd, OwnedFd};
use rustix::io::Errno;
use std::collections::{BTreeMap, BTreeSet};
use std::mem::{offset_of, size_of};
use std::rc::Rc;
use std::time::{Duration, Instant};

/// A worker does not keep up when one in so many of its connections is stolen, and for so
/// many looks after the last time.
const OVERLOADED_SHARE: u64 = 20;
const OVERLOADED_LOOKS: u32 = 20;
/// A zone has lost most of its connections when one in so many was stolen in a look, and at
/// least so many.
const MOST_SHARE: u64 = 4;
const MOST: u64 = 4;
/// A handshake that takes longer is taken for one that never ends: until then the monitor
/// stays awake, because nobody rings when it ends.
const HANDSHAKE: Duration = Duration::from_secs(3);

/// A worker's local listen socket, and what was seen of its queue last.
struct Shared {
    socket: Rc<OwnedFd>,
    added: u64,
    looked: u64,
    length: u64,
    /// `added - taken - length`: handshakes that have not ended; since when it is that, and
    /// what it was when nothing was under way.
    open: u64,
    open_since: Instant,
    lost: u64,
    /// Looks until it counts as keeping up again.
    overloaded: u32,
    /// From whom it has stolen, at the last look.
    stolen: [u32; QUEUES],
}

pub(super) struct Balance {
    mem: Mapping,
    /// By place.
    shared: BTreeMap<u32, Shared>,
    /// Somebody rings when something comes.
    parked: bool,
}

/// What one look at a group found.
#[derive(Default)]
struct Found {
    /// A connection waits for a worker that has not looked since the last time.
    stuck: bool,
    /// A connection waits.
    waits: bool,
    moves: Vec<Stolen>,
}

/// A zone that is not busy has stolen from this one most.
struct Stolen {
    /// CPUs.
    from: u32,
    to: u32,
    /// The one it stole from is.
    busy: bool,
    /// It has lost most of what came.
    most: bool,
}

fn bit(place: u32) -> u64 {
    1 << (place - 1)
}

impl Balance {
    pub(super) fn new(mem: impl AsFd) -> std::io::Result<Balance> {
        let mem = Mapping::new(mem, BALANCE_SIZE)?;
        Ok(Balance { mem, shared: BTreeMap::new(), parked: false })
    }

    /// Places of the zones that share connections.
    pub(super) fn places(&self) -> impl Iterator<Item = &u32> {
        self.shared.keys()
    }

    /// Nothing comes, and somebody rings when something does.
    pub(super) fn is_parked(&self) -> bool {
        self.parked
    }

    fn word(&self, off: usize) -> &AtomicU32 {
        self.mem.at(off)
    }
    fn bits(&self, off: usize) -> &AtomicU64 {
        self.mem.at(off)
    }
    fn busy(&self) -> &AtomicU64 {
        self.bits(offset_of!(abi::Balance, busy))
    }
    fn overloaded(&self) -> &AtomicU64 {
        self.bits(offset_of!(abi::Balance, overloaded))
    }
    fn gone(&self) -> &AtomicU64 {
        self.bits(offset_of!(abi::Balance, gone))
    }
    fn queue(&self, place: u32) -> &Queue {
        self.mem.at(offset_of!(abi::Balance, queue) + (place as usize - 1) % QUEUES * size_of::<Queue>())
    }
    fn stolen(&self, thief: u32) -> [u32; QUEUES] {
        let row = offset_of!(abi::Balance, stolen) + (thief as usize - 1) % QUEUES * QUEUES * 4;
        std::array::from_fn(|v| self.word(row + v * 4).load(Ordering::Relaxed))
    }

    /// The limit is the application's backlog over the zones (3.3.1).
    fn set_limits(&self, knobs: &Knobs, guests: bool) {
        let limit = match self.shared.values().next() {
            Some(first) if self.shared.len() > 1 || guests => {
                let backlog = listener::backlog(first.socket.as_raw_fd()).map_or(0, |(limit, _)| limit);
                (backlog / self.shared.len() as u32).clamp(1, 0x7fff)
            }
            // Nobody to steal from, and nothing to count.
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

    /// A new worker has this place.
    fn enter(&mut self, place: u32, socket: Rc<OwnedFd>) {
        let q = self.queue(place);
        let waiting = listener::backlog(socket.as_raw_fd()).map_or(0, |(_, n)| u64::from(n));
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

    /// Its worker is gone. True: it was shared.
    fn leave(&mut self, place: u32) -> bool {
        let was = self.shared.remove(&place).is_some();
        if was {
            self.gone().fetch_or(bit(place), Ordering::Relaxed);
            self.busy().fetch_and(!bit(place), Ordering::Relaxed);
        }
        was
    }

    /// Measures every queue.
    fn look(&mut self, now: Instant, cpu: impl Fn(u32) -> Option<u32>) -> Found {
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
            let length = listener::backlog(s.socket.as_raw_fd()).map_or(0, |(_, n)| u64::from(n));
            let open = added.wrapping_sub(taken).wrapping_sub(length);
            q.drift.store(open, Ordering::Relaxed);
            if open != s.open {
                (s.open, s.open_since) = (open, now);
            } else if now.saturating_duration_since(s.open_since) >= HANDSHAKE {
                s.lost = open;
            }
            let mut average = q.average.load(Ordering::Relaxed);
            if added == s.added {
                // Nothing comes that could move the average.
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
            // 3.3.2: each zone that is not busy takes from the one it stole from most.
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

    /// Nothing waits, nothing came: from now on the program rings.
    fn park(&mut self) {
        let quiet =
            self.shared.values().all(|s| s.length == 0 && s.open == s.lost) && self.busy().load(Ordering::Relaxed) == 0;
        let all = |b: &Balance| -> bool {
            b.shared.iter().any(|(place, s)| b.queue(*place).added.load(Ordering::SeqCst) != s.added)
        };
        self.parked = quiet && idle::park(self.word(offset_of!(abi::Balance, idle)), || all(self));
    }
}

impl Group {
    fn conns_that_share(&self) -> BTreeSet<ConnId> {
        let shared = |place: &u32| self.balance.as_ref().is_some_and(|b| b.shared.contains_key(place));
        self.members.iter().filter(|(place, _)| shared(place)).map(|(_, m)| m.conn).collect()
    }
}

impl Monitor {
    /// [`kind::BALANCE`].
    pub(crate) fn balance(&mut self, id: ConnId, msg: &Msg) -> Answer {
        let off = self.config.balance.off;
        let g = self.zones.all.get_mut(&msg.id).filter(|g| g.holders.contains(&id)).ok_or(Errno::NOENT)?;
        if off {
            return Err(Errno::OPNOTSUPP);
        }
        if g.balance.is_none() {
            g.balance = Some(Balance::new(g.select.balance()).map_err(|_| Errno::OPNOTSUPP)?);
            let data = EventData::new_u64(crate::monitor::FIRST_WAKER | g.id);
            epoll::add(&*self.epoll, g.select.waker(), data, EventFlags::IN)?;
        }
        let map = rustix::io::fcntl_dupfd_cloexec(g.select.balance(), 0)?;
        Ok((reply(msg), Some(Rc::new(map))))
    }

    /// [`kind::SHARE`].
    pub(crate) fn share(&mut self, id: ConnId, msg: &Msg, fd: Option<Attached>) -> Option<()> {
        let fd = fd?;
        let (shape, _) = listening(fd.as_fd()).ok()?;
        let netns = descriptor::netns_cookie(fd.as_fd()).ok()?;
        let place = u32::try_from(msg.arg0).ok().filter(|p| (1..=QUEUES as u32).contains(p))?;
        let g = self.zones.all.get_mut(&msg.id)?;
        let cpu = g.members.get(&place).filter(|m| m.conn == id)?.cpu;
        // As for LOCAL: nobody hands the others a listener that is not theirs.
        if g.netns != netns || g.shape != shape.addr() {
            return None;
        }
        let mut others = g.conns_that_share();
        if g.own.is_some() {
            // Related or not (workers that were started one by one): who shares the address must
            // serve whatever comes. But not another user's, who may have got the socket.
            let uid = |conn: ConnId| self.clients.get(conn).map(|c| c.uid);
            others.retain(|other| uid(*other) == uid(id));
        }
        let is_first = !others.contains(&id);
        let balance = g.balance.as_mut()?;
        let socket = Rc::new(fd.keep());
        balance.enter(place, socket.clone());
        balance.set_limits(&self.config.balance, !g.guests.is_empty());
        balance.park();
        let peer = |place: u32, cpu: u32, fd: &Rc<OwnedFd>| {
            let msg = Msg { id: g.id, arg0: place.into(), arg1: cpu.into(), ..Msg::new(kind::PEER) };
            Outgoing { msg, fd: Some(fd.clone()), unasked: true }
        };
        for other in others.iter().copied().filter(|other| *other != id) {
            self.clients.send(other, peer(place, cpu, &socket), &self.arenas);
        }
        if is_first {
            for (p, m) in g.members.iter().filter(|(_, m)| m.conn != id && others.contains(&m.conn)) {
                if let Some(s) = g.balance.as_ref().and_then(|b| b.shared.get(p)) {
                    self.clients.send(id, peer(*p, m.cpu, &s.socket), &self.arenas);
                }
            }
        }
        tracing::debug!(group = g.id, process = id, place, "balanced");
        self.zones.balance_at(Instant::now() + self.config.balance.interval);
        Some(())
    }

    /// The worker at a place is gone, or has closed its socket.
    pub(super) fn unshare(&mut self, group: GroupId, place: u32, owner: ConnId) {
        let Some(g) = self.zones.all.get_mut(&group) else { return };
        let Some(balance) = g.balance.as_mut() else { return };
        if !balance.leave(place) {
            return;
        }
        balance.set_limits(&self.config.balance, !g.guests.is_empty());
        let msg = Msg { id: group, arg0: place.into(), ..Msg::new(kind::PEER_GONE) };
        for other in g.conns_that_share().into_iter().filter(|other| *other != owner) {
            self.clients.send(other, Outgoing { msg, fd: None, unasked: true }, &self.arenas);
        }
    }

    /// [`kind::WAITING`]: a connection is there now, or he is told when one is.
    pub(crate) fn waiting(&mut self, id: ConnId, msg: &Msg) -> Answer {
        let off = self.config.balance.off;
        let known = self.zones.all.get_mut(&msg.id).filter(|g| !off && g.own.is_none() && g.holders.contains(&id));
        let g = known.ok_or(Errno::NOENT)?;
        let length = |s: &Shared| listener::backlog(s.socket.as_raw_fd()).map_or(0, |(_, n)| n);
        let waits =
            |b: &Balance| b.shared.iter().find(|(_, s)| length(s) > 0).map(|(place, s)| (*place, s.socket.clone()));
        let mut found = g.balance.as_ref().and_then(waits);
        if found.is_none() && g.guests.insert(id) {
            if let Some(b) = &mut g.balance {
                b.set_limits(&self.config.balance, true);
                b.park();
                // From here on it is counted what comes.
                found = waits(b);
            }
            self.zones.balance_at(Instant::now() + self.config.balance.interval);
        }
        let (place, socket) = found.ok_or(Errno::AGAIN)?;
        Ok((Msg { arg0: place.into(), ..reply(msg) }, Some(socket)))
    }

    /// [`kind::SHUT`].
    pub(crate) fn shut_group(&mut self, id: ConnId, msg: &Msg) -> Answer {
        let known = self.zones.all.get_mut(&msg.id).filter(|g| g.own.is_none() && g.holders.contains(&id));
        let g = known.ok_or(Errno::NOENT)?;
        if msg.arg0 == 1 {
            g.withdrawn = true;
            g.assign();
        }
        for s in g.balance.iter().flat_map(|b| b.shared.values()) {
            let _ = rustix::net::shutdown(&*s.socket, rustix::net::Shutdown::Read);
        }
        self.zones.call(msg.id);
        self.zones_look();
        Ok((reply(msg), None))
    }

    /// [`kind::PEER_CLOSED`].
    pub(crate) fn peer_closed(&mut self, id: ConnId, msg: &Msg) {
        if self.zones.all.get(&msg.id).is_some_and(|g| g.holders.contains(&id)) {
            self.zones.call(msg.id);
            self.zones_look();
        }
    }

    /// A group's program has rung.
    pub(crate) fn balance_rung(&mut self, group: GroupId) {
        if let Some(g) = self.zones.all.get_mut(&group) {
            g.select.heard();
            if let Some(b) = &mut g.balance {
                b.parked = false;
            }
        }
        self.zones.balance_at(Instant::now());
    }

    /// Looks at the queues if it is time.
    pub(crate) fn balance_if_due(&mut self) {
        let now = Instant::now();
        if self.zones.balance_next.is_none_or(|at| at > now) {
            return;
        }
        self.zones.balance_next = None;
        let mut moves = Vec::new();
        let mut zones = Vec::new();
        let mut nudges = Vec::new();
        let mut again = false;
        let knobs = &self.config.balance;
        for g in self.zones.all.values_mut() {
            let has_flows = knobs.migrate && !self.steers.has_groups(g.netns);
            g.fit_flows(has_flows, now);
            let members = &g.members;
            let Some(b) = g.balance.as_mut().filter(|b| !b.parked && !b.shared.is_empty()) else {
                // Nothing comes, and groups go home.
                again |= g.move_flows(&[], self.steers.spare(now), knobs.groups, now);
                continue;
            };
            let before: u64 = b.shared.values().map(|s| s.added).fold(0, u64::wrapping_add);
            let found = b.look(now, |place| members.get(&place).map(|m| m.cpu));
            let came = b.shared.values().map(|s| s.added).fold(0, u64::wrapping_add).wrapping_sub(before);
            if came == 0 {
                b.park();
            }
            again |= !b.parked;
            zones.extend(b.shared.keys().filter_map(|place| Some((g.netns, members.get(place)?.cpu))));
            let netns = g.netns;
            let of = |Stolen { from, to, busy, most }| Move { netns, from, to, busy, most };
            let stolen: Vec<Move> = found.moves.into_iter().map(of).collect();
            again |= g.move_flows(&stolen, self.steers.spare(now), knobs.groups, now);
            moves.extend(stolen);
            if found.waits {
                nudges.extend(std::mem::take(&mut g.guests).into_iter().map(|conn| (g.id, conn)));
            }
            if found.stuck {
                nudges.extend(g.conns_that_share().into_iter().map(|conn| (g.id, conn)));
            }
        }
        self.nudge(nudges);
        let knobs = self.config.balance.clone();
        if knobs.migrate {
            again |= self.steer_also(&crate::steer::Also::Migrate { moves, zones, asked: knobs.groups }).away;
        }
        if again {
            self.zones.balance_at(now + knobs.interval);
        }
    }

    fn nudge(&mut self, whom: Vec<(GroupId, ConnId)>) {
        for (group, conn) in whom {
            let msg = Msg { id: group, ..Msg::new(kind::WAKE_HINT) };
            self.clients.send(conn, Outgoing { msg, fd: None, unasked: true }, &self.arenas);
        }
    }
}

impl super::Zones {
    /// The next look is not later than this.
    fn balance_at(&mut self, at: Instant) {
        self.balance_next = Some(self.balance_next.map_or(at, |next| next.min(at)));
    }
}

impl Group {
    /// For the report: queues, and steals by pair.
    pub(super) fn report_balance(&self) -> Option<report::Balance> {
        let b = self.balance.as_ref()?;
        let busy = b.busy().load(Ordering::Relaxed);
        let queues = b.shared.iter().map(|(place, s)| {
            let q = b.queue(*place);
            report::Queue {
                place: *place,
                cpu: self.members.get(place).map_or(0, |m| m.cpu),
                length: listener::backlog(s.socket.as_raw_fd()).map_or(0, |(_, n)| n),
                counted: q.length(),
                average: f64::from(q.average.load(Ordering::Relaxed)) / f64::from(ONE),
                busy: busy & bit(*place) != 0,
                added: q.added.load(Ordering::Relaxed),
                taken: q.taken.load(Ordering::Relaxed),
            }
        });
        let steals = b.shared.keys().flat_map(|thief| {
            let row = b.stolen(*thief);
            row.into_iter().enumerate().filter(|(_, n)| *n > 0).map(move |(victim, n)| report::Steals {
                thief: *thief,
                victim: victim as u32 + 1,
                connections: n.into(),
            })
        });
        Some(report::Balance {
            limit: b.word(offset_of!(abi::Balance, limit)).load(Ordering::Relaxed),
            queues: queues.collect(),
            steals: steals.collect(),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::shm::memfd;
    use rustix::fs::SealFlags;
    use std::net::{Ipv4Addr, TcpListener, TcpStream};

    /// One queue of a listener, which is looked at in turns of a tenth of a second.
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
            balance.enter(1, Rc::new(listener.try_clone().unwrap().into()));
            balance.set_limits(&Knobs::default(), false);
            Watched { balance, listener, now: Instant::now() }
        }
        /// As the BPF program.
        fn syn(&self) {
            self.balance.queue(1).added.fetch_add(1, Ordering::SeqCst);
        }
        pub(super) fn accept(&self) {
            self.listener.accept().unwrap();
            self.balance.queue(1).taken.fetch_add(1, Ordering::SeqCst);
        }
        /// Stuck, and whether it is parked afterwards.
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
