//! A real monitor in this process, and clients that send and write anything.
//!
//! The oracle: an honest client beside them keeps its listener and its channel, and gets answers.
//! If the monitor panics, the process aborts.

use crate::input::Input;
use crate::readers;
use fsocket_abi::arena::{self, ARENA_SIZE, SOCK_OFF};
use fsocket_abi::channel::{CHANNEL_SIZE, SLOT_OFF, SYN_OFF, WAITER_OFF};
use fsocket_monitor::memory::{memfd, Mapping};
use fsocket_monitor::wire::{self, Received};
use fsocket_monitor::{Config, Monitor};
use fsocket_proto::raw::Packet;
use fsocket_proto::{notice, request, Addr, Payload};
use fsocket_sync::atomic::{AtomicU32, AtomicU64, Ordering};
use rustix::event::{eventfd, poll, EventfdFlags, PollFd, PollFlags, Timespec};
use rustix::fd::{AsFd, OwnedFd};
use rustix::fs::SealFlags;
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};
use std::mem::offset_of;
use std::net::{TcpListener, TcpStream};
use std::path::PathBuf;
use std::sync::OnceLock;
use std::time::Duration;

/// How long an honest client may wait for an answer, even on a busy machine.
const PATIENCE: Duration = Duration::from_secs(20);

/// All numbers of messages are lower.
const KINDS: u8 = 96;

static MONITOR: OnceLock<PathBuf> = OnceLock::new();

