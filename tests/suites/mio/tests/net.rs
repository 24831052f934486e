//! mio's TCP sockets: what mio's documentation promises, tested through `Poll` alone.

use mio::net::{TcpListener, TcpStream};
use mio::{event::Event, Events, Interest, Poll, Token, Waker};
use std::io::{self, IoSlice, IoSliceMut, Read, Write};
use std::net::{Shutdown, SocketAddr};
use std::os::fd::{AsRawFd, FromRawFd, IntoRawFd};
use std::time::{Duration, Instant};

const LISTENER: Token = Token(0);
const CLIENT: Token = Token(1);
const SERVER: Token = Token(2);
const LIMIT: Duration = Duration::from_secs(10);

/// Polls until an event of `token` satisfies `wanted`.
#[track_caller]
fn wait(poll: &mut Poll, token: Token, wanted: impl Fn(&Event) -> bool) {
    let mut events = Events::with_capacity(16);
    let end = Instant::now() + LIMIT;
    while Instant::now() < end {
        poll.poll(&mut events, Some(Duration::from_millis(500))).expect("poll");
        if events.iter().any(|e| e.token() == token && wanted(e)) {
            return;
        }
    }
    panic!("no such event of {token:?}");
}

/// Checks that no event of `token` comes for 50 ms.
#[track_caller]
fn quiet(poll: &mut Poll, token: Token) {
    let mut events = Events::with_capacity(16);
    poll.poll(&mut events, Some(Duration::from_millis(50))).expect("poll");
    assert!(events.iter().all(|e| e.token() != token), "{events:?}");
}

fn would_block<T: std::fmt::Debug>(r: io::Result<T>) {
    assert_eq!(r.expect_err("nothing is there").kind(), io::ErrorKind::WouldBlock);
}

struct Pair {
    poll: Poll,
    listener: TcpListener,
    client: TcpStream,
    server: TcpStream,
}

fn listen(address: &str) -> (Poll, TcpListener) {
    let poll = Poll::new().expect("poll");
    let mut listener = TcpListener::bind(address.parse().expect("address")).expect("bind");
    poll.registry().register(&mut listener, LISTENER, Interest::READABLE).expect("register");
    (poll, listener)
}

fn pair_on(address: &str) -> Pair {
    let (mut poll, listener) = listen(address);
    let mut client = TcpStream::connect(listener.local_addr().expect("address")).expect("connect");
    poll.registry().register(&mut client, CLIENT, Interest::READABLE | Interest::WRITABLE).expect("register");
    wait(&mut poll, CLIENT, Event::is_writable);
    assert!(client.take_error().expect("SO_ERROR").is_none());
    let mut server = loop {
        match listener.accept() {
            Ok((s, from)) => break (assert_eq!(from, client.local_addr().expect("address")), s).1,
            Err(e) if e.kind() == io::ErrorKind::WouldBlock => wait(&mut poll, LISTENER, Event::is_readable),
            Err(e) => panic!("{e}"),
        }
    };
    poll.registry().register(&mut server, SERVER, Interest::READABLE | Interest::WRITABLE).expect("register");
    Pair { poll, listener, client, server }
}

fn pair() -> Pair {
    pair_on("127.0.0.1:0")
}

#[test]
fn connect_and_accept() {
    let p = pair();
    assert_eq!(p.client.peer_addr().unwrap(), p.listener.local_addr().unwrap());
    assert_eq!(p.server.peer_addr().unwrap(), p.client.local_addr().unwrap());
    would_block(p.listener.accept());
}

#[test]
fn connect_and_accept_ipv6() {
    let p = pair_on("[::1]:0");
    assert!(p.client.peer_addr().unwrap().is_ipv6());
}

#[test]
fn nobody_listens() {
    let (_, listener) = listen("127.0.0.1:0");
    let address: SocketAddr = listener.local_addr().unwrap();
    drop(listener);
    let mut poll = Poll::new().unwrap();
    // The connection is refused at once, or by an event.
    let Ok(mut c) = TcpStream::connect(address) else { return };
    poll.registry().register(&mut c, CLIENT, Interest::READABLE | Interest::WRITABLE).unwrap();
    wait(&mut poll, CLIENT, |e| e.is_error() || e.is_read_closed() || e.is_write_closed());
    assert_eq!(c.take_error().unwrap().unwrap().kind(), io::ErrorKind::ConnectionRefused);
}

#[test]
fn edges_and_would_block() {
    let mut p = pair();
    would_block(p.client.read(&mut [0; 8]));
    p.server.write_all(b"hello").unwrap();
    wait(&mut p.poll, CLIENT, Event::is_readable);
    // Edge-triggered: no other event comes before more bytes.
    quiet(&mut p.poll, CLIENT);
    let mut got = [0; 8];
    assert_eq!(p.client.read(&mut got).unwrap(), 5);
    would_block(p.client.read(&mut got));
    p.server.write_all(b"again").unwrap();
    wait(&mut p.poll, CLIENT, Event::is_readable);
    assert_eq!(p.client.read(&mut got).unwrap(), 5);
}

