//! Connections that go over from shared memory to kernel TCP: both ends of the
//! kernel connection, until every process that needs one has taken its copy.

use crate::address::{destination, is_loopback, is_v4};
use crate::channels::Channel;
use crate::descriptor::{self, Attached};
use crate::requests::{reply, Answer};
use crate::{ChannelId, ConnId, Monitor};
use fsocket_abi::channel::{slot_state, CLIENT, SERVER, SLOTS};
use fsocket_proto::{switch, Msg};
use fsocket_sync::atomic::Ordering;
use rustix::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use rustix::io::Errno;
use std::collections::HashMap;
use std::net::{Ipv4Addr, SocketAddr};
use std::rc::Rc;

/// Bytes that a kernel end takes before anybody reads: a whole ring, and what
/// the kernel needs to keep them.
const BUFFER: i32 = 3 << 20;
/// Segment size on the loopback interface, for either IP version.
const MSS: u32 = 65_464;

#[derive(Default)]
struct Ends {
    generation: u32,
    end: [Option<Rc<OwnedFd>>; 2],
    ready: bool,
}

/// The connections of one channel that have been switched, by slot.
#[derive(Default)]
pub struct Switched(HashMap<usize, Ends>);

impl Switched {
    /// Is there an end that somebody may still come for?
    pub fn is_waiting(&self) -> bool {
        self.0.values().any(|ends| ends.ready)
    }

    /// One side needs its end no more; `reset`: it closes with a reset, if nobody
    /// else has that end.
    pub fn release(&mut self, slot: usize, side: usize, generation: u32, reset: bool) {
        if let Some(ends) = self.0.get_mut(&slot).filter(|e| e.generation == generation) {
            let end = ends.end[side & 1].take();
            if let Some(end) = end.filter(|_| reset && ends.ready) {
                let linger: [i32; 2] = [1, 0];
                let _ = set(end.as_fd(), libc::SOL_SOCKET, libc::SO_LINGER, &linger.map(i32::to_ne_bytes).concat());
            }
            // Half-made by a requester that died, or done with.
            if !ends.ready || ends.end.iter().all(Option::is_none) {
                self.0.remove(&slot);
            }
        }
    }
}

/// What a message names.
struct Named {
    channel: ChannelId,
    slot: usize,
    side: usize,
    generation: u32,
}

impl Named {
    fn parse(msg: &Msg) -> Result<Named, Errno> {
        let named = Named {
            channel: ChannelId::try_from(msg.id).map_err(|_| Errno::NOENT)?,
            slot: msg.arg0 as u32 as usize,
            side: (msg.arg0 >> 32) as usize,
            generation: msg.arg1 as u32,
        };
        if named.slot >= SLOTS || named.side > 1 {
            return Err(Errno::INVAL);
        }
        Ok(named)
    }
}

impl Monitor {
    /// The channel, if the requester is on a side of it.
    pub(crate) fn party(&self, id: ConnId, channel: ChannelId) -> Result<&Channel, Errno> {
        let family = self.clients.get(id).ok_or(Errno::BADF)?.family;
        let ch = self.channels.get(channel).ok_or(Errno::NOENT)?;
        if !ch.is_party(CLIENT, family) && !ch.is_party(SERVER, family) {
            return Err(Errno::NOENT);
        }
        Ok(ch)
    }

