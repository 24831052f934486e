//! Tests of listening, connecting, channels, wakers and ports.

use crate::support::*;
use fsocket_abi::channel::{waker_key, CHANNEL_SIZE, CLIENT, MAGIC};
use fsocket_monitor::memory::Mapping;
use fsocket_proto::raw::{waiter, Packet};
use fsocket_proto::registry::{Registry, SIZE};
use fsocket_proto::{notice, request, Payload};
use fsocket_sync::atomic::{AtomicU64, Ordering};
use rustix::fs::SealFlags;
use rustix::io::Errno;
use rustix::mm::{MapFlags, ProtFlags};
use std::collections::BTreeSet;
use std::mem::offset_of;

#[test]
fn the_registry_lists_listeners_and_is_read_only() {
    let d = Daemon::start();
    let mut p = d.stranger();
    let registry = p.hello();
    assert!(Mapping::new(&registry, SIZE).is_err(), "mapped for writing");
    // SAFETY: this maps a new range, which is never unmapped.
    let at = unsafe {
        rustix::mm::mmap(std::ptr::null_mut(), SIZE, ProtFlags::READ, MapFlags::SHARED, &registry, 0).unwrap()
    };
    let read = |off: usize| {
        // SAFETY: the offset is inside the mapping and aligned, and an atomic may be read there.
        unsafe { &*at.cast::<u8>().add(off).cast::<AtomicU64>() }.load(Ordering::Acquire)
    };
    assert_eq!(read(offset_of!(Registry, magic)), fsocket_proto::registry::MAGIC);
    assert_eq!(read(offset_of!(Registry, entries)), 0);
    let (l, _) = listener();
    let id = p.listen(&l);
    assert_eq!(read(offset_of!(Registry, entries)), 1);
    assert_eq!(read(offset_of!(Registry, entry)), id);
    assert_eq!(read(offset_of!(Registry, generation)) % 2, 0);
    p.tell(Packet { id, ..Packet::new(request::Unlisten::KIND) }, None);
    p.sync();
    assert_eq!(read(offset_of!(Registry, entries)), 0);
}

#[test]
fn the_same_socket_is_one_listener_and_siblings_are_two() {
    use rustix::net::{sockopt, AddressFamily, SocketType};
    let d = Daemon::start();
    let (mut a, mut b) = (d.process(), d.process());
    let make = |port| {
        let s = rustix::net::socket(AddressFamily::INET, SocketType::STREAM, None).unwrap();
        sockopt::set_socket_reuseport(&s, true).unwrap();
        rustix::net::bind(&s, &std::net::SocketAddr::from(([127, 0, 0, 1], port))).unwrap();
        rustix::net::listen(&s, 8).unwrap();
        s
    };
    let one = make(0);
    let port = std::net::SocketAddr::try_from(rustix::net::getsockname(&one).unwrap()).unwrap().port();
    let two = make(port);
    let id = a.listen(&one);
    assert_eq!(a.listen(&one), id);
    assert_eq!(b.listen(&one), id);
    let sibling = b.listen(&two);
    assert_ne!(sibling, id);
    // Connections are spread over both listeners.
    let mut c = d.process();
    let reached: BTreeSet<u64> = (0..4).map(|_| c.connect_to(v4([127, 0, 0, 1], port), 0).0).map(|m| m.arg0).collect();
    assert_eq!(reached, BTreeSet::from([id, sibling]));
}

#[test]
fn a_channel_is_sealed_and_reused_until_full() {
    let d = Daemon::start();
    let (mut s, mut c) = (d.process(), d.process());
    let (l, port) = listener();
    let id = s.listen(&l);
    let to = v4([127, 0, 0, 1], port);
    let (first, fd) = c.connect_to(to, 0);
    let fd = fd.unwrap();
    assert_eq!((first.result, first.arg0, first.arg1), (0, id, CHANNEL_SIZE as u64));
    assert_eq!(rustix::fs::fstat(&fd).unwrap().st_size as usize, CHANNEL_SIZE);
    let seals = rustix::fs::fcntl_get_seals(&fd).unwrap();
    assert!(seals.contains(SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL));
    assert!(!seals.contains(SealFlags::WRITE));
    let view = ChannelView::new(first.id as u32, fd);
    assert_eq!(view.map.at::<AtomicU64>(0).load(Ordering::Relaxed), MAGIC);

    let (again, fd) = c.connect_to(to, 0);
    assert_eq!((again.id, again.arg2), (first.id, 1));
    assert!(fd.is_none());
    let (more, fd) = c.connect_to(to, first.id);
    assert!(fd.is_some());
    assert_ne!(more.id, first.id);
    assert_eq!(c.connect_to(to, first.id).0.id, more.id, "the newest");
    // Another process gets a channel of its own.
    assert_ne!(d.process().connect_to(to, 0).0.id, more.id);
}

