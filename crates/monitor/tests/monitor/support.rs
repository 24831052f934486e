//! A monitor in a temporary directory, and clients that the tests play.
//!
//! Long: tests of one subject on one fixture.

use fsocket_abi::arena::{self, ARENA_SIZE, SOCK_OFF};
use fsocket_abi::channel::{
    slot_state, Header, Slot, SynQueue, Waiter, CHANNEL_SIZE, SLOT_OFF, SYN_OFF, WAITERS, WAITER_OFF,
};
use fsocket_abi::sock::{Name, Place, Sock};
use fsocket_monitor::broker::Broker;
use fsocket_monitor::memory::{memfd, Mapping};
use fsocket_monitor::wire::{self, Received};
use fsocket_monitor::{Config, Endpoint, Monitor};
use fsocket_proto::raw::Packet;
use fsocket_proto::{notice, request, Addr, Payload};
use fsocket_sync::atomic::{AtomicU32, AtomicU64, Ordering};
use rustix::event::{eventfd, poll, EventfdFlags, PollFd, PollFlags, Timespec};
use rustix::fd::{AsFd, BorrowedFd, OwnedFd};
use rustix::fs::SealFlags;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};
use std::mem::offset_of;
use std::net::{TcpListener, TcpStream};
use std::path::PathBuf;
use std::sync::atomic::AtomicU64 as Nonces;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

pub const PATIENCE: Duration = Duration::from_secs(60);

pub struct Daemon {
    pub socket: PathBuf,
    stop: OwnedFd,
    thread: Option<JoinHandle<()>>,
    _dir: tempfile::TempDir,
}

impl Daemon {
    pub fn start() -> Daemon {
        Daemon::with(|_| {})
    }

    pub fn with(change: impl FnOnce(&mut Config)) -> Daemon {
        let dir = tempfile::tempdir().unwrap();
        let mut config = Config {
            socket: dir.path().join("private/monitor.sock"),
            private: true,
            linger: Duration::from_secs(60),
            mode: 0o600,
            keep: None,
            descriptors: u64::MAX,
            memory: u64::MAX,
            balance: Default::default(),
            // All connections are allowed, because this machine may have a firewall.
            rules: fsocket_monitor::policy::rules::Rules::allowing(),
            programs: Vec::new(),
            hosts: None,
            links: None,
            retired: false,
        };
        change(&mut config);
        let socket = config.socket.clone();
        let stop = eventfd(0, EventfdFlags::CLOEXEC).unwrap();
        let stop_too = stop.try_clone().unwrap();
        let start = move || match config.private {
            true => Monitor::start(config),
            // A broker as in the system monitor, but in a thread of this process.
            false => {
                let endpoint = Endpoint::publish(&config)?;
                let broker = Broker::beside(endpoint.fd.as_fd(), config.keep.as_deref()).unwrap();
                Monitor::on(config, endpoint, broker)
            }
        };
        let thread = std::thread::spawn(move || start().unwrap().run(stop_too.as_fd(), || true).unwrap());
        wait_until("the socket is there", || socket.exists());
        Daemon { socket, stop, thread: Some(thread), _dir: dir }
    }

    pub fn has_exited(&self) -> bool {
        self.thread.as_ref().is_none_or(JoinHandle::is_finished)
    }

    /// A client that has not sent HELLO.
    pub fn stranger(&self) -> Proc {
        let fd = rustix::net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None);
        let fd = fd.unwrap();
        rustix::net::connect(&fd, &SocketAddrUnix::new(&self.socket).unwrap()).unwrap();
        Proc::on(fd)
    }

    pub fn process(&self) -> Proc {
        let mut p = self.stranger();
        p.hello();
        p
    }

    /// A worker of a listener, and a client with a channel to that listener.
    pub fn acquainted(&self) -> (Proc, Proc, Listener, ChannelView) {
        acquaint(self.process(), self.process())
    }

    pub fn process_with_arena(&self) -> Proc {
        let mut p = self.process();
        p.make_arena();
        p
    }
}

/// Makes the first process a worker of a new listener, and gives the second one a channel to it.
pub fn acquaint(mut worker: Proc, mut client: Proc) -> (Proc, Proc, Listener, ChannelView) {
    let (socket, port) = listener();
    let id = worker.listen(&socket);
    worker.work(id);
    let channel = client.connect(port);
    (worker, client, Listener { socket, port, id }, channel)
}