    pub fn switch(&mut self, id: ConnId, msg: &Msg, fd: Option<Attached>) -> Answer {
        let named = Named::parse(msg)?;
        let fd = fd.ok_or(Errno::BADF)?;
        let family = self.clients.get(id).ok_or(Errno::BADF)?.family;
        let ch = self.party(id, named.channel)?;
        let slot = ch.mem.slot(named.slot);
        let in_use = slot.state.load(Ordering::Acquire) != slot_state::FREE
            && slot.generation.load(Ordering::Relaxed) == named.generation;
        if !ch.is_party(named.side, family) || !in_use {
            return Err(Errno::NOENT);
        }
        let connected = matches!(msg.arg2, switch::OWN_READY | switch::OTHER_READY);
        descriptor::tcp(fd.as_fd(), connected)?;
        let mut all = ch.switched.borrow_mut();
        let other = 1 - named.side;
        match msg.arg2 {
            switch::OWN | switch::OWN_READY | switch::ALONE => {
                if all.0.get(&named.slot).is_some_and(|e| e.generation == named.generation) {
                    return Err(Errno::ALREADY);
                }
                let ready = msg.arg2 == switch::ALONE;
                let mut ends = Ends { generation: named.generation, ready, ..Ends::default() };
                ends.end[named.side] = Some(Rc::new(fd.keep()));
                all.0.insert(named.slot, ends);
                let family = if other == CLIENT { slot.family.load(Ordering::Relaxed) } else { ch.addr.family };
                Ok((Msg { arg0: u64::from(family), ..reply(msg) }, None))
            }
            switch::OTHER | switch::OTHER_READY => {
                let ends = all.0.get_mut(&named.slot).filter(|e| e.generation == named.generation && !e.ready);
                let ends = ends.ok_or(Errno::INVAL)?;
                ends.end[other] = Some(Rc::new(fd.keep()));
                let made = match &ends.end {
                    [Some(c), Some(s)] if !connected => self.connect_ends(ch, named.slot, c.as_fd(), s.as_fd()),
                    [Some(_), Some(_)] => Ok(()),
                    _ => Err(Errno::INVAL),
                };
                match made {
                    Ok(()) => ends.ready = true,
                    Err(e) => {
                        tracing::info!(error = %e, "a switched connection gets other port numbers");
                        all.0.remove(&named.slot);
                        // Whatever the reason, an ordinary connection will do.
                        return Err(Errno::PERM);
                    }
                }
                tracing::debug!(channel = named.channel, slot = named.slot, "switched to the kernel");
                Ok((reply(msg), None))
            }
            _ => Err(Errno::INVAL),
        }
    }

    /// Connects two sockets with each other under the addresses of the
    /// connection in `slot`. What the client wrote there decides only which of
    /// this host's own addresses it is.
    fn connect_ends(&self, ch: &Channel, slot: usize, c: BorrowedFd<'_>, s: BorrowedFd<'_>) -> Result<(), Errno> {
        let control = ch.mem.slot(slot);
        let claimed = destination(std::array::from_fn(|i| control.dst[i].load(Ordering::Relaxed)));
        let any = ch.addr.ip == crate::address::V4_ANY || ch.addr.ip == crate::address::V6_ANY;
        let dst = if any { claimed } else { ch.addr.ip };
        let port = control.client_port.load(Ordering::Relaxed);
        if !(is_loopback(&dst) || self.locals.contains(&dst)) || port < 1024 {
            return Err(Errno::INVAL);
        }
        let src = if is_v4(&dst) && is_loopback(&dst) { Ipv4Addr::LOCALHOST.to_ipv6_mapped().octets() } else { dst };
        let (client, server) = ((src, port), (dst, ch.addr.port));
        let seq = [random(), random()];
        half_open(c, client, server, seq[0], seq[1])?;
        half_open(s, server, client, seq[1], seq[0])?;
        for fd in [c, s] {
            set(fd, libc::SOL_SOCKET, libc::SO_SNDBUFFORCE, &BUFFER.to_ne_bytes())?;
            set(fd, libc::IPPROTO_TCP, TCP_REPAIR, &0i32.to_ne_bytes())?;
        }
        Ok(())
    }

    pub fn claim(&mut self, id: ConnId, msg: &Msg) -> Answer {
        let named = Named::parse(msg)?;
        let ch = self.party(id, named.channel)?;
        let all = ch.switched.borrow();
        let ends = all.0.get(&named.slot).filter(|e| e.generation == named.generation).ok_or(Errno::NOENT)?;
        if !ends.ready {
            return Err(Errno::AGAIN);
        }
        let end = ends.end[named.side].clone().ok_or(Errno::NOENT)?;
        Ok((reply(msg), Some(end)))
    }

