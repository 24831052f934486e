//! Tests that no client gets from the monitor what the kernel would refuse to it.
//!
//! The attackers have another user than root and no capabilities; the monitor runs as root. With
//! every descriptor that an attacker ever had, `cannot_have` tries to get a port that the attacker
//! must not have.
//!
//! Long: tests of one subject on one fixture.

use super::support::*;
use super::switching::{in_use, of};
use fsocket_abi::channel::{slot_state, CLIENT, SERVER};
use fsocket_monitor::Config;
use fsocket_proto::raw::Packet;
use fsocket_proto::registry::lessee;
use fsocket_proto::values::Switching;
use fsocket_proto::{request, Addr, Payload};
use fsocket_sync::atomic::Ordering;
use rustix::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use rustix::io::Errno;
use rustix::net::{sockopt, AddressFamily, SocketType};
use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::os::unix::fs::PermissionsExt;

const NOBODY: u32 = 65534;

/// A monitor for all users. `None`: the test does not run as root.
fn of_root(test: &str) -> Option<Daemon> {
    for_users(test, |_| {})
}

pub fn for_users(test: &str, change: impl FnOnce(&mut Config)) -> Option<Daemon> {
    if !rustix::process::geteuid().is_root() {
        eprintln!("SKIPPED: {test}: not root");
        return None;
    }
    Some(Daemon::with(|config| {
        config.private = false;
        config.mode = 0o666;
        config.rules = super::policy::rules(&format!("share = [[0, {NOBODY}]]\n[[rule]]\naction = \"allow\"\n"));
        let dir = config.socket.parent().and_then(|d| d.parent()).unwrap();
        std::fs::set_permissions(dir, std::fs::Permissions::from_mode(0o755)).unwrap();
        change(config);
    }))
}

/// Runs `work` as user `uid`, without effective capabilities.
pub fn as_user<T>(uid: u32, work: impl FnOnce() -> T) -> T {
    struct Back;
    impl Drop for Back {
        fn drop(&mut self) {
            // SAFETY: the call accesses no memory. As a raw system call it changes only this
            // thread.
            assert_eq!(unsafe { libc::syscall(libc::SYS_setresuid, 0, 0, 0) }, 0);
        }
    }
    // SAFETY: the call accesses no memory. As a raw system call it changes only this thread. (With
    // another user than root, no capability is effective.)
    assert_eq!(unsafe { libc::syscall(libc::SYS_setresuid, uid, uid, 0) }, 0);
    let _back = Back;
    work()
}

fn in_repair(fd: BorrowedFd<'_>) -> bool {
    const TCP_REPAIR: i32 = 19;
    let (mut value, mut len) = (0i32, 4);
    // SAFETY: `value` and `len` are valid for writes of that size.
    let rc = unsafe {
        libc::getsockopt(fd.as_raw_fd(), libc::IPPROTO_TCP, TCP_REPAIR, (&raw mut value).cast(), &raw mut len)
    };
    rc == 0 && value != 0
}

fn disconnect(fd: BorrowedFd<'_>) {
    let none = [0u8; 16];
    // SAFETY: the kernel reads the family, AF_UNSPEC (zero), from 16 valid bytes.
    unsafe { libc::connect(fd.as_raw_fd(), none.as_ptr().cast(), 16) };
}

fn port_of(fd: BorrowedFd<'_>) -> Option<u16> {
    SocketAddr::try_from(rustix::net::getsockname(fd).ok()?).ok().map(|a| a.port())
}

/// Tries by all means to get `port`, which belongs to another process, with a descriptor.
fn cannot_have(fd: BorrowedFd<'_>, port: u16) {
    if sockopt::socket_type(fd) != Ok(SocketType::STREAM) {
        return;
    }
    assert!(!in_repair(fd), "TCP_REPAIR is on");
    for round in 0..3 {
        for ip in [Ipv4Addr::LOCALHOST, Ipv4Addr::UNSPECIFIED] {
            for at in [SocketAddr::from((ip, port)), SocketAddr::from((ip.to_ipv6_mapped(), port))] {
                assert!(rustix::net::bind(fd, &at).is_err(), "bound to {at}, round {round}");
            }
        }
        if port_of(fd) == Some(port) {
            assert!(rustix::net::listen(fd, 1).is_err(), "listens on {port}, round {round}");
        }
        match round {
            0 => {
                let _ = sockopt::set_socket_reuseaddr(fd, true);
                let _ = sockopt::set_socket_reuseport(fd, true);
            }
            _ => disconnect(fd),
        }
    }
    assert_ne!(port_of(fd), Some(port), "it keeps the port");
}

