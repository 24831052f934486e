//! Requests that the broker must refuse even if an attacker controls the front.

use super::support::*;
use fsocket_monitor::ancillary::Sender;
use fsocket_monitor::broker::line::Ask;
use fsocket_monitor::broker::Broker;
use fsocket_monitor::maker::{in_repair, End, Order};
use rustix::fd::{AsFd, BorrowedFd, OwnedFd};
use rustix::io::Errno;
use rustix::net::{sockopt, AddressFamily, SocketAddrUnix, SocketFlags, SocketType};
use rustix::process::{pidfd_open, PidfdFlags};
use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream};

/// A broker with an endpoint where clients of this user can connect.
struct Stage {
    broker: Broker,
    endpoint: OwnedFd,
    dir: tempfile::TempDir,
    netns: u64,
}

fn seqpacket() -> OwnedFd {
    rustix::net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None).unwrap()
}

fn unix_listener(dir: &tempfile::TempDir, name: &str) -> OwnedFd {
    let l = seqpacket();
    rustix::net::bind(&l, &SocketAddrUnix::new(dir.path().join(name)).unwrap()).unwrap();
    rustix::net::listen(&l, 8).unwrap();
    l
}

/// Connects to a server. Returns the client's end and the server's end.
fn to(dir: &tempfile::TempDir, name: &str, listener: &OwnedFd) -> (OwnedFd, OwnedFd) {
    let c = seqpacket();
    rustix::net::connect(&c, &SocketAddrUnix::new(dir.path().join(name)).unwrap()).unwrap();
    (c, rustix::net::accept(listener).unwrap())
}

impl Stage {
    fn new() -> Stage {
        let dir = tempfile::tempdir().unwrap();
        let endpoint = unix_listener(&dir, "monitor");
        let broker = Broker::beside(endpoint.as_fd(), None).unwrap();
        let netns = fsocket_monitor::descriptor::netns_cookie(tcp().as_fd()).unwrap();
        Stage { broker, endpoint, dir, netns }
    }

    fn client(&self) -> (OwnedFd, OwnedFd) {
        to(&self.dir, "monitor", &self.endpoint)
    }

    fn refuses(&self, order: &Order, why: Errno) {
        assert_eq!(self.broker.connection(order, self.netns, None).unwrap_err(), why);
        assert_eq!(self.broker.dial(order, self.netns, None).unwrap_err(), why);
    }
}

fn tcp() -> OwnedFd {
    rustix::net::socket(AddressFamily::INET, SocketType::STREAM, None).unwrap()
}

fn own_uid() -> u32 {
    rustix::process::geteuid().as_raw()
}

fn end(port: u16, uid: u32) -> End {
    End { v6: false, ip: Ipv4Addr::LOCALHOST.to_ipv6_mapped().octets(), port, uid }
}

fn order(client: u16, server: u16) -> Order {
    Order { client: end(client, own_uid()), server: end(server, own_uid()), named: true, holder: None }
}

fn port_of(fd: BorrowedFd<'_>) -> u16 {
    SocketAddr::try_from(rustix::net::getsockname(fd).unwrap()).unwrap().port()
}

#[test]
fn an_order_needs_users_and_a_listener_that_were_shown() {
    let stage = Stage::new();
    let l = TcpListener::bind("127.0.0.1:0").unwrap();
    let at = l.local_addr().unwrap().port();
    let free = port_of(TcpListener::bind("127.0.0.1:0").unwrap().as_fd());
    stage.refuses(&order(free, at), Errno::PERM);
    let (_client, control) = stage.client();
    stage.broker.user(control.as_fd());
    stage.refuses(&order(free, at), Errno::PERM);
    // None of these sockets listens.
    let connected = TcpStream::connect(("127.0.0.1", at)).unwrap();
    let bound = tcp();
    rustix::net::bind(&bound, &SocketAddr::from(([127, 0, 0, 1], 0))).unwrap();
    let file = std::fs::File::open("/dev/null").unwrap();
    for fd in [connected.as_fd(), bound.as_fd(), control.as_fd(), file.as_fd(), tcp().as_fd()] {
        stage.broker.listener(fd);
        stage.broker.user(fd);
    }
    stage.refuses(&order(free, at), Errno::PERM);
    stage.refuses(&order(free, port_of(bound.as_fd())), Errno::PERM);
    stage.broker.listener(l.as_fd());
    let [c, s] = stage.broker.connection(&order(free, at), stage.netns, None).unwrap();
    for fd in [&c, &s] {
        assert!(!in_repair(fd.as_fd()).unwrap_or(false));
    }
    if own_uid() == 0 {
        assert_eq!((port_of(c.as_fd()), port_of(s.as_fd())), (free, at));
        // It refuses a user that was never a client, and another namespace.
        let mut other = order(free, at);
        other.server.uid = 12345;
        stage.refuses(&other, Errno::PERM);
        other = order(free, at);
        other.client.uid = 12345;
        stage.refuses(&other, Errno::PERM);
    }
    let elsewhere = stage.broker.connection(&order(free, at), stage.netns + 1, Some(tcp().as_fd()));
    assert_eq!(elsewhere.unwrap_err(), Errno::PERM);
}