/// A listener that a process has registered.
pub struct Listener {
    pub socket: TcpListener,
    pub port: u16,
    pub id: u64,
}

impl Drop for Daemon {
    fn drop(&mut self) {
        let _ = rustix::io::write(&self.stop, &1u64.to_ne_bytes());
        let result = self.thread.take().map(JoinHandle::join);
        if !std::thread::panicking() {
            assert!(!matches!(result, Some(Err(_))), "the monitor panicked");
        }
    }
}

pub fn wait_until(what: &str, mut f: impl FnMut() -> bool) {
    let end = Instant::now() + PATIENCE;
    while !f() {
        assert!(Instant::now() < end, "still waiting until {what}");
        std::thread::sleep(Duration::from_millis(2));
    }
}

fn readable_within(fd: BorrowedFd<'_>, limit: Duration) -> bool {
    let mut fds = [PollFd::new(&fd, PollFlags::IN)];
    let limit = Timespec { tv_sec: limit.as_secs() as i64, tv_nsec: i64::from(limit.subsec_nanos()) };
    poll(&mut fds, Some(&limit)).unwrap() > 0
}

/// A client of the monitor.
pub struct Proc {
    pub fd: OwnedFd,
    pub nonce: u64,
    seq: u32,
    /// Unrequested messages that have arrived so far.
    pub unasked: Vec<(Packet, Option<OwnedFd>)>,
    pub arena: Option<Mapping>,
}

impl Proc {
    pub fn on(fd: OwnedFd) -> Proc {
        static NEXT: Nonces = Nonces::new(1000);
        // Only bits 16 and above name the process; the lower ones distinguish its threads.
        let nonce = NEXT.fetch_add(1, std::sync::atomic::Ordering::Relaxed) << 16 | 1;
        Proc { fd, nonce, seq: 0, unasked: Vec::new(), arena: None }
    }

    pub fn tell(&self, msg: Packet, fd: Option<BorrowedFd<'_>>) {
        wire::send(self.fd.as_fd(), &msg.into(), fd).unwrap();
    }

    fn next(&mut self) -> Option<(Packet, Option<OwnedFd>)> {
        assert!(readable_within(self.fd.as_fd(), PATIENCE), "no answer");
        match wire::receive(self.fd.as_fd()) {
            Received::Message(m, fd) => Some((m.into(), fd)),
            Received::End | Received::Nothing | Received::Later => None,
            other => panic!("{other:?}"),
        }
    }

    /// Sends a request and returns its answer. `None`: the monitor has dropped this client.
    pub fn try_request(&mut self, msg: Packet, fd: Option<BorrowedFd<'_>>) -> Option<(Packet, Option<OwnedFd>)> {
        self.seq += 1;
        let msg = Packet { seq: self.seq, ..msg };
        if wire::send(self.fd.as_fd(), &msg.into(), fd).is_err() {
            return None;
        }
        loop {
            let (answer, fd) = self.next()?;
            if answer.kind == msg.kind {
                assert_eq!(answer.seq, self.seq);
                return Some((answer, fd));
            }
            self.unasked.push((answer, fd));
        }
    }

    pub fn request(&mut self, msg: Packet, fd: Option<BorrowedFd<'_>>) -> (Packet, Option<OwnedFd>) {
        self.try_request(msg, fd).expect("thrown out")
    }

    /// Whether the monitor has closed the control socket.
    pub fn is_dropped(&mut self) -> bool {
        let mut fds = [PollFd::new(&self.fd, PollFlags::IN)];
        let soon = Timespec { tv_sec: 10, tv_nsec: 0 };
        poll(&mut fds, Some(&soon)).unwrap();
        fds[0].revents().contains(PollFlags::HUP)
    }

    /// Returns when the monitor has handled everything that was sent before.
    pub fn sync(&mut self) {
        self.request(Packet { id: u64::MAX, ..Packet::new(request::ChannelHandle::KIND) }, None);
    }

    /// The next unrequested message.
    pub fn wait_unasked(&mut self) -> (Packet, Option<OwnedFd>) {
        if self.unasked.is_empty() {
            let got = self.next().expect("thrown out");
            self.unasked.push(got);
        }
        self.unasked.remove(0)
    }