fn names(slot: &fsocket_abi::channel::Slot, family: i32, dst: [u8; 16], port: u16) {
    slot.family.store(family as u8, Ordering::Relaxed);
    for (to, byte) in slot.dst.iter().zip(dst) {
        to.store(byte, Ordering::Relaxed);
    }
    slot.client_port.store(port, Ordering::Relaxed);
    slot.generation.store(9, Ordering::Relaxed);
    slot.state.store(slot_state::ESTABLISHED, Ordering::Release);
}

fn tcp(family: AddressFamily) -> OwnedFd {
    rustix::net::socket(family, SocketType::STREAM, None).unwrap()
}

/// Asks for path switches with sockets that are already bound, connected or listening. Returns all
/// resulting descriptors.
fn by_sockets_that_are_something(c: &mut Proc, ch: &ChannelView, ip: [u8; 16], port: u16) -> Vec<OwnedFd> {
    let bound = || {
        let fd = tcp(AddressFamily::INET);
        rustix::net::bind(&fd, &SocketAddr::from((Ipv4Addr::LOCALHOST, 0))).unwrap();
        fd
    };
    let mut held = vec![bound(), OwnedFd::from(connected()), OwnedFd::from(TcpListener::bind("127.0.0.1:0").unwrap())];
    for i in 0..3 {
        for what in 0..6 {
            let n = 200 + i * 6 + what as usize;
            names(ch.slot(n), libc::AF_INET, ip, port);
            let msg = Packet { id: u64::from(ch.id), arg0: n as u64, arg1: 9, ..Packet::new(request::Switch::KIND) };
            let got = c.request(of(msg, request::Switch::KIND, CLIENT, what), Some(held[i].as_fd())).1;
            held.extend(got);
        }
    }
    held
}

/// One user has both sides of a connection, and wants a port of root. The test tries every order
/// of requests, with sockets of every family and in every state.
#[test]
fn no_port_of_somebody_else_by_a_switch() {
    let Some(d) = of_root("no_port_of_somebody_else_by_a_switch") else { return };
    let victim = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = victim.local_addr().unwrap().port();
    as_user(NOBODY, || {
        let v6 = TcpListener::bind("[::1]:0").ok();
        let own = v6.or_else(|| TcpListener::bind("127.0.0.1:0").ok()).unwrap();
        let at = own.local_addr().unwrap();
        let (mut s, mut c) = (d.process(), d.process());
        let l = s.listen(&own);
        s.work(l);
        let ip = match at.ip() {
            std::net::IpAddr::V4(v4) => v4.to_ipv6_mapped().octets(),
            std::net::IpAddr::V6(v6) => v6.octets(),
        };
        let family = if at.is_ipv6() { libc::AF_INET6 } else { libc::AF_INET } as u16;
        let (answer, fd) = c.connect_to(Addr { ip, port: at.port(), family, v6only: 0 }, 0);
        let ch = ChannelView::new(answer.id as u32, fd.unwrap());
        let mut held: Vec<OwnedFd> = Vec::new();
        // The first and the second request of each order: side, and the kind of the request.
        let orders: [&[(usize, u64)]; 8] = [
            &[(SERVER, 0), (SERVER, 1)],
            &[(CLIENT, 0), (CLIENT, 1)],
            &[(SERVER, 0), (CLIENT, 0), (SERVER, 1)],
            &[(SERVER, 1), (SERVER, 0)],
            &[(CLIENT, 2), (CLIENT, 3)],
            &[(CLIENT, 0)],
            &[(CLIENT, 4), (SERVER, 0)],
            &[(SERVER, 5), (SERVER, 5)],
        ];
        let mut slot = 0;
        for order in orders {
            for families in [[AddressFamily::INET, AddressFamily::INET6], [AddressFamily::INET; 2]] {
                for claimed in [libc::AF_INET, libc::AF_INET6, 0, libc::AF_UNIX] {
                    slot += 1;
                    names(ch.slot(slot), claimed, ip, port);
                    let msg = Packet {
                        id: u64::from(ch.id),
                        arg0: slot as u64,
                        arg1: 9,
                        ..Packet::new(request::Switch::KIND)
                    };
                    for (i, (side, what)) in order.iter().enumerate() {
                        let fd = tcp(families[i % 2]);
                        let p = if *side == CLIENT { &mut c } else { &mut s };
                        let (_, got) = p.request(of(msg, request::Switch::KIND, *side, *what), Some(fd.as_fd()));
                        held.push(fd);
                        held.extend(got);
                    }
                    for p in [&mut s, &mut c] {
                        for side in [CLIENT, SERVER] {
                            held.extend(p.request(of(msg, request::Claim::KIND, side, 0), None).1);
                        }
                    }
                }
            }
        }
        held.extend(by_sockets_that_are_something(&mut c, &ch, ip, port));
        // One side ends meanwhile.
        drop(s);
        c.sync();
        assert!(held.len() > 100, "nothing was tried");
        held.iter().for_each(|fd| cannot_have(fd.as_fd(), port));
    });
    drop(TcpStream::connect(victim.local_addr().unwrap()).unwrap());
}

