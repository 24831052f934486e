//! Checks that the two ends of a connection between two network namespaces are found, and that no
//! other socket is.

use fsocket_bpf::pairs::{Pairs, Recorder};
use fsocket_bpf::Error;
use fsocket_testkit::need_hosts;
use fsocket_testkit::netns::{Hosts, NetHost, Receive};
use rustix::net::{sockopt, AddressFamily, SocketType};
use std::io::{ErrorKind, Read, Write};
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream};
use std::os::fd::{AsFd, AsRawFd};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

const TCP_REPAIR: libc::c_int = 19;

fn start() -> Option<(Recorder, Pairs)> {
    match Recorder::start() {
        Ok(recorder) => {
            let pairs = Pairs::of(recorder.parts().unwrap()).unwrap();
            Some((recorder, pairs))
        }
        Err(Error::Missing(why)) => {
            println!("SKIPPED: pairs: {why}");
            None
        }
        Err(e) => panic!("{e}"),
    }
}

fn count(pairs: &Pairs, name: &str) -> u64 {
    pairs.counts().iter().find(|c| c.0 == name).unwrap().1
}

fn cookie(socket: &impl AsFd) -> u64 {
    sockopt::socket_cookie(socket).unwrap()
}

/// A connection from one host to the other. Returns its two ends.
fn connection(client: &NetHost, server: &NetHost, to: IpAddr) -> (TcpStream, TcpStream) {
    let listener = server.within(|| TcpListener::bind((to, 0))).unwrap();
    let to = listener.local_addr().unwrap();
    let active = client.within(|| TcpStream::connect(to)).unwrap();
    (active, listener.accept().unwrap().0)
}

fn two_hosts() -> (Hosts, NetHost, NetHost) {
    let mut hosts = Hosts::new().unwrap();
    let (mut client, mut server) = (hosts.add("client").unwrap(), hosts.add("server").unwrap());
    hosts.link(&mut client, &mut server, 1, &Receive::Inline).unwrap();
    (hosts, client, server)
}

fn set(socket: &impl AsRawFd, level: i32, name: i32, value: i32) {
    // SAFETY: the value is an integer, and its size is passed.
    let rc = unsafe { libc::setsockopt(socket.as_raw_fd(), level, name, (&raw const value).cast(), 4) };
    assert_eq!(rc, 0, "{}", std::io::Error::last_os_error());
}

#[test]
fn ends_find_each_other_across_namespaces() {
    need_hosts!();
    let Some((_recorder, pairs)) = start() else { return };
    let (_hosts, client, server) = two_hosts();
    for to in [IpAddr::from(server.interfaces[0].v4), server.interfaces[0].v6.into()] {
        for _ in 0..50 {
            let (active, passive) = connection(&client, &server, to);
            assert_eq!(pairs.peer_of(cookie(&active)), Some(cookie(&passive)), "{to}");
            assert_eq!(pairs.peer_of(cookie(&passive)), Some(cookie(&active)), "{to}");
        }
    }
    // Within one namespace no pair is recorded, because the addresses identify both ends.
    let (active, passive) = connection(&client, &client, IpAddr::from([127, 0, 0, 1]));
    assert_eq!((pairs.peer_of(cookie(&active)), pairs.peer_of(cookie(&passive))), (None, None));
}

/// If the kernel makes a socket established without a packet (TCP_REPAIR), the socket is no
/// connection's end.
#[test]
fn a_repaired_socket_is_no_end() {
    need_hosts!();
    let Some((_recorder, pairs)) = start() else { return };
    let (_hosts, client, server) = two_hosts();
    let (active, passive) = connection(&client, &server, server.interfaces[0].v4.into());
    let before = count(&pairs, "repaired");
    let forged = client.within(|| {
        let s = rustix::net::socket(AddressFamily::INET, SocketType::STREAM, None).unwrap();
        set(&s, libc::IPPROTO_TCP, TCP_REPAIR, 1);
        rustix::net::bind(&s, &SocketAddr::from((client.interfaces[0].v4, 4000))).unwrap();
        rustix::net::connect(&s, &passive.local_addr().unwrap()).unwrap();
        s
    });
    assert_eq!(count(&pairs, "repaired"), before + 1);
    assert_eq!(pairs.peer_of(cookie(&forged)), None);
    assert_eq!(pairs.peer_of(cookie(&active)), Some(cookie(&passive)));
}

