//! Tests of listener groups, and of requests that must be refused.

use crate::support::*;
use fsocket_proto::raw::Packet;
use fsocket_proto::{notice, request, Payload};
use fsocket_reuseport::listener::{like, reuse_port, Shape};
use rustix::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use rustix::io::Errno;

fn may_load() -> bool {
    match fsocket_bpf::probe::permitted() {
        Ok(()) => true,
        Err(reason) => {
            println!("SKIPPED: {reason}");
            false
        }
    }
}

/// Makes a local listen socket beside `global`.
fn local_of(global: BorrowedFd<'_>) -> OwnedFd {
    let fd = global.as_raw_fd();
    reuse_port(fd, true).unwrap();
    let shape = Shape::of(fd).unwrap();
    // SAFETY: `like` has just made the descriptor, and nothing else owns it.
    unsafe { OwnedFd::from_raw_fd(like(fd, &shape).unwrap()) }
}

fn errno(e: Errno) -> i32 {
    e.raw_os_error()
}

#[test]
fn a_worker_that_ends_is_forgotten_and_the_others_are_told() {
    if !may_load() {
        return;
    }
    let d = Daemon::start();
    let (mut a, mut b) = (d.process_with_arena(), d.process_with_arena());
    let (global, _) = listener();
    let locals = [local_of(global.as_fd()), local_of(global.as_fd())];
    let (answer, program) = a.request(Packet::new(request::Group::KIND), Some(global.as_fd()));
    assert_eq!(answer.result, 0);
    assert!(program.is_some());
    let group = answer.id;
    assert_eq!(b.request(Packet::new(request::Group::KIND), Some(global.as_fd())).0.id, group, "the same socket");
    let join = |p: &mut Proc, cpu, fd: &OwnedFd| {
        p.request(Packet { id: group, arg0: cpu, ..Packet::new(request::Local::KIND) }, Some(fd.as_fd())).0
    };
    assert_eq!(join(&mut a, 0, &locals[0]).arg0, 1);
    assert_eq!(join(&mut b, 1, &locals[1]).arg0, 2);
    // Workers are told to look when the first worker joins, too.
    drop(a);
    let mut looks = 0;
    for _ in 0..16 {
        let (told, _) = b.wait_unasked();
        looks += u32::from(told.kind == notice::Look::KIND && told.id == group);
        if looks == 4 {
            // The place of the ended worker is free again.
            let third = local_of(global.as_fd());
            assert_eq!(join(&mut b, 0, &third).arg0, 1);
            return;
        }
    }
    panic!("nobody was told to look");
}

#[test]
fn who_is_no_worker_gets_what_waits_for_one_and_is_told() {
    if !may_load() {
        return;
    }
    let d = Daemon::start();
    let (mut worker, mut guest, mut other) = (d.process_with_arena(), d.process_with_arena(), d.process_with_arena());
    let (global, port) = listener();
    let local = local_of(global.as_fd());
    let (answer, program) = worker.request(Packet::new(request::Group::KIND), Some(global.as_fd()));
    let group = answer.id;
    fsocket_reuseport::classic::attach_loaded(global.as_raw_fd(), program.expect("a program").as_raw_fd()).unwrap();
    let msg = |kind| Packet { id: group, ..Packet::new(kind) };
    assert_eq!(worker.request(msg(request::Local::KIND), Some(local.as_fd())).0.arg0, 1);
    assert_eq!(worker.request(msg(request::Balance::KIND), None).0.result, 0);
    let waiting = |p: &mut Proc| p.request(msg(request::Waiting::KIND), None);
    assert_eq!(waiting(&mut other).0.result, errno(Errno::NOENT), "has not shown the global one");
    assert_eq!(guest.request(Packet::new(request::Group::KIND), Some(global.as_fd())).0.id, group);
    assert_eq!(waiting(&mut guest).0.result, errno(Errno::AGAIN), "not shared yet");
    worker.tell(Packet { arg0: 1, ..msg(request::Share::KIND) }, Some(local.as_fd()));
    worker.sync();
    assert_eq!(waiting(&mut guest).0.result, errno(Errno::AGAIN), "nothing waits");
    let _client = std::net::TcpStream::connect(("127.0.0.1", port)).unwrap();
    let told = (0..8).map(|_| guest.wait_unasked().0).find(|told| told.kind == notice::WakeHint::KIND);
    assert_eq!(told.map(|told| told.id), Some(group));
    let (answer, socket) = waiting(&mut guest);
    assert_eq!((answer.result, answer.arg0), (0, 1));
    rustix::net::accept(socket.expect("a socket")).unwrap();
    assert_eq!(waiting(&mut guest).0.result, errno(Errno::AGAIN), "taken");
    // A process that has not shown the global socket may not shut down the group.
    assert_eq!(other.request(msg(request::Shut::KIND), None).0.result, errno(Errno::NOENT));
    assert!(rustix::net::sockopt::socket_acceptconn(&local).unwrap());
    assert_eq!(guest.request(msg(request::Shut::KIND), None).0.result, 0);
    assert!(!rustix::net::sockopt::socket_acceptconn(&local).unwrap());
}

