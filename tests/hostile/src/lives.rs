//! The lives of hostile processes. A life ends when the process is killed, which may happen at any
//! step.

use crate::descriptors::Descriptors;
use crate::peer::{Channel, Peer, SHARED};
use crate::random::Random;
use fsocket_abi::channel::{self, record, slot_state, status, SERVER, SLOTS};
use fsocket_abi::path_switch::PeerStatus;
use fsocket_proto::raw::{waiter, Packet};
use fsocket_proto::{notice, request, Addr, Payload};
use fsocket_sync::atomic::{AtomicU32, AtomicU64, Ordering};
use fsocket_sys as sys;
use std::path::Path;

pub struct Life<'a> {
    pub socket: &'a Path,
    pub ports: &'a [u16],
    pub random: Random,
}

type Script = fn(&mut Life) -> Option<()>;

/// The cost of a script for its victims. A control run over kernel TCP causes the same cost.
#[derive(Clone, Copy, PartialEq)]
pub enum Cost {
    /// Connections, opened one after the other.
    Connections,
    /// A few connections until the script is detected, and its own CPU time.
    Words,
    /// A few connections, whose server the script wakes all the time.
    Wakes,
    /// The script's own CPU time.
    Messages,
}
use Cost::*;

/// All scripts. The name is for people who look for the cause of a failure.
pub const SCRIPTS: &[(&str, Cost, Script)] = &[
    ("messages before HELLO", Messages, |l| l.messages(false)),
    ("messages", Messages, |l| l.messages(true)),
    ("never reads", Messages, |l| l.never_reads()),
    ("shows what it has not", Messages, |l| l.shows()),
    ("queue positions", Words, |l| l.queue_positions()),
    ("queue entries", Words, |l| l.queue_entries()),
    ("random words", Words, |l| l.random_words()),
    ("boundary words", Wakes, |l| l.boundary_words()),
    ("bad records", Connections, |l| l.connections(Break::Record)),
    ("bad positions", Connections, |l| l.connections(Break::Position)),
    ("a status that no side has", Connections, |l| l.connections(Break::Status)),
    ("moves and never arrives", Connections, |l| l.connections(Break::Moving)),
    ("has moved nowhere", Connections, |l| l.connections(Break::Moved)),
    ("wants everything", Connections, |l| l.connections(Break::Wants)),
    ("shows and takes back", Connections, |l| l.connections(Break::Flicker)),
    ("useless marks", Connections, |l| l.connections(Break::Marks)),
    ("fills the ring and stops", Connections, |l| l.connections(Break::Silence)),
    ("lies in its arena", Messages, |l| l.arena()),
    ("listens and does not accept", Messages, |l| l.listener()),
    ("asks for everything", Messages, |l| l.hoarder()),
];

/// Greater than the number of every message.
const KINDS: usize = 96;

/// Time in nanoseconds that an honest connection takes with a server and the two CPUs of a small
/// machine.
pub const A_CONNECTION_NS: usize = 5_000_000;

#[derive(Clone, Copy, PartialEq)]
enum Break {
    Record,
    Position,
    Status,
    Moving,
    Moved,
    Wants,
    Flicker,
    Marks,
    Silence,
}

