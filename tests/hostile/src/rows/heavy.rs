//! Row 12: a single message, or the end of a single process, makes the monitor look at thousands of
//! channels.

use super::means::{drain, published};
use crate::lives::Life;
use crate::peer::Peer;
use fsocket_abi::channel::slot_state;
use fsocket_proto::raw::Packet;
use fsocket_proto::{request, Addr, Payload};
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

/// Makes very many channels to listeners at one port. A few of them have connections that wait.
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

/// Ends the listeners with all their channels.
pub fn unlistens(l: &mut Life) -> Option<()> {
    let much = much(l)?;
    for (_, id) in &much.listeners {
        much.server.tell(Packet { id: *id, ..Packet::new(request::Unlisten::KIND) }, None);
    }
    sys::nanosleep(100_000_000);
    Some(())
}

/// Ends the processes of their user.
pub fn dies(l: &mut Life) -> Option<()> {
    much(l).map(drop)
}

/// Asks whether an address is in use, for which the monitor looks at every channel.
pub fn asks(l: &mut Life) -> Option<()> {
    let much = much(l)?;
    let socket = sys::socket(libc::AF_INET, libc::SOCK_STREAM, 0).ok()?;
    let ip = Ipv4Addr::new(127, 0, 0, 9).to_ipv6_mapped().octets();
    let addr = Addr { ip, port: much.port, family: libc::AF_INET as u16, v6only: 0 };
    loop {
        if !much.client.tell(Packet { addr, seq: 1, ..Packet::new(request::InUse::KIND) }, Some(socket)) {
            sys::nanosleep(100_000);
        }
        drain(&much.client);
    }
}

/// Sends every message for which the monitor may look at all channels.
pub fn says_everything(l: &mut Life) -> Option<()> {
    let mut much = much(l)?;
    let socket = sys::socket(libc::AF_INET, libc::SOCK_STREAM, 0).ok()?;
    let kinds = [
        request::Report::KIND,
        request::Options::KIND,
        request::Worker::KIND,
        request::Settled::KIND,
        request::Unpublish::KIND,
        request::ChannelHandle::KIND,
        request::Ports::KIND,
        request::Nearer::KIND,
        request::Offer::KIND,
        request::Rest::KIND,
        request::Meet::KIND,
        request::Connect::KIND,
    ];
    loop {
        let what = *l.random.one(&kinds);
        let id =
            if l.random.chance(50) { l.random.one(&much.listeners).1 } else { (*l.random.one(&much.channels)).into() };
        let (arg0, arg1, seq) = (l.random.below(3) as u64, l.random.below(2) as u64, 1 + l.random.below(9) as u32);
        let ip = Ipv4Addr::LOCALHOST.to_ipv6_mapped().octets();
        let addr = Addr { ip, port: much.port, family: libc::AF_INET as u16, v6only: 0 };
        let fd = match what {
            request::Unpublish::KIND => Some(std::os::fd::AsRawFd::as_raw_fd(&much.listeners[0].0)),
            request::Offer::KIND | request::Meet::KIND | request::Connect::KIND | request::Ports::KIND => Some(socket),
            _ => None,
        };
        let by = if l.random.chance(50) { &mut much.server } else { &mut much.client };
        by.tell(Packet { id, arg0, arg1, seq, addr, ..Packet::new(what) }, fd);
        drain(&much.server);
        drain(&much.client);
    }
}

/// Forks children without number, each with everything that its parent has.
pub fn forks(l: &mut Life) -> Option<()> {
    let mut much = much(l)?;
    loop {
        let [ours, theirs] = sys::socketpair(libc::AF_UNIX, libc::SOCK_SEQPACKET).ok()?;
        let child = Packet { id: l.random.next() << 16 | 1, ..Packet::new(request::Adopt::KIND) };
        much.server.tell(child, Some(theirs));
        let _ = (sys::close(theirs), sys::close(ours));
        much.server.request(Packet { id: u64::MAX, ..Packet::new(request::Claim::KIND) }, None)?;
    }
}