#[test]
fn somebody_elses_group_and_other_sockets_are_refused() {
    if !may_load() {
        return;
    }
    let d = Daemon::start();
    let (mut owner, mut other) = (d.process(), d.process());
    let (global, _) = listener();
    let local = local_of(global.as_fd());
    let group = owner.request(Packet::new(request::Group::KIND), Some(global.as_fd())).0.id;
    let join = |p: &mut Proc, group, fd: Option<BorrowedFd<'_>>| {
        p.request(Packet { id: group, ..Packet::new(request::Local::KIND) }, fd).0.result
    };
    assert_eq!(join(&mut other, group, Some(local.as_fd())), errno(Errno::NOENT), "has not shown the global one");
    assert_eq!(join(&mut owner, group + 1, Some(local.as_fd())), errno(Errno::NOENT));
    assert_eq!(join(&mut owner, group, None), errno(Errno::BADF));
    assert_eq!(join(&mut owner, group, Some(connected().as_fd())), errno(Errno::INVAL), "does not listen");
    let (elsewhere, _) = listener();
    assert_eq!(join(&mut owner, group, Some(elsewhere.as_fd())), errno(Errno::NOENT), "another address");
    assert_eq!(join(&mut owner, group, Some(local.as_fd())), 0);
    // Leaving a group without having joined it has no effect.
    other.tell(Packet { id: group, arg0: 1, ..Packet::new(request::Left::KIND) }, None);
    owner.tell(Packet { id: 99, arg0: u64::MAX, ..Packet::new(request::Left::KIND) }, None);
    other.sync();
    owner.sync();
}

/// A listening socket that shares the address `at`, as a program would make it.
fn shared(at: std::net::SocketAddr) -> OwnedFd {
    let s = rustix::net::socket(rustix::net::AddressFamily::INET, rustix::net::SocketType::STREAM, None).unwrap();
    rustix::net::sockopt::set_socket_reuseport(&s, true).unwrap();
    rustix::net::bind(&s, &at).unwrap();
    rustix::net::listen(&s, 5).unwrap();
    s
}

