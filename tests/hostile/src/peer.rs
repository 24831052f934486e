//! A process as the monitor sees it, which sends each message by itself.

use crate::random::Random;
use fsocket_abi::channel::{self, slot_state, Slot, SynQueue, Waiter, CHANNEL_SIZE};
use fsocket_proto::raw::{self, Packet};
use fsocket_proto::{request, Addr, Payload, MSG_SIZE};
use fsocket_sync::atomic::Ordering;
use fsocket_sys::{self as sys, Errno};
use std::mem::{offset_of, size_of};
use std::path::Path;
use zerocopy::{FromBytes, IntoBytes};

/// A connection to the monitor's control socket.
pub struct Peer {
    pub fd: i32,
    seq: u32,
}

/// If an answer takes longer than this, the monitor has thrown out this peer. Milliseconds.
const PATIENCE_MS: u64 = 2000;

impl Peer {
    /// # Errors
    /// No process listens there, or there is no room.
    pub fn connect(socket: &Path) -> Result<Peer, Errno> {
        let fd = sys::socket(libc::AF_UNIX, libc::SOCK_SEQPACKET | libc::SOCK_CLOEXEC, 0)?;
        let path = socket.as_os_str().as_encoded_bytes();
        let mut address = vec![0u8; path.len() + 3];
        address[..2].copy_from_slice(&(libc::AF_UNIX as u16).to_ne_bytes());
        address[2..2 + path.len()].copy_from_slice(path);
        if let Err(e) = sys::connect(fd, &address) {
            let _ = sys::close(fd);
            return Err(e);
        }
        Ok(Peer { fd, seq: 0 })
    }

    /// Sends a message without waiting. Returns false if the monitor does not take it.
    pub fn tell(&self, msg: Packet, fd: Option<i32>) -> bool {
        sys::send_with_fd(self.fd, msg.as_bytes(), fd, libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL).is_ok()
    }

    /// Receives a message, if there is one.
    pub fn receive(&self) -> Option<(Packet, Option<i32>)> {
        let mut buf = [0u8; MSG_SIZE];
        match sys::recv_with_fd(self.fd, &mut buf, libc::MSG_DONTWAIT) {
            Ok((n, fd)) if n == MSG_SIZE => Packet::read_from_bytes(&buf).ok().map(|m| (m, fd)),
            _ => None,
        }
    }

    /// Returns the answer to a request, or None if the monitor has thrown out this peer or is
    /// silent.
    pub fn request(&mut self, msg: Packet, fd: Option<i32>) -> Option<(Packet, Option<i32>)> {
        self.seq += 1;
        let msg = Packet { seq: self.seq, ..msg };
        if !self.tell(msg, fd) {
            return None;
        }
        let end = sys::now_ns() + PATIENCE_MS * 1_000_000;
        while sys::now_ns() < end {
            let mut p = libc::pollfd { fd: self.fd, events: libc::POLLIN, revents: 0 };
            // SAFETY: the call uses one local pollfd.
            let _ = unsafe { sys::ppoll(&mut p, 1, Some(50_000_000), std::ptr::null()) };
            while let Some((answer, got)) = self.receive() {
                if answer.kind == msg.kind && answer.seq == msg.seq {
                    return Some((answer, got));
                }
                got.map(sys::close);
            }
            if p.revents & libc::POLLHUP != 0 {
                return None;
            }
        }
        None
    }

    pub fn hello(&mut self, random: &mut Random) -> bool {
        let msg = Packet {
            id: random.next() << 16 | 1,
            arg0: u64::from(std::process::id()),
            arg1: u64::from(fsocket_abi::VERSION),
            ..Packet::new(request::Hello::KIND)
        };
        self.request(msg, None).is_some_and(|(answer, fd)| {
            fd.map(sys::close);
            answer.result == 0
        })
    }

    /// Asks for one more channel, and keeps nothing of it. `full` is the channel before.
    pub fn another(&mut self, port: u16, full: u64) -> Option<u32> {
        self.another_at(std::net::Ipv4Addr::LOCALHOST, port, full)
    }

    pub fn another_at(&mut self, ip: std::net::Ipv4Addr, port: u16, full: u64) -> Option<u32> {
        let socket = sys::socket(libc::AF_INET, libc::SOCK_STREAM, 0).ok()?;
        let addr = Addr { ip: ip.to_ipv6_mapped().octets(), port, family: libc::AF_INET as u16, v6only: 0 };
        let answer = self.request(Packet { addr, arg0: full, ..Packet::new(request::Connect::KIND) }, Some(socket));
        let _ = sys::close(socket);
        let (answer, memory) = answer?;
        memory.map(sys::close);
        (answer.result == 0).then_some(answer.id as u32)
    }

    /// Asks for a channel to the listener on this port of 127.0.0.1. The error is an errno.
    pub fn channel(&mut self, port: u16) -> Result<Channel, i32> {
        let socket = sys::socket(libc::AF_INET, libc::SOCK_STREAM, 0).map_err(|e| e.raw())?;
        let ip = std::net::Ipv4Addr::LOCALHOST.to_ipv6_mapped().octets();
        let addr = Addr { ip, port, family: libc::AF_INET as u16, v6only: 0 };
        let answer = self.request(Packet { addr, ..Packet::new(request::Connect::KIND) }, Some(socket));
        let _ = sys::close(socket);
        let (answer, memory) = answer.ok_or(libc::EPIPE)?;
        if answer.result != 0 {
            return Err(answer.result);
        }
        let memory = memory.ok_or(libc::EALREADY)?;
        let flags = libc::MAP_SHARED | libc::MAP_NORESERVE;
        let base =
            sys::mmap(CHANNEL_SIZE, libc::PROT_READ | libc::PROT_WRITE, flags, memory, 0).map_err(|e| e.raw())?;
        Ok(Channel { id: answer.id as u32, base, memory, port: answer.addr.port.max(1024), server: port })
    }
}