/// The socket of this process's only monitor, which never stops.
fn monitor() -> &'static PathBuf {
    MONITOR.get_or_init(|| {
        let dir = tempfile::tempdir().expect("a directory").keep();
        let socket = dir.join("private/monitor.sock");
        let config = Config {
            socket: socket.clone(),
            private: true,
            linger: Duration::from_secs(86400),
            mode: 0o600,
            keep: None,
            descriptors: u64::MAX,
            memory: u64::MAX,
            programs: Vec::new(),
            hosts: None,
            links: None,
            retired: false,
            balance: Default::default(),
            rules: fsocket_monitor::policy::rules::Rules::allowing(),
        };
        let start = move || {
            // The thread has its own network namespace, so accidental changes do not reach other
            // programs. (Both need root.)
            // SAFETY: the call takes numbers only, and changes this thread alone.
            let _ = unsafe { libc::unshare(libc::CLONE_NEWNET) };
            let (_stop, never) = (eventfd(0, EventfdFlags::CLOEXEC), eventfd(0, EventfdFlags::CLOEXEC));
            let run = || Monitor::start(config).expect("a monitor").run(never.expect("an eventfd").as_fd(), || true);
            let ended = std::panic::catch_unwind(std::panic::AssertUnwindSafe(run));
            eprintln!("the monitor has ended: {ended:?}");
            std::process::abort();
        };
        std::thread::spawn(start);
        for _ in 0..2000 {
            if socket.exists() {
                break;
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        socket
    })
}

/// A client of the monitor.
struct Client {
    fd: OwnedFd,
    seq: u32,
    /// Numbers that answers have contained.
    ids: Vec<u64>,
    channel: Option<OwnedFd>,
}

impl Client {
    fn new() -> Client {
        let (family, kind) = (AddressFamily::UNIX, SocketType::SEQPACKET);
        let fd = rustix::net::socket_with(family, kind, SocketFlags::CLOEXEC, None).expect("a socket");
        rustix::net::connect(&fd, &SocketAddrUnix::new(monitor()).expect("a path")).expect("the monitor");
        Client { fd, seq: 0, ids: vec![0, 1], channel: None }
    }

    fn hello(&mut self, nonce: u64) {
        let version = u64::from(fsocket_abi::VERSION);
        self.tell(Packet { id: nonce, arg0: 1, arg1: version, ..Packet::new(request::Hello::KIND) }, None);
    }

    fn tell(&self, msg: Packet, fd: Option<&OwnedFd>) {
        let _ = wire::send(self.fd.as_fd(), &msg.into(), fd.map(AsFd::as_fd));
    }

    /// Receives all messages that are there.
    fn drain(&mut self) {
        while let Received::Message(msg, fd) = wire::receive(self.fd.as_fd()) {
            let msg = Packet::from(msg);
            if self.ids.len() < 64 {
                self.ids.extend([msg.id, msg.arg0]);
            }
            if let (request::Connect::KIND | notice::ChannelSrv::KIND | request::ChannelHandle::KIND, Some(fd)) =
                (msg.kind, fd)
            {
                self.channel = Some(fd);
            }
        }
    }

    /// Waits for the answer to a request.
    fn ask(&mut self, msg: Packet, fd: Option<&OwnedFd>) -> Option<(Packet, Option<OwnedFd>)> {
        self.seq += 1;
        self.tell(Packet { seq: self.seq, ..msg }, fd);
        loop {
            let limit = Timespec { tv_sec: PATIENCE.as_secs() as i64, tv_nsec: 0 };
            let mut fds = [PollFd::new(&self.fd, PollFlags::IN)];
            // EINTR: libFuzzer has a timer.
            match poll(&mut fds, Some(&limit)) {
                Err(Errno::INTR) => continue,
                ready => assert!(ready.expect("poll") > 0, "no answer within {PATIENCE:?}"),
            }
            match wire::receive(self.fd.as_fd()) {
                Received::Message(answer, fd) if answer.kind() == msg.kind && answer.seq() == self.seq => {
                    return Some((answer.into(), fd))
                }
                Received::Message(..) | Received::Cut(_) | Received::Nothing | Received::Later => {}
                Received::End | Received::Malformed => return None,
            }
        }
    }
}

/// The clients that must not notice anything, and their objects.
struct Honest {
    server: Client,
    client: Client,
    listener: u64,
    address: Addr,
    channel: u64,
    socket: TcpListener,
    /// A listener for clients that break the protocol. After that, their user gets no channel to
    /// this listener for a while, and all clients here are of one user.
    bait: (u64, Addr, TcpListener),
}

impl Honest {
    fn new() -> Honest {
        let (mut server, mut client) = (Client::new(), Client::new());
        server.hello(0xAAAA_0001_0000_0001);
        client.hello(0xAAAA_0002_0000_0001);
        let (listener, address, socket) = Honest::listen(&mut server);
        let bait = Honest::listen(&mut server);
        let mut honest = Honest { server, client, listener, address, channel: 0, socket, bait };
        honest.channel = honest.connect();
        honest
    }

    fn listen(server: &mut Client) -> (u64, Addr, TcpListener) {
        let socket = TcpListener::bind("127.0.0.1:0").expect("a listener");
        let listening = socket.try_clone().expect("a descriptor").into();
        let (answer, _) = server.ask(Packet::new(request::Listen::KIND), Some(&listening)).expect("an answer");
        assert_eq!(answer.result, 0);
        server.ask(Packet { id: answer.id, ..Packet::new(request::Worker::KIND) }, None).expect("an answer");
        let ip = std::net::Ipv4Addr::LOCALHOST.to_ipv6_mapped().octets();
        let port = socket.local_addr().expect("an address").port();
        (answer.id, Addr { ip, port, family: libc::AF_INET as u16, v6only: 0 }, socket)
    }

    fn connect(&mut self) -> u64 {
        let socket = rustix::net::socket(AddressFamily::INET, SocketType::STREAM, None).expect("a socket");
        let asked = Packet { addr: self.address, ..Packet::new(request::Connect::KIND) };
        let (answer, _) = self.client.ask(asked, Some(&socket)).expect("an answer");
        assert_eq!(answer.result, 0, "CONNECT is refused");
        assert_eq!(answer.arg0, self.listener);
        answer.id
    }

    /// Checks that nothing has changed: the channel is the same, and both clients get answers.
    fn check(&mut self) {
        assert_eq!(self.connect(), self.channel, "the channel is another one");
        self.server
            .ask(Packet { id: u64::MAX, ..Packet::new(request::ChannelHandle::KIND) }, None)
            .expect("the server was dropped");
        self.server.drain();
        let _ = &self.socket;
    }
}

fn honest(check: impl FnOnce(&mut Honest)) {
    thread_local! {
        static HONEST: std::cell::RefCell<Option<Honest>> = const { std::cell::RefCell::new(None) };
    }
    HONEST.with_borrow_mut(|h| check(h.get_or_insert_with(Honest::new)));
}

/// A descriptor of a right or a wrong kind.
fn descriptor(input: &mut Input, own: &TcpListener) -> Option<OwnedFd> {
    let sealed = |size| memfd("fuzz", size, SealFlags::SHRINK | SealFlags::GROW).ok();
    let socket = |family, kind| rustix::net::socket(family, kind, None).ok();
    match input.u8() % 20 {
        0 => own.try_clone().ok().map(Into::into),
        1 => socket(AddressFamily::INET, SocketType::STREAM),
        2 => socket(AddressFamily::INET6, SocketType::STREAM),
        3 => socket(AddressFamily::INET, SocketType::DGRAM),
        4 => socket(AddressFamily::UNIX, SocketType::SEQPACKET),
        5 => {
            let pair = rustix::net::socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None);
            pair.ok().map(|p| p.0)
        }
        6 => {
            let fd = sealed(ARENA_SIZE)?;
            label(&fd);
            Some(fd)
        }
        7 => sealed(ARENA_SIZE),
        8 => sealed(usize::from(input.u16())),
        9 => eventfd(0, EventfdFlags::CLOEXEC).ok(),
        10 => rustix::pipe::pipe().ok().map(|p| p.0),
        11 => std::fs::File::open("/proc/self/status").ok().map(Into::into),
        12 => TcpStream::connect(own.local_addr().ok()?).ok().map(Into::into),
        13 => TcpListener::bind("[::1]:0").ok().map(Into::into),
        14 => {
            // A request as JSON.
            let fd = sealed(4096)?;
            let _ = rustix::io::pwrite(&fd, &input.bytes::<64>(), 0);
            Some(fd)
        }
        15 => {
            // The accepted end of a connection.
            let _opened = TcpStream::connect(own.local_addr().ok()?).ok()?;
            own.accept().ok().map(|(end, _)| end.into())
        }
        16 => {
            // The monitor does not know this process. The number of a known process would name an
            // honest client.
            let text = br#"{"target":{"process":1},"off":true}"#;
            let fd = sealed(text.len())?;
            let _ = rustix::io::pwrite(&fd, text, 0);
            Some(fd)
        }
        _ => None,
    }
}

