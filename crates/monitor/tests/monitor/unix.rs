//! Unix connections: the kernel says which two sockets are connected, whatever processes show and say.

use crate::rights::{as_user, for_users};
use crate::support::*;
use fsocket_proto::raw::Packet;
use fsocket_proto::values::Passing;
use fsocket_proto::{request, Payload};
use rustix::fd::AsFd;
use rustix::net::sockopt::socket_cookie;
use std::os::unix::net::{UnixDatagram, UnixListener, UnixStream};
use std::path::PathBuf;

fn offer() -> Packet {
    Packet { id: 5, arg0: 1, ..Packet::new(request::Offer::KIND) }
}

fn meet() -> Packet {
    Packet::new(request::Meet::KIND)
}

/// A listener of a path of its own.
struct Place(PathBuf, UnixListener);

impl Place {
    fn new(name: &str) -> Place {
        let path = std::env::temp_dir().join(format!("fastsocket-{name}-{}", std::process::id()));
        let listener = UnixListener::bind(&path).unwrap();
        Place(path, listener)
    }
    /// The opening end and the accepting one.
    fn pair(&self) -> (UnixStream, UnixStream) {
        let opened = UnixStream::connect(&self.0).unwrap();
        (opened, self.1.accept().unwrap().0)
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.0);
    }
}

fn result(p: &mut Proc, what: Packet, fd: impl AsFd) -> i32 {
    p.request(what, Some(fd.as_fd())).0.result
}

#[test]
fn ends_find_each_other() {
    let (d, place) = (Daemon::start(), Place::new("ends"));
    let (mut server, mut client) = (d.process(), d.process());
    let (a, b) = place.pair();
    assert_eq!(result(&mut client, meet(), &a), libc::ENOENT, "nobody has offered the other one");
    assert_eq!(result(&mut server, offer(), &b), 0);
    let (met, memory) = client.request(meet(), Some(a.as_fd()));
    assert_eq!(met.result, 0);
    assert!(memory.is_some());
    let upgrade = Packet { id: met.id, arg0: 3, arg1: 9, arg2: 1, ..Packet::new(request::Upgrade::KIND) };
    assert_eq!(result(&mut client, upgrade, &a), 0);
    let (told, memory) = server.wait_unasked();
    assert_eq!((told.id, told.arg2, memory.is_some()), (met.id, 5, true));
    // It was for once.
    assert_eq!(result(&mut client, upgrade, &a), libc::ENOENT);
    // The next one goes into the same channel.
    let (a, b) = place.pair();
    assert_eq!(result(&mut server, offer(), &b), 0);
    assert_eq!(client.request(meet(), Some(a.as_fd())).0.id, met.id);
}

#[test]
fn only_those_that_are_connected() {
    let (d, place) = (Daemon::start(), Place::new("only"));
    let (mut server, mut client) = (d.process(), d.process());
    let (a, b) = place.pair();
    let (c, _e) = place.pair();
    assert_eq!(result(&mut server, offer(), &b), 0);
    // Another connection's end, the offered end itself, and both ends in one process.
    assert_eq!(result(&mut client, meet(), &c), libc::ENOENT);
    assert_eq!(result(&mut client, meet(), &b), libc::ENOENT);
    assert_eq!(result(&mut server, meet(), &a), libc::EXDEV);
    // None of these is a connected stream.
    let (datagram, _other) = UnixDatagram::pair().unwrap();
    for wrong in [datagram.as_fd(), place.1.as_fd()] {
        assert!(result(&mut server, offer(), wrong) > 0 && result(&mut client, meet(), wrong) > 0);
    }
    // Closed since: whatever has its number now, it is not this connection.
    drop(b);
    assert!(matches!(result(&mut client, meet(), &a), libc::ENOENT | libc::EXDEV));
}

#[test]
fn not_while_another_process_has_it() {
    let (d, place) = (Daemon::start(), Place::new("while"));
    let (mut parent, mut child, mut client) = (d.process(), d.process(), d.process());
    let (a, b) = place.pair();
    let id = socket_cookie(&b).unwrap();
    let passed = |what: Passing| Packet { id, arg0: what as u64, ..Packet::new(request::Passed::KIND) };
    let received = Packet { arg1: 1, ..offer() };
    parent.tell(passed(Passing::Sent), None);
    parent.sync();
    child.tell(passed(Passing::Arrived), None);
    assert_eq!(result(&mut child, received, &b), libc::EAGAIN);
    parent.tell(passed(Passing::Released), None);
    parent.sync();
    assert_eq!(result(&mut child, received, &b), 0);
    assert_eq!(result(&mut client, meet(), &a), 0);
}

#[test]
fn nor_of_users_that_share_nothing() {
    let Some(d) = for_users("nor_of_users_that_share_nothing", |_| {}) else { return };
    let place = Place::new("users");
    let (mut server, mut same, mut other) =
        (as_user(70_001, || d.process()), as_user(70_001, || d.process()), as_user(70_002, || d.process()));
    let (a, b) = place.pair();
    // (Who a process is, is said with each message.)
    assert_eq!(as_user(70_001, || result(&mut server, offer(), &b)), 0);
    assert_eq!(as_user(70_002, || result(&mut other, meet(), &a)), libc::EPERM);
    assert_eq!(as_user(70_001, || result(&mut same, meet(), &a)), 0);
}