    pub fn release(&mut self, id: ConnId, msg: &Msg) {
        if let Ok(named) = Named::parse(msg) {
            if let Ok(ch) = self.party(id, named.channel) {
                ch.switched.borrow_mut().release(named.slot, named.side, named.generation, false);
            }
            self.sweep();
        }
    }
}

// linux/tcp.h; tcp(7) says nothing of them, CRIU's documentation does.
const TCP_REPAIR: i32 = 19;
const TCP_REPAIR_QUEUE: i32 = 20;
const TCP_QUEUE_SEQ: i32 = 21;
const TCP_REPAIR_OPTIONS: i32 = 22;
const RECV_QUEUE: i32 = 1;
const SEND_QUEUE: i32 = 2;
const OPT_MSS: u32 = 2;
const OPT_WINDOW: u32 = 3;
const OPT_SACK: u32 = 4;
/// With timestamps the pair of ports can be used again a second after its last
/// connection (net.ipv4.tcp_tw_reuse), without them after a minute.
const OPT_TIMESTAMP: u32 = 8;

/// One end of an established connection, without a handshake: sequence numbers
/// are those that the other end is given the other way round.
fn half_open(
    fd: BorrowedFd<'_>,
    local: ([u8; 16], u16),
    peer: ([u8; 16], u16),
    send_seq: u32,
    recv_seq: u32,
) -> Result<(), Errno> {
    let v4 = rustix::net::sockopt::socket_domain(fd)? == rustix::net::AddressFamily::INET;
    let addr = |(ip, port): ([u8; 16], u16)| {
        let ip = std::net::Ipv6Addr::from(ip);
        match ip.to_ipv4_mapped().filter(|_| v4) {
            Some(ip) => SocketAddr::from((ip, port)),
            None => SocketAddr::from((ip, port)),
        }
    };
    let tcp = |name, value: &[u8]| set(fd, libc::IPPROTO_TCP, name, value);
    tcp(TCP_REPAIR, &1i32.to_ne_bytes())?;
    if !v4 {
        let _ = set(fd, libc::IPPROTO_IPV6, libc::IPV6_V6ONLY, &0i32.to_ne_bytes());
    }
    rustix::net::bind(fd, &addr(local))?;
    for (queue, seq) in [(SEND_QUEUE, send_seq), (RECV_QUEUE, recv_seq)] {
        tcp(TCP_REPAIR_QUEUE, &queue.to_ne_bytes())?;
        tcp(TCP_QUEUE_SEQ, &seq.to_ne_bytes())?;
    }
    rustix::net::connect(fd, &addr(peer))?;
    let options = [OPT_MSS, MSS, OPT_WINDOW, 7 << 16 | 7, OPT_SACK, 0, OPT_TIMESTAMP, 0];
    tcp(TCP_REPAIR_OPTIONS, &options.map(u32::to_ne_bytes).concat())
}

fn random() -> u32 {
    let mut seq = [0u8; 4];
    let _ = rustix::rand::getrandom(&mut seq, rustix::rand::GetRandomFlags::empty());
    u32::from_ne_bytes(seq)
}

fn set(fd: BorrowedFd<'_>, level: i32, name: i32, value: &[u8]) -> Result<(), Errno> {
    // SAFETY: pointer and length are those of `value`.
    let rc =
        unsafe { libc::setsockopt(fd.as_raw_fd(), level, name, value.as_ptr().cast(), value.len() as libc::socklen_t) };
    if rc != 0 {
        return Err(std::io::Error::last_os_error().raw_os_error().map_or(Errno::IO, Errno::from_raw_os_error));
    }
    Ok(())
}