/// A channel. It stays mapped as long as the process lives.
pub struct Channel {
    pub id: u32,
    base: *mut u8,
    pub memory: i32,
    /// The first of the leased ports.
    pub port: u16,
    server: u16,
}

impl Channel {
    /// The word at this offset.
    pub fn word<T>(&self, off: usize) -> &T {
        let off = off.min(CHANNEL_SIZE - size_of::<T>()) & !(align_of::<T>() - 1);
        // SAFETY: the word is inside the mapping and aligned. `T` is an atomic integer, for which all
        // bits are valid.
        unsafe { &*(self.base.add(off) as *const T) }
    }
    pub fn header(&self) -> &channel::Header {
        self.word(0)
    }
    pub fn queue(&self, q: usize) -> &SynQueue {
        self.word(channel::SYN_OFF + q * size_of::<SynQueue>())
    }
    pub fn waiter(&self, side: usize, w: usize) -> &Waiter {
        self.word(channel::WAITER_OFF + (side * (channel::WAITERS + 1) + w) * size_of::<Waiter>())
    }
    pub fn slot(&self, i: usize) -> &Slot {
        self.word(channel::SLOT_OFF + i * size_of::<Slot>())
    }
    pub fn record(&self, slot: usize, dir: usize, off: usize) -> &fsocket_sync::atomic::AtomicU64 {
        self.word(channel::ring_off(slot, dir) + off)
    }

    /// Opens a connection as an honest client does, and wakes a waiting worker.
    pub fn open(&self, peer: &Peer, slot: usize) {
        let s = self.slot(slot);
        s.generation.fetch_add(1, Ordering::Relaxed);
        s.family.store(libc::AF_INET as u8, Ordering::Relaxed);
        s.client_port.store(self.port + (slot % 64) as u16, Ordering::Relaxed);
        let to = std::net::Ipv4Addr::LOCALHOST.to_ipv6_mapped().octets();
        for (d, b) in s.dst.iter().zip(to) {
            d.store(b, Ordering::Relaxed);
        }
        for dir in 0..2 {
            let d = &s.dir[dir];
            d.prod.status.store(0, Ordering::Relaxed);
            d.prod.rewind_from.store(0, Ordering::Relaxed);
            d.cons.head.store(channel::POS_START, Ordering::Relaxed);
            d.want_data.renew();
            d.want_space.renew();
            self.record(slot, dir, 0).store(0, Ordering::Relaxed);
        }
        s.state.store(slot_state::SYN, Ordering::Release);
        let workers = self.header().workers.load(Ordering::Relaxed);
        let q = if workers == 0 { 0 } else { 1 + workers.trailing_zeros() as usize };
        let queue = self.queue(q);
        let tail = queue.tail.load(Ordering::Relaxed);
        queue.entry[tail as usize % queue.entry.len()].store(slot as u32 + 1, Ordering::Relaxed);
        queue.tail.store(tail.wrapping_add(1), Ordering::Release);
        self.wake(peer, u64::MAX);
    }

    /// Puts bytes into the ring of a connection on which nothing was sent before.
    pub fn say(&self, peer: &Peer, slot: usize, text: &[u8]) {
        for (i, chunk) in text.chunks(8).enumerate() {
            let mut word = [0u8; 8];
            word[..chunk.len()].copy_from_slice(chunk);
            self.record(slot, 0, 8 + i * 8).store(u64::from_ne_bytes(word), Ordering::Relaxed);
        }
        self.record(slot, 0, 8 + text.len().next_multiple_of(8)).store(0, Ordering::Relaxed);
        self.record(slot, 0, 0)
            .store(channel::record::pack(channel::record::DATA, text.len() as u64, 0), Ordering::Release);
        self.mark(peer, slot);
    }

    /// Marks a connection at all waiters of the other side, and wakes them.
    pub fn mark(&self, peer: &Peer, slot: usize) {
        for w in 0..channel::WAITERS {
            let waiter = self.waiter(channel::SERVER, w);
            if waiter.waker.load(Ordering::Relaxed) != 0 {
                waiter.ready[slot / 64].fetch_or(1 << (slot % 64), Ordering::Relaxed);
                waiter.summary.fetch_or(1 << (slot / 64), Ordering::Release);
            }
        }
        for d in 0..2 {
            for want in [&self.slot(slot).dir[d].want_data, &self.slot(slot).dir[d].want_space] {
                want.take();
                want.seq.fetch_add(1, Ordering::Release);
                sys::futex_wake(&want.seq, i32::MAX);
            }
        }
        self.wake(peer, 1);
    }

    /// Wakes all sleepers of the other side.
    pub fn wake(&self, peer: &Peer, summary: u64) {
        for w in 0..channel::WAITERS {
            let waiter = self.waiter(channel::SERVER, w);
            let waker = waiter.waker.load(Ordering::Relaxed);
            if waker != 0 {
                if summary == u64::MAX {
                    waiter.summary.fetch_or(channel::SUMMARY_SYN, Ordering::Release);
                }
                waiter.sleeping.store(0, Ordering::Relaxed);
                peer.tell(
                    Packet {
                        id: waker,
                        arg0: self.id.into(),
                        arg1: raw::waiter(channel::SERVER, w),
                        ..Packet::new(request::Ring::KIND)
                    },
                    None,
                );
            }
        }
    }

    pub fn server_port(&self) -> u16 {
        self.server
    }
}

/// Offsets of the begin and the end of the memory that the two sides write.
pub const SHARED: (usize, usize) = (offset_of!(channel::Header, workers), channel::RING_OFF);
