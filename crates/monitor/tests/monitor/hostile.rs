//! Misbehaving clients hurt only themselves.

use crate::support::*;
use fsocket_abi::arena::{ARENA_SIZE, SOCKS};
use fsocket_abi::channel::{slot_state, waker_key, SLOTS};
use fsocket_monitor::memory::memfd;
use fsocket_proto::raw::Packet;
use fsocket_proto::{notice, request, Payload};
use fsocket_sync::atomic::{AtomicU32, Ordering};
use rustix::event::{eventfd, EventfdFlags};
use rustix::fd::AsFd;
use rustix::fs::SealFlags;
use rustix::io::Errno;
use rustix::net::SendFlags;

#[test]
fn malformed_packets_drop_only_their_sender() {
    let d = Daemon::start();
    let mut good = d.process();
    let packets: [&[u8]; 4] = [b"", b"x", &[0; 71], &[0xff; 200]];
    for packet in packets {
        let mut p = d.process();
        rustix::net::send(&p.fd, packet, SendFlags::empty()).unwrap();
        assert!(p.is_dropped());
    }
    let messages = [
        Packet { version: 99, ..Packet::new(request::Ports::KIND) },
        Packet::new(0),
        Packet::new(u32::MAX),
        Packet::new(notice::ChannelSrv::KIND),
        Packet::new(request::Hello::KIND),
        Packet::new(request::Adopt::KIND),
        Packet::new(request::Arena::KIND),
    ];
    for msg in messages {
        let mut p = d.process();
        p.tell(msg, None);
        assert!(p.is_dropped(), "{msg:?}");
    }
    let mut p = d.stranger();
    p.tell(Packet::new(request::Ports::KIND), None);
    assert!(p.is_dropped(), "without HELLO");
    good.sync();
}

#[test]
fn another_abi_is_told_so() {
    let d = Daemon::start();
    let mut p = d.stranger();
    let (answer, fd) = p.request(Packet { id: 1, arg1: 999, ..Packet::new(request::Hello::KIND) }, None);
    assert_eq!(answer.result, Errno::PROTO.raw_os_error());
    assert!(fd.is_none());
}

#[test]
fn what_does_not_listen_is_no_listener() {
    let d = Daemon::start();
    let mut p = d.process();
    let mut refused = |fd: Option<rustix::fd::BorrowedFd<'_>>| {
        assert_ne!(p.request(Packet::new(request::Listen::KIND), fd).0.result, 0);
    };
    refused(Some(connected().as_fd()));
    refused(Some(std::net::UdpSocket::bind("127.0.0.1:0").unwrap().as_fd()));
    refused(Some(std::fs::File::open("/dev/null").unwrap().as_fd()));
    refused(None);
    let dir = tempfile::tempdir().unwrap();
    refused(Some(std::os::unix::net::UnixListener::bind(dir.path().join("s")).unwrap().as_fd()));
    // Connecting wants a socket, too.
    let null = std::fs::File::open("/dev/null").unwrap();
    assert_ne!(
        p.request(Packet { addr: v4([127, 0, 0, 1], 1), ..Packet::new(request::Connect::KIND) }, Some(null.as_fd()))
            .0
            .result,
        0
    );
}

#[test]
fn a_socket_closed_in_secret_gets_no_connections() {
    let d = Daemon::start();
    let (mut s, mut c) = (d.process(), d.process());
    let (l, port) = listener();
    let old = s.listen(&l);
    drop(l);
    let to = v4([127, 0, 0, 1], port);
    assert_eq!(c.connect_to(to, 0).0.result, Errno::NOENT.raw_os_error());
    // The old listener does not stand in the way of a later one, either.
    let Ok(again) = std::net::TcpListener::bind(("127.0.0.1", port)) else { return };
    assert_ne!(s.listen(&again), old);
    assert_eq!(c.connect_to(to, 0).0.result, 0);
    // Nor is a channel with it a reason.
    drop(again);
    assert_eq!(c.connect_to(to, 0).0.result, Errno::NOENT.raw_os_error());
}

#[test]
fn an_arena_that_could_shrink_is_refused() {
    let d = Daemon::start();
    let try_arena = |size: usize, seals: SealFlags, labelled: bool| {
        let mut p = d.process();
        let fd = memfd("arena", size, seals).unwrap();
        if labelled {
            label_arena(&fd);
        }
        p.tell(Packet::new(request::Arena::KIND), Some(fd.as_fd()));
        p.is_dropped()
    };
    assert!(try_arena(ARENA_SIZE, SealFlags::GROW, true));
    assert!(try_arena(ARENA_SIZE, SealFlags::SHRINK, true));
    assert!(try_arena(4096, SealFlags::SHRINK | SealFlags::GROW, false));
    assert!(try_arena(ARENA_SIZE * 2, SealFlags::SHRINK | SealFlags::GROW, true));
    assert!(try_arena(ARENA_SIZE, SealFlags::SHRINK | SealFlags::GROW, false), "without magic");
    let mut p = d.process();
    p.tell(Packet::new(request::Arena::KIND), Some(std::fs::File::open("/dev/zero").unwrap().as_fd()));
    assert!(p.is_dropped());
    let mut p = d.process_with_arena();
    let fd = memfd("arena", ARENA_SIZE, SealFlags::SHRINK | SealFlags::GROW).unwrap();
    label_arena(&fd);
    p.tell(Packet::new(request::Arena::KIND), Some(fd.as_fd()));
    assert!(p.is_dropped(), "a second arena");
}

