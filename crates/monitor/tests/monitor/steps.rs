//! A user has as much as it can get, and a single message or the end of a process concerns all of
//! it. Other users must have their turns meanwhile.

use crate::rights::{as_user, for_users};
use crate::support::*;
use fsocket_abi::channel::slot_state;
use fsocket_monitor::wire;
use fsocket_proto::raw::Packet;
use fsocket_proto::{request, Payload};
use fsocket_sync::atomic::Ordering;
use rustix::fd::AsFd;
use std::net::{Ipv4Addr, TcpListener};

const GREEDY: u32 = 70_001;
/// Channels to each of two listeners. This is fewer than a user may have.
const CHANNELS: usize = 200;
/// Another user must get at least this many answers before the slow work ends.
const TURNS: usize = 10;

struct Much {
    server: Proc,
    client: Proc,
    /// Both have the same port.
    listeners: Vec<(TcpListener, u64)>,
    channels: Vec<ChannelView>,
    port: u16,
}

/// Makes the channels. A connection waits in many slots of each channel. (None is in a queue:
/// connections that wait in a queue would move to the kernel after a while.)
fn much(d: &Daemon) -> Much {
    as_user(GREEDY, || {
        let (mut server, mut client) = (d.process(), d.process());
        let (first, port) = listener();
        let second = TcpListener::bind(("127.0.0.2", port)).unwrap();
        let mut channels = Vec::new();
        let listeners: Vec<_> =
            [first, second].into_iter().map(|l| (server.listen(&l), l)).map(|(id, l)| (l, id)).collect();
        for (n, (_, id)) in listeners.iter().enumerate() {
            server.work(*id);
            let to = v4([127, 0, 0, n as u8 + 1], port);
            let mut full = 0;
            for _ in 0..CHANNELS {
                let (answer, fd) = client.connect_to(to, full);
                assert_eq!(answer.result, 0, "channel {} of {n}", channels.len());
                full = answer.id;
                let ch = ChannelView::new(answer.id as u32, fd.unwrap());
                let elsewhere = Ipv4Addr::new(127, 0, 0, 77).to_ipv6_mapped().octets();
                for slot in (0..1024).step_by(8).map(|i| ch.slot(i)) {
                    slot.dst.iter().zip(elsewhere).for_each(|(to, byte)| to.store(byte, Ordering::Relaxed));
                    slot.state.store(slot_state::SYN, Ordering::Release);
                }
                channels.push(ch);
            }
        }
        Much { server, client, listeners, channels, port }
    })
}

/// How many requests of another user are answered before `is_done` returns true.
fn answered_until(other: &mut Proc, mut is_done: impl FnMut() -> bool) -> usize {
    let mut n = 0;
    while !is_done() {
        other.sync();
        n += 1;
        assert!(n < 1_000_000, "it never ends");
    }
    n
}

#[test]
fn the_end_of_a_listener_with_many_channels_is_cut_into_turns() {
    let Some(d) = for_users("the_end_of_a_listener", |_| {}) else { return };
    let mut other = as_user(70_009, || d.process());
    let much = much(&d);
    for (_, id) in &much.listeners {
        much.server.tell(Packet { id: *id, ..Packet::new(request::Unlisten::KIND) }, None);
    }
    let waits = |ch: &ChannelView| ch.slot(1016).state.load(Ordering::Acquire) == slot_state::SYN;
    let n = answered_until(&mut other, || !much.channels.iter().any(waits));
    assert!(n > TURNS, "{n}");
    assert!(much.channels.iter().all(ChannelView::listener_closed));
    drop(much.client);
    d.acquainted();
}

#[test]
fn so_is_the_end_of_a_process_with_many_channels() {
    let Some(d) = for_users("so_is_the_end_of_a_process", |_| {}) else { return };
    let mut other = as_user(70_009, || d.process());
    let Much { server, client, channels, listeners, .. } = much(&d);
    drop(client);
    let n = answered_until(&mut other, || channels.iter().all(ChannelView::client_gone));
    assert!(n > TURNS, "{n}");
    drop((server, listeners));
    d.acquainted();
}

#[test]
fn and_a_question_about_all_channels() {
    let Some(d) = for_users("and_a_question_about_all_channels", |_| {}) else { return };
    let mut other = as_user(70_009, || d.process());
    let much = much(&d);
    // Three requests at once.
    let socket = rustix::net::socket(rustix::net::AddressFamily::INET, rustix::net::SocketType::STREAM, None).unwrap();
    let asks = Packet { addr: v4([127, 0, 0, 3], much.port), ..Packet::new(request::InUse::KIND) };
    let mut answers = 0;
    for seq in 1..=3 {
        much.client.tell(Packet { seq: 1000 + seq, ..asks }, Some(socket.as_fd()));
    }
    let n = answered_until(&mut other, || {
        while let wire::Received::Message(m, _) = wire::receive(much.client.fd.as_fd()) {
            if m.is::<request::InUse>() {
                assert_eq!((m.seq(), m.refusal()), (1001 + answers, None));
                answers += 1;
            }
        }
        answers == 3
    });
    assert!(n > TURNS, "{n}");
}
