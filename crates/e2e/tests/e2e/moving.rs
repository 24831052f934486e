//! Flow groups that move all the time: the SYN arrives on one CPU, the ACK of the same handshake
//! on another, and data is in flight meanwhile. No connection may be reset, and no byte may be
//! lost.

use fsocket_bpf::steer::{Policy, Request, Steering};
use fsocket_bpf::xdp::Mode;
use fsocket_testkit::netns::{Chain, Receive};
use fsocket_testkit::servers::{self, Way};
use fsocket_testkit::{need, need_hosts, stock_mode, Host};
use std::io::{Read, Write};
use std::net::{SocketAddrV4, TcpStream};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;

const CPUS: u32 = 2;
/// Few groups, so that each one moves often: several times during a handshake.
const GROUPS: u32 = 16;
const CLIENTS: u32 = 4;

/// Number of moves of each group.
type Moves = Arc<[AtomicU64; GROUPS as usize]>;

/// Steers the device of the middle host itself, instead of the monitor.
struct Mover {
    stop: Arc<AtomicBool>,
    thread: JoinHandle<()>,
    moves: Moves,
}

impl Mover {
    fn start(chain: &Chain) -> Mover {
        let stop = Arc::new(AtomicBool::new(false));
        let moves = Moves::default();
        let (middle, device) = (chain.middle.clone(), chain.middle.interfaces[0].device.clone());
        let (theirs, counted) = (stop.clone(), moves.clone());
        let (ready, attached) = std::sync::mpsc::channel();
        let thread = std::thread::spawn(move || {
            let netns = middle.within(netns_cookie);
            let request = Request {
                device,
                policy: Policy::FlowGroups,
                precise: false,
                cpus: (0..CPUS).collect(),
                slices: false,
                mode: None::<Mode>,
                netns,
            };
            let steering = middle.within(|| Steering::attach(&request)).unwrap_or_else(|e| panic!("{e}"));
            steering.set_groups(&request.cpus).expect("groups");
            ready.send(()).expect("the test waits");
            for n in 0.. {
                if theirs.load(Ordering::Relaxed) {
                    break;
                }
                for group in 0..GROUPS {
                    steering.set_group(group, Some((n + group) % CPUS)).expect("a group");
                    counted[group as usize].fetch_add(1, Ordering::Relaxed);
                }
            }
        });
        attached.recv_timeout(Duration::from_secs(20)).expect("steering");
        Mover { stop, thread, moves }
    }

    fn stop(self) {
        self.stop.store(true, Ordering::Relaxed);
        self.thread.join().expect("the mover");
    }
}

/// Cookie of the calling thread's network namespace.
fn netns_cookie() -> u64 {
    const SO_NETNS_COOKIE: libc::c_int = 71;
    let socket = std::net::UdpSocket::bind("127.0.0.1:0").or_else(|_| std::net::UdpSocket::bind("0.0.0.0:0"));
    let socket = socket.expect("a socket");
    let (mut cookie, mut size) = (0u64, 8u32);
    // SAFETY: the kernel writes at most eight bytes, and `cookie` has eight.
    let r = unsafe {
        libc::getsockopt(socket.as_raw_fd(), libc::SOL_SOCKET, SO_NETNS_COOKIE, (&raw mut cookie).cast(), &mut size)
    };
    assert_eq!(r, 0, "SO_NETNS_COOKIE: {}", std::io::Error::last_os_error());
    cookie
}

