//! Tests that a process which does not read for a moment is not dropped because of other
//! processes' messages.

use crate::support::*;
use fsocket_abi::channel::{status, waker_key, CLIENT, SERVER};
use fsocket_monitor::memory::memfd_of;
use fsocket_monitor::wire;
use fsocket_proto::operate::{Request, Target};
use fsocket_proto::raw::{waiter, Packet};
use fsocket_proto::{request, Payload};
use rustix::fd::AsFd;
use rustix::process::{pidfd_open, PidfdFlags};

/// Plays a server that does not read, a peer that does what it can against the server, and a third
/// process that is connected to the server. The server may get at most this many messages.
#[track_caller]
fn is_not_dropped(at_most: usize, attack: impl FnOnce(&Daemon, &mut Proc, &mut Proc, &[ChannelView])) {
    let d = Daemon::start();
    let (mut server, mut peer, mut third) = (d.process_with_arena(), d.process(), d.process());
    // (So many channels that the peer can ask for more pipes than one process may have messages
    // waiting.)
    let listeners: Vec<_> = (0..12)
        .map(|_| {
            let (socket, port) = listener();
            let id = server.listen(&socket);
            server.work(id);
            (socket, port)
        })
        .collect();
    let channels: Vec<_> = listeners.iter().map(|(_, port)| peer.connect(*port)).collect();
    let its = third.connect(listeners[0].1);
    its.set_state(0, fsocket_abi::channel::slot_state::ESTABLISHED);
    server.sync();
    server.unasked.clear();
    attack(&d, &mut server, &mut peer, &channels);
    third.sync();
    assert!(!its.client_gone() && !its.listener_closed());
    assert_eq!(its.status(0, SERVER) & status::CLOSED, 0, "the third process has lost its connection");
    server.sync();
    assert!(server.unasked.len() <= at_most, "{} messages", server.unasked.len());
    drop(listeners);
}

/// Asks for a pipe for each waker, at each waiter. (The monitor may drop the peer for that.)
fn ask_for_pipes(peer: &mut Proc, ringer: u64, channels: &[ChannelView]) {
    for ch in channels {
        for i in 0..1024u64 {
            let waiter = waiter(CLIENT, i as usize / 256);
            let named = Packet { id: i % 256, arg0: u64::from(ch.id), arg1: waiter, arg2: ringer, ..Packet::new(0) };
            for kind in [request::Waker::KIND, request::WakerReady::KIND] {
                let _ = wire::send(peer.fd.as_fd(), &Packet { kind, ..named }.into(), None);
            }
            if i % 32 == 0 {
                let ask = Packet { id: u64::MAX, ..Packet::new(request::ChannelHandle::KIND) };
                if peer.try_request(ask, None).is_none() {
                    return;
                }
                peer.unasked.clear();
            }
        }
    }
}

/// The server's process number, as WOKEN shows it.
fn number_of(server: &mut Proc, peer: &mut Proc, ch: &ChannelView) -> u64 {
    let key = waker_key(peer.nonce, 0);
    server.tell(
        Packet { id: key, arg0: u64::from(ch.id), arg1: waiter(CLIENT, 0), ..Packet::new(request::Ring::KIND) },
        None,
    );
    peer.wait_unasked().0.arg2
}

#[test]
fn by_pipes_that_it_has_no_use_for() {
    is_not_dropped(4, |_, server, peer, channels| {
        let number = number_of(server, peer, &channels[0]);
        ask_for_pipes(peer, number, channels);
    });
}

/// Here the server has rung each of the peer's wakers, so the peer may have the pipes.
#[test]
fn by_pipes_that_it_may_get() {
    // The limit is the capacity of the server's socket and the peer's share.
    is_not_dropped(2000, |_, server, peer, channels| {
        let number = number_of(server, peer, &channels[0]);
        for ch in channels {
            for waker in 0..255 {
                let key = waker_key(peer.nonce, waker);
                let ring = Packet {
                    id: key,
                    arg0: u64::from(ch.id),
                    arg1: waiter(CLIENT, 0),
                    ..Packet::new(request::Ring::KIND)
                };
                server.tell(ring, None);
            }
            server.sync();
            peer.sync();
            peer.unasked.clear();
        }
        ask_for_pipes(peer, number, channels);
    });
}

/// The peer rings each of the server's wakers, in the name of all channels.
#[test]
fn by_rings() {
    is_not_dropped(2000, |_, server, peer, channels| {
        for i in 0..20_000usize {
            let (key, ch) = (waker_key(server.nonce, i % 255), &channels[i / 255 % channels.len()]);
            let ring =
                Packet { id: key, arg0: u64::from(ch.id), arg1: waiter(SERVER, 0), ..Packet::new(request::Ring::KIND) };
            peer.tell(ring, None);
            if i % 64 == 0 {
                peer.sync();
            }
        }
    });
}

/// The peer takes descriptors of the server again and again.
#[test]
fn by_descriptors_that_are_taken() {
    is_not_dropped(2000, |_, _, peer, _| {
        let me = pidfd_open(rustix::process::getpid(), PidfdFlags::empty()).unwrap();
        let (socket, _) = listener();
        for i in 0..10_000 {
            // (The monitor may drop the peer: closing what the peer has shown takes time.)
            let named = Packet { arg0: i, ..Packet::new(request::Transfer::KIND) };
            let Some((answer, _)) = peer.try_request(named, Some(me.as_fd())) else { return };
            let shown = Packet { id: answer.id, arg2: 1, ..Packet::new(request::Transfer::KIND) };
            if peer.try_request(shown, Some(socket.as_fd())).is_none() {
                return;
            }
        }
    });
}

/// An operator, who may be any process of the same user, switches the server off and on.
#[test]
fn by_an_operator() {
    is_not_dropped(2000, |_, _, peer, _| {
        for i in 0..12_000 {
            let request = Request { off: i % 2 == 0, target: Target::Process(std::process::id()) };
            let text = serde_json::to_vec(&request).unwrap();
            let fd = memfd_of("request", &text).unwrap();
            let asked = Packet { arg0: text.len() as u64, ..Packet::new(request::Operate::KIND) };
            if peer.try_request(asked, Some(fd.as_fd())).is_none() {
                return;
            }
            peer.unasked.clear();
        }
    });
}
