//! Connections that go over to kernel TCP, and listeners that are given away.

use super::support::*;
use fsocket_abi::channel::{record, ring_off, slot_state, status, CLIENT, POS_START, RING_CAP, SERVER, SLOTS};
use fsocket_abi::path_switch::PeerStatus;
use fsocket_monitor::memory::Mapping;
use fsocket_proto::raw::Packet;
use fsocket_proto::values::Switching;
use fsocket_proto::{request, switch, Payload};
use fsocket_sync::atomic::{AtomicU64, Ordering};
use rustix::fd::{AsFd, OwnedFd};
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketType};
use std::io::{Read, Write};
use std::net::{Ipv4Addr, TcpStream};

/// A connection in slot 3, as a client and a worker leave it.
pub fn in_use(ch: &ChannelView) -> Packet {
    let slot = ch.slot(3);
    slot.client_port.store(ch.port + 3, Ordering::Relaxed);
    slot.family.store(libc::AF_INET as u8, Ordering::Relaxed);
    for (to, byte) in slot.dst.iter().zip(Ipv4Addr::LOCALHOST.to_ipv6_mapped().octets()) {
        to.store(byte, Ordering::Relaxed);
    }
    slot.generation.store(9, Ordering::Relaxed);
    slot.state.store(slot_state::ESTABLISHED, Ordering::Release);
    Packet { id: u64::from(ch.id), arg0: 3, arg1: 9, ..Packet::new(request::Switch::KIND) }
}

pub fn of(msg: Packet, kind: u32, side: usize, what: u64) -> Packet {
    Packet { kind, arg0: msg.arg0 & 0xffff_ffff | (side as u64) << 32, arg2: what, ..msg }
}

fn fresh() -> OwnedFd {
    rustix::net::socket(AddressFamily::INET, SocketType::STREAM, None).unwrap()
}

fn code(e: Errno) -> i32 {
    e.raw_os_error()
}

/// Leaves `text` in the ring from `side`, as a sender does.
fn send_in_ring(ch: &ChannelView, side: usize, text: &[u8]) {
    let ring = Mapping::part(&ch.fd, ring_off(3, side), RING_CAP).unwrap();
    let dir = &ch.slot(3).dir[side];
    let start = POS_START as usize % RING_CAP;
    for (i, bytes) in text.chunks(8).enumerate() {
        let mut word = [0; 8];
        word[..bytes.len()].copy_from_slice(bytes);
        ring.at::<AtomicU64>(start + 8 + i * 8).store(u64::from_ne_bytes(word), Ordering::Relaxed);
    }
    ring.at::<AtomicU64>(start).store(record::pack(record::DATA, text.len() as u64, 0), Ordering::Release);
    dir.cons.head.store(POS_START, Ordering::Relaxed);
    ch.slot(3).migrated[side].base.store(POS_START, Ordering::Relaxed);
    ch.slot(3).migrated[side].limit.store(0, Ordering::Relaxed);
}

#[test]
fn both_ends_have_the_names_of_the_connection() {
    let d = Daemon::start();
    let (mut s, mut c, l, ch) = d.acquainted();
    let msg = in_use(&ch);
    assert_eq!(s.request(of(msg, request::Claim::KIND, SERVER, 0), None).0.result, code(Errno::NOENT));
    send_in_ring(&ch, CLIENT, b"not read yet");
    let (answer, server) = s.request(of(msg, request::Switch::KIND, SERVER, Switching::Make as u64), None);
    assert_eq!(answer.result, 0);
    // The other side begins too: it is told, and takes its own.
    assert_eq!(
        c.request(of(msg, request::Switch::KIND, CLIENT, Switching::Make as u64), None).0.result,
        code(Errno::ALREADY)
    );
    // No side gets the other side's end.
    assert_eq!(s.request(of(msg, request::Claim::KIND, CLIENT, 0), None).0.result, code(Errno::NOENT));
    let client = c.request(of(msg, request::Claim::KIND, CLIENT, 0), None).1.unwrap();
    let (mut server, mut client) = (TcpStream::from(server.unwrap()), TcpStream::from(client));
    let act = |what: u32| Packet {
        arg1: msg.arg1 | u64::from(what) << 32,
        ..of(msg, request::Switch::KIND, SERVER, Switching::Act as u64)
    };
    assert_eq!(s.request(act(switch::act::POUR), None).0.result, 0);
    assert_eq!(ch.slot(3).dir[CLIENT].cons.head.load(Ordering::Relaxed), POS_START + 8 + 16, "it was taken");
    let mut b = [0; 12];
    server.read_exact(&mut b).unwrap();
    assert_eq!(&b, b"not read yet");
    if rustix::process::geteuid().is_root() {
        assert_eq!(server.peer_addr().unwrap().port(), ch.port + 3);
        assert_eq!(client.peer_addr().unwrap(), l.socket.local_addr().unwrap());
    } else {
        eprintln!("NAMES NOT ASSERTED: both_ends_have_the_names_of_the_connection: no CAP_NET_ADMIN");
    }
    assert_eq!(client.local_addr().unwrap(), server.peer_addr().unwrap());
    client.write_all(b"there").unwrap();
    server.write_all(b"back").unwrap();
    let mut b = [0; 5];
    server.read_exact(&mut b).unwrap();
    assert_eq!(&b, b"there");
    // Once a side releases its end, the monitor closes it, and the caller has the last copy.
    for (p, side) in [(&s, SERVER), (&c, CLIENT)] {
        p.tell(of(msg, request::Release::KIND, side, 0), None);
    }
    s.sync();
    c.sync();
    assert_eq!(s.request(of(msg, request::Claim::KIND, SERVER, 0), None).0.result, code(Errno::NOENT));
    drop(server);
    let mut rest = Vec::new();
    client.read_to_end(&mut rest).unwrap();
    assert_eq!(rest, b"back");
}