/// A client of another user's server gets its own end, which belongs to its own user. It must get
/// nothing of the server's.
#[test]
fn no_port_of_the_server() {
    let Some(d) = of_root("no_port_of_the_server") else { return };
    let (victim, port) = listener();
    let mut s = d.process();
    let l = s.listen(&victim);
    s.work(l);
    let (held, ends) = as_user(NOBODY, || {
        let mut c = d.process();
        let ch = c.connect(port);
        let msg = in_use(&ch);
        let mut held = Vec::new();
        let (answer, own) = c.request(
            of(msg, request::Switch::KIND, CLIENT, Switching::Make as u64),
            Some(tcp(AddressFamily::INET).as_fd()),
        );
        assert_eq!(answer.result, 0);
        let own = own.unwrap();
        assert_eq!(rustix::fs::fstat(&own).unwrap().st_uid, NOBODY);
        assert_eq!(port_of(own.as_fd()), Some(ch.port + 3), "under its own name");
        assert!(!in_repair(own.as_fd()));
        let (answer, others) = c.request(of(msg, request::Claim::KIND, SERVER, 0), None);
        assert_eq!(answer.result, Errno::NOENT.raw_os_error());
        held.extend(others);
        // Without a connection of its own, a client may not ask for the other side.
        let (answer, others) = c.request(of(msg, request::Switch::KIND, SERVER, Switching::Make as u64), None);
        assert_eq!(answer.result, Errno::NOENT.raw_os_error());
        held.extend(others);
        let server = s.request(of(msg, request::Claim::KIND, SERVER, 0), None).1.unwrap();
        assert_eq!(rustix::fs::fstat(&server).unwrap().st_uid, 0, "the server's is the server's");
        assert!(!in_repair(server.as_fd()));
        held.push(own);
        held.iter().for_each(|fd| cannot_have(fd.as_fd(), port));
        (held, server)
    });
    drop((victim, ends));
    // Not even after the server has ended.
    for fd in &held {
        assert_ne!(port_of(fd.as_fd()), Some(port));
    }
}

