//! Clients decide how long it takes to close what they share: how long a socket lingers, which
//! messages wait in it, and how many. The monitor must close all of it and serve other clients
//! meanwhile.

use crate::rights::{as_user, for_users};
use crate::support::*;
use crate::switching::of;
use fsocket_abi::channel::{slot_state, CLIENT, SERVER};
use fsocket_proto::raw::Packet;
use fsocket_proto::values::Switching;
use fsocket_proto::{request, Payload};
use fsocket_sync::atomic::Ordering;
use rustix::fd::{AsFd, OwnedFd};
use rustix::net::{
    sockopt, AddressFamily, SendAncillaryBuffer, SendAncillaryMessage, SendFlags, SocketFlags, SocketType,
};
use std::io::Write;
use std::mem::MaybeUninit;
use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};
use zerocopy::IntoBytes;

/// If the event loop closed a descriptor itself, it would lose this much time: then the watchdog
/// ends the wait.
const ONCE: Duration = Duration::from_millis(50);
const ENDS: usize = 60;
const GREEDY: u32 = 70_001;

/// Sockets of connections whose close would wait for an hour, and their peers, which do not read.
fn lingering(n: usize) -> (Vec<OwnedFd>, Vec<TcpStream>) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let both = (0..n).map(|_| {
        let c = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let (s, _) = listener.accept().unwrap();
        linger(&c);
        (OwnedFd::from(c), s)
    });
    both.unzip()
}

pub fn linger(mut c: &TcpStream) {
    sockopt::set_socket_linger(c, Some(Duration::from_secs(3600))).unwrap();
    c.set_nonblocking(true).unwrap();
    while c.write(&[0; 1 << 16]).is_ok() {}
}

/// Whether this process has a TCP socket with this address. (The monitor is a thread of this
/// process.)
fn is_open(at: std::net::SocketAddr) -> bool {
    let fds = std::fs::read_dir("/proc/self/fd").unwrap().flatten();
    fds.filter_map(|fd| fd.file_name().to_str()?.parse::<i32>().ok()).any(|fd| {
        // SAFETY: the number is only used for a question; if it is closed meanwhile, the call
        // fails.
        let fd = unsafe { rustix::fd::BorrowedFd::borrow_raw(fd) };
        rustix::net::getsockname(fd).ok().and_then(|name| std::net::SocketAddr::try_from(name).ok()) == Some(at)
    })
}

/// Runs `attack`, then measures how long another user waits for an answer. An event loop that
/// waits for each close takes at least the asserted time, on a machine of any speed.
#[track_caller]
fn is_served_while(d: &Daemon, waits: usize, attack: impl FnOnce()) {
    let mut other = as_user(70_009, || d.process());
    other.sync();
    attack();
    let begin = Instant::now();
    other.sync();
    let took = begin.elapsed();
    assert!(took < ONCE * waits as u32, "{took:?}"); // bound: what a loop that waits takes at least
}

/// Moves the connection in slot `i` to the kernel. Returns its two ends; this process keeps no
/// copies.
pub fn switched(s: &mut Proc, c: &mut Proc, ch: &ChannelView, i: usize) -> (OwnedFd, TcpStream) {
    let slot = ch.slot(i);
    slot.client_port.store(ch.port + i as u16, Ordering::Relaxed);
    slot.family.store(libc::AF_INET as u8, Ordering::Relaxed);
    for (to, byte) in slot.dst.iter().zip(Ipv4Addr::LOCALHOST.to_ipv6_mapped().octets()) {
        to.store(byte, Ordering::Relaxed);
    }
    slot.generation.store(9, Ordering::Relaxed);
    slot.state.store(slot_state::ESTABLISHED, Ordering::Release);
    let msg = Packet { id: u64::from(ch.id), arg0: i as u64, arg1: 9, ..Packet::new(request::Switch::KIND) };
    let (answer, server) = s.request(of(msg, request::Switch::KIND, SERVER, Switching::Make as u64), None);
    assert_eq!(answer.result, 0);
    let client = c.request(of(msg, request::Claim::KIND, CLIENT, 0), None).1.unwrap();
    (client, TcpStream::from(server.unwrap()))
}