#[test]
fn where_nobody_listens_there_is_no_channel() {
    let d = Daemon::start();
    let (mut s, mut c) = (d.process(), d.process());
    let (l, port) = listener();
    s.listen(&l);
    let refused = |c: &mut Proc, to| assert_eq!(c.connect_to(to, 0).0.result, Errno::NOENT.raw_os_error());
    refused(&mut c, v4([127, 0, 0, 1], port ^ 1));
    refused(&mut c, v4([127, 0, 0, 2], port));
    refused(&mut c, v4([192, 0, 2, 1], port));
    drop(s);
    wait_until("the listener is gone", || c.connect_to(v4([127, 0, 0, 1], port), 0).0.result != 0);
}

#[test]
fn somebody_elses_address_cannot_be_taken() {
    use rustix::net::{sockopt, AddressFamily, SocketType};
    let d = Daemon::start();
    let s = rustix::net::socket(AddressFamily::INET, SocketType::STREAM, None).unwrap();
    sockopt::set_ip_freebind(&s, true).unwrap();
    rustix::net::bind(&s, &std::net::SocketAddr::from(([192, 0, 2, 1], 0))).unwrap();
    rustix::net::listen(&s, 8).unwrap();
    let port = std::net::SocketAddr::try_from(rustix::net::getsockname(&s).unwrap()).unwrap().port();
    let mut p = d.process();
    p.listen(&s);
    assert_eq!(p.connect_to(v4([192, 0, 2, 1], port), 0).0.result, Errno::NOENT.raw_os_error());
}

#[test]
fn a_wildcard_listener_takes_own_addresses_only() {
    let d = Daemon::start();
    let l = std::net::TcpListener::bind("0.0.0.0:0").unwrap();
    let port = l.local_addr().unwrap().port();
    let mut p = d.process();
    p.listen(&l);
    for ip in [[127, 0, 0, 1], [127, 5, 5, 5], [0, 0, 0, 0]] {
        assert_eq!(p.connect_to(v4(ip, port), 0).0.result, 0, "{ip:?}");
    }
    for ip in fsocket_monitor::address::local_addresses() {
        let to = fsocket_proto::Addr { ip, ..v4([0; 4], port) };
        assert_eq!(p.connect_to(to, 0).0.result == 0, fsocket_monitor::address::is_v4(&ip));
    }
    assert_ne!(p.connect_to(v4([192, 0, 2, 1], port), 0).0.result, 0);
}

#[test]
fn a_worker_is_told_of_channels_before_and_after() {
    let d = Daemon::start();
    let (mut s, mut c) = (d.process_with_arena(), d.process());
    let (l, port) = listener();
    let id = s.listen(&l);
    let early = c.connect(port);
    assert_eq!(early.workers(), 0);
    assert_eq!(s.work(id), 0);
    let (msg, fd) = s.unasked.remove(0);
    assert_eq!(
        (msg.kind, msg.id, msg.arg0, msg.arg1),
        (notice::ChannelSrv::KIND, u64::from(early.id), id, CHANNEL_SIZE as u64)
    );
    assert_eq!(rustix::fs::fstat(fd.unwrap()).unwrap().st_ino, rustix::fs::fstat(&early.fd).unwrap().st_ino);
    assert_eq!(early.workers(), 1);
    assert_eq!(s.pending(), 1);

    let late = d.process().connect(port);
    assert_eq!(late.workers(), 1);
    let (msg, _) = s.wait_unasked();
    assert_eq!((msg.kind, msg.id), (notice::ChannelSrv::KIND, u64::from(late.id)));
    wait_until("it is counted", || s.pending() >= 2);

    // A second worker: a child of the first one.
    let mut child = s.adopt();
    assert_eq!(child.work(id), 1);
    assert_eq!(early.workers(), 3);
    drop(child);
    wait_until("its bit is cleared", || early.workers() == 1);
}

#[test]
fn only_holders_may_work() {
    let d = Daemon::start();
    let (mut s, mut other) = (d.process(), d.process());
    let (l, _) = listener();
    let id = s.listen(&l);
    let (answer, _) = other.request(Packet { id, ..Packet::new(request::Worker::KIND) }, None);
    assert_eq!(answer.result, Errno::NOENT.raw_os_error());
}