#[test]
fn nonsense_in_an_arena_closes_nothing_of_others() {
    let d = Daemon::start();
    let (_s, _c, _l, ch) = d.acquainted();
    for slot in [0, 1, SLOTS - 1] {
        ch.set_state(slot, slot_state::ESTABLISHED);
    }
    let p = d.process_with_arena();
    let mut i = 0;
    for channel in [ch.id, 0, u32::MAX] {
        for slot in [0, 1, SLOTS - 1, SLOTS, u32::MAX as usize] {
            for side in [0, 1, 2, u32::MAX as usize] {
                p.open_sock(i, channel, slot, side, &[p.nonce, p.nonce]);
                i += 1;
            }
        }
    }
    let map = p.arena.as_ref().unwrap();
    map.at::<AtomicU32>(std::mem::offset_of!(fsocket_abi::arena::Header, high_water))
        .store(u32::MAX, Ordering::Relaxed);
    assert!(crate::reporting::report(&d).connections.len() <= SOCKS);
    drop(p);
    wait_until("it is gone", || crate::reporting::report(&d).processes.len() == 2);
    for slot in [0, 1, SLOTS - 1] {
        assert_eq!((ch.status(slot, 0), ch.status(slot, 1)), (0, 0));
    }
}

#[test]
fn nonsense_in_a_channel_is_survived() {
    let d = Daemon::start();
    let (mut s, mut c) = (d.process_with_arena(), d.process_with_arena());
    let (l, port) = listener();
    let id = s.listen(&l);
    s.work(id);
    let ch = c.connect(port);
    // Everything up to the rings, all ones, then patterns.
    for word in (0..fsocket_abi::channel::RING_OFF).step_by(4) {
        ch.map.at::<AtomicU32>(word).store(u32::MAX, Ordering::Relaxed);
    }
    for slot in 0..SLOTS {
        s.open_sock(slot, ch.id, slot, 1, &[s.nonce]);
        c.open_sock(slot, ch.id, slot, 0, &[c.nonce]);
        for half in [&s.sock(slot).rx, &c.sock(slot).rx] {
            half.set_pos(u64::MAX - slot as u64);
        }
        ch.set_state(slot, slot_state::SYN);
        for side in 0..2 {
            ch.slot(slot).dir[side].prod.status.store(0, Ordering::Relaxed);
        }
    }
    crate::reporting::report(&d);
    let other = d.process();
    drop(c);
    drop(s);
    wait_until("both are gone", || crate::reporting::report(&d).processes.len() == 1);
    drop(other);
}

/// A descriptor that comes with a ring is nobody's: it is closed, and the sleeper is woken.
#[test]
fn no_descriptor_of_a_client_is_rung() {
    let d = Daemon::start();
    let (mut s, mut c, _l, ch) = d.acquainted();
    let full = eventfd(0, EventfdFlags::CLOEXEC).unwrap();
    rustix::io::write(&full, &(u64::MAX - 1).to_ne_bytes()).unwrap();
    for kind in [request::Ring::KIND, request::Waker::KIND, request::WakerReady::KIND] {
        let msg = Packet { id: waker_key(c.nonce, 0), arg0: u64::from(ch.id), ..Packet::new(kind) };
        s.tell(msg, Some(full.as_fd()));
    }
    s.sync();
    assert!(c.is_woken(0));
}

#[test]
fn an_adopted_socket_must_be_one_of_ours() {
    let d = Daemon::start();
    for bad in [true, false] {
        let mut p = d.process();
        let (a, _b) = std::os::unix::net::UnixStream::pair().unwrap();
        let null = std::fs::File::open("/dev/null").unwrap();
        let fd = if bad { a.as_fd() } else { null.as_fd() };
        p.tell(Packet { id: 12345, ..Packet::new(request::Adopt::KIND) }, Some(fd));
        assert!(p.is_dropped());
    }
    // A nonce that a relative has.
    let mut p = d.process();
    let child = p.adopt();
    let (_a, b) = rustix::net::socketpair(
        rustix::net::AddressFamily::UNIX,
        rustix::net::SocketType::SEQPACKET,
        rustix::net::SocketFlags::CLOEXEC,
        None,
    )
    .unwrap();
    p.tell(Packet { id: child.nonce, ..Packet::new(request::Adopt::KIND) }, Some(b.as_fd()));
    assert!(p.is_dropped());
}

