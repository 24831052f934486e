//! Connections that go over to kernel TCP, and listeners that are given away.

use super::support::*;
use fsocket_abi::channel::{slot_state, CLIENT, SERVER, SLOTS};
use fsocket_proto::{kind, switch, Msg};
use fsocket_sync::atomic::Ordering;
use rustix::fd::{AsFd, OwnedFd};
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketType};
use std::io::{Read, Write};
use std::net::{Ipv4Addr, TcpStream};

const PORT: u16 = 45_678;

/// A connection in slot 3, as a client and a worker leave it.
fn in_use(ch: &ChannelView) -> Msg {
    let slot = ch.slot(3);
    slot.client_port.store(PORT, Ordering::Relaxed);
    slot.family.store(libc::AF_INET as u16, Ordering::Relaxed);
    for (to, byte) in slot.dst.iter().zip(Ipv4Addr::LOCALHOST.to_ipv6_mapped().octets()) {
        to.store(byte, Ordering::Relaxed);
    }
    slot.generation.store(9, Ordering::Relaxed);
    slot.state.store(slot_state::ESTABLISHED, Ordering::Release);
    Msg { id: u64::from(ch.id), arg0: 3, arg1: 9, ..Msg::new(kind::SWITCH) }
}

fn of(msg: Msg, kind: u32, side: usize, what: u64) -> Msg {
    Msg { kind, arg0: msg.arg0 & 0xffff_ffff | (side as u64) << 32, arg2: what, ..msg }
}

fn fresh() -> OwnedFd {
    rustix::net::socket(AddressFamily::INET, SocketType::STREAM, None).unwrap()
}

fn code(e: Errno) -> i32 {
    e.raw_os_error()
}

#[test]
fn both_ends_have_the_names_of_the_connection() {
    let d = Daemon::start();
    let (mut s, mut c, l, ch) = d.acquainted();
    let msg = in_use(&ch);
    assert_eq!(s.request(of(msg, kind::CLAIM, SERVER, 0), None).0.result, code(Errno::NOENT));
    let (own, other) = (fresh(), fresh());
    let (answer, _) = s.request(of(msg, kind::SWITCH, SERVER, switch::OWN), Some(own.as_fd()));
    assert_eq!((answer.result, answer.arg0), (0, libc::AF_INET as u64));
    // The other side begins too: it is told, and waits.
    let late = fresh();
    assert_eq!(
        c.request(of(msg, kind::SWITCH, CLIENT, switch::OWN), Some(late.as_fd())).0.result,
        code(Errno::ALREADY)
    );
    assert_eq!(c.request(of(msg, kind::CLAIM, CLIENT, 0), None).0.result, code(Errno::AGAIN));
    let (answer, _) = s.request(of(msg, kind::SWITCH, SERVER, switch::OTHER), Some(other.as_fd()));
    if answer.result == code(Errno::PERM) {
        eprintln!("SKIPPED: both_ends_have_the_names_of_the_connection: no CAP_NET_ADMIN");
        return;
    }
    assert_eq!(answer.result, 0);
    let claim = |p: &mut Proc, side| TcpStream::from(p.request(of(msg, kind::CLAIM, side, 0), None).1.unwrap());
    let (mut server, mut client) = (claim(&mut s, SERVER), claim(&mut c, CLIENT));
    assert_eq!(server.peer_addr().unwrap().port(), PORT);
    assert_eq!(client.peer_addr().unwrap(), l.socket.local_addr().unwrap());
    assert_eq!(client.local_addr().unwrap(), server.peer_addr().unwrap());
    client.write_all(b"there").unwrap();
    server.write_all(b"back").unwrap();
    let mut b = [0; 5];
    server.read_exact(&mut b).unwrap();
    assert_eq!(&b, b"there");
    // Once a side says so its end is closed here: the last copy is the caller's.
    drop((own, other));
    for (p, side) in [(&s, SERVER), (&c, CLIENT)] {
        p.tell(of(msg, kind::RELEASE, side, 0), None);
    }
    s.sync();
    c.sync();
    assert_eq!(s.request(of(msg, kind::CLAIM, SERVER, 0), None).0.result, code(Errno::NOENT));
    drop(server);
    let mut rest = Vec::new();
    client.read_to_end(&mut rest).unwrap();
    assert_eq!(rest, b"back");
}