/// Opens a connection from exactly this port, which decides about its flow group. `None`: the port
/// is not free yet.
fn connect_from(port: u16, to: SocketAddrV4) -> Option<TcpStream> {
    let address = |ip: u32, port: u16| libc::sockaddr_in {
        sin_family: libc::AF_INET as u16,
        sin_port: port.to_be(),
        sin_addr: libc::in_addr { s_addr: ip.to_be() },
        sin_zero: [0; 8],
    };
    let size = size_of::<libc::sockaddr_in>() as u32;
    // SAFETY: `socket` takes no pointers, and nothing else owns the new descriptor.
    let socket = unsafe {
        let fd = libc::socket(libc::AF_INET, libc::SOCK_STREAM | libc::SOCK_CLOEXEC, 0);
        assert!(fd >= 0);
        OwnedFd::from_raw_fd(fd)
    };
    let (fd, one) = (socket.as_raw_fd(), 1i32);
    let (here, there) = (address(0, port), address(u32::from(*to.ip()), to.port()));
    // SAFETY: all pointers are to live locals, and each is passed with its size.
    let done = unsafe {
        libc::setsockopt(fd, libc::SOL_SOCKET, libc::SO_REUSEADDR, (&raw const one).cast(), 4) == 0
            && libc::bind(fd, (&raw const here).cast(), size) == 0
            && libc::connect(fd, (&raw const there).cast(), size) == 0
    };
    let error = std::io::Error::last_os_error();
    if !done {
        let taken = matches!(error.raw_os_error(), Some(libc::EADDRINUSE | libc::EADDRNOTAVAIL));
        assert!(taken, "connect from {port}: {error}");
        return None;
    }
    let stream = TcpStream::from(socket);
    stream.set_read_timeout(Some(Duration::from_secs(10))).expect("time-out");
    Some(stream)
}

/// The ports of one client in turn, each with its flow group.
fn ports(client: u32) -> impl Iterator<Item = (u16, usize)> {
    (0u32..).map(move |n| {
        let group = client + CLIENTS * (n % (GROUPS / CLIENTS));
        let block = n / (GROUPS / CLIENTS) % 6;
        ((32768 + 4096 * block + group) as u16, group as usize)
    })
}

struct Stage {
    host: Host,
    _server: fsocket_testkit::Proc,
    front: SocketAddrV4,
    chain: Chain,
}

fn stage(files: &[(&str, &[u8])]) -> Stage {
    let chain = Chain::new(CPUS as usize, &Receive::Inline).expect("hosts");
    let host = Host::configured(Some(&chain.middle), "[balance]\nmigrate = false\n");
    for (name, content) in files {
        host.file(name, content);
    }
    let front = SocketAddrV4::new(chain.middle_front(), 80);
    let server = servers::nginx(&host, Way::Ours, &[front.into()], CPUS as usize);
    servers::wait_zones(&host, CPUS.into());
    Stage { host, _server: server, front, chain }
}

macro_rules! need_this {
    () => {
        need_hosts!();
        need!("nginx");
        if stock_mode() {
            return eprintln!("SKIPPED: stock mode has no zones");
        }
        if std::thread::available_parallelism().map_or(1, |n| n.get()) < CPUS as usize {
            return eprintln!("SKIPPED: needs two CPUs");
        }
        if let Err(reason) = fsocket_bpf::probe::permitted() {
            return eprintln!("SKIPPED: {reason}");
        }
    };
}