/// A channel of one user whose connections have all moved to the kernel. Their ends linger, and
/// the slots are marked as free.
fn with_ends(d: &Daemon) -> (Proc, Proc, Listener, ChannelView, Vec<std::net::SocketAddr>) {
    as_user(GREEDY, || {
        let (mut s, mut c, l, ch) = d.acquainted();
        let ends = (0..ENDS).map(|i| {
            let (client, server) = switched(&mut s, &mut c, &ch, i);
            let client = TcpStream::from(client);
            linger(&client);
            ch.set_state(i, slot_state::FREE);
            // (The monitor has copies of both ends.)
            drop(server);
            client.local_addr().unwrap()
        });
        let ends = ends.collect();
        (s, c, l, ch, ends)
    })
}

#[test]
fn ends_that_linger_hold_up_nobody_when_a_channel_is_broken() {
    let Some(d) = for_users("ends_that_linger", |_| {}) else { return };
    let (s, c, _l, ch, ends) = with_ends(&d);
    assert!(ends.iter().all(|at| is_open(*at)));
    is_served_while(&d, ENDS, || c.tell(Packet { id: ch.id.into(), ..Packet::new(request::Broken::KIND) }, None));
    wait_until("all ends are closed", || !ends.iter().any(|at| is_open(*at)));
    drop((s, c));
}

#[test]
fn nor_when_the_user_is_killed() {
    let Some(d) = for_users("nor_when_the_user_is_killed", |_| {}) else { return };
    let (s, c, l, ch, ends) = with_ends(&d);
    for (i, _) in ends.iter().enumerate() {
        ch.set_state(i, slot_state::ESTABLISHED);
    }
    is_served_while(&d, ENDS, || drop((s, c, l)));
    wait_until("all ends are closed", || !ends.iter().any(|at| is_open(*at)));
}

/// A control socket that contains messages and that the monitor does not have yet. Only its
/// messages hold the descriptors in them.
struct Stuffed(Proc, OwnedFd);

impl Stuffed {
    fn new() -> Stuffed {
        let pair = rustix::net::socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None);
        let (ours, theirs) = pair.unwrap();
        Stuffed(Proc::on(ours), theirs)
    }

    fn with(self, bytes: &[u8], fds: Vec<OwnedFd>) -> Stuffed {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(253))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        let borrowed: Vec<_> = fds.iter().map(AsFd::as_fd).collect();
        assert!(fds.is_empty() || control.push(SendAncillaryMessage::ScmRights(&borrowed)));
        let parts = [rustix::io::IoSlice::new(bytes)];
        rustix::net::sendmsg(&self.0.fd, &parts, &mut control, SendFlags::empty()).unwrap();
        self
    }

    /// Hands the socket to the monitor as a child of `parent`.
    fn hand_over(self, parent: &Proc) -> Proc {
        parent.tell(Packet { id: self.0.nonce, ..Packet::new(request::Adopt::KIND) }, Some(self.1.as_fd()));
        self.0
    }
}

/// The addresses of the sockets whose peers these readers are. Each address is in use as long as
/// its socket is open.
fn addresses(readers: &[TcpStream]) -> Vec<std::net::SocketAddr> {
    readers.iter().map(|s| s.peer_addr().unwrap()).collect()
}

/// Each message has more descriptors than the monitor accepts. If the receive buffer lacked room
/// for them, the kernel would close them in the event loop's thread.
#[test]
fn nor_do_sockets_in_a_message() {
    let Some(d) = for_users("nor_do_sockets_in_a_message", |_| {}) else { return };
    let (mut fds, readers) = lingering(ENDS * 4);
    let ends = addresses(&readers);
    let mut all = Vec::new();
    while !fds.is_empty() {
        all.push(Stuffed::new().with(b"what", fds.split_off(fds.len() - 4)));
    }
    let parent = as_user(GREEDY, || d.process());
    let mut children = Vec::new();
    is_served_while(&d, ENDS, || children = all.into_iter().map(|child| child.hand_over(&parent)).collect());
    wait_until("all are closed", || !ends.iter().any(|at| is_open(*at)));
}