/// The client's port is one that was leased to the client, even if the client has written another
/// one into the slot. It must not be a port of another process that is connected to the same
/// listener.
#[test]
fn a_forged_port_is_not_used() {
    let Some(d) = of_root("a_forged_port_is_not_used") else { return };
    let (other, taken) = listener();
    let (mut s, mut c, _l, ch) = d.acquainted();
    let mut third = d.process();
    let second = third.connect(_l.port).port;
    as_user(NOBODY, || {
        for (slot, forged) in [(4, taken), (5, 80), (6, 0), (7, 45_678), (8, second)] {
            names(ch.slot(slot), libc::AF_INET, v4([127, 0, 0, 1], 0).ip, forged);
            let msg = Packet { id: u64::from(ch.id), arg0: slot as u64, arg1: 9, ..Packet::new(request::Switch::KIND) };
            let (answer, end) = c.request(of(msg, request::Switch::KIND, CLIENT, Switching::Make as u64), None);
            assert_eq!(answer.result, 0, "it goes over all the same");
            let end = end.unwrap();
            assert_ne!(port_of(end.as_fd()), Some(forged));
            // The end is connected, and cannot get the server's port either.
            assert_ne!(rustix::net::getpeername(&end).unwrap(), None);
            cannot_have(end.as_fd(), taken);
        }
        // The server's side asks for a connection to its listener in the kernel, with the forged
        // port.
        names(ch.slot(9), libc::AF_INET, v4([127, 0, 0, 1], 0).ip, taken);
        let msg = Packet { id: u64::from(ch.id), arg0: 9, arg1: 9, ..Packet::new(request::Switch::KIND) };
        wait_until("it is connected", || {
            s.request(of(msg, request::Switch::KIND, SERVER, Switching::Dial as u64), None).0.result == 0
        });
        let end = c.request(of(msg, request::Claim::KIND, CLIENT, 0), None).1.unwrap();
        assert_ne!(port_of(end.as_fd()), Some(taken));
    });
    drop(other);
}

/// The lessee of a port, in the registry page that accepting processes read.
fn owner(registry: &OwnedFd, port: u16) -> u32 {
    let at = std::mem::offset_of!(fsocket_proto::registry::Registry, owner) + usize::from(port) * 4;
    let mut word = [0; 4];
    assert_eq!(rustix::io::pread(registry, &mut word, at as u64), Ok(4));
    u32::from_ne_bytes(word)
}

/// The registry page that accepting processes read.
#[test]
fn ports_are_leased_to_a_channel() {
    let d = Daemon::start();
    let (mut s, mut c) = (d.process(), d.stranger());
    let registry = c.hello();
    let owner = |port| owner(&registry, port);
    let (l, port) = listener();
    let id = s.listen(&l);
    s.work(id);
    let ch = c.connect(port);
    assert!((ch.port..=ch.port + 63).all(|p| owner(p) == lessee(ch.id)));
    assert_ne!(owner(ch.port - 1), lessee(ch.id));
    assert!(ch.port.checked_add(64).is_none_or(|p| owner(p) != lessee(ch.id)));
    let more = c.request(Packet { id: u64::from(ch.id), ..Packet::new(request::Ports::KIND) }, None).0.arg0 as u16;
    assert!((more..=more + 63).all(|p| owner(p) == lessee(ch.id)));
    // A port that the client itself has bound.
    let bind = |p: &mut Proc, fd: &OwnedFd| {
        p.request(Packet { id: u64::from(ch.id), ..Packet::new(request::Ports::KIND) }, Some(fd.as_fd())).0
    };
    let own = tcp(AddressFamily::INET);
    assert_eq!(bind(&mut c, &own).result, Errno::INVAL.raw_os_error(), "not bound");
    rustix::net::bind(&own, &SocketAddr::from((Ipv4Addr::LOCALHOST, 0))).unwrap();
    let bound = port_of(own.as_fd()).unwrap();
    assert_eq!(bind(&mut s, &own).result, Errno::NOENT.raw_os_error(), "not its channel");
    let answer = bind(&mut c, &own);
    assert_eq!((answer.result, answer.arg0, owner(bound)), (0, u64::from(bound), lessee(ch.id)));
    let stream = TcpStream::connect(l.local_addr().unwrap()).unwrap();
    for wrong in [
        OwnedFd::from(stream.try_clone().unwrap()),
        l.try_clone().unwrap().into(),
        std::fs::File::open("/dev/null").unwrap().into(),
    ] {
        assert_eq!(bind(&mut c, &wrong).result, Errno::INVAL.raw_os_error());
    }
    // A process shows a socket with the port of its former connection, which another process has
    // now.
    let was = tcp(AddressFamily::INET);
    rustix::net::connect(&was, &l.local_addr().unwrap()).unwrap();
    sockopt::set_socket_linger(&was, Some(std::time::Duration::ZERO)).unwrap();
    disconnect(was.as_fd());
    let stale = port_of(was.as_fd()).unwrap();
    let now = tcp(AddressFamily::INET);
    if rustix::net::bind(&now, &SocketAddr::from((Ipv4Addr::LOCALHOST, stale))).is_ok() {
        assert_ne!(bind(&mut c, &was).result, 0, "a port that it has no more");
    }
    // This channel shows a port that lies in another channel's block. The monitor refuses.
    let mut c2 = d.process();
    let ch2 = c2.connect(port);
    let theirs = tcp(AddressFamily::INET);
    rustix::net::bind(&theirs, &SocketAddr::from((Ipv4Addr::LOCALHOST, ch2.port + 7))).unwrap();
    assert_eq!(bind(&mut c, &theirs).result, Errno::ADDRINUSE.raw_os_error());
    // The process that now has the bound socket gets the port.
    let m2 = Packet { id: u64::from(ch2.id), ..Packet::new(request::Ports::KIND) };
    assert_eq!(c2.request(m2, Some(own.as_fd())).0.result, 0);
    assert_eq!(owner(bound), lessee(ch2.id));
    // After the client has ended, queued connections can still be accepted. After that, all ports
    // are free.
    ch.syn(0, 3);
    drop(c);
    s.sync();
    assert_eq!(owner(ch.port), lessee(ch.id));
    ch.set_state(3, slot_state::FREE);
    drop(c2);
    drop(l);
    s.tell(Packet { id, ..Packet::new(request::Unlisten::KIND) }, None);
    wait_until("they are free", || {
        s.sync();
        owner(ch.port) == 0 && owner(more) == 0 && owner(bound) == 0 && owner(ch2.port) == 0
    });
}

