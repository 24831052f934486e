//! Shared tools of the attackers: both sides of a channel of their own, sockets whose close waits,
//! and floods.

use crate::lives::Life;
use crate::peer::{Channel, Peer};
use fsocket_abi::channel::{slot_state, CLIENT, SERVER};
use fsocket_proto::raw::Packet;
use fsocket_proto::values::Switching;
use fsocket_proto::{request, Payload};
use fsocket_sync::atomic::Ordering;
use fsocket_sys as sys;
use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::os::fd::{AsRawFd, IntoRawFd};

/// A listener of the attacker, and a channel to it.
pub struct Own {
    pub server: Peer,
    pub client: Peer,
    _listener: TcpListener,
    /// The monitor's number for the listener.
    pub id: u64,
    pub channel: Channel,
}

pub fn own(l: &mut Life) -> Option<Own> {
    let (mut server, mut client) = (l.peer()?, l.peer()?);
    let listener = TcpListener::bind("127.0.0.1:0").ok()?;
    let id = published(&mut server, &listener)?;
    let channel = client.channel(listener.local_addr().ok()?.port()).ok()?;
    Some(Own { server, client, _listener: listener, id, channel })
}

/// Publishes a listener, at which the server accepts. Returns the monitor's number for it.
pub fn published(server: &mut Peer, listener: &TcpListener) -> Option<u64> {
    let (answer, _) = server.request(Packet::new(request::Listen::KIND), Some(listener.as_raw_fd()))?;
    server.request(Packet { id: answer.id, ..Packet::new(request::Worker::KIND) }, None)?;
    Some(answer.id)
}

/// Receives and discards all messages.
pub fn drain(peer: &Peer) {
    while let Some((_, fd)) = peer.receive() {
        fd.map(sys::close);
    }
}

impl Own {
    /// Moves connection `slot` to the kernel. Returns both ends.
    pub fn switched(&mut self, slot: usize) -> Option<[i32; 2]> {
        let s = self.channel.slot(slot);
        s.client_port.store(self.channel.port + slot as u16 % 64, Ordering::Relaxed);
        s.family.store(libc::AF_INET as u8, Ordering::Relaxed);
        for (to, byte) in s.dst.iter().zip(Ipv4Addr::LOCALHOST.to_ipv6_mapped().octets()) {
            to.store(byte, Ordering::Relaxed);
        }
        s.generation.store(9, Ordering::Relaxed);
        s.state.store(slot_state::ESTABLISHED, Ordering::Release);
        let of = |kind, side: usize, what| Packet {
            id: self.channel.id.into(),
            arg0: slot as u64 | (side as u64) << 32,
            arg1: 9,
            arg2: what,
            ..Packet::new(kind)
        };
        let (_, server) = self.server.request(of(request::Switch::KIND, SERVER, Switching::Make as u64), None)?;
        let (_, client) = self.client.request(of(request::Claim::KIND, CLIENT, 0), None)?;
        Some([client?, server?])
    }

    /// Makes up to `n` ends whose close waits. If `marked`, their slots are marked as free.
    pub fn lingering_ends(&mut self, n: usize, marked: bool) {
        for slot in 0..n {
            let Some([client, server]) = self.switched(slot) else { return };
            linger(client);
            if marked {
                self.channel.slot(slot).state.store(slot_state::FREE, Ordering::Release);
            }
            let _ = (sys::close(server), sys::close(client));
        }
    }
}

/// Makes the close of this socket wait for an hour, for bytes that no process reads.
pub fn linger(fd: i32) {
    let value = [1i32, 3600].map(i32::to_ne_bytes).concat();
    let _ = sys::setsockopt(fd, libc::SOL_SOCKET, libc::SO_LINGER, &value);
    let flags = sys::fcntl(fd, libc::F_GETFL, 0).unwrap_or(0);
    let _ = sys::fcntl(fd, libc::F_SETFL, (flags | libc::O_NONBLOCK) as usize);
    while sys::write(fd, &[0; 1 << 16]).is_ok() {}
}

/// Makes kernel connections whose close waits. Returns both ends of each.
pub fn lingering(n: usize) -> Vec<[i32; 2]> {
    let Ok(listener) = TcpListener::bind("127.0.0.1:0") else { return Vec::new() };
    let Ok(at) = listener.local_addr() else { return Vec::new() };
    let one = |_| {
        let c = TcpStream::connect(at).ok()?;
        let (s, _) = listener.accept().ok()?;
        linger(c.as_raw_fd());
        Some([c.into_raw_fd(), s.into_raw_fd()])
    };
    (0..n).map_while(one).collect()
}

/// Connects by kernel TCP to a listener of its own, and closes, as fast as possible.
pub fn kernel_flood(hold: usize) -> Option<()> {
    let listener = TcpListener::bind("127.0.0.1:0").ok()?;
    listener.set_nonblocking(true).ok()?;
    let at = listener.local_addr().ok()?;
    let mut held = Vec::new();
    loop {
        if let Ok(c) = TcpStream::connect(at) {
            held.push(c);
        }
        held.extend(listener.accept().ok().map(|(s, _)| s));
        if held.len() > hold {
            held.clear();
        }
    }
}

/// Makes calls that cost only the kernel something.
pub fn kernel_calls() -> Option<()> {
    let (a, b) = std::os::unix::net::UnixDatagram::pair().ok()?;
    let mut buf = [0; 72];
    loop {
        let _ = a.send(&buf);
        let _ = b.recv(&mut buf);
    }
}