fn label(fd: &OwnedFd) -> Option<Mapping> {
    let map = Mapping::new(fd, ARENA_SIZE).ok()?;
    map.at::<AtomicU64>(offset_of!(arena::Header, magic)).store(arena::MAGIC, Ordering::Relaxed);
    map.at::<AtomicU32>(offset_of!(arena::Header, version)).store(fsocket_abi::VERSION, Ordering::Relaxed);
    Some(map)
}

/// A number that means something, or any number.
fn number(input: &mut Input, client: &Client, own: &Honest) -> u64 {
    match input.u8() % 8 {
        0 => 0,
        1 => client.ids[usize::from(input.u8()) % client.ids.len()],
        2 => own.listener,
        3 => own.channel,
        4 => u64::from(input.u8()),
        5 => u64::MAX,
        6 => 0xAAAA_0001_0000_0001,
        _ => input.u64(),
    }
}

/// Sends the messages of two clients that the bytes describe.
pub fn messages(data: &[u8]) {
    honest(|own| {
        let mut input = Input::new(data);
        let mut clients = [Client::new(), Client::new()];
        let mut rounds = 0;
        while !input.is_empty() && rounds < 64 {
            rounds += 1;
            let what = input.u8();
            let which = usize::from(what & 1);
            if what >> 1 & 7 == 0 {
                clients[which].drain();
                continue;
            }
            let client = &clients[which];
            let msg = if what >> 1 & 7 == 1 {
                readers::message(&mut input)
            } else {
                let kind = u32::from(input.u8() % KINDS);
                let mut n = || number(&mut input, client, own);
                let (id, arg0, arg1, arg2) = (n(), n(), n(), n());
                let version = u64::from(fsocket_abi::VERSION);
                let arg1 = if kind == request::Hello::KIND && arg1 != 1 { version } else { arg1 };
                let addr = Addr { port: own.address.port ^ u16::from(input.u8() & 1), ..own.address };
                Packet { id, arg0, arg1, arg2, addr, seq: u32::from(input.u8()), ..Packet::new(kind) }
            };
            // Requests that change devices as root must not run on this machine.
            if msg.kind == request::Steer::KIND {
                continue;
            }
            let fd = descriptor(&mut input, &own.socket);
            clients[which].tell(msg, fd.as_ref());
        }
        drop(clients);
        own.check();
    });
}

