//! Tests that the monitor refuses what the kernel or the administrator refuses.

use crate::support::*;
use fsocket_monitor::policy::rules::Rules;
use fsocket_proto::raw::Packet;
use fsocket_proto::{request, Addr, Payload};
use rustix::fd::{AsFd, OwnedFd};
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketFlags, SocketType};
use std::io::Write;
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::process::{Command, Stdio};

/// Rules, read as from the configuration file.
pub fn rules(text: &str) -> Rules {
    let mut file = tempfile::NamedTempFile::new().unwrap();
    file.write_all(text.as_bytes()).unwrap();
    fsocket_monitor::settings::read(Some(file.path())).unwrap().rules
}

fn with_rules(private: bool, text: &str) -> Daemon {
    // (All ports are allowed, because this machine may have a firewall.)
    let rules = rules(&format!("{text}\n[[rule]]\naction = \"allow\"\nport = \"1-65535\"\n"));
    Daemon::with(|c| (c.private, c.mode, c.rules) = (private, 0o666, rules))
}

fn tcp() -> OwnedFd {
    rustix::net::socket(AddressFamily::INET, SocketType::STREAM, None).unwrap()
}

/// Sends CONNECT with this socket. Returns 0 or an errno.
fn ask(p: &mut Proc, to: Addr, fd: impl AsFd) -> i32 {
    p.request(Packet { addr: to, ..Packet::new(request::Connect::KIND) }, Some(fd.as_fd())).0.result
}

fn is(result: i32, e: Errno) -> bool {
    result == e.raw_os_error()
}

fn here(port: u16) -> Addr {
    v4([127, 0, 0, 1], port)
}

fn reach(fd: &OwnedFd, port: u16) {
    rustix::net::connect(fd, &SocketAddr::from(([127, 0, 0, 1], port))).unwrap();
}

/// A worker with a listener. The caller must keep all parts.
fn served(d: &Daemon) -> (Proc, TcpListener, u16) {
    let mut server = d.process();
    let (socket, port) = listener();
    let id = server.listen(&socket);
    server.work(id);
    (server, socket, port)
}

#[test]
fn only_an_unused_tcp_socket_leads_to_a_channel() {
    let d = Daemon::start();
    let (_server, _socket, port) = served(&d);
    let mut c = d.process();
    let unix = rustix::net::socket(AddressFamily::UNIX, SocketType::STREAM, None).unwrap();
    let udp = rustix::net::socket(AddressFamily::INET, SocketType::DGRAM, None).unwrap();
    let bound = tcp();
    rustix::net::bind(&bound, &SocketAddr::from(([127, 0, 0, 1], 0))).unwrap();
    let (listens, _) = listener();
    let elsewhere = connected();
    let file = std::fs::File::open("/dev/null").unwrap();
    let v6only = rustix::net::socket(AddressFamily::INET6, SocketType::STREAM, None).unwrap();
    rustix::net::sockopt::set_ipv6_v6only(&v6only, true).unwrap();
    for (what, fd) in [
        ("a Unix socket", unix.as_fd()),
        ("UDP", udp.as_fd()),
        ("bound", bound.as_fd()),
        ("listens", listens.as_fd()),
        ("connected elsewhere", elsewhere.as_fd()),
        ("a file", file.as_fd()),
        ("the wrong family", v6only.as_fd()),
    ] {
        assert_ne!(ask(&mut c, here(port), fd), 0, "{what}");
    }
    assert_eq!(ask(&mut c, here(port), tcp()), 0);
}

#[test]
fn a_rule_denies() {
    let (socket, port) = listener();
    let (other, other_port) = listener();
    let d = with_rules(true, &format!("[[rule]]\naction = \"deny\"\nport = {port}\naddress = \"127.0.0.0/8\"\n"));
    let mut server = d.process();
    for socket in [&socket, &other] {
        let id = server.listen(socket);
        server.work(id);
    }
    let mut c = d.process();
    assert!(is(ask(&mut c, here(port), tcp()), Errno::ACCESS));
    assert_eq!(ask(&mut c, here(other_port), tcp()), 0);
}