/// The kernel lets sockets of one process share a port if their destinations differ. Channels must
/// do the same.
#[test]
fn channels_of_a_process_share_ports_where_it_has_many() {
    const MANY: usize = 70;
    let d = Daemon::start();
    let (mut s, mut c) = (d.process(), d.stranger());
    let listeners: Vec<_> = (0..MANY).map(|_| listener()).collect();
    let ids: Vec<_> = listeners.iter().map(|(l, _)| s.listen(l)).collect();
    for id in &ids {
        s.work(*id);
    }
    let registry = c.hello();
    let owner = |port| owner(&registry, port);
    let channels: Vec<_> = listeners.iter().map(|(_, port)| c.connect(*port)).collect();
    let ours = lessee(channels[0].id);
    assert!(channels.iter().all(|ch| ch.port != 0 && lessee(ch.id) == ours && owner(ch.port) == ours));
    let mut blocks: Vec<u16> = channels.iter().map(|ch| ch.port).collect();
    blocks.sort_unstable();
    blocks.dedup();
    assert_eq!(blocks.len(), 64, "as many as there are before they are shared");
    // Two channels to one destination never share a port.
    let last = &channels[MANY - 1];
    let mut own = vec![last.port];
    for _ in 0..5 {
        own.push(c.request(Packet { id: u64::from(last.id), ..Packet::new(request::Ports::KIND) }, None).0.arg0 as u16);
    }
    assert!(own.iter().all(|first| blocks.contains(first)), "they are shared: {own:?}");
    let distinct: std::collections::BTreeSet<_> = own.iter().collect();
    assert_eq!(distinct.len(), own.len(), "{own:?}");
    // Another process does not get these ports.
    let mut other = d.process();
    let theirs = other.connect(listeners[0].1);
    assert!(lessee(theirs.id) != ours && !blocks.contains(&theirs.port) && owner(theirs.port) == lessee(theirs.id));
    // The process keeps the ports as long as any of its channels has them.
    s.tell(Packet { id: ids[MANY - 1], ..Packet::new(request::Unlisten::KIND) }, None);
    s.sync();
    assert!(own.iter().all(|first| owner(*first) == ours));
    drop(c);
    ids.iter().take(MANY - 1).for_each(|id| s.tell(Packet { id: *id, ..Packet::new(request::Unlisten::KIND) }, None));
    wait_until("they are free", || {
        s.sync();
        blocks.iter().all(|first| owner(*first) == 0)
    });
}