/// The sleeper is woken by a message, asks for a pipe and confirms it. Then the process that rings
/// gets its end.
#[test]
fn two_processes_get_a_pipe_of_their_own() {
    let d = Daemon::start();
    let (mut s, mut c, _l, ch) = d.acquainted();
    s.sync();
    s.unasked.clear();
    let mut other = d.process();
    let key = waker_key(c.nonce, 7);
    let place = |kind| Packet { arg0: u64::from(ch.id), arg1: waiter(CLIENT, 3), ..Packet::new(kind) };
    // All these rings must be ignored. The first is by a process that is no party of the channel.
    // The others have a key of no process on that side, or a waiter that does not exist.
    other.tell(Packet { id: key, ..place(request::Ring::KIND) }, None);
    for key in [waker_key(s.nonce, 7), waker_key(other.nonce, 7), key & !0xff, 0, u64::MAX] {
        s.tell(Packet { id: key, ..place(request::Ring::KIND) }, None);
    }
    s.tell(Packet { id: key, arg1: waiter(CLIENT, 63), ..place(request::Ring::KIND) }, None);
    s.tell(Packet { id: key, arg1: 2 << 8, ..place(request::Ring::KIND) }, None);
    for p in [&mut other, &mut s, &mut c] {
        p.sync();
        assert!(p.unasked.is_empty());
    }
    s.tell(Packet { id: key, ..place(request::Ring::KIND) }, None);
    let (woken, none) = c.wait_unasked();
    assert_eq!((woken.kind, woken.id, woken.arg0, woken.arg1), (notice::Woken::KIND, 7, u64::from(ch.id), 3));
    assert!(none.is_none());

    // A confirmation before the request has no effect.
    let ask = |kind, ringer| Packet { id: 7, arg2: ringer, ..place(kind) };
    c.tell(ask(request::WakerReady::KIND, woken.arg2), None);
    // A request has no effect from the wrong side, with a process that is no party, or with the
    // process itself.
    s.tell(ask(request::Waker::KIND, woken.arg2), None);
    for ringer in [0, u64::MAX, woken.arg2 + 1000] {
        c.tell(ask(request::Waker::KIND, ringer), None);
    }
    for p in [&mut s, &mut c] {
        p.sync();
        assert!(p.unasked.is_empty());
    }
    for _ in 0..3 {
        c.tell(ask(request::Waker::KIND, woken.arg2), None);
    }
    let (m, read) = c.wait_unasked();
    assert_eq!((m.kind, m.id, m.arg2), (notice::WakerRead::KIND, 7, woken.arg2));
    let read = read.expect("the read end");
    s.sync();
    assert!(s.unasked.is_empty(), "not before the sleeper watches it");
    for _ in 0..3 {
        c.tell(ask(request::WakerReady::KIND, woken.arg2), None);
    }
    let (m, write) = s.wait_unasked();
    assert_eq!((m.kind, m.id, m.arg0, m.arg1), (notice::WakerWrite::KIND, key, u64::from(ch.id), 3));
    let write = write.expect("the other end");
    rustix::io::write(&write, &[1]).unwrap();
    assert!(rung(&read));
    c.sync();
    s.sync();
    assert!(c.unasked.is_empty() && s.unasked.is_empty(), "once for each pair");
    // Each end has a file description of its own: changing the flags of one does not change the
    // other.
    rustix::fs::fcntl_setfl(&write, rustix::fs::OFlags::empty()).unwrap();
    assert!(rustix::fs::fcntl_getfl(&read).unwrap().contains(rustix::fs::OFlags::NONBLOCK));
    // After the process that wakes has closed its end, the monitor holds no copy of that end.
    drop(write);
    let mut byte = [0; 8];
    assert_eq!(rustix::io::read(&read, &mut byte), Ok(1));
    wait_until("nobody can write any more", || rustix::io::read(&read, &mut byte) == Ok(0));
}

/// If a process does not read, only one message waits for each of its wakers, however often it is
/// rung.
#[test]
fn rings_for_one_that_does_not_read_are_one() {
    let d = Daemon::start();
    let (mut s, mut c, _l, ch) = d.acquainted();
    for i in 0..20_000u64 {
        let key = waker_key(c.nonce, i as usize % 3);
        s.tell(
            Packet { id: key, arg0: u64::from(ch.id), arg1: waiter(CLIENT, 0), ..Packet::new(request::Ring::KIND) },
            None,
        );
        if i % 16 == 0 {
            s.sync();
        }
    }
    s.sync();
    c.sync();
    let woken = c.unasked.iter().filter(|(m, _)| m.kind == notice::Woken::KIND).count();
    assert!((3..2_000).contains(&woken), "{woken} messages: what the socket holds, and three");
    c.sync();
}

#[test]
fn leases_are_unique_and_come_back() {
    let d = Daemon::start();
    let lease = |p: &mut Proc| p.request(Packet::new(request::Ports::KIND), None).0;
    let (mut a, mut b) = (d.process(), d.process());
    let mut seen = BTreeSet::new();
    for _ in 0..20 {
        for p in [&mut a, &mut b] {
            let m = lease(p);
            assert_eq!((m.result, m.arg1), (0, 64));
            for port in m.arg0..m.arg0 + m.arg1 {
                assert!((1024..=65535).contains(&port) && seen.insert(port));
            }
        }
    }
    // More leases than there are blocks, by processes that end.
    for _ in 0..40 {
        let mut p = d.process();
        for _ in 0..20 {
            assert_eq!(lease(&mut p).result, 0);
        }
        drop(p);
        b.sync();
    }
    assert_eq!(lease(&mut a).result, 0);
}