/// A client with an arena and a channel to the honest server fills both with values, and ends.
pub fn arena(data: &[u8]) {
    honest(|own| {
        let mut input = Input::new(data);
        let mut client = Client::new();
        client.hello(input.u64() | 1 << 32 | 1);
        let Ok(fd) = memfd("arena", ARENA_SIZE, SealFlags::SHRINK | SealFlags::GROW) else { return };
        let Some(map) = label(&fd) else { return };
        client.tell(Packet::new(request::Arena::KIND), Some(&fd));
        let socket = rustix::net::socket(AddressFamily::INET, SocketType::STREAM, None).expect("a socket");
        let asked = Packet { addr: own.bait.1, ..Packet::new(request::Connect::KIND) };
        let Some((answer, Some(memory))) = client.ask(asked, Some(&socket)) else {
            own.server.tell(Packet { id: own.bait.0, ..Packet::new(request::Unlisten::KIND) }, None);
            own.bait = Honest::listen(&mut own.server);
            return own.check();
        };
        let channel = Mapping::new(&memory, CHANNEL_SIZE).expect("a mapping");
        let mut rounds = 0;
        while !input.is_empty() && rounds < 512 {
            rounds += 1;
            let (what, at) = (input.u8(), usize::from(input.u16()));
            let value = match input.u8() % 8 {
                0 => 0,
                1 => answer.id,
                2 => own.channel,
                3 => u64::from(input.u8()),
                4 => u64::from(input.u32()),
                5 => u64::MAX,
                6 => 1 << (input.u8() % 64),
                _ => input.u64(),
            };
            match what % 8 {
                0 => map.at::<AtomicU32>(offset_of!(arena::Header, high_water)).store(value as u32, Ordering::Relaxed),
                1 => map.at::<AtomicU64>(at % 512 * 8).store(value, Ordering::Relaxed),
                2 | 3 => map.at::<AtomicU32>(SOCK_OFF + at % 512 * 4).store(value as u32, Ordering::Relaxed),
                4 => channel.at::<AtomicU32>(SYN_OFF + at * 4).store(value as u32, Ordering::Relaxed),
                5 => channel.at::<AtomicU64>(WAITER_OFF + at % 3000 * 8).store(value, Ordering::Relaxed),
                6 => channel.at::<AtomicU32>(SLOT_OFF + at % 1000 * 4).store(value as u32, Ordering::Relaxed),
                _ => {
                    // A message makes the monitor look at the memory.
                    let kinds = [
                        request::ChannelHandle::KIND,
                        request::Arrives::KIND,
                        request::Unlisten::KIND,
                        request::Ports::KIND,
                        request::Switch::KIND,
                        request::Report::KIND,
                    ];
                    let kind = kinds[at % kinds.len()];
                    client.tell(Packet { id: answer.id, arg0: value, seq: 9, ..Packet::new(kind) }, None);
                }
            }
        }
        client.drain();
        drop(client);
        own.check();
    });
}