/// A server keeps connections of dead clients open. That must not use up the ports.
#[test]
fn ports_of_the_dead_are_used_where_there_are_no_others() {
    let d = Daemon::start();
    let mut s = d.process();
    let (l, port) = listener();
    let id = s.listen(&l);
    s.work(id);
    for _ in 0..600 {
        let mut c = d.process();
        let ch = c.connect(port);
        assert_ne!(ch.port, 0, "no port");
        ch.set_state(3, slot_state::ESTABLISHED);
        drop(c);
    }
}

/// Sockets are made in the connection's network namespace. A descriptor shows which namespace that
/// is; the monitor does nothing else with the descriptor.
#[test]
fn in_another_network_namespace() {
    let Some(d) = of_root("in_another_network_namespace") else { return };
    std::thread::scope(|scope| {
        let there = scope.spawn(|| {
            // SAFETY: the call accesses no memory, and changes only this thread.
            if unsafe { libc::unshare(libc::CLONE_NEWNET) } != 0 {
                eprintln!("SKIPPED: in_another_network_namespace: no namespaces");
                return;
            }
            let up = std::process::Command::new("ip").args(["link", "set", "lo", "up"]).status();
            assert!(up.is_ok_and(|s| s.success()), "ip link");
            let (mut s, mut c, l, ch) = d.acquainted();
            let msg = in_use(&ch);
            let make = of(msg, request::Switch::KIND, CLIENT, Switching::Make as u64);
            let ask = |p: &mut Proc, m: Packet, fd: Option<BorrowedFd<'_>>| p.request(m, fd).0.result;
            assert_eq!(ask(&mut c, make, None), Errno::BADF.raw_os_error());
            let (pipe, _w) = rustix::pipe::pipe().unwrap();
            let wrong: [OwnedFd; 4] = [
                pipe,
                std::fs::File::open("/dev/null").unwrap().into(),
                std::os::unix::net::UnixDatagram::unbound().unwrap().into(),
                std::net::UdpSocket::bind("127.0.0.1:0").unwrap().into(),
            ];
            for fd in &wrong {
                assert_eq!(ask(&mut c, make, Some(fd.as_fd())), Errno::INVAL.raw_os_error());
            }
            // The monitor does not take sockets that the process has made itself just because of
            // the namespace.
            let stream = OwnedFd::from(connected());
            let ready = of(msg, request::Switch::KIND, CLIENT, Switching::OwnReady as u64);
            assert_eq!(ask(&mut c, ready, Some(stream.as_fd())), Errno::PERM.raw_os_error());
            let here = tcp(AddressFamily::INET);
            let end = c.request(make, Some(here.as_fd())).1.expect("an end");
            let other = s.request(of(msg, request::Claim::KIND, SERVER, 0), None).1.expect("the other");
            let cookie = |fd: &OwnedFd| fsocket_monitor::descriptor::netns_cookie(fd.as_fd()).unwrap();
            assert_eq!((cookie(&end), cookie(&other)), (cookie(&here), cookie(&here)));
            assert_eq!((port_of(end.as_fd()), port_of(other.as_fd())), (Some(ch.port + 3), Some(l.port)));
        });
        there.join().unwrap();
    });
    let (_s, mut c, _l, ch) = d.acquainted();
    let msg = in_use(&ch);
    assert_eq!(
        c.request(of(msg, request::Switch::KIND, CLIENT, Switching::Make as u64), None).0.result,
        0,
        "ours is what it was"
    );
}