#[test]
fn strangers_on_a_shared_address() {
    if !may_load() {
        return;
    }
    let d = Daemon::start();
    let mut p = d.process_with_arena();
    let any = std::net::SocketAddr::from(([127, 0, 0, 1], 0));
    let stranger = shared(any);
    let at = rustix::net::getsockname(&stranger).unwrap().try_into().unwrap();
    let ours = [shared(at), shared(at)];
    let announce = |p: &mut Proc, fd: &OwnedFd| {
        p.request(Packet { arg0: 1, ..Packet::new(request::Group::KIND) }, Some(fd.as_fd()))
    };
    let (answer, program) = announce(&mut p, &ours[0]);
    assert_eq!((answer.result, program.is_some()), (0, false), "the stranger was there first");
    let (again, program) = announce(&mut p, &ours[1]);
    assert_eq!((again.id, program.is_some()), (answer.id, false));
    drop(stranger);
    // The stranger's socket has gone, and the monitor tells the workers to look.
    let (told, _) = p.wait_unasked();
    assert_eq!((told.kind, told.id), (notice::Look::KIND, answer.id));
    let (answer, program) = announce(&mut p, &ours[0]);
    assert_eq!((answer.result, program.is_some()), (0, true));
    let join = |p: &mut Proc, cpu, fd: &OwnedFd| {
        p.request(Packet { id: answer.id, arg0: cpu, ..Packet::new(request::Local::KIND) }, Some(fd.as_fd())).0
    };
    let (first, second) = (join(&mut p, 0, &ours[0]), join(&mut p, 1, &ours[1]));
    assert_eq!((first.result, first.arg0, second.arg0), (0, 1, 2));
    // Another process of the same program announces a socket of the group. It gets the same place.
    let mut q = d.process_with_arena();
    announce(&mut q, &ours[1]);
    assert_eq!(join(&mut q, 1, &ours[1]).arg0, 2);
}

/// The workers of a program start at the same time. The socket of the second one listens before it
/// is announced.
#[test]
fn a_sibling_is_a_stranger_until_it_is_shown() {
    if !may_load() {
        return;
    }
    let d = Daemon::start();
    let (mut a, mut b) = (d.process_with_arena(), d.process_with_arena());
    let first = shared(std::net::SocketAddr::from(([127, 0, 0, 1], 0)));
    let at = rustix::net::getsockname(&first).unwrap().try_into().unwrap();
    let second = shared(at);
    let announce = |p: &mut Proc, fd: &OwnedFd| {
        p.request(Packet { arg0: 1, ..Packet::new(request::Group::KIND) }, Some(fd.as_fd()))
    };
    let (answer, program) = announce(&mut a, &first);
    let group = answer.id;
    assert_eq!((answer.result, program.is_some()), (0, false), "nobody knows the second one");
    // The first worker may now go to sleep where no message reaches it, so it gets its place at
    // once.
    let join = |p: &mut Proc, cpu, fd: &OwnedFd| {
        let (m, _) = p.request(Packet { id: group, arg0: cpu, ..Packet::new(request::Local::KIND) }, Some(fd.as_fd()));
        (m.result, m.arg0, m.arg1)
    };
    assert_eq!(join(&mut a, 0, &first), (0, 1, 0));
    for told in [0, 20, 200] {
        assert_eq!(a.wait_unasked().0.kind, notice::Look::KIND, "it is the first worker, after {told} ms");
    }
    let (answer, program) = announce(&mut b, &second);
    assert_eq!((answer.result, answer.id, program.is_some()), (0, group, true), "there is no stranger");
    // A worker that was told of a stranger must be told that there is none any more, although no
    // process has joined and no connection has come.
    let (told, _) = a.wait_unasked();
    assert_eq!((told.kind, told.id), (notice::Look::KIND, group));
    assert_eq!(join(&mut b, 1, &second), (0, 2, 1));
}

#[test]
fn only_a_listening_socket_is_copied() {
    let d = Daemon::start();
    let mut p = d.process();
    let null = std::fs::File::open("/dev/null").unwrap();
    let stream = connected();
    for fd in [None, Some(null.as_fd()), Some(stream.as_fd())] {
        assert_ne!(p.request(Packet::new(request::Clone::KIND), fd).0.result, 0);
    }
    let (global, _) = listener();
    assert_ne!(p.request(Packet { arg0: 2, ..Packet::new(request::Clone::KIND) }, Some(global.as_fd())).0.result, 0);
    // A copied socket listens at the same address.
    reuse_port(global.as_raw_fd(), true).unwrap();
    let (answer, copy) = p.request(Packet::new(request::Clone::KIND), Some(global.as_fd()));
    assert_eq!(answer.result, 0);
    let copy = copy.expect("a socket");
    assert!(rustix::net::sockopt::socket_acceptconn(&copy).unwrap());
    assert_eq!(rustix::net::getsockname(&copy).unwrap(), rustix::net::getsockname(&global).unwrap());
}
