//! Clients of one user connect and close as fast as they can. New and old clients of other users
//! must still be served.

use crate::rights::{as_user, for_users};
use crate::support::*;
use fsocket_proto::raw::Packet;
use fsocket_proto::{request, Payload};
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

const TIME: Duration = Duration::from_millis(700);

/// Connects again and again. Returns how often.
fn flood(d: &Daemon, over: &AtomicBool, first: Option<Packet>) -> u64 {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let address = SocketAddrUnix::new(&d.socket).unwrap();
    let mut n = 0;
    while !over.load(Ordering::Relaxed) {
        let fd = rustix::net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None).unwrap();
        // (EAGAIN: the backlog is full.)
        if rustix::net::connect(&fd, &address).is_ok() {
            n += 1;
            let _ = first.map(|msg| fsocket_monitor::wire::send(rustix::fd::AsFd::as_fd(&fd), &msg.into(), None));
        }
    }
    n
}

/// Repeats `what` during a flood. Each time, at most `most` connections of the flood may come
/// first. (The test counts connections, because all threads compete for the CPUs and times would
/// say little.)
#[track_caller]
fn waits_for(most: u64, d: &Daemon, first: Option<Packet>, mut what: impl FnMut()) {
    let over = AtomicBool::new(false);
    let (came, served) = std::thread::scope(|s| {
        let over = &over;
        let floods = [70_001, 70_002, 70_003].map(|uid| s.spawn(move || as_user(uid, || flood(d, over, first))));
        std::thread::sleep(TIME / 4);
        let (end, mut served) = (Instant::now() + TIME, 0);
        while Instant::now() < end {
            what();
            served += 1;
        }
        over.store(true, Ordering::Relaxed);
        (floods.into_iter().map(|f| f.join().unwrap()).sum::<u64>(), served)
    });
    println!("{came} came, {served} served: {} for each", came / served);
    assert!(came <= served * most, "{came} have come, and {served} were served");
}

#[test]
fn clients_that_come_and_go_keep_nobody_waiting_who_is_there() {
    let Some(d) = for_users("clients_that_come_and_go", |_| {}) else { return };
    let mut p = as_user(70_009, || d.process());
    waits_for(3000, &d, None, || p.sync());
    // Also if the clients of the flood send a message.
    let hello = Packet { id: 77 << 16 | 1, arg1: u64::from(fsocket_abi::VERSION), ..Packet::new(request::Hello::KIND) };
    waits_for(3000, &d, Some(hello), || p.sync());
}

#[test]
fn nor_somebody_who_comes() {
    let Some(d) = for_users("nor_somebody_who_comes", |_| {}) else { return };
    // (New clients share one backlog with the flood, and on a busy machine the monitor may wait
    // long for a CPU. If a HELLO had to wait behind all other clients, 130,000 came first.)
    waits_for(50_000, &d, None, || {
        let fd = rustix::net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None);
        let fd = fd.unwrap();
        let address = SocketAddrUnix::new(&d.socket).unwrap();
        as_user(70_009, || rustix::net::connect(&fd, &address).unwrap());
        as_user(70_009, || Proc::on(fd).hello());
    });
}