impl Life<'_> {
    pub fn peer(&mut self) -> Option<Peer> {
        let mut peer = Peer::connect(self.socket).ok()?;
        peer.hello(&mut self.random).then_some(peer)
    }

    pub fn introduced(&mut self) -> Option<(Peer, Channel)> {
        let mut peer = self.peer()?;
        let port = *self.random.one(self.ports);
        let channel = peer.channel(port).ok()?;
        Some((peer, channel))
    }

    fn message(&mut self) -> Packet {
        let r = &mut self.random;
        let mut word = |small: usize| if r.chance(60) { r.below(small) as u64 } else { r.word() };
        let (id, arg0, arg1, arg2, seq) = (word(64), word(16), word(8), word(6), word(1000) as u32);
        let kind = if r.chance(95) { r.below(KINDS) as u32 } else { r.word() as u32 };
        let ip = std::net::Ipv4Addr::LOCALHOST.to_ipv6_mapped().octets();
        let port = if r.chance(50) { *r.one(self.ports) } else { r.word() as u16 };
        let addr = Addr { ip, port, family: libc::AF_INET as u16, v6only: 0 };
        let version = if r.chance(98) { fsocket_proto::VERSION } else { r.word() as u16 };
        Packet { kind, seq, version, id, arg0, arg1, arg2, addr, ..Packet::new(kind) }
    }

    /// Sends messages of every kind in any order, with any descriptor or none.
    fn messages(&mut self, hello: bool) -> Option<()> {
        loop {
            let peer = if hello { self.peer()? } else { Peer::connect(self.socket).ok()? };
            let fds = Descriptors::new(peer.fd);
            for _ in 0..self.random.below(300) {
                let fd = self.random.chance(60).then(|| *self.random.one(fds.all()));
                let sent = if self.random.chance(2) {
                    let junk: Vec<u8> = (0..self.random.below(300)).map(|_| self.random.next() as u8).collect();
                    sys::send_with_fd(peer.fd, &junk, fd, libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL).is_ok()
                } else {
                    peer.tell(self.message(), fd)
                };
                if self.random.chance(70) {
                    while let Some((_, fd)) = peer.receive() {
                        fd.map(sys::close);
                    }
                }
                if !sent {
                    break;
                }
            }
            fds.close();
            let _ = sys::close(peer.fd);
        }
    }

    fn never_reads(&mut self) -> Option<()> {
        let peer = self.peer()?;
        loop {
            let mut m = self.message();
            m.kind = *self.random.one(&[
                request::Claim::KIND,
                request::Ports::KIND,
                request::Connect::KIND,
                request::Report::KIND,
                request::Worker::KIND,
            ]);
            m.version = fsocket_proto::VERSION;
            if !peer.tell(m, None) {
                sys::nanosleep(1_000_000);
            }
        }
    }

    /// After a restart of the monitor, processes show it what they have. This process shows
    /// objects at any time, and does not have most of them.
    fn shows(&mut self) -> Option<()> {
        let (mut peer, c) = self.introduced()?;
        let fds = Descriptors::new(peer.fd);
        let told = [
            request::Attach::KIND,
            request::Arena::KIND,
            request::Counts::KIND,
            request::Nearer::KIND,
            notice::Watched::KIND,
            request::Settled::KIND,
            request::Passed::KIND,
        ];
        let asked = [
            request::Ports::KIND,
            request::InUse::KIND,
            request::Meet::KIND,
            request::Offer::KIND,
            request::Upgrade::KIND,
            request::ChannelHandle::KIND,
            request::Operate::KIND,
        ];
        loop {
            let near = c.id.wrapping_add(self.random.below(9) as u32).wrapping_sub(4);
            let id = if self.random.chance(70) { near.into() } else { self.random.word() };
            let own = [c.memory, *self.random.one(fds.all())];
            let fd = self.random.chance(90).then(|| *self.random.one(&own));
            let lease = u64::from(c.port) + 64 * self.random.below(4) as u64;
            let (arg0, arg1) = (self.random.below(3) as u64, self.random.below(3) as u64);
            let arg2 = if self.random.chance(50) { lease } else { self.random.below(3) as u64 };
            let what = Packet { id, arg0, arg1, arg2, ..self.message() };
            let what = Packet { version: fsocket_proto::VERSION, ..what };
            if self.random.chance(60) {
                peer.tell(Packet { kind: *self.random.one(&told), ..what }, fd);
            } else {
                let (_, got) = peer.request(Packet { kind: *self.random.one(&asked), ..what }, fd)?;
                got.map(sys::close);
            }
        }
    }

    fn queue_positions(&mut self) -> Option<()> {
        let (peer, c) = self.introduced()?;
        loop {
            let q = if self.random.chance(50) { self.random.below(4) } else { self.random.below(channel::WORKERS + 1) };
            let (queue, ahead) = (c.queue(q), *self.random.one(&[1 << 31, 257, 1 << 16, u32::MAX]));
            queue.tail.store(queue.head.load(Ordering::Relaxed).wrapping_add(ahead), Ordering::Release);
            c.wake(&peer, u64::MAX);
            sys::nanosleep(200_000);
        }
    }

    fn queue_entries(&mut self) -> Option<()> {
        let (peer, c) = self.introduced()?;
        loop {
            let queue = c.queue(self.random.below(3));
            let tail = queue.tail.load(Ordering::Relaxed);
            for i in 0..self.random.below(255) as u32 {
                let entry =
                    if self.random.chance(50) { self.random.below(SLOTS + 1) as u64 } else { self.random.word() };
                queue.entry[tail.wrapping_add(i) as usize % queue.entry.len()].store(entry as u32, Ordering::Relaxed);
                queue.tail.store(tail.wrapping_add(i + 1), Ordering::Release);
            }
            c.wake(&peer, u64::MAX);
            sys::nanosleep(200_000);
        }
    }

    fn random_words(&mut self) -> Option<()> {
        let (peer, c) = self.introduced()?;
        (0..8).for_each(|slot| c.open(&peer, slot));
        loop {
            for _ in 0..256 {
                let off = SHARED.0 + self.random.below(SHARED.1 - SHARED.0);
                c.word::<AtomicU64>(off).store(self.random.word(), Ordering::Relaxed);
                let slot = self.random.below(8);
                let dir = self.random.below(2);
                c.record(slot, dir, self.random.below(4096) & !7).store(self.random.word(), Ordering::Relaxed);
            }
            c.wake(&peer, u64::MAX);
            sys::nanosleep(100_000);
        }
    }

    /// Changes one word at a time, while all other words are right.
    fn boundary_words(&mut self) -> Option<()> {
        let (peer, c) = self.introduced()?;
        (0..4).for_each(|slot| c.open(&peer, slot));
        let mut off = SHARED.0 + (self.random.below(SHARED.1 - SHARED.0) & !3);
        loop {
            let word = c.word::<AtomicU32>(off);
            let was = word.load(Ordering::Relaxed);
            for value in [0, 1, 0xff, 1 << 20, 1 << 31, u32::MAX, self.random.next() as u32] {
                word.store(value, Ordering::Release);
                c.mark(&peer, self.random.below(4));
            }
            word.store(was, Ordering::Release);
            off = if off + 4 >= SHARED.1 { SHARED.0 } else { off + 4 };
        }
    }

    /// Opens connections as an honest client does, and then breaks the rules on them.
    fn connections(&mut self, how: Break) -> Option<()> {
        let (peer, c) = self.introduced()?;
        let mut slot = 0;
        loop {
            c.open(&peer, slot);
            let asks: &[u8] =
                if c.server_port() % 2 == 0 { b"GET /1000 HTTP/1.1\r\nHost: x\r\n\r\n" } else { b"PING\r\n" };
            if self.random.chance(80) {
                c.say(&peer, slot, asks);
            }
            // The number of connections must not cause the harm, because every user may connect.
            sys::nanosleep(self.random.below(2 * A_CONNECTION_NS) as u64);
            self.spoil(&peer, &c, slot, how);
            slot = (slot + 1) % SLOTS;
        }
    }

    fn spoil(&mut self, peer: &Peer, c: &Channel, slot: usize, how: Break) {
        let s = c.slot(slot);
        let d = &s.dir;
        match how {
            Break::Record => {
                for off in (0..256).step_by(8) {
                    c.record(slot, 0, off)
                        .store(record::pack(self.random.below(4) as u64, self.random.word(), 0), Ordering::Release);
                }
            }
            Break::Position => {
                for word in [
                    &d[1].cons.head,
                    &d[0].prod.rewind_from,
                    &d[0].prod.space_at,
                    &s.migrated[1].base,
                    &s.migrated[1].limit,
                ] {
                    word.store(self.random.word(), Ordering::Release);
                }
                d[1].cons.window.store(self.random.word() as u32, Ordering::Relaxed);
            }
            Break::Status => {
                let odd = [status::CLOSED, status::SHUT_BOTH, 1 << 6, 1 << 31, status::CLOSED | status::SHUT_BOTH];
                d[0].prod.status.store(*self.random.one(&odd), Ordering::Release);
            }
            Break::Moving => d[0].prod.status.store(PeerStatus::MOVING.bits(), Ordering::Release),
            Break::Moved => {
                peer.tell(
                    Packet {
                        id: c.id.into(),
                        arg0: slot as u64,
                        arg1: s.generation.load(Ordering::Relaxed).into(),
                        ..Packet::new(request::Switch::KIND)
                    },
                    None,
                );
                d[0].prod.status.store(PeerStatus::MOVED.bits(), Ordering::Release);
            }
            Break::Wants => {
                for w in 0..channel::WAITERS {
                    let waiter = c.waiter(channel::CLIENT, w);
                    waiter.waker.store(self.random.next(), Ordering::Relaxed);
                    waiter.sleeping.store(1, Ordering::Relaxed);
                }
                for dir in d {
                    let _ = dir.want_data.arm(u64::MAX);
                    let _ = dir.want_space.arm(u64::MAX);
                }
            }
            Break::Flicker => {
                for _ in 0..2000 {
                    c.record(slot, 0, 64).fetch_xor(record::pack(record::DATA, 8, 0), Ordering::Release);
                    d[1].cons.head.fetch_xor(1 << 40, Ordering::Release);
                    d[0].prod.status.fetch_xor(status::CLOSED, Ordering::Release);
                }
            }
            Break::Marks => {
                for w in 0..channel::WAITERS {
                    let waiter = c.waiter(SERVER, w);
                    if waiter.waker.load(Ordering::Relaxed) != 0 {
                        waiter.ready.iter().for_each(|r| r.store(u64::MAX, Ordering::Relaxed));
                        waiter.summary.store(u64::MAX, Ordering::Release);
                    }
                }
                c.wake(peer, 1);
                return;
            }
            Break::Silence => return,
        }
        c.mark(peer, slot);
    }

    fn arena(&mut self) -> Option<()> {
        let (peer, c) = self.introduced()?;
        let fds = Descriptors::new(peer.fd);
        let arena = *fds.all().last()?;
        let len = fsocket_abi::arena::ARENA_SIZE;
        let base = sys::mmap(len, libc::PROT_READ | libc::PROT_WRITE, libc::MAP_SHARED | libc::MAP_NORESERVE, arena, 0)
            .ok()?;
        peer.tell(Packet::new(request::Arena::KIND), Some(arena));
        for slot in 0..SLOTS {
            c.slot(slot).state.store(slot_state::ESTABLISHED, Ordering::Relaxed);
        }
        loop {
            for _ in 0..1000 {
                let near = self.random.chance(90);
                let off = 16 + self.random.below(if near { 1 << 20 } else { len - 24 });
                // SAFETY: the offset is inside the mapping, and aligned.
                let word = unsafe { &*(base.add(off & !7) as *const AtomicU64) };
                word.store(self.random.word(), Ordering::Relaxed);
            }
            sys::nanosleep(500_000);
        }
    }

    fn listener(&mut self) -> Option<()> {
        let mut peer = self.peer()?;
        loop {
            let Ok(l) = std::net::TcpListener::bind("127.0.0.1:0") else { return None };
            let fd = std::os::fd::AsRawFd::as_raw_fd(&l);
            let (answer, _) = peer.request(Packet::new(request::Listen::KIND), Some(fd))?;
            peer.request(Packet { id: answer.id, ..Packet::new(request::Worker::KIND) }, None)?;
            if self.random.chance(50) {
                peer.request(Packet { id: answer.id, ..Packet::new(request::Unlisten::KIND) }, None)?;
            }
        }
    }

    fn hoarder(&mut self) -> Option<()> {
        let mut peer = self.peer()?;
        let mut waker = 0;
        loop {
            waker += 1;
            let (id, arg0, arg2) = (waker % 256, self.random.below(64) as u64, self.random.below(64) as u64);
            for what in [request::Waker::KIND, request::WakerReady::KIND] {
                peer.tell(Packet { id, arg0, arg1: waiter(self.random.below(2), 0), arg2, ..Packet::new(what) }, None);
            }
            let _ = peer.request(Packet { id: 0, ..Packet::new(request::Ports::KIND) }, None);
            let port = *self.random.one(self.ports);
            let _ = peer.channel(port).map(|c| c.queue(0).want.arm(u64::MAX));
        }
    }
}