#[test]
fn a_port_that_was_not_shown_is_not_shared() {
    if own_uid() != 0 {
        eprintln!("SKIPPED: a_port_that_was_not_shown_is_not_shared: not root");
        return;
    }
    let stage = Stage::new();
    let (_client, control) = stage.client();
    stage.broker.user(control.as_fd());
    let l = TcpListener::bind("127.0.0.1:0").unwrap();
    stage.broker.listener(l.as_fd());
    let held = tcp();
    rustix::net::bind(&held, &SocketAddr::from(([127, 0, 0, 1], 0))).unwrap();
    let port = port_of(held.as_fd());
    let cookie = sockopt::socket_cookie(&held).unwrap();
    let order = Order { holder: Some(cookie), ..order(port, l.local_addr().unwrap().port()) };
    // The cookie alone proves nothing: any process can read it.
    let [c, _s] = stage.broker.connection(&order, stage.netns, None).unwrap();
    assert_ne!(port_of(c.as_fd()), port);
    // A client cannot have a privileged port.
    let low = Order { client: end(99, 0), holder: None, ..order };
    let [c, _s] = stage.broker.connection(&low, stage.netns, None).unwrap();
    assert_ne!(port_of(c.as_fd()), 99);
    let diag = fsocket_monitor::sockdiag::SockDiag::new();
    if !diag.is_some_and(|mut d| d.unconnected(port).unwrap().contains(&cookie)) {
        eprintln!("SKIPPED: a_port_that_was_not_shown_is_not_shared: before Linux 6.8");
        return;
    }
    stage.broker.bound(held.as_fd());
    let [c, _s] = stage.broker.connection(&order, stage.netns, None).unwrap();
    assert_eq!(port_of(c.as_fd()), port);
}

#[test]
fn an_address_of_which_another_user_has_the_port_is_given_up() {
    if own_uid() != 0 {
        eprintln!("SKIPPED: an_address_of_which_another_user_has_the_port_is_given_up: not root");
        return;
    }
    let stage = Stage::new();
    let (_client, control) = stage.client();
    stage.broker.user(control.as_fd());
    let l = TcpListener::bind("127.0.0.1:0").unwrap();
    let at = l.local_addr().unwrap();
    stage.broker.listener(l.as_fd());
    drop(l);
    // SAFETY: the call accesses no memory, and changes only this thread, which ends with the test.
    unsafe { libc::syscall(libc::SYS_setfsuid, 65534) };
    let _others = TcpListener::bind(at).unwrap();
    let free = port_of(TcpListener::bind("127.0.0.1:0").unwrap().as_fd());
    let [_c, s] = stage.broker.connection(&order(free, at.port()), stage.netns, None).unwrap();
    assert_ne!(port_of(s.as_fd()), at.port());
    assert_eq!(stage.broker.dial(&order(free, at.port()), stage.netns, None).unwrap_err(), Errno::PERM);
}

#[test]
fn a_user_is_whom_the_kernel_names() {
    let stage = Stage::new();
    let l = TcpListener::bind("127.0.0.1:0").unwrap();
    let free = port_of(TcpListener::bind("127.0.0.1:0").unwrap().as_fd());
    stage.broker.listener(l.as_fd());
    // A connection to another server shows that server's user. The client's end of a connection to
    // the monitor shows the monitor's user.
    let other = unix_listener(&stage.dir, "other");
    let (c, s) = to(&stage.dir, "other", &other);
    let (mine, control) = stage.client();
    for fd in [c.as_fd(), s.as_fd(), mine.as_fd(), other.as_fd()] {
        stage.broker.user(fd);
        assert!(stage.broker.clone_listener(l.as_fd(), fd, false).is_err());
    }
    stage.refuses(&order(free, l.local_addr().unwrap().port()), Errno::PERM);
    // A process that has changed its credentials passes an end of a socket pair that it has made
    // itself.
    let (pair, _its) =
        rustix::net::socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None).unwrap();
    // (After a send, this end has an abstract name.)
    sockopt::set_socket_passcred(&pair, true).unwrap();
    rustix::net::send(&pair, b"x", rustix::net::SendFlags::empty()).unwrap();
    let control = if own_uid() == 0 { &pair } else { &control };
    stage.broker.user(control.as_fd());
    sockopt::set_socket_reuseport(&l, true).unwrap();
    stage.broker.clone_listener(l.as_fd(), control.as_fd(), false).unwrap();
    assert!(stage.broker.connection(&order(free, l.local_addr().unwrap().port()), stage.netns, None).is_ok());
}

#[test]
fn a_copy_is_of_a_listening_socket_that_is_shown() {
    let stage = Stage::new();
    let (_client, control) = stage.client();
    for fd in [tcp().as_fd(), control.as_fd(), std::fs::File::open("/dev/null").unwrap().as_fd()] {
        assert!(stage.broker.clone_listener(fd, control.as_fd(), false).is_err());
    }
}