/// A sender dies while the other side moves, in any place: what it has sent arrives, and then its end.
#[test]
fn what_the_dead_have_sent_arrives() {
    for mover_is_done in [false, true] {
        let d = Daemon::start();
        let (mut s, c, _l, ch) = acquaint(d.process_with_arena(), d.process_with_arena());
        let msg = in_use(&ch);
        send_in_ring(&ch, CLIENT, b"not read yet");
        let sock = c.open_sock(0, ch.id, 3, CLIENT, &[c.nonce]);
        sock.rx.set_pos(POS_START);
        sock.rx.set_base(POS_START);
        let end = s.request(of(msg, request::Switch::KIND, SERVER, Switching::Make as u64), None).1.unwrap();
        let mut server = TcpStream::from(end);
        if mover_is_done {
            ch.slot(3).dir[SERVER].prod.status.store(PeerStatus::MOVED.bits(), Ordering::Release);
        }
        drop(c);
        wait_until("it is closed", || ch.status(3, CLIENT) & status::CLOSED != 0);
        assert_eq!(ch.status(3, CLIENT) & status::RST, 0);
        if !mover_is_done {
            let acts = Packet {
                arg1: msg.arg1 | u64::from(switch::act::POUR) << 32,
                ..of(msg, request::Switch::KIND, SERVER, Switching::Act as u64)
            };
            assert_eq!(s.request(acts, None).0.result, 0);
            s.request(of(msg, request::Release::KIND, CLIENT, 0), None);
        }
        let mut all = Vec::new();
        server.read_to_end(&mut all).unwrap();
        assert_eq!(all, b"not read yet", "{mover_is_done}");
    }
}

/// Both are gone: nobody would come for the sockets, for which the channel would stay.
#[test]
fn a_mover_that_dies_leaves_no_sockets() {
    let d = Daemon::start();
    let (mut s, mut c, _l, ch) = acquaint(d.process_with_arena(), d.process_with_arena());
    let msg = in_use(&ch);
    s.open_sock(0, ch.id, 3, SERVER, &[s.nonce]);
    assert_eq!(s.request(of(msg, request::Switch::KIND, SERVER, Switching::Make as u64), None).0.result, 0);
    drop(s);
    wait_until("it is closed", || ch.status(3, SERVER) & status::CLOSED != 0);
    assert_eq!(c.request(of(msg, request::Claim::KIND, CLIENT, 0), None).0.result, code(Errno::NOENT));
}