#[test]
fn handshakes_whose_syn_and_ack_come_to_different_cpus() {
    need_this!();
    const EACH: usize = 750;
    // On a loaded machine the mover gets little CPU time. So continue until enough handshakes were
    // hit by a move, but not for ever.
    const CROSSED: u64 = 300;
    const MOST: usize = 5 * EACH;
    let stage = stage(&[("www/64", &[b'x'; 64])]);
    let mover = Mover::start(&stage.chain);
    let crossed = AtomicU64::new(0);
    let all = AtomicU64::new(0);
    std::thread::scope(|s| {
        for client in 0..CLIENTS {
            let (crossed, all, moves, to, chain) = (&crossed, &all, &mover.moves, stage.front, &stage.chain);
            s.spawn(move || {
                chain.client.within(|| {
                    let mut ports = ports(client);
                    let mut done = 0;
                    while done < EACH || (done < MOST && crossed.load(Ordering::Relaxed) < CROSSED) {
                        let (port, group) = ports.next().expect("endless");
                        let before = moves[group].load(Ordering::Relaxed);
                        let Some(mut c) = connect_from(port, to) else { continue };
                        // With two CPUs, an odd number of moves means that the group is on the
                        // other CPU.
                        let moved = moves[group].load(Ordering::Relaxed) - before;
                        crossed.fetch_add(moved % 2, Ordering::Relaxed);
                        all.fetch_add(1, Ordering::Relaxed);
                        done += 1;
                        c.write_all(b"GET /64 HTTP/1.1\r\nHost: t\r\nConnection: close\r\n\r\n").expect("send");
                        let mut got = Vec::new();
                        c.read_to_end(&mut got).unwrap_or_else(|e| panic!("client {client}, connection {done}: {e}"));
                        assert!(got.starts_with(b"HTTP/1.1 200") && got.ends_with(&[b'x'; 64]), "{got:?}");
                    }
                })
            });
        }
    });
    let moves: u64 = mover.moves.iter().map(|n| n.load(Ordering::Relaxed)).sum();
    mover.stop();
    let (crossed, all) = (crossed.into_inner(), all.into_inner());
    println!("{all} connections, of {crossed} the ACK came to another CPU than the SYN; {moves} moves");
    assert!(all >= EACH as u64 * u64::from(CLIENTS));
    assert!(crossed >= CROSSED, "{crossed} of {all}: the groups moved too slowly ({moves} moves)");
    // The sockets of both CPUs must have received connections. (If a worker gets no CPU time, the
    // other one takes its connections.)
    let zones = stage.host.zones();
    let selected = |cpu: usize| zones["groups"][0]["selections"]["self"][cpu].as_u64().unwrap_or(0);
    assert!(selected(0) > CROSSED / 10 && selected(1) > CROSSED / 10, "{zones:#}");
}

#[test]
fn data_in_flight_in_both_directions() {
    need_this!();
    const REQUESTS: usize = 400;
    let big: Vec<u8> = (0..3_000_000u32).flat_map(|n| n.wrapping_mul(2_654_435_761).to_le_bytes()).collect();
    let stage = stage(&[("www/64", &[b'x'; 64]), ("www/big", &big)]);
    let mover = Mover::start(&stage.chain);
    let before: u64 = mover.moves.iter().map(|n| n.load(Ordering::Relaxed)).sum();
    std::thread::scope(|s| {
        for client in 0..CLIENTS {
            let (big, to, chain) = (&big, stage.front, &stage.chain);
            s.spawn(move || {
                chain.client.within(|| {
                    let mut ports = ports(client).filter_map(|(port, _)| connect_from(port, to));
                    let mut c = ports.next().expect("a connection");
                    c.write_all(b"GET /big HTTP/1.1\r\nHost: t\r\nConnection: close\r\n\r\n").expect("send");
                    let mut got = Vec::new();
                    c.read_to_end(&mut got).expect("the answer");
                    assert!(got.ends_with(big) && got.len() < big.len() + 1000, "{} bytes", got.len());
                    // Send many requests at once while their answers arrive.
                    let c = ports.next().expect("a connection");
                    let mut sender = &c;
                    std::thread::scope(|s| {
                        s.spawn(move || {
                            let more = "Pad: ".to_owned() + &"p".repeat(900);
                            for n in 0..REQUESTS {
                                let close = if n + 1 == REQUESTS { "Connection: close\r\n" } else { "" };
                                write!(sender, "GET /64 HTTP/1.1\r\nHost: t\r\n{more}\r\n{close}\r\n").expect("send");
                            }
                        });
                        let mut got = Vec::new();
                        (&c).read_to_end(&mut got).expect("answers");
                        let answers = got.windows(68).filter(|w| w.starts_with(b"\r\n\r\n") && w[4..] == [b'x'; 64]);
                        assert_eq!(answers.count(), REQUESTS);
                    });
                })
            });
        }
    });
    let moves = mover.moves.iter().map(|n| n.load(Ordering::Relaxed)).sum::<u64>() - before;
    mover.stop();
    println!("{moves} moves");
    assert!(moves > 1000, "{moves} moves");
}