#[test]
fn a_rule_names_an_executable_a_user_and_a_namespace() {
    let me = std::env::current_exe().unwrap();
    let ns = rustix::fs::stat("/proc/self/ns/net").unwrap().st_ino;
    let uid = rustix::process::getuid().as_raw();
    for (condition, denied) in [
        (format!("client_exe = {me:?}"), true),
        ("client_exe = \"/usr/bin/other\"".to_owned(), false),
        (format!("server_exe = {me:?}"), true),
        (format!("client_user = {uid}"), true),
        (format!("server_user = {}", uid + 1), false),
        (format!("netns = {ns}"), true),
        (format!("netns = {}", ns + 1), false),
        ("client_cgroup = \"/\"".to_owned(), true),
        ("server_cgroup = \"/no/such\"".to_owned(), false),
    ] {
        let d = with_rules(true, &format!("[[rule]]\naction = \"deny\"\n{condition}\n"));
        let (_server, _socket, port) = served(&d);
        let result = ask(&mut d.process(), here(port), tcp());
        assert!(if denied { is(result, Errno::ACCESS) } else { result == 0 }, "{condition}: {result}");
    }
}

#[test]
fn kernel_first_wants_the_handshake_of_the_socket_that_was_shown() {
    let d = with_rules(true, "[[rule]]\naction = \"kernel-first\"\naddress = \"127.0.0.0/8\"\n");
    let (_server, _socket, port) = served(&d);
    let mut c = d.process();
    let first = tcp();
    assert!(is(ask(&mut c, here(port), &first), Errno::NOKEY));
    // A connection made before, or by another process, proves nothing.
    let older = TcpStream::connect(("127.0.0.1", port)).unwrap();
    assert!(is(ask(&mut c, here(port), &older), Errno::NOKEY));
    assert!(is(ask(&mut c, here(port), tcp()), Errno::NOKEY));
    reach(&first, port);
    assert_eq!(ask(&mut c, here(port), &first), 0);
    assert_eq!(ask(&mut c, here(port), tcp()), 0, "for a while");
    // Another process must ask for itself.
    assert!(is(ask(&mut d.process(), here(port), tcp()), Errno::NOKEY));
    assert!(is(ask(&mut d.process(), here(port), &first), Errno::NOKEY), "a socket that was handed over");
    std::thread::sleep(
        std::time::Duration::from_secs(fsocket_proto::ROUTE_SECS) + std::time::Duration::from_millis(200),
    );
    assert!(is(ask(&mut c, here(port), tcp()), Errno::NOKEY), "the proof is old");
    assert!(is(ask(&mut c, here(port), &first), Errno::NOKEY), "and so is its connection");
}

/// A process that connects to the monitor as root and then becomes another user.
fn dropped_to(d: &Daemon, uid: u32) -> Proc {
    let connect = format!("s=socket.socket(socket.AF_UNIX,socket.SOCK_SEQPACKET); s.connect({:?})", d.socket);
    let mut p = relay(None, "", &format!("{connect}; os.setgroups([]); os.setgid({uid}); os.setuid({uid})"));
    p.hello();
    p
}

/// Numbers of users without a name.
const ALICE: u32 = 54321;
const BOB: u32 = 54322;

#[test]
fn a_process_is_the_user_that_it_is_now() {
    if !rustix::process::geteuid().is_root() {
        return eprintln!("SKIPPED: not root");
    }
    for share in [false, true] {
        let d = with_rules(false, &if share { format!("share = [[{ALICE}, 0]]") } else { String::new() });
        let (_server, _socket, port) = served(&d);
        assert_eq!(ask(&mut dropped_to(&d, 0), here(port), tcp()), 0);
        let result = ask(&mut dropped_to(&d, ALICE), here(port), tcp());
        assert!(if share { result == 0 } else { is(result, Errno::PERM) }, "{share}: {result}");
        assert!(is(ask(&mut dropped_to(&d, BOB), here(port), tcp()), Errno::PERM));
    }
}

/// A worker of another user does not get an existing channel. If there is no worker yet, the first
/// one may belong to either user.
#[test]
fn a_worker_is_asked_about_as_well() {
    if !rustix::process::geteuid().is_root() {
        return eprintln!("SKIPPED: not root");
    }
    let d = with_rules(false, "");
    let mut master = d.process();
    let (socket, port) = listener();
    let id = master.listen(&socket);
    let mut root = dropped_to(&d, 0);
    assert!(is(ask(&mut root, here(port), tcp()), Errno::NOENT), "nobody accepts");
    let mut alices = dropped_to(&d, ALICE);
    alices.listen(&socket);
    alices.work(id);
    assert!(is(ask(&mut root, here(port), tcp()), Errno::PERM));
    let mut client = dropped_to(&d, ALICE);
    assert_eq!(ask(&mut client, here(port), tcp()), 0);
    let mut bobs = dropped_to(&d, BOB);
    bobs.listen(&socket);
    let (answer, _) = bobs.request(Packet { id, ..Packet::new(request::Worker::KIND) }, None);
    assert!(is(answer.result, Errno::PERM), "{}", answer.result);
    assert!(bobs.unasked.is_empty());
}