/// If the kernel ends a watched connection, this is reported; a close by a program is not.
/// `misses`: the BPF program `changes` is detached, so `errors` must report the end.
fn end_is_told(misses: bool) {
    let Some((mut recorder, pairs)) = start() else { return };
    let (_hosts, client, server) = two_hosts();
    let to = IpAddr::from(server.interfaces[0].v4);
    let (closed, other) = connection(&client, &server, to);
    let (left, peer_of_left) = connection(&client, &server, to);
    let (active, _passive) = connection(&client, &server, to);
    for end in [&closed, &left, &active] {
        pairs.watch(end.as_fd()).unwrap();
        set(end, libc::SOL_SOCKET, libc::SO_KEEPALIVE, 1);
        set(end, libc::IPPROTO_TCP, libc::TCP_KEEPIDLE, 1);
        set(end, libc::IPPROTO_TCP, libc::TCP_KEEPINTVL, 1);
        set(end, libc::IPPROTO_TCP, libc::TCP_KEEPCNT, 3);
    }
    if misses {
        recorder.miss_changes();
    }
    drop((closed, other, peer_of_left));
    // The end of this stream has arrived before the device goes down, so a program has closed the
    // connection.
    assert_eq!((&left).read(&mut [0]).unwrap(), 0);
    client.inside("ip", &["link", "set", &client.interfaces[0].device, "down"]).unwrap();
    let until = Instant::now() + Duration::from_secs(20);
    let mut ended = Vec::new();
    while ended.is_empty() && Instant::now() < until {
        std::thread::sleep(Duration::from_millis(50));
        ended = pairs.ended();
    }
    assert_eq!(ended, [cookie(&active)]);
    assert!(pairs.ended().is_empty(), "once");
}

#[test]
fn the_end_of_a_watched_connection_is_told() {
    need_hosts!();
    end_is_told(false);
}

#[test]
fn also_if_the_change_was_missed() {
    need_hosts!();
    end_is_told(true);
}

/// If many connections end at once, none of their ends is lost.
#[test]
fn no_end_is_lost_among_many() {
    const MANY: usize = 5000;
    need_hosts!();
    let Some((_recorder, pairs)) = start() else { return };
    let (_hosts, client, server) = two_hosts();
    let listener = server.within(|| TcpListener::bind((server.interfaces[0].v4, 0))).unwrap();
    let to = listener.local_addr().unwrap();
    let mut watched = std::collections::BTreeSet::new();
    for _ in 0..MANY {
        let active = client.within(|| TcpStream::connect(to)).unwrap();
        let (passive, _) = listener.accept().unwrap();
        watched.insert(cookie(&active));
        pairs.watch(active.as_fd()).unwrap();
        // The other end resets the connection.
        sockopt::set_socket_linger(&passive, Some(Duration::ZERO)).unwrap();
        drop(passive);
        // The peer's kernel may handle the packet later (ksoftirqd). If this end were closed
        // before that, its own program would have closed it, and the end would not be reported.
        assert_eq!((&active).read(&mut [0]).unwrap_err().kind(), ErrorKind::ConnectionReset);
    }
    assert_eq!(pairs.ended().into_iter().collect::<std::collections::BTreeSet<_>>(), watched);
}

/// A process that is root in user and network namespaces of its own cannot pass for the other
/// end.
#[test]
fn an_end_in_somebody_elses_namespace_is_none() {
    need_hosts!();
    let Some((_recorder, pairs)) = start() else { return };
    let (_hosts, client, server) = two_hosts();
    let listener = server.within(|| TcpListener::bind((server.interfaces[0].v4, 0))).unwrap();
    let to = listener.local_addr().unwrap();
    // It has a network namespace of its own, to which root (this test) has given a connection.
    let script = format!(
        "read line; exec {} -c 'import socket, sys; s = socket.create_connection((\"{}\", {})); sys.stdin.read()'",
        fsocket_testkit::PYTHON,
        to.ip(),
        to.port()
    );
    let mut command = Command::new("unshare");
    command.args(["--user", "--map-root-user", "--net", "sh", "-c", &script]);
    client.place(&mut command);
    let mut child = command.stdin(Stdio::piped()).spawn().unwrap();
    let before = count(&pairs, "foreign");
    let pid = child.id();
    let own = std::fs::read_link("/proc/self/ns/user").unwrap();
    let until = Instant::now() + Duration::from_secs(10);
    while std::fs::read_link(format!("/proc/{pid}/ns/user")).is_ok_and(|ns| ns == own) && Instant::now() < until {
        std::thread::sleep(Duration::from_millis(5));
    }
    let namespace = format!("/proc/{pid}/ns/net");
    let run = |program: &str, args: &[&str]| {
        let status = Command::new(program).args(args).status().unwrap();
        assert!(status.success(), "{program} {args:?}");
    };
    let inside = |args: &[&str]| run("nsenter", &[&[&format!("--net={namespace}"), "ip"][..], args].concat());
    let link = format!("fsown{}", std::process::id());
    run(
        "ip",
        &[
            "-n",
            &server.namespace,
            "link",
            "add",
            &link,
            "type",
            "veth",
            "peer",
            "name",
            "eth0",
            "netns",
            &pid.to_string(),
        ],
    );
    run("ip", &["-n", &server.namespace, "addr", "add", "10.99.0.1/24", "dev", &link]);
    run("ip", &["-n", &server.namespace, "link", "set", &link, "up"]);
    inside(&["addr", "add", "10.99.0.2/24", "dev", "eth0"]);
    inside(&["link", "set", "eth0", "up"]);
    inside(&["route", "add", "default", "via", "10.99.0.1"]);
    let mut input = child.stdin.take().unwrap();
    input.write_all(b"\n").unwrap();
    let (passive, _) = listener.accept().unwrap();
    assert_eq!(pairs.peer_of(cookie(&passive)), None);
    assert!(count(&pairs, "foreign") > before);
    drop(input);
    let _ = child.wait();
}