#[test]
fn peek_keeps() {
    let mut p = pair();
    p.server.write_all(b"twice").unwrap();
    wait(&mut p.poll, CLIENT, Event::is_readable);
    let mut got = [0; 5];
    assert_eq!(p.client.peek(&mut got).unwrap(), 5);
    assert_eq!((p.client.read(&mut got).unwrap(), &got), (5, b"twice"));
}

#[test]
fn vectored() {
    let mut p = pair();
    let n = p.server.write_vectored(&[IoSlice::new(b"ab"), IoSlice::new(b"cde")]).unwrap();
    assert_eq!(n, 5);
    wait(&mut p.poll, CLIENT, Event::is_readable);
    let (mut a, mut b) = ([0; 3], [0; 3]);
    let n = p.client.read_vectored(&mut [IoSliceMut::new(&mut a), IoSliceMut::new(&mut b)]).unwrap();
    assert_eq!((n, &a, &b[..2]), (5, b"abc", &b"de"[..]));
}

#[test]
fn full_then_writable() {
    let mut p = pair();
    let block = vec![7; 65536];
    let mut sent = 0;
    while let Ok(n) = p.server.write(&block) {
        sent += n;
    }
    assert!(sent > 65536);
    let (mut got, mut buf) = (0, vec![0; 65536]);
    while got < sent {
        match p.client.read(&mut buf) {
            Ok(n) => got += n,
            Err(e) if e.kind() == io::ErrorKind::WouldBlock => wait(&mut p.poll, CLIENT, Event::is_readable),
            Err(e) => panic!("{e}"),
        }
    }
    wait(&mut p.poll, SERVER, Event::is_writable);
    assert!(p.server.write(&block).unwrap() > 0);
}

#[test]
fn shutdown_of_each_kind() {
    let mut p = pair();
    p.server.shutdown(Shutdown::Write).unwrap();
    wait(&mut p.poll, CLIENT, Event::is_read_closed);
    assert_eq!(p.client.read(&mut [0; 8]).unwrap(), 0);
    p.client.write_all(b"still").unwrap();
    wait(&mut p.poll, SERVER, Event::is_readable);
    assert_eq!(p.server.read(&mut [0; 8]).unwrap(), 5);
    p.client.shutdown(Shutdown::Both).unwrap();
    wait(&mut p.poll, SERVER, |e| e.is_read_closed() && e.is_write_closed());
    assert_eq!(p.client.write(b"x").expect_err("shut").kind(), io::ErrorKind::BrokenPipe);
}

#[test]
fn dropped_with_unread_data() {
    let mut p = pair();
    p.client.write_all(b"never read").unwrap();
    wait(&mut p.poll, SERVER, Event::is_readable);
    drop(p.server);
    wait(&mut p.poll, CLIENT, Event::is_error);
    assert_eq!(p.client.read(&mut [0; 8]).expect_err("reset").kind(), io::ErrorKind::ConnectionReset);
}

#[test]
fn reregister_and_deregister() {
    let mut p = pair();
    p.poll.registry().deregister(&mut p.client).unwrap();
    p.server.write_all(b"unheard").unwrap();
    quiet(&mut p.poll, CLIENT);
    p.poll.registry().register(&mut p.client, CLIENT, Interest::WRITABLE).unwrap();
    wait(&mut p.poll, CLIENT, |e| e.is_writable() && !e.is_readable());
    let twice = p.poll.registry().register(&mut p.client, Token(9), Interest::READABLE);
    assert_eq!(twice.expect_err("registered").kind(), io::ErrorKind::AlreadyExists);
    p.poll.registry().reregister(&mut p.client, Token(9), Interest::READABLE).unwrap();
    wait(&mut p.poll, Token(9), Event::is_readable);
    p.poll.registry().deregister(&mut p.client).unwrap();
    let gone = p.poll.registry().reregister(&mut p.client, CLIENT, Interest::READABLE);
    assert_eq!(gone.expect_err("not there").kind(), io::ErrorKind::NotFound);
}

#[test]
fn options() {
    let p = pair();
    for on in [true, false] {
        p.client.set_nodelay(on).unwrap();
        assert_eq!(p.client.nodelay().unwrap(), on);
    }
    p.client.set_ttl(33).unwrap();
    assert_eq!(p.client.ttl().unwrap(), 33);
}