/// A process that runs `before` (Python), connects to the monitor, and relays messages for this
/// test.
fn played_by_child(d: &Daemon, before: &str) -> Proc {
    let connect = format!("s=socket.socket(socket.AF_UNIX,socket.SOCK_SEQPACKET); s.connect({:?})", d.socket);
    let mut p = relay(None, before, &connect);
    p.hello();
    p
}

const NO_NEW_PRIVS: &str = "assert libc.prctl(38,1,0,0,0)==0";

#[test]
fn a_process_that_may_be_restricted_has_the_kernel_first() {
    let d = Daemon::start();
    let (_server, _socket, port) = served(&d);
    let mut free = played_by_child(&d, "");
    assert_eq!(ask(&mut free, here(port), tcp()), 0);
    let mut boxed = played_by_child(&d, NO_NEW_PRIVS);
    let first = tcp();
    assert!(is(ask(&mut boxed, here(port), &first), Errno::NOKEY));
    reach(&first, port);
    assert_eq!(ask(&mut boxed, here(port), &first), 0);
}

#[test]
fn a_restricted_child_is_not_taken_for_its_parent() {
    let d = Daemon::start();
    let (_server, _socket, port) = served(&d);
    // The parent announces a child. The process that then speaks for the child is another one (the
    // relay).
    let mut parent = d.process();
    let Proc { fd, nonce, .. } = parent.announce(false);
    let from = "s=socket.fromfd(1,socket.AF_UNIX,socket.SOCK_SEQPACKET)";
    let mut relayed = relay(Some(fd), NO_NEW_PRIVS, from);
    relayed.nonce = nonce;
    relayed.hello();
    assert!(is(ask(&mut relayed, here(port), tcp()), Errno::NOKEY));
    assert_eq!(ask(&mut parent, here(port), tcp()), 0);
}

/// Gives up all capabilities except those to become any user and group.
const FEWER_CAPABILITIES: &str = "assert libc.capset((ctypes.c_uint32*2)(0x20080522,0),\
    (ctypes.c_uint32*6)(0xc0,0xc0,0,0,0,0))==0";

/// All these processes claim the same rights. A process with fewer rights may still have the
/// listening socket.
#[test]
fn a_process_has_the_rights_that_the_kernel_shows() {
    if !rustix::process::geteuid().is_root() {
        return eprintln!("SKIPPED: not root");
    }
    let d = Daemon::start();
    for (before, then) in [("", 0), (FEWER_CAPABILITIES, Errno::OPNOTSUPP.raw_os_error())] {
        let (mut server, socket, _) = served(&d);
        let mut other = played_by_child(&d, before);
        let id = other.listen(&socket);
        assert_eq!(other.request(Packet { id, ..Packet::new(request::Worker::KIND) }, None).0.result, then, "{before}");
        server.sync();
    }
}

/// A process that sends over its socket `s` what the test tells it, and ends when the test drops
/// the result.
fn relay(stdout: Option<OwnedFd>, before: &str, make_s: &str) -> Proc {
    let script = format!(
        "import ctypes,os,socket,threading\n\
         libc=ctypes.CDLL(None,use_errno=True)\n\
         {before}\n\
         {make_s}\n\
         t=socket.fromfd(0,socket.AF_UNIX,socket.SOCK_SEQPACKET)\n\
         def pump(a,b):\n\
         \x20while True:\n\
         \x20\x20m,f,_,_=socket.recv_fds(a,4096,4)\n\
         \x20\x20if not m: os._exit(0)\n\
         \x20\x20socket.send_fds(b,[m],f)\n\
         \x20\x20[os.close(x) for x in f]\n\
         threading.Thread(target=pump,args=(s,t)).start(); pump(t,s)\n"
    );
    let (ours, theirs) =
        rustix::net::socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None).unwrap();
    let mut command = Command::new("/usr/bin/python3");
    command.arg("-c").arg(script).stdin(Stdio::from(theirs));
    if let Some(fd) = stdout {
        command.stdout(Stdio::from(fd));
    }
    let mut child = command.spawn().unwrap();
    std::thread::spawn(move || child.wait());
    Proc::on(ours)
}
