use super::*;
use std::net::TcpListener;

/// The kernel gives out no such port by itself. Another test may use one.
const PORTS: std::ops::Range<u16> = 20_000..21_000;

/// Makes a connection whose client has the first free port of [`PORTS`].
fn at_a_free_port(client: End, server: End) -> (End, [OwnedFd; 2]) {
    for port in PORTS {
        let client = End { port, ..client };
        match apart(None, || repaired(&Order { client, server, named: true, holder: None })) {
            Err(Errno::ADDRINUSE) => {}
            made => return (client, made.unwrap()),
        }
    }
    panic!("no port of {PORTS:?} is free");
}

#[test]
fn connections_of_every_family_have_their_names() {
    if !rustix::process::geteuid().is_root() {
        eprintln!("SKIPPED: connections_of_every_family_have_their_names: not root");
        return;
    }
    let v4 = Ipv4Addr::LOCALHOST.to_ipv6_mapped().octets();
    let v6 = Ipv6Addr::LOCALHOST.octets();
    for (ip, c6, s6, listens) in [
        (v4, false, false, "127.0.0.1:0"),
        (v4, false, true, "[::]:0"),
        (v4, true, true, "[::]:0"),
        (v4, true, false, "0.0.0.0:0"),
        (v6, true, true, "[::1]:0"),
        (v6, true, true, "[::]:0"),
    ] {
        let l = TcpListener::bind(listens).unwrap();
        let server = End { v6: s6, ip, port: l.local_addr().unwrap().port(), uid: 2 };
        let (client, [c, s]) = at_a_free_port(End { v6: c6, ip, port: 0, uid: 1 }, server);
        for (fd, uid) in [(&c, 1), (&s, 2)] {
            assert_eq!(rustix::fs::fstat(fd).unwrap().st_uid, uid);
            assert!(!in_repair(fd.as_fd()).unwrap());
        }
        finished(&c, &client, &server).unwrap();
        finished(&s, &server, &client).unwrap();
    }
}

#[test]
fn a_port_that_the_client_holds_is_shared_with_nobody_else() {
    if !rustix::process::geteuid().is_root() {
        eprintln!("SKIPPED: a_port_that_the_client_holds_is_shared_with_nobody_else: not root");
        return;
    }
    let l = TcpListener::bind("127.0.0.1:0").unwrap();
    for at in [[127, 0, 0, 1], [0; 4]] {
        let held = rustix::net::socket(AddressFamily::INET, SocketType::STREAM, None).unwrap();
        rustix::net::bind(&held, &SocketAddr::from((at, 0))).unwrap();
        let port = SocketAddr::try_from(rustix::net::getsockname(&held).unwrap()).unwrap().port();
        let cookie = sockopt::socket_cookie(&held).unwrap();
        if !SockDiag::new().is_some_and(|mut d| d.unconnected(port).unwrap().contains(&cookie)) {
            eprintln!("SKIPPED: a_port_that_the_client_holds_is_shared_with_nobody_else: before Linux 6.8");
            return;
        }
        let end = |port| End { v6: false, ip: Ipv4Addr::LOCALHOST.to_ipv6_mapped().octets(), port, uid: 1 };
        let server = end(l.local_addr().unwrap().port());
        let order = |holder| Order { client: end(port), server, named: true, holder };
        assert_eq!(repaired(&order(None)).unwrap_err(), Errno::ADDRINUSE);
        assert_eq!(repaired(&order(Some(cookie + 1))).unwrap_err(), Errno::ADDRINUSE);
        repaired(&order(Some(cookie))).unwrap();
    }
}

/// Only older connections use the client's port. Both ends of the first connection are closed, and
/// one is in TIME_WAIT. The client's end of the other connection is still open.
#[test]
fn a_port_is_the_clients_beside_its_older_connections() {
    if !rustix::process::geteuid().is_root() {
        eprintln!("SKIPPED: a_port_is_the_clients_beside_its_older_connections: not root");
        return;
    }
    assert!((0..8).any(|_| is_the_clients_beside_its_older_connections()), "each time another program has the port");
}

