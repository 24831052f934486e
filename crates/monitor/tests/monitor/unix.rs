//! Tests of Unix connections. The kernel says which two sockets are connected, whatever processes
//! show and claim.

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

/// A Unix listener with a path of its own.
struct Place(PathBuf, UnixListener);

impl Place {
    fn new(name: &str) -> Place {
        let path = std::env::temp_dir().join(format!("fastsocket-{name}-{}", std::process::id()));
        let listener = UnixListener::bind(&path).unwrap();
        Place(path, listener)
    }
    /// A new connection: the opening end and the accepted end.
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

/// Number of ends that the monitor has refused.
fn refused(d: &Daemon) -> u64 {
    crate::reporting::report(d).totals["unix.refused"]
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
    // The offer was for one use.
    assert_eq!(result(&mut client, upgrade, &a), libc::ENOENT);
    // The next connection uses the same channel.
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
    // These do not fit: the end of another connection, the offered end itself, and the second end
    // in the same process.
    assert_eq!(result(&mut client, meet(), &c), libc::ENOENT);
    assert_eq!(result(&mut client, meet(), &b), libc::ENOENT);
    assert_eq!(result(&mut server, meet(), &a), libc::EXDEV);
    // A process writes the inode number or the cookie of an end into every field of its message.
    // That must have no effect.
    let inode = rustix::fs::fstat(&b).unwrap().st_ino;
    for word in [inode, socket_cookie(&b).unwrap()] {
        let lie = |kind| Packet { id: word, arg0: word, arg1: 0, arg2: word, ..Packet::new(kind) };
        assert_eq!(result(&mut client, lie(request::Meet::KIND), &c), libc::ENOENT);
        assert!(result(&mut client, lie(request::Upgrade::KIND), &c) > 0);
    }
    // None of these is a connected stream.
    let (datagram, _other) = UnixDatagram::pair().unwrap();
    for wrong in [datagram.as_fd(), place.1.as_fd()] {
        assert!(result(&mut server, offer(), wrong) > 0 && result(&mut client, meet(), wrong) > 0);
    }
    // The offered socket is closed. The monitor must not confuse it with another socket that gets
    // the same number.
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
    // Here the process does not say that it has received the socket.
    assert_eq!(result(&mut child, offer(), &b), libc::EAGAIN);
    assert_eq!(result(&mut client, meet(), &a), libc::ENOENT);
    assert_eq!(refused(&d), 2);
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
    // (The kernel tells the user of the sender with each message.)
    assert_eq!(as_user(70_001, || result(&mut server, offer(), &b)), 0);
    assert_eq!(as_user(70_002, || result(&mut other, meet(), &a)), libc::EPERM);
    // The other user's process was passed the server's end, and offers it. Then the client comes.
    let before = refused(&d);
    assert_eq!(as_user(70_002, || result(&mut other, offer(), &b)), 0);
    assert_eq!(as_user(70_001, || result(&mut same, meet(), &a)), libc::EPERM);
    assert_eq!(refused(&d), before + 1);
    assert_eq!(as_user(70_001, || result(&mut server, offer(), &b)), 0);
    assert_eq!(as_user(70_001, || result(&mut same, meet(), &a)), 0);
}