/// All requests, with meaningless numbers: those that must be refused, and the others.
fn nonsense(is_high: bool) -> (Vec<Ask>, Vec<Ask>) {
    let number = if is_high { u64::MAX } else { 0 };
    let end = End { v6: is_high, ip: [number as u8; 16], port: number as u16, uid: number as u32 };
    let order = Order { client: end, server: end, named: is_high, holder: is_high.then_some(number) };
    let ends = [Ask::Connection { order, netns: number }, Ask::Dial { order, netns: number }];
    let others = [Ask::User, Ask::Listener, Ask::Bound, Ask::Clone { reservation: is_high }, Ask::Hosts];
    let open = [Ask::Kept, Ask::Keep, Ask::Leave, Ask::Closings, Ask::Diag, Ask::Inode, Ask::Rules, Ask::Xfrm];
    let to_all = [Ask::Pairs, Ask::Chains, Ask::Steer, Ask::SteerAlso, Ask::Host, Ask::Exe { pid: number as u32 }];
    let numbered = [Ask::Selector { group: number, kept: is_high }, Ask::Forget { group: number }];
    let may = open.into_iter().chain(to_all).chain(numbered).chain([Ask::Programs { kinds: number }]);
    (ends.into_iter().chain(others).collect(), may.collect())
}

#[test]
fn nonsense_is_refused() {
    let stage = Stage::new();
    let fd = tcp();
    for fds in [&[][..], &[fd.as_fd()], &[fd.as_fd(); 6]] {
        for is_high in [false, true] {
            let (refused, others) = nonsense(is_high);
            for ask in refused {
                assert!(stage.broker.ask(ask, fds).is_err(), "{ask:?}");
            }
            for ask in others {
                let _ = stage.broker.ask(ask, fds);
            }
        }
    }
    // The broker still works.
    let (_client, control) = stage.client();
    stage.broker.user(control.as_fd());
    let l = listener().0;
    stage.broker.listener(l.as_fd());
}

/// Makes a process with this number, which waits to be killed. `None`: the number is not
/// available.
fn with_number(pid: u32) -> Option<u32> {
    let wanted = [pid as libc::pid_t];
    // SAFETY: plain C data, for which zero is valid.
    let mut args: libc::clone_args = unsafe { std::mem::zeroed() };
    args.exit_signal = libc::SIGCHLD as u64;
    args.set_tid = wanted.as_ptr() as u64;
    args.set_tid_size = 1;
    // SAFETY: without CLONE_VM the call works like `fork`. The child makes only system calls.
    match unsafe { libc::syscall(libc::SYS_clone3, &raw const args, size_of::<libc::clone_args>()) } {
        0 => loop {
            // SAFETY: the call accesses no memory.
            unsafe { libc::pause() };
        },
        made => u32::try_from(made).ok().filter(|made| *made == pid),
    }
}

/// Steering takes a right. Here the process that connected has ended, and a process with that
/// right has got its number. The request must still be refused.
#[test]
fn another_process_with_the_number_of_the_one_that_connected_lends_it_no_right() {
    if !rustix::process::geteuid().is_root() {
        return eprintln!("SKIPPED: not root");
    }
    let stage = Stage::new();
    let path = stage.dir.path().join("monitor");
    let connect = format!(
        "import socket,sys; s=socket.socket(socket.AF_UNIX,socket.SOCK_SEQPACKET); s.connect({path:?}); print('there',flush=True); sys.stdin.read()"
    );
    let mut child = std::process::Command::new("python3")
        .args(["-c", &connect])
        .stdin(std::process::Stdio::piped())
        .stdout(std::process::Stdio::piped())
        .spawn()
        .unwrap();
    let mut said = [0; 6];
    std::io::Read::read_exact(child.stdout.as_mut().unwrap(), &mut said).unwrap();
    let control = rustix::net::accept(&stage.endpoint).unwrap();
    let pidfd = |pid: u32| {
        let pid = rustix::process::Pid::from_raw(pid as i32).unwrap();
        Sender {
            pid: pid.as_raw_nonzero().get() as u32,
            pidfd: pidfd_open(pid, PidfdFlags::empty()).ok(),
            ..Sender::default()
        }
    };
    let ask = |sender: &Sender| stage.broker.steer(br#"{"do":"status"}"#, control.as_fd(), sender).map(drop);
    assert_eq!(ask(&pidfd(child.id())), Ok(()), "it has the right itself");
    let number = child.id();
    drop(child.stdin.take());
    child.wait().unwrap();
    let Some(other) = with_number(number) else { return eprintln!("SKIPPED: no process with a number of choice") };
    let asked = ask(&pidfd(other));
    // SAFETY: `other` is this process's own child, which is still to be waited for.
    unsafe {
        libc::kill(other as i32, libc::SIGKILL);
        libc::waitpid(other as i32, std::ptr::null_mut(), 0);
    }
    assert_eq!(asked, Err(Errno::PERM));
}