/// False: another program of the machine has bound the port meanwhile, so this run shows nothing.
fn is_the_clients_beside_its_older_connections() -> bool {
    let listeners = [(); 3].map(|()| TcpListener::bind("127.0.0.1:0").unwrap());
    let ip = Ipv4Addr::LOCALHOST.to_ipv6_mapped().octets();
    let end = |port| End { v6: false, ip, port, uid: 1 };
    let [first, second, third] = listeners.each_ref().map(|l| end(l.local_addr().unwrap().port()));
    let (client, [c, s]) = at_a_free_port(end(0), first);
    drop(c);
    let probe = rustix::net::socket(AddressFamily::INET, SocketType::STREAM, None).unwrap();
    if !SockDiag::new().is_some_and(|mut d| {
        rustix::net::bind(&probe, &SocketAddr::from(([127, 0, 0, 1], 0))).unwrap();
        let port = SocketAddr::try_from(rustix::net::getsockname(&probe).unwrap()).unwrap().port();
        !d.unconnected(port).unwrap().is_empty()
    }) {
        eprintln!("SKIPPED: a_port_is_the_clients_beside_its_older_connections: before Linux 6.8");
        return true;
    }
    rustix::io::read(&s, &mut [0; 1]).unwrap();
    drop(s);
    let order = |server| Order { client, server, named: true, holder: None };
    let _kept = repaired(&order(second)).unwrap();
    // The same pair of addresses again, which is in TIME_WAIT.
    repaired(&order(first)).unwrap();
    let refused = repaired(&order(second)).unwrap_err();
    if refused == Errno::ADDRINUSE {
        return false;
    }
    assert_eq!(refused, Errno::ADDRNOTAVAIL);
    let dialled = dial(&order(third), None).unwrap();
    let port = SocketAddr::try_from(rustix::net::getsockname(&dialled).unwrap()).unwrap().port();
    assert_eq!(port, client.port);
    assert!(!in_repair(dialled.as_fd()).unwrap());
    // From here on another socket is bound to the port and may listen there.
    let other = rustix::net::socket(AddressFamily::INET, SocketType::STREAM, None).unwrap();
    repair(&other, true).unwrap();
    rustix::net::bind(&other, &client.addr()).unwrap();
    assert_eq!(repaired(&order(third)).unwrap_err(), Errno::ADDRINUSE);
    let dialled = dial(&order(second), None).unwrap();
    assert_ne!(SocketAddr::try_from(rustix::net::getsockname(&dialled).unwrap()).unwrap().port(), client.port);
    true
}

#[test]
fn what_no_socket_can_have_is_an_ordinary_connection() {
    let v4 = Ipv4Addr::LOCALHOST.to_ipv6_mapped().octets();
    let v6 = Ipv6Addr::LOCALHOST.octets();
    let uid = rustix::process::geteuid().as_raw();
    for (ip, c6, s6) in [(v6, false, true), (v6, true, false), (v6, false, false), (v4, true, false)] {
        for named in [false, true] {
            let end = |v6| End { v6, ip, port: 80, uid };
            let [c, s] = connection(&Order { client: end(c6), server: end(s6), named, holder: None }, None).unwrap();
            assert_ne!(descriptor::tcp(c.as_fd(), true), Err(Errno::INVAL));
            rustix::io::write(&c, b"x").unwrap();
            let mut b = [0; 1];
            assert_eq!(rustix::io::read(&s, &mut b).unwrap(), 1);
            assert!(!in_repair(c.as_fd()).unwrap_or(false) && !in_repair(s.as_fd()).unwrap_or(false));
        }
    }
}

/// A wait ends in time even if it is longer than the time between two signals.
#[test]
fn the_watchdogs_signals_do_not_lengthen_a_wait() {
    let watchdog = crate::watchdog::Watchdog::every(Duration::from_millis(5)).unwrap();
    let (silent, writer) = rustix::pipe::pipe().unwrap();
    watchdog.arm();
    assert!(!is_ready_within(silent.as_fd(), PollFlags::IN, Duration::from_millis(50)));
    drop(writer);
    assert!(is_ready_within(silent.as_fd(), PollFlags::IN | PollFlags::HUP, Duration::ZERO));
}