    pub fn hello(&mut self) -> OwnedFd {
        self.hello_with(0)
    }

    /// `class`: the rights that the process claims.
    pub fn hello_with(&mut self, class: u64) -> OwnedFd {
        let msg = Packet {
            arg2: class,
            id: self.nonce,
            arg0: u64::from(std::process::id()),
            arg1: u64::from(fsocket_abi::VERSION),
            ..Packet::new(request::Hello::KIND)
        };
        let (answer, fd) = self.request(msg, None);
        assert_eq!(answer.result, 0);
        assert_ne!(answer.id, 0);
        fd.expect("the registry")
    }

    pub fn make_arena(&mut self) {
        self.show_arena();
        self.sync();
    }

    /// Shows an arena, without waiting until the monitor has handled it.
    pub fn show_arena(&mut self) {
        let fd = memfd("arena", ARENA_SIZE, SealFlags::SHRINK | SealFlags::GROW).unwrap();
        let map = label_arena(&fd);
        self.tell(Packet::new(request::Arena::KIND), Some(fd.as_fd()));
        self.arena = Some(map);
    }

    pub fn count(&self, counter: arena::Counter, n: u64) {
        let stats = self.arena.as_ref().unwrap().at::<arena::Stats>(arena::STATS_OFF);
        stats.counter[counter as usize].fetch_add(n, Ordering::Relaxed);
    }

    pub fn pending(&self) -> u32 {
        self.arena.as_ref().unwrap().at::<AtomicU32>(offset_of!(arena::Header, pending)).load(Ordering::Acquire)
    }

    pub fn sock(&self, index: usize) -> &Sock {
        let map = self.arena.as_ref().unwrap();
        map.at::<AtomicU32>(offset_of!(arena::Header, high_water)).fetch_max(index as u32 + 1, Ordering::Relaxed);
        map.at(SOCK_OFF + index * size_of::<Sock>())
    }

    /// Makes an open socket in this process's arena.
    pub fn open_sock(&self, index: usize, channel: u32, slot: usize, side: usize, holders: &[u64]) -> &Sock {
        let s = self.sock(index);
        s.begin(Place { channel, slot, side });
        s.set_names(libc::AF_INET as u16, &Name::default(), &Name::default());
        holders.iter().filter(|nonce| **nonce != 0).for_each(|nonce| assert!(s.add_holder(*nonce)));
        let _ = s.claim();
        s
    }

    pub fn listen(&mut self, socket: impl AsFd) -> u64 {
        let (answer, _) = self.request(Packet::new(request::Listen::KIND), Some(socket.as_fd()));
        assert_eq!(answer.result, 0);
        answer.id
    }

    pub fn work(&mut self, listener: u64) -> u64 {
        let (answer, _) = self.request(Packet { id: listener, ..Packet::new(request::Worker::KIND) }, None);
        assert_eq!(answer.result, 0);
        answer.arg0
    }

    pub fn connect_to(&mut self, addr: Addr, full: u64) -> (Packet, Option<OwnedFd>) {
        let family = AddressFamily::from_raw(addr.family);
        let socket = rustix::net::socket(family, SocketType::STREAM, None).unwrap();
        self.request(Packet { addr, arg0: full, ..Packet::new(request::Connect::KIND) }, Some(socket.as_fd()))
    }

    pub fn connect(&mut self, port: u16) -> ChannelView {
        let (answer, fd) = self.connect_to(v4([127, 0, 0, 1], port), 0);
        assert_eq!(answer.result, 0);
        ChannelView { port: answer.addr.port, ..ChannelView::new(answer.id as u32, fd.expect("a new channel")) }
    }

    /// Whether the monitor has reported so far that waker `waker` was rung.
    pub fn is_woken(&mut self, waker: u64) -> bool {
        self.sync();
        self.unasked.iter().any(|(m, _)| m.kind == notice::Woken::KIND && m.id == waker)
    }

    /// Announces a child, as a parent does before `fork`.
    pub fn adopt(&mut self) -> Proc {
        let mut child = self.announce(false);
        child.hello();
        child
    }

    /// Announces the next program, as a program does before `exec`, and leaves these listeners to
    /// it.
    pub fn successor(&mut self, listeners: &[u64]) -> Proc {
        let mut next = self.announce(true);
        for l in listeners {
            self.tell(Packet { id: next.nonce, arg0: *l, ..Packet::new(request::Keep::KIND) }, None);
        }
        next.hello();
        next
    }