#[test]
fn raw_descriptor_and_back() {
    let mut p = pair();
    let fd = p.client.into_raw_fd();
    // SAFETY: `into_raw_fd` has just given up the ownership of `fd`.
    let mut client = unsafe { TcpStream::from_raw_fd(fd) };
    assert_eq!(client.as_raw_fd(), fd);
    p.server.write_all(b"same").unwrap();
    wait(&mut p.poll, CLIENT, Event::is_readable);
    assert_eq!(client.read(&mut [0; 8]).unwrap(), 4);
}

#[test]
fn waker_beside_connections() {
    let mut p = pair();
    let waker = std::sync::Arc::new(Waker::new(p.poll.registry(), Token(7)).unwrap());
    for round in 0..20 {
        let other = waker.clone();
        let t = std::thread::spawn(move || {
            std::thread::sleep(Duration::from_millis(3));
            other.wake().unwrap();
        });
        wait(&mut p.poll, Token(7), Event::is_readable);
        t.join().unwrap();
        p.server.write_all(&[round]).unwrap();
        wait(&mut p.poll, CLIENT, Event::is_readable);
        let mut got = [0];
        assert_eq!((p.client.read(&mut got).unwrap(), got), (1, [round]));
    }
}

#[test]
fn a_thread_polls_what_another_writes() {
    let p = pair();
    let Pair { mut poll, mut client, mut server, listener: _keep } = p;
    let reader = std::thread::spawn(move || {
        let (mut sum, mut n, mut buf) = (0u64, 0, [0; 4096]);
        while n < 400_000 {
            match client.read(&mut buf) {
                Ok(k) => {
                    sum += buf[..k].iter().map(|b| u64::from(*b)).sum::<u64>();
                    n += k;
                }
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => wait(&mut poll, CLIENT, Event::is_readable),
                Err(e) => panic!("{e}"),
            }
        }
        sum
    });
    let mut expected = 0;
    for i in 0..4000u32 {
        let piece = [(i % 251) as u8; 100];
        expected += u64::from(piece[0]) * 100;
        let mut at = 0;
        while at < piece.len() {
            match server.write(&piece[at..]) {
                Ok(n) => at += n,
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => std::thread::yield_now(),
                Err(e) => panic!("{e}"),
            }
        }
    }
    assert_eq!(reader.join().unwrap(), expected);
}

/// An echo server on one `Poll`, its clients on another.
#[test]
fn a_hundred_connections() {
    const N: usize = 100;
    let (mut poll, listener) = listen("127.0.0.1:0");
    let address = listener.local_addr().unwrap();
    let server = std::thread::spawn(move || {
        let (mut conns, mut ended) = (Vec::new(), [false; N]);
        let mut events = Events::with_capacity(32);
        while ended.contains(&false) {
            poll.poll(&mut events, Some(LIMIT)).unwrap();
            assert!(!events.is_empty(), "{ended:?}");
            for e in &events {
                if e.token() == LISTENER {
                    while let Ok((mut s, _)) = listener.accept() {
                        let token = Token(10 + conns.len());
                        poll.registry().register(&mut s, token, Interest::READABLE).unwrap();
                        conns.push(s);
                    }
                    continue;
                }
                let s = &mut conns[e.token().0 - 10];
                let mut buf = [0; 256];
                loop {
                    match s.read(&mut buf) {
                        // An end that arrives during the loop is read here, and reported
                        // afterwards.
                        Ok(0) => break ended[e.token().0 - 10] = true,
                        Ok(n) => s.write_all(&buf[..n]).unwrap(),
                        Err(e) if e.kind() == io::ErrorKind::WouldBlock => break,
                        Err(e) => panic!("{e}"),
                    }
                }
            }
        }
    });
    let mut poll = Poll::new().unwrap();
    let mut clients: Vec<_> = (0..N).map(|_| TcpStream::connect(address).unwrap()).collect();
    for (i, c) in clients.iter_mut().enumerate() {
        poll.registry().register(c, Token(i), Interest::READABLE | Interest::WRITABLE).unwrap();
    }
    let (mut events, mut turns, mut open) = (Events::with_capacity(32), [0u8; N], N);
    let mut sent = [false; N];
    while open > 0 {
        poll.poll(&mut events, Some(LIMIT)).unwrap();
        assert!(!events.is_empty(), "{open} open");
        for e in &events {
            let i = e.token().0;
            if turns[i] == 5 {
                continue;
            }
            if e.is_writable() && !sent[i] {
                clients[i].write_all(&[i as u8, turns[i]]).unwrap();
                sent[i] = true;
            }
            let mut got = [0; 2];
            while turns[i] < 5 && matches!(clients[i].read(&mut got), Ok(2)) {
                assert_eq!(got, [i as u8, turns[i]]);
                turns[i] += 1;
                if turns[i] < 5 {
                    clients[i].write_all(&[i as u8, turns[i]]).unwrap();
                } else {
                    clients[i].shutdown(Shutdown::Write).unwrap();
                    open -= 1;
                }
            }
        }
    }
    server.join().unwrap();
}