#[test]
fn relatives_begin_anew_with_one_socket() {
    let d = Daemon::start();
    let (mut s, mut c, _l, ch) = d.acquainted();
    let msg = in_use(&ch);
    let own = fresh();
    let alone = of(msg, kind::SWITCH, CLIENT, switch::ALONE);
    let stream = OwnedFd::from(connected());
    assert_eq!(c.request(alone, Some(stream.as_fd())).0.result, code(Errno::INVAL), "connected to somebody");
    assert_eq!(c.request(alone, Some(own.as_fd())).0.result, 0);
    rustix::net::sockopt::set_tcp_nodelay(&own, true).unwrap();
    for _ in 0..2 {
        let end = c.request(of(msg, kind::CLAIM, CLIENT, 0), None).1.unwrap();
        assert!(rustix::net::sockopt::tcp_nodelay(&end).unwrap(), "another socket");
    }
    assert_eq!(s.request(of(msg, kind::CLAIM, SERVER, 0), None).0.result, code(Errno::NOENT));
    c.tell(of(msg, kind::RELEASE, CLIENT, 0), None);
    c.sync();
    assert_eq!(c.request(of(msg, kind::CLAIM, CLIENT, 0), None).0.result, code(Errno::NOENT));
}

#[test]
fn what_waits_is_marked_once() {
    let d = Daemon::start();
    let (mut s, mut c) = (d.process(), d.process());
    let (l, port) = listener();
    let id = s.listen(&l);
    let ch = c.connect(port);
    let mark = |p: &mut Proc, mark: u64| p.request(Msg { id, arg0: mark, ..Msg::new(kind::OPTIONS) }, None).0;
    let of = |slot: usize| ch.slot(slot).dir[SERVER].prod.options.load(Ordering::Relaxed);
    assert_eq!(mark(&mut c, 5).result, code(Errno::NOENT), "not his");
    assert_eq!(mark(&mut s, 5).arg0, 0, "nothing waits");
    ch.syn(0, 3);
    assert_eq!((mark(&mut s, 6).arg0, of(3)), (1, 6));
    ch.syn(0, 4);
    assert_eq!((mark(&mut s, 7).arg0, of(3), of(4)), (1, 6, 7));
    ch.set_state(3, slot_state::ESTABLISHED);
    assert_eq!((mark(&mut s, 8).arg0, of(4)), (0, 7));
}

#[test]
fn only_the_parties_and_only_a_connection() {
    let d = Daemon::start();
    let (mut s, mut c, _l, ch) = d.acquainted();
    let mut other = d.process();
    let msg = in_use(&ch);
    let own = fresh();
    let ask = |p: &mut Proc, m: Msg, fd: Option<&OwnedFd>| p.request(m, fd.map(|f| f.as_fd())).0.result;
    let good = of(msg, kind::SWITCH, CLIENT, switch::OWN);
    assert_eq!(ask(&mut other, good, Some(&own)), code(Errno::NOENT), "a stranger");
    assert_eq!(ask(&mut other, of(msg, kind::CLAIM, CLIENT, 0), None), code(Errno::NOENT));
    assert_eq!(ask(&mut s, good, Some(&own)), code(Errno::NOENT), "the other side's end");
    assert_eq!(ask(&mut c, good, None), code(Errno::BADF));
    assert_eq!(ask(&mut c, Msg { arg1: 8, ..good }, Some(&own)), code(Errno::NOENT), "an earlier connection");
    assert_eq!(ask(&mut c, Msg { arg0: 4, ..good }, Some(&own)), code(Errno::NOENT), "a free slot");
    assert_eq!(ask(&mut c, Msg { arg0: SLOTS as u64, ..good }, Some(&own)), code(Errno::INVAL));
    assert_eq!(ask(&mut c, Msg { arg0: 3 | 2 << 32, ..good }, Some(&own)), code(Errno::INVAL));
    assert_eq!(ask(&mut c, Msg { arg2: switch::OTHER, ..good }, Some(&own)), code(Errno::INVAL), "out of order");
    let stream = OwnedFd::from(connected());
    assert_eq!(ask(&mut c, good, Some(&stream)), code(Errno::INVAL), "connected to somebody");
    let udp = OwnedFd::from(std::net::UdpSocket::bind("127.0.0.1:0").unwrap());
    assert_eq!(ask(&mut c, good, Some(&udp)), code(Errno::INVAL));
    // Addresses that are not this host's, or a port that no client has.
    ch.slot(3).client_port.store(80, Ordering::Relaxed);
    assert_eq!(ask(&mut c, good, Some(&own)), 0);
    assert_eq!(ask(&mut c, Msg { arg2: switch::OTHER, ..good }, Some(&fresh())), code(Errno::PERM));
}

#[test]
fn a_listener_that_was_given_away_takes_no_new_clients() {
    let d = Daemon::start();
    let (mut s, _c, l, ch) = d.acquainted();
    let mut other = d.process();
    ch.set_state(0, slot_state::SYN);
    let away = Msg { id: l.id, ..Msg::new(kind::UNPUBLISH) };
    assert_eq!(other.request(away, None).0.result, code(Errno::NOENT), "not his");
    assert!(!ch.listener_closed());
    assert_eq!(s.request(away, None).0.result, 0);
    assert!(ch.listener_closed());
    assert_eq!(ch.slot(0).state.load(Ordering::Relaxed), slot_state::SYN, "still to be accepted");
    assert_eq!(other.connect_to(v4([127, 0, 0, 1], l.port), 0).0.result, code(Errno::NOENT));
}
