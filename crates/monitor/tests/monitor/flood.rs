//! A user's clients come and go as fast as they can. Others are served, new ones and those who are there.

use crate::rights::{as_user, for_users};
use crate::support::*;
use fsocket_proto::raw::Packet;
use fsocket_proto::{request, Payload};
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

const TIME: Duration = Duration::from_millis(700);

/// Connects again and again; how often.
fn flood(d: &Daemon, over: &AtomicBool, first: Option<Packet>) -> u64 {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let address = SocketAddrUnix::new(&d.socket).unwrap();
    let mut n = 0;
    while !over.load(Ordering::Relaxed) {
        let fd = rustix::net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None).unwrap();
        // (EAGAIN: the queue is full.)
        if rustix::net::connect(&fd, &address).is_ok() {
            n += 1;
            let _ = first.map(|msg| fsocket_monitor::wire::send(rustix::fd::AsFd::as_fd(&fd), &msg.into(), None));
        }
    }
    n
}

/// What is done again and again waits each time for so many connections of a flood at most. (All of them compete for the
/// CPUs, so that times say little.)
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
    // Those that say something, too.
    let hello = Packet { id: 77 << 16 | 1, arg1: u64::from(fsocket_abi::VERSION), ..Packet::new(request::Hello::KIND) };
    waits_for(3000, &d, Some(hello), || p.sync());
}

#[test]
fn nor_somebody_who_comes() {
    let Some(d) = for_users("nor_somebody_who_comes", |_| {}) else { return };
    // (One queue has all that come. On a busy machine it is long until the monitor is given a CPU; a HELLO that
    // waited behind all that had come took 130,000.)
    waits_for(50_000, &d, None, || {
        let fd = rustix::net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None);
        let fd = fd.unwrap();
        let address = SocketAddrUnix::new(&d.socket).unwrap();
        as_user(70_009, || rustix::net::connect(&fd, &address).unwrap());
        as_user(70_009, || Proc::on(fd).hello());
    });
}