#[test]
fn who_does_not_read_gets_everything_later() {
    let d = Daemon::start();
    let mut s = d.process_with_arena();
    let (l, port) = listener();
    let id = s.listen(&l);
    s.work(id);
    // More messages than a socket buffer holds, while `s` does not read.
    let clients: Vec<Proc> = (0..4)
        .map(|_| {
            let mut c = d.process();
            let mut full = 0;
            for _ in 0..256 {
                let (m, _) = c.connect_to(v4([127, 0, 0, 1], port), full);
                assert_eq!(m.result, 0);
                full = m.id;
            }
            c
        })
        .collect();
    // A worker's table is full.
    let (m, _) = d.process().connect_to(v4([127, 0, 0, 1], port), 0);
    assert_eq!(m.result, Errno::MFILE.raw_os_error());
    for _ in 0..4 * 256 {
        assert_eq!(s.wait_unasked().0.kind, notice::ChannelSrv::KIND);
    }
    s.sync();
    assert!(s.unasked.is_empty());
    drop(clients);
}

#[test]
fn requests_without_reading_answers_are_bounded() {
    let d = Daemon::start();
    let (p, mut good) = (d.process(), d.process());
    let mut sent = 0;
    // The monitor stops reading them at some point; then so many fit into the
    // socket buffer.
    while fsocket_monitor::wire::send(p.fd.as_fd(), &Packet::new(request::ChannelHandle::KIND).into(), None).is_ok() {
        sent += 1;
        assert!(sent < 100_000);
    }
    std::thread::sleep(std::time::Duration::from_millis(50));
    good.sync();
}

/// A message of the kind within the limit, of those that nobody asked for.
fn told(p: &mut Proc, kind: u32) -> Packet {
    loop {
        let (msg, _) = p.wait_unasked();
        if msg.kind == kind {
            return msg;
        }
    }
}

#[test]
fn a_queue_of_nonsense_ends_its_channel_and_the_client_gets_no_other() {
    let d = Daemon::start();
    let (mut s, mut c, l, ch) = d.acquainted();
    ch.set_state(0, slot_state::ESTABLISHED);
    ch.queue(5).tail.store(1 << 31, Ordering::Release);
    // (On a busy machine the monitor may have put the channel to rest before.)
    c.tell(Packet { id: ch.id.into(), ..Packet::new(request::Arrives::KIND) }, None);
    for p in [&mut c, &mut s] {
        let gone = told(p, notice::ChannelGone::KIND);
        assert_eq!((gone.id, gone.arg0), (u64::from(ch.id), 1));
    }
    assert!(ch.listener_closed());
    for side in 0..2 {
        assert_ne!(ch.status(0, side) & fsocket_abi::channel::status::RST, 0);
    }
    let to = v4([127, 0, 0, 1], l.port);
    // Another process of the same user is no better.
    for p in [&mut c, &mut d.process()] {
        assert_eq!(p.connect_to(to, 0).0.result, Errno::ACCESS.raw_os_error());
    }
    // It is one listener's distrust.
    let (other, port) = listener();
    s.listen(&other);
    assert_eq!(c.connect_to(v4([127, 0, 0, 1], port), 0).0.result, 0);
}

#[test]
fn a_side_that_says_so_ends_a_channel_and_nobody_else_can() {
    let d = Daemon::start();
    let (mut s, mut c, l, ch) = d.acquainted();
    let broken = Packet { id: ch.id.into(), ..Packet::new(request::Broken::KIND) };
    let mut stranger = d.process();
    stranger.tell(broken, None);
    stranger.sync();
    assert!(!ch.listener_closed());
    c.tell(broken, None);
    assert_eq!(told(&mut s, notice::ChannelGone::KIND).arg0, 1);
    // The client speaks for itself alone.
    let to = v4([127, 0, 0, 1], l.port);
    assert_eq!(c.connect_to(to, 0).0.result, Errno::ACCESS.raw_os_error());
    let (answer, fd) = stranger.connect_to(to, 0);
    assert!(answer.result == 0 && fd.is_some());
    s.tell(Packet { id: answer.id, ..Packet::new(request::Broken::KIND) }, None);
    assert_eq!(told(&mut stranger, notice::ChannelGone::KIND).id, answer.id);
    assert_eq!(d.process().connect_to(to, 0).0.result, Errno::ACCESS.raw_os_error());
    // Twice, and of what is gone: nothing.
    s.tell(Packet { id: answer.id, ..Packet::new(request::Broken::KIND) }, None);
    s.tell(Packet { id: u64::MAX, ..Packet::new(request::Broken::KIND) }, None);
    s.sync();
}

#[test]
fn what_waits_where_nobody_looks_does_not_wake_workers_for_ever() {
    let d = Daemon::start();
    let (mut s, c, _l, ch) = d.acquainted();
    ch.syn(60, 0);
    c.tell(Packet { id: ch.id.into(), ..Packet::new(request::Arrives::KIND) }, None);
    let mut woken = 0;
    let end = std::time::Instant::now() + std::time::Duration::from_secs(2);
    while std::time::Instant::now() < end {
        ch.sleep(1, 0, fsocket_abi::channel::waker_key(s.nonce, 5));
        std::thread::sleep(std::time::Duration::from_millis(5));
        s.sync();
        woken += s.unasked.iter().filter(|(m, _)| m.kind == notice::Woken::KIND).count();
        s.unasked.clear();
    }
    assert!((1..=9).contains(&woken), "woken {woken} times");
}
