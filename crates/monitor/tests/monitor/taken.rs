//! Tests of taking a descriptor of another client.

use crate::rights::{as_user, for_users};
use crate::support::*;
use fsocket_proto::raw::Packet;
use fsocket_proto::{request, Payload};
use rustix::event::{eventfd, EventfdFlags};
use rustix::fd::{AsFd, OwnedFd};
use rustix::io::Errno;
use rustix::net::sockopt::socket_cookie;
use rustix::process::{pidfd_open, Pid, PidfdFlags};

/// A pidfd of this process, which plays all clients.
fn this() -> OwnedFd {
    pidfd_open(rustix::process::getpid(), PidfdFlags::empty()).unwrap()
}

fn name(p: &mut Proc, pidfd: Option<&OwnedFd>) -> Packet {
    p.request(Packet { arg0: 7, ..Packet::new(request::Transfer::KIND) }, pidfd.map(AsFd::as_fd)).0
}

fn show(p: &mut Proc, number: u64, socket: impl AsFd) -> i32 {
    p.request(Packet { id: number, arg2: 1, ..Packet::new(request::Transfer::KIND) }, Some(socket.as_fd())).0.result
}

#[test]
fn the_holder_is_told_and_the_taker_hears_of_it() {
    let d = Daemon::start();
    let (mut taker, mut holder) = (d.process(), d.process());
    let init = pidfd_open(Pid::INIT, PidfdFlags::empty()).unwrap();
    let null = OwnedFd::from(std::fs::File::open("/dev/null").unwrap());
    assert_eq!(name(&mut taker, None).result, Errno::BADF.raw_os_error());
    assert_eq!(name(&mut taker, Some(&null)).result, Errno::INVAL.raw_os_error());
    assert_eq!(name(&mut taker, Some(&init)).result, Errno::NOENT.raw_os_error(), "it is none of ours");
    let named = name(&mut taker, Some(&this()));
    assert_eq!(named.result, 0);
    // The holder is not told of a socket that the taker does not have.
    let (socket, _) = listener();
    assert_eq!(show(&mut taker, named.id + 1, &socket), Errno::NOENT.raw_os_error());
    let no_socket = eventfd(0, EventfdFlags::CLOEXEC).unwrap();
    assert_ne!(show(&mut taker, named.id, no_socket), 0);
    holder.sync();
    assert!(holder.unasked.is_empty());
    assert_eq!(show(&mut taker, named.id, &socket), 0);
    let (told, _) = holder.wait_unasked();
    assert_eq!((told.kind, told.id, told.arg0), (request::Transfer::KIND, named.id, 7));
    assert_eq!(told.arg1, socket_cookie(&socket).unwrap());
    holder.tell(Packet { id: told.id, ..Packet::new(request::Transferred::KIND) }, None);
    let (heard, _) = taker.wait_unasked();
    assert_eq!((heard.kind, heard.id), (request::Transferred::KIND, named.id));
    // A second answer has no effect.
    holder.tell(Packet { id: told.id, ..Packet::new(request::Transferred::KIND) }, None);
    holder.sync();
    taker.sync();
    assert!(taker.unasked.is_empty(), "{:?}", taker.unasked);
    assert_eq!(show(&mut taker, named.id, &socket), Errno::NOENT.raw_os_error());
    // A holder that has ended cannot answer.
    drop(holder);
    wait_until("it is gone", || name(&mut taker, Some(&this())).result == Errno::NOENT.raw_os_error());
}

/// An answer has no effect if no process waits for it, or if it comes from a process that was not
/// asked.
#[test]
fn nobody_hears_of_an_answer_to_another_one() {
    let d = Daemon::start();
    let (mut taker, mut holder) = (d.process(), d.process());
    let named = name(&mut taker, Some(&this()));
    // This process connects after the taker has named the holder, so it cannot be the holder.
    let mut stranger = d.process();
    let (socket, _) = listener();
    let flood = |p: &mut Proc| {
        for id in 0..2000 {
            p.tell(Packet { id, ..Packet::new(request::Transferred::KIND) }, None);
            if id % 64 == 0 {
                p.sync();
            }
        }
        p.sync();
    };
    flood(&mut stranger);
    // An answer that comes before the question has no effect either.
    flood(&mut holder);
    assert_eq!(show(&mut taker, named.id, &socket), 0);
    flood(&mut stranger);
    for p in [&mut taker, &mut stranger] {
        p.sync();
        assert!(p.unasked.is_empty(), "{:?}", p.unasked);
    }
    flood(&mut holder);
    assert_eq!(taker.wait_unasked().0.kind, request::Transferred::KIND);
}

#[test]
fn nothing_is_taken_of_another_user() {
    let Some(d) = for_users("nothing_is_taken_of_another_user", |_| {}) else { return };
    let [mut taker, mut same, mut other] = [70_001, 70_001, 70_002].map(|uid| as_user(uid, || d.process()));
    assert_eq!(name(&mut taker, Some(&this())).result, Errno::PERM.raw_os_error());
    let (socket, _) = listener();
    for id in 0..50 {
        show(&mut taker, id, &socket);
    }
    for p in [&mut same, &mut other] {
        p.sync();
        assert!(p.unasked.is_empty());
    }
}
