//! Endless floods of clients, and messages that the monitor passes on to others (rows 2, 3 and 8).

use super::means::{drain, own};
use crate::lives::Life;
use crate::peer::Peer;
use fsocket_abi::channel::{waker_key, CLIENT, SERVER};
use fsocket_proto::raw::{waiter, Packet};
use fsocket_proto::{request, Payload};
use fsocket_sync::atomic::Ordering;
use fsocket_sys as sys;

/// Connects and closes.
pub fn comes_and_goes(l: &mut Life) -> Option<()> {
    loop {
        if let Ok(p) = Peer::connect(l.socket) {
            let _ = sys::close(p.fd);
        }
    }
}

/// Connects, says hello and closes.
pub fn greets_and_goes(l: &mut Life) -> Option<()> {
    loop {
        if let Ok(p) = Peer::connect(l.socket) {
            let hello = Packet {
                id: l.random.next() << 16 | 1,
                arg0: 1,
                arg1: u64::from(fsocket_abi::VERSION),
                ..Packet::new(request::Hello::KIND)
            };
            p.tell(hello, None);
            let _ = sys::close(p.fd);
        }
    }
}

/// Connects many times, stays, and closes all connections at once.
pub fn comes_and_stays(l: &mut Life) -> Option<()> {
    loop {
        let all: Vec<_> = (0..900).map_while(|_| Peer::connect(l.socket).ok()).collect();
        for p in all {
            let _ = sys::close(p.fd);
        }
    }
}

/// Asks for pipes at every waiter of several channels, to any process that may be the server.
pub fn pipes(l: &mut Life) -> Option<()> {
    let (mut peer, first) = l.introduced()?;
    let mut channels = vec![first.id];
    for _ in 0..11 {
        let full = u64::from(*channels.last()?);
        channels.push(peer.another(*l.random.one(l.ports), full)?);
    }
    loop {
        for ch in &channels {
            for i in 0..1024u64 {
                let at = waiter(CLIENT, i as usize / 256);
                let named = Packet {
                    id: i % 256,
                    arg0: u64::from(*ch),
                    arg1: at,
                    arg2: i % 40,
                    ..Packet::new(request::Waker::KIND)
                };
                peer.tell(named, None);
                peer.tell(Packet { kind: request::WakerReady::KIND, ..named }, None);
                drain(&peer);
            }
        }
    }
}

/// The attacker reads from the channel which wakers the server uses, and asks the monitor to ring each of them, without
/// end.
pub fn rings(l: &mut Life) -> Option<()> {
    let (peer, c) = l.introduced()?;
    (0..8).for_each(|slot| c.open(&peer, slot));
    loop {
        for w in 0..fsocket_abi::channel::WAITERS {
            let key = c.waiter(SERVER, w).waker.load(Ordering::Relaxed);
            for waker in (key != 0).then_some(0..255).into_iter().flatten() {
                let at = waiter(SERVER, w);
                let ring = Packet {
                    id: waker_key(key, waker),
                    arg0: c.id.into(),
                    arg1: at,
                    ..Packet::new(request::Ring::KIND)
                };
                peer.tell(ring, None);
            }
        }
        drain(&peer);
    }
}

/// Opens and closes channels. The server is told of each.
pub fn channels(l: &mut Life) -> Option<()> {
    loop {
        let mut peer = l.peer()?;
        let port = *l.random.one(l.ports);
        let mut full = 0;
        while let Some(id) = peer.another(port, full).map(u64::from) {
            peer.tell(Packet { id: full, ..Packet::new(request::Rest::KIND) }, None);
            full = id;
        }
        let _ = sys::close(peer.fd);
    }
}

/// Sends answers that no process has asked for.
pub fn transferred(l: &mut Life) -> Option<()> {
    let peer = l.peer()?;
    loop {
        for id in 0..4096 {
            if !peer.tell(Packet { id, arg0: id, ..Packet::new(request::Transferred::KIND) }, None) {
                sys::nanosleep(100_000);
            }
        }
    }
}

/// Names every process of the machine, and shows a socket of its own as if it came from there.
pub fn takes(l: &mut Life) -> Option<()> {
    let mut peer = l.peer()?;
    let socket = sys::socket(libc::AF_INET, libc::SOCK_STREAM, 0).ok()?;
    loop {
        let pids = std::fs::read_dir("/proc").ok()?.flatten();
        for pid in pids.filter_map(|e| e.file_name().to_str()?.parse::<i32>().ok()) {
            // SAFETY: the call takes numbers only.
            let pidfd = unsafe { libc::syscall(libc::SYS_pidfd_open, pid, 0) } as i32;
            for number in 0..8 {
                let named = Packet { arg0: number, ..Packet::new(request::Transfer::KIND) };
                let (answer, _) = peer.request(named, (pidfd >= 0).then_some(pidfd))?;
                for id in [answer.id, number] {
                    peer.request(Packet { id, arg2: 1, ..Packet::new(request::Transfer::KIND) }, Some(socket))?;
                }
            }
            let _ = sys::close(pidfd);
        }
    }
}

/// Names channels, waiters and processes of others in all messages that the monitor passes on.
pub fn others_names(l: &mut Life) -> Option<()> {
    let own = own(l)?;
    let peer = own.client;
    loop {
        let what = *l.random.one(&[
            request::Ring::KIND,
            request::Waker::KIND,
            request::WakerReady::KIND,
            request::Upgrade::KIND,
            request::Arrives::KIND,
            request::Broken::KIND,
            request::Rest::KIND,
            request::Nearer::KIND,
            request::PeerClosed::KIND,
            request::Release::KIND,
        ]);
        let mut small = || l.random.below(256) as u64;
        let (id, arg0, arg1, arg2) = (small(), small(), (small() % 8) | ((small() & 1) << 8), small());
        if !peer.tell(Packet { id, arg0, arg1, arg2, ..Packet::new(what) }, None) {
            sys::nanosleep(100_000);
        }
        drain(&peer);
    }
}