    /// Announces a process that has not sent a message yet.
    pub fn announce(&mut self, successor: bool) -> Proc {
        let (ours, theirs) =
            rustix::net::socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None).unwrap();
        // As in the library: so the child's first message shows its credentials, too.
        rustix::net::sockopt::set_socket_passcred(&theirs, true).unwrap();
        let child = Proc::on(ours);
        self.tell(
            Packet { id: child.nonce, arg0: successor.into(), ..Packet::new(request::Adopt::KIND) },
            Some(theirs.as_fd()),
        );
        child
    }
}

pub fn label_arena(fd: &OwnedFd) -> Mapping {
    let map = Mapping::new(fd, ARENA_SIZE).unwrap();
    map.at::<AtomicU64>(offset_of!(arena::Header, magic)).store(arena::MAGIC, Ordering::Relaxed);
    map.at::<AtomicU32>(offset_of!(arena::Header, version)).store(fsocket_abi::VERSION, Ordering::Relaxed);
    map
}

pub fn v4(ip: [u8; 4], port: u16) -> Addr {
    let ip = std::net::Ipv4Addr::from(ip).to_ipv6_mapped().octets();
    Addr { ip, port, family: libc::AF_INET as u16, v6only: 0 }
}

pub fn listener() -> (TcpListener, u16) {
    let l = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = l.local_addr().unwrap().port();
    (l, port)
}

pub fn connected() -> TcpStream {
    let (l, _) = listener();
    TcpStream::connect(l.local_addr().unwrap()).unwrap()
}

pub fn rung(end: &OwnedFd) -> bool {
    readable_within(end.as_fd(), Duration::ZERO)
}

/// A channel, mapped as one side maps it.
pub struct ChannelView {
    pub id: u32,
    pub map: Mapping,
    pub fd: OwnedFd,
    /// The first port that was leased to the client.
    pub port: u16,
}

impl ChannelView {
    pub fn new(id: u32, fd: OwnedFd) -> ChannelView {
        ChannelView { id, map: Mapping::new(&fd, CHANNEL_SIZE).unwrap(), fd, port: 0 }
    }

    pub fn slot(&self, i: usize) -> &Slot {
        self.map.at(SLOT_OFF + i * size_of::<Slot>())
    }

    pub fn waiter(&self, side: usize, i: usize) -> &Waiter {
        self.map.at(WAITER_OFF + (side * (WAITERS + 1) + i) * size_of::<Waiter>())
    }

    pub fn queue(&self, q: usize) -> &SynQueue {
        self.map.at(SYN_OFF + q * size_of::<SynQueue>())
    }

    pub fn workers(&self) -> u64 {
        self.map.at::<AtomicU64>(offset_of!(Header, workers)).load(Ordering::Acquire)
    }

    pub fn listener_closed(&self) -> bool {
        self.map.at::<AtomicU32>(offset_of!(Header, listener_closed)).load(Ordering::Acquire) != 0
    }

    pub fn client_gone(&self) -> bool {
        self.map.at::<AtomicU32>(offset_of!(Header, client_gone)).load(Ordering::Acquire) != 0
    }

    pub fn status(&self, slot: usize, side: usize) -> u32 {
        self.slot(slot).dir[side].prod.status.load(Ordering::Acquire)
    }

    pub fn set_state(&self, slot: usize, state: u32) {
        self.slot(slot).state.store(state, Ordering::Release);
    }

    /// Puts a slot into a queue, as a client does that connects.
    pub fn syn(&self, q: usize, slot: usize) {
        self.set_state(slot, slot_state::SYN);
        let queue = self.queue(q);
        let tail = queue.tail.load(Ordering::Relaxed);
        queue.entry[tail as usize % queue.entry.len()].store(slot as u32 + 1, Ordering::Relaxed);
        queue.tail.store(tail + 1, Ordering::Release);
    }

    /// Makes a waiter of `side` sleep on a waker.
    pub fn sleep(&self, side: usize, w: usize, key: u64) -> &Waiter {
        let waiter = self.waiter(side, w);
        waiter.waker.store(key, Ordering::Relaxed);
        waiter.sleeping.store(1, Ordering::SeqCst);
        waiter
    }
}