/// Descriptors in messages that the monitor never reads, because it has dropped the client.
#[test]
fn nor_do_sockets_that_nobody_receives() {
    let Some(d) = for_users("nor_do_sockets_that_nobody_receives", |_| {}) else { return };
    let (fds, readers) = lingering(ENDS);
    let ends = addresses(&readers);
    // (The monitor drops the client for the first message.)
    let stuffed = |fd| Stuffed::new().with(b"what", Vec::new()).with(b"what", vec![fd]);
    let all: Vec<_> = fds.into_iter().map(stuffed).collect();
    let parent = as_user(GREEDY, || d.process());
    let mut children = Vec::new();
    is_served_while(&d, ENDS, || children = all.into_iter().map(|child| child.hand_over(&parent)).collect());
    wait_until("all are closed", || !ends.iter().any(|at| is_open(*at)));
}

/// Closing what a user sends takes only a few of the monitor's threads.
#[test]
fn what_is_slow_to_close_takes_few_threads() {
    let Some(d) = for_users("what_is_slow_to_close_takes_few_threads", |_| {}) else { return };
    let closing = || {
        let tasks = std::fs::read_dir("/proc/self/task").unwrap().flatten();
        tasks.filter(|t| std::fs::read_to_string(t.path().join("comm")).is_ok_and(|c| c.trim() == "close")).count()
    };
    let (fds, readers) = lingering(ENDS);
    let ends = addresses(&readers);
    let unlisten = Packet { id: 1, ..Packet::new(request::Unlisten::KIND) };
    let all = fds.into_iter().fold(Stuffed::new(), |all, fd| all.with(unlisten.as_bytes(), vec![fd]));
    let parent = as_user(GREEDY, || d.process());
    let _child = all.hand_over(&parent);
    wait_until("all are closed", || !ends.iter().any(|at| is_open(*at)));
    // (Monitors of other tests run in this process, too.)
    let threads = closing();
    assert!(threads < ENDS / 2, "{threads}");
}

/// A server that has accepted many connections shows many Unix sockets at once. The monitor must
/// drop no process for that. It must not do so either if one of the sockets takes long to close
/// and others wait behind it. Here a lingering socket was passed over that one and never received.
#[test]
fn unix_sockets_are_closed_in_their_own_time() {
    const BURST: usize = 100;
    let Some(d) = for_users("unix_sockets_are_closed_in_their_own_time", |_| {}) else { return };
    let (fds, readers) = lingering(ENDS);
    let ends = addresses(&readers);
    let (slow, waiting) = UnixStream::pair().unwrap();
    for fd in fds {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        let passed = [fd.as_fd()];
        assert!(control.push(SendAncillaryMessage::ScmRights(&passed)));
        rustix::net::sendmsg(&slow, &[rustix::io::IoSlice::new(b"x")], &mut control, SendFlags::empty()).unwrap();
    }
    // (From here on only the monitor has the sockets.)
    let unlisten = Packet { id: 1, ..Packet::new(request::Unlisten::KIND) };
    let burst = (0..BURST).map(|_| UnixStream::pair().unwrap().0);
    let all = std::iter::once(waiting).chain(burst);
    let all = all.fold(Stuffed::new(), |all, fd| all.with(unlisten.as_bytes(), vec![fd.into()]));
    let parent = as_user(GREEDY, || d.process());
    let mut shows = None;
    is_served_while(&d, ENDS, || shows = Some(all.hand_over(&parent)));
    shows.as_mut().unwrap().sync();
    wait_until("all are closed", || !ends.iter().any(|at| is_open(*at)));
    shows.as_mut().unwrap().sync();
}

/// Descriptors that a user has left in the monitor are closed after the user's processes have
/// ended.
#[test]
fn nothing_is_left_of_a_user() {
    let Some(d) = for_users("nothing_is_left_of_a_user", |_| {}) else { return };
    let (s, c, l, ch, ends) = with_ends(&d);
    drop((s, c, l, ch));
    wait_until("all ends are closed", || !ends.iter().any(|at| is_open(*at)));
    let held = || {
        let mut root = d.stranger();
        let (answer, fd) = root.request(Packet { arg2: 1, ..Packet::new(request::Report::KIND) }, None);
        let mut text = vec![0; answer.arg0 as usize];
        rustix::io::pread(fd.unwrap(), &mut text, 0).unwrap();
        let report: fsocket_proto::report::Report = serde_json::from_slice(&text).unwrap();
        report.held.iter().find(|h| h.uid == GREEDY).map_or(0, |h| h.descriptors)
    };
    wait_until("nothing counts for it", || held() == 0);
}
