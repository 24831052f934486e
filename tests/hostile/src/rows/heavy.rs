//! Row 12: a single message, or the end of a single process, makes the monitor look at thousands of channels.

use super::means::{drain, published};
use crate::lives::Life;
use crate::peer::Peer;
use fsocket_abi::channel::slot_state;
use fsocket_proto::{kind, Addr, Msg};
use fsocket_sync::atomic::Ordering;
use fsocket_sys as sys;
use std::net::{Ipv4Addr, TcpListener};

struct Much {
    server: Peer,
    client: Peer,
    listeners: Vec<(TcpListener, u64)>,
    channels: Vec<u32>,
    port: u16,
}

/// Channels without number to listeners at one port, a few of them with connections that wait.
fn much(l: &mut Life) -> Option<Much> {
    let (mut server, mut client) = (l.peer()?, l.peer()?);
    let first = TcpListener::bind("127.0.0.1:0").ok()?;
    let port = first.local_addr().ok()?.port();
    let mut all = vec![first];
    all.extend((2..5).filter_map(|n| TcpListener::bind((Ipv4Addr::new(127, 0, 0, n), port)).ok()));
    let (mut listeners, mut channels) = (Vec::new(), Vec::new());
    for (n, socket) in all.into_iter().enumerate() {
        let id = published(&mut server, &socket)?;
        listeners.push((socket, id));
        let mut full = 0;
        for _ in 0..500 {
            let Some(channel) = client.another_at(Ipv4Addr::new(127, 0, 0, n as u8 + 1), port, full) else { break };
            full = channel.into();
            channels.push(channel);
        }
        drain(&server);
        if let Ok(c) = client.channel(port) {
            (0..1024).for_each(|i| c.slot(i).state.store(slot_state::SYN, Ordering::Release));
        }
    }
    Some(Much { server, client, listeners, channels, port })
}

/// The ends of listeners with all their channels.
pub fn unlistens(l: &mut Life) -> Option<()> {
    let much = much(l)?;
    for (_, id) in &much.listeners {
        much.server.tell(Msg { id: *id, ..Msg::new(kind::UNLISTEN) }, None);
    }
    sys::nanosleep(100_000_000);
    Some(())
}

/// The end of their user.
pub fn dies(l: &mut Life) -> Option<()> {
    much(l).map(drop)
}

/// Whether an address is in use, of which each channel is asked.
pub fn asks(l: &mut Life) -> Option<()> {
    let much = much(l)?;
    let socket = sys::socket(libc::AF_INET, libc::SOCK_STREAM, 0).ok()?;
    let ip = Ipv4Addr::new(127, 0, 0, 9).to_ipv6_mapped().octets();
    let addr = Addr { ip, port: much.port, family: libc::AF_INET as u16, v6only: 0 };
    loop {
        if !much.client.tell(Msg { addr, seq: 1, ..Msg::new(kind::IN_USE) }, Some(socket)) {
            sys::nanosleep(100_000);
        }
        drain(&much.client);
    }
}

/// Every message that may look at all of them.
pub fn says_everything(l: &mut Life) -> Option<()> {
    let mut much = much(l)?;
    let socket = sys::socket(libc::AF_INET, libc::SOCK_STREAM, 0).ok()?;
    let kinds = [
        kind::REPORT,
        kind::OPTIONS,
        kind::WORKER,
        kind::SETTLED,
        kind::UNPUBLISH,
        kind::CHANNEL_HANDLE,
        kind::PORTS,
        kind::NEARER,
        kind::JOIN,
        kind::OFFER,
        kind::REST,
        kind::BRIEF,
        kind::MEET,
        kind::CONNECT,
    ];
    loop {
        let what = *l.random.one(&kinds);
        let id =
            if l.random.chance(50) { l.random.one(&much.listeners).1 } else { (*l.random.one(&much.channels)).into() };
        let (arg0, arg1, seq) = (l.random.below(3) as u64, l.random.below(2) as u64, 1 + l.random.below(9) as u32);
        let ip = Ipv4Addr::LOCALHOST.to_ipv6_mapped().octets();
        let addr = Addr { ip, port: much.port, family: libc::AF_INET as u16, v6only: 0 };
        let fd = match what {
            kind::UNPUBLISH => Some(std::os::fd::AsRawFd::as_raw_fd(&much.listeners[0].0)),
            kind::OFFER | kind::MEET | kind::CONNECT | kind::PORTS => Some(socket),
            _ => None,
        };
        let by = if l.random.chance(50) { &mut much.server } else { &mut much.client };
        by.tell(Msg { id, arg0, arg1, seq, addr, ..Msg::new(what) }, fd);
        drain(&much.server);
        drain(&much.client);
    }
}

/// Forked children without number, each with all that its parent has.
pub fn forks(l: &mut Life) -> Option<()> {
    let mut much = much(l)?;
    loop {
        let [ours, theirs] = sys::socketpair(libc::AF_UNIX, libc::SOCK_SEQPACKET).ok()?;
        let child = Msg { id: l.random.next() << 16 | 1, ..Msg::new(kind::ADOPT) };
        much.server.tell(child, Some(theirs));
        let _ = (sys::close(theirs), sys::close(ours));
        much.server.request(Msg { id: u64::MAX, ..Msg::new(kind::CLAIM) }, None)?;
    }
}