#[test]
fn what_a_mover_does_at_the_other_end() {
    let d = Daemon::start();
    let (mut s, mut c, _l, ch) = d.acquainted();
    let msg = in_use(&ch);
    let act = |what: u32| Packet {
        arg1: msg.arg1 | u64::from(what) << 32,
        ..of(msg, request::Switch::KIND, SERVER, Switching::Act as u64)
    };
    assert_eq!(s.request(act(switch::act::FIN), None).0.result, code(Errno::NOENT), "there is none");
    let mut server =
        TcpStream::from(s.request(of(msg, request::Switch::KIND, SERVER, Switching::Make as u64), None).1.unwrap());
    // Nonsense in the ring, or where it is said to be read: nothing is read beyond it.
    let ring = Mapping::part(&ch.fd, ring_off(3, CLIENT), RING_CAP).unwrap();
    let start = POS_START as usize % RING_CAP;
    let (head, moved) = (&ch.slot(3).dir[CLIENT].cons.head, &ch.slot(3).migrated[CLIENT]);
    for (header, at, base, limit) in [
        (u64::MAX, POS_START, POS_START, 0),
        (record::pack(record::DATA, RING_CAP as u64 * 2, 0), POS_START, POS_START, 0),
        (record::pack(record::PAD, 8, 0), POS_START, POS_START, 0),
        (0, POS_START, POS_START + 8, 0),
        (0, 0, u64::MAX, 0),
        (0, u64::MAX, 0, u64::MAX),
        (0, POS_START, POS_START, RING_CAP as u64 + 1),
        (0, POS_START + RING_CAP as u64 - 8, POS_START, 16),
    ] {
        ring.at::<AtomicU64>(start).store(header, Ordering::Relaxed);
        head.store(at, Ordering::Relaxed);
        moved.base.store(base, Ordering::Relaxed);
        moved.limit.store(limit, Ordering::Relaxed);
        let _ = s.request(act(switch::act::POUR), None);
    }
    for what in [switch::act::SPEAK, switch::act::FIN] {
        assert_eq!(s.request(act(what), None).0.result, 0);
    }
    let mut rest = Vec::new();
    server.read_to_end(&mut rest).unwrap();
    assert_eq!(rest, [0]);
    assert_eq!(s.request(act(switch::act::RESET), None).0.result, 0);
    s.request(of(msg, request::Release::KIND, CLIENT, 0), None);
    let reset = server.write(b"x").and_then(|_| server.write(b"x")).and_then(|_| server.read(&mut [0; 1]));
    assert!(reset.is_err(), "{reset:?}");
    assert_eq!(c.request(of(msg, request::Claim::KIND, CLIENT, 0), None).0.result, code(Errno::NOENT));
}

#[test]
fn what_nobody_accepted_goes_to_the_kernels_listener() {
    let d = Daemon::start();
    let (mut s, mut c, l, ch) = d.acquainted();
    let msg = in_use(&ch);
    let dial = |side| of(msg, request::Switch::KIND, side, Switching::Dial as u64);
    assert_eq!(c.request(dial(CLIENT), None).0.result, code(Errno::INVAL));
    wait_until("it is connected", || match s.request(dial(SERVER), None).0.result {
        0 => true,
        other => {
            assert_eq!(other, code(Errno::INPROGRESS));
            false
        }
    });
    assert_eq!(s.request(dial(SERVER), None).0.result, code(Errno::ALREADY));
    let (mut accepted, from) = l.socket.accept().unwrap();
    assert_eq!(from.port(), ch.port + 3);
    assert_eq!(s.request(of(msg, request::Claim::KIND, SERVER, 0), None).0.result, code(Errno::NOENT));
    let mut client = TcpStream::from(c.request(of(msg, request::Claim::KIND, CLIENT, 0), None).1.unwrap());
    client.write_all(b"there").unwrap();
    let mut b = [0; 5];
    accepted.read_exact(&mut b).unwrap();
    assert_eq!(&b, b"there");
}

/// A process gives its listener away, and has not the right or the time to empty its queues.
#[test]
fn what_waits_goes_into_the_kernels_queue() {
    let d = Daemon::start();
    let (mut s, mut c, l, ch) = d.acquainted();
    let msg = in_use(&ch);
    ch.slot(3).state.store(slot_state::SYN, Ordering::Release);
    send_in_ring(&ch, CLIENT, b"hello");
    // Its client has sent that, and closed.
    ch.slot(3).dir[CLIENT].prod.status.store(status::FIN | status::CLOSED, Ordering::Release);
    ch.syn(2, 3);
    let away = Packet { id: l.id, ..Packet::new(request::Unpublish::KIND) };
    assert_eq!(s.request(away, None).0.result, 0);
    let (mut accepted, from) = l.socket.accept().unwrap();
    assert_eq!(from.port(), ch.port + 3);
    let mut all = Vec::new();
    accepted.read_to_end(&mut all).unwrap();
    assert_eq!(all, b"hello");
    assert_eq!(ch.status(3, SERVER), PeerStatus::MOVED.bits() | status::CLOSED);
    assert_eq!((ch.queue(2).head.load(Ordering::Relaxed), ch.listener_closed()), (1, true));
    // (Nothing is left for the client to come for.)
    assert_eq!(c.request(of(msg, request::Claim::KIND, CLIENT, 0), None).0.result, code(Errno::NOENT));
}