/// A process was handed one of several sockets that share an address. It has one share of the
/// connections. It must not get a larger share by copies that belong to the owner's user.
#[test]
fn no_larger_share_of_somebody_elses_address() {
    let Some(d) = of_root("no_larger_share_of_somebody_elses_address") else { return };
    let shared = |port: u16| {
        let fd = tcp(AddressFamily::INET);
        sockopt::set_socket_reuseport(&fd, true).unwrap();
        rustix::net::bind(&fd, &SocketAddr::from((Ipv4Addr::LOCALHOST, port))).unwrap();
        rustix::net::listen(&fd, 8).unwrap();
        fd
    };
    let handed = shared(0);
    let port = port_of(handed.as_fd()).unwrap();
    let copy = |p: &mut Proc| p.request(Packet::new(request::Clone::KIND), Some(handed.as_fd()));
    as_user(NOBODY, || {
        let mut p = d.process();
        // While it is the only socket at the address, the process may have as many copies as its
        // workers need.
        let copies = [copy(&mut p).1.unwrap(), copy(&mut p).1.unwrap()];
        assert!(copies.iter().all(|fd| rustix::fs::fstat(fd).unwrap().st_uid == 0 && !in_repair(fd.as_fd())));
    });
    let _other = shared(port);
    as_user(NOBODY, || assert_eq!(copy(&mut d.process()).0.result, Errno::PERM.raw_os_error()));
    assert_eq!(copy(&mut d.process()).0.result, 0, "root may");
}

/// The monitor accepts two ends that one side has made only if the monitor may not enter the
/// namespace.
#[test]
fn where_the_monitor_cannot_enter() {
    if !rustix::process::geteuid().is_root() {
        eprintln!("SKIPPED: where_the_monitor_cannot_enter: not root");
        return;
    }
    let d = as_user(NOBODY, Daemon::start);
    let here = TcpListener::bind("127.0.0.1:0").unwrap();
    let elsewhere = OwnedFd::from(TcpStream::connect(here.local_addr().unwrap()).unwrap());
    std::thread::scope(|scope| {
        let there = scope.spawn(|| {
            // SAFETY: the call accesses no memory, and changes only this thread.
            if unsafe { libc::unshare(libc::CLONE_NEWNET) } != 0 {
                eprintln!("SKIPPED: where_the_monitor_cannot_enter: no namespaces");
                return;
            }
            let up = std::process::Command::new("ip").args(["link", "set", "lo", "up"]).status();
            assert!(up.is_ok_and(|s| s.success()), "ip link");
            let (mut s, mut c, l, ch) = d.acquainted();
            let msg = in_use(&ch);
            let ask = |p: &mut Proc, what, fd: BorrowedFd<'_>| {
                p.request(of(msg, request::Switch::KIND, CLIENT, what), Some(fd)).0.result
            };
            let fresh = tcp(AddressFamily::INET);
            let (own, other) = {
                let c = TcpStream::connect(l.socket.local_addr().unwrap()).unwrap();
                (OwnedFd::from(c), OwnedFd::from(l.socket.accept().unwrap().0))
            };
            assert_eq!(
                ask(&mut c, Switching::OwnReady as u64, own.as_fd()),
                Errno::PERM.raw_os_error(),
                "not tried yet"
            );
            assert_eq!(ask(&mut c, Switching::Make as u64, fresh.as_fd()), Errno::XDEV.raw_os_error());
            assert_eq!(
                ask(&mut c, Switching::OtherReady as u64, other.as_fd()),
                Errno::INVAL.raw_os_error(),
                "out of order"
            );
            for wrong in [&fresh, &elsewhere] {
                assert_eq!(ask(&mut c, Switching::OwnReady as u64, wrong.as_fd()), Errno::INVAL.raw_os_error());
            }
            assert_eq!(ask(&mut c, Switching::OwnReady as u64, own.as_fd()), 0);
            let early = s.request(of(msg, request::Claim::KIND, SERVER, 0), None).0.result;
            assert_eq!(early, Errno::AGAIN.raw_os_error(), "half-made");
            assert_eq!(ask(&mut c, Switching::OtherReady as u64, other.as_fd()), 0);
            let got = s.request(of(msg, request::Claim::KIND, SERVER, 0), None).1.expect("the other end");
            assert_eq!(rustix::net::getpeername(&got).unwrap(), rustix::net::getpeername(&other).unwrap());
        });
        there.join().unwrap();
    });
}