#[test]
fn relatives_begin_anew_with_one_socket() {
    let d = Daemon::start();
    let (mut s, mut c, _l, ch) = d.acquainted();
    let msg = in_use(&ch);
    let own = fresh();
    let alone = of(msg, request::Switch::KIND, CLIENT, Switching::Alone as u64);
    let stream = OwnedFd::from(connected());
    assert_eq!(c.request(alone, Some(stream.as_fd())).0.result, code(Errno::INVAL), "connected to somebody");
    assert_eq!(c.request(alone, Some(own.as_fd())).0.result, 0);
    rustix::net::sockopt::set_tcp_nodelay(&own, true).unwrap();
    for _ in 0..2 {
        let end = c.request(of(msg, request::Claim::KIND, CLIENT, 0), None).1.unwrap();
        assert!(rustix::net::sockopt::tcp_nodelay(&end).unwrap(), "another socket");
    }
    assert_eq!(s.request(of(msg, request::Claim::KIND, SERVER, 0), None).0.result, code(Errno::NOENT));
    c.tell(of(msg, request::Release::KIND, CLIENT, 0), None);
    c.sync();
    assert_eq!(c.request(of(msg, request::Claim::KIND, CLIENT, 0), None).0.result, code(Errno::NOENT));
}

#[test]
fn what_waits_is_marked_once() {
    let d = Daemon::start();
    let (mut s, mut c) = (d.process(), d.process());
    let (l, port) = listener();
    let id = s.listen(&l);
    let ch = c.connect(port);
    let mark =
        |p: &mut Proc, mark: u64| p.request(Packet { id, arg0: mark, ..Packet::new(request::Options::KIND) }, None).0;
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
    let ask = |p: &mut Proc, m: Packet, fd: Option<&OwnedFd>| p.request(m, fd.map(|f| f.as_fd())).0.result;
    let good = of(msg, request::Switch::KIND, CLIENT, Switching::Make as u64);
    assert_eq!(ask(&mut other, good, None), code(Errno::NOENT), "a stranger");
    assert_eq!(ask(&mut other, of(msg, request::Claim::KIND, CLIENT, 0), None), code(Errno::NOENT));
    assert_eq!(ask(&mut s, good, None), code(Errno::NOENT), "the other side's end");
    assert_eq!(ask(&mut c, Packet { arg1: 8, ..good }, None), code(Errno::NOENT), "an earlier connection");
    assert_eq!(ask(&mut c, Packet { arg0: 4, ..good }, None), code(Errno::NOENT), "a free slot");
    assert_eq!(ask(&mut c, Packet { arg0: SLOTS as u64, ..good }, None), code(Errno::INVAL));
    assert_eq!(ask(&mut c, Packet { arg0: 3 | 2 << 32, ..good }, None), code(Errno::INVAL));
    assert_eq!(ask(&mut c, Packet { arg2: 99, ..good }, None), code(Errno::INVAL));
    let ready = |what| Packet { arg2: what, ..good };
    assert_eq!(
        ask(&mut c, ready(Switching::OtherReady as u64), Some(&own)),
        code(Errno::PERM),
        "the monitor can make them"
    );
    let stream = OwnedFd::from(connected());
    assert_eq!(ask(&mut c, ready(Switching::OwnReady as u64), Some(&stream)), code(Errno::PERM));
    let udp = OwnedFd::from(std::net::UdpSocket::bind("127.0.0.1:0").unwrap());
    for wrong in [&stream, &udp] {
        assert_eq!(ask(&mut c, ready(Switching::Alone as u64), Some(wrong)), code(Errno::INVAL));
    }
}

#[test]
fn a_listener_that_was_given_away_takes_no_new_clients() {
    let d = Daemon::start();
    let (mut s, _c, l, ch) = d.acquainted();
    let mut other = d.process();
    ch.set_state(0, slot_state::SYN);
    let away = Packet { id: l.id, ..Packet::new(request::Unpublish::KIND) };
    assert_eq!(other.request(away, None).0.result, code(Errno::NOENT), "not his");
    assert!(!ch.listener_closed());
    assert_eq!(s.request(away, None).0.result, 0);
    assert!(ch.listener_closed());
    assert_eq!(ch.slot(0).state.load(Ordering::Relaxed), slot_state::SYN, "still to be accepted");
    assert_eq!(other.connect_to(v4([127, 0, 0, 1], l.port), 0).0.result, code(Errno::NOENT));
}
