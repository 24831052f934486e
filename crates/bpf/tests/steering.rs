//! Tests steering between hosts whose receive queues interrupt like those of a network card. Both
//! cases are tested: without steering, half of the packets come to the wrong CPU; with steering,
//! none do.

use fsocket_bpf::locality::{Cell, Kind, Locality};
use fsocket_bpf::slices::Slices;
use fsocket_bpf::steer::{Policy, Request, Steering};
use fsocket_bpf::xdp::Mode;
use fsocket_testkit::netns::{Chain, Interface, NetHost, Receive};
use fsocket_testkit::{need_hosts, process};
use std::io::{Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::os::fd::{AsRawFd, FromRawFd};
use std::sync::atomic::{AtomicU16, Ordering};
use std::sync::OnceLock;
use std::thread;

const CONNECTIONS: usize = 48;
const ROUNDS: usize = 10;
const IP_LOCAL_PORT_RANGE: libc::c_int = 51;
const SO_NETNS_COOKIE: libc::c_int = 71;

/// Ends the test if it cannot run here.
macro_rules! need_two_cpus_and_bpf {
    () => {
        need_hosts!();
        if cpus().len() < 2 {
            return eprintln!("SKIPPED: needs two CPUs");
        }
        if let Err(reason) = fsocket_bpf::probe::permitted() {
            return eprintln!("SKIPPED: {reason}");
        }
    };
}

/// All CPUs of this machine, which all take part. They are counted once, because a pinned thread
/// would count only its own CPU.
fn cpus() -> Vec<usize> {
    static COUNT: OnceLock<usize> = OnceLock::new();
    (0..*COUNT.get_or_init(|| thread::available_parallelism().map_or(1, |n| n.get()))).collect()
}

fn cpu_numbers() -> Vec<u32> {
    cpus().iter().map(|cpu| *cpu as u32).collect()
}

/// Three hosts in a row, with a receive queue for every CPU.
fn chain() -> Chain {
    Chain::new(cpus().len(), &Receive::Threads(cpus())).expect("hosts")
}

fn slices() -> Slices {
    Slices::new(32768..=60999, &cpu_numbers()).unwrap()
}

/// A socket of the calling thread's host. With `slice`, its source port comes from this slice.
fn socket(v6: bool, slice: Option<usize>) -> libc::c_int {
    let family = if v6 { libc::AF_INET6 } else { libc::AF_INET };
    // SAFETY: only numbers are passed.
    let fd = unsafe { libc::socket(family, libc::SOCK_STREAM | libc::SOCK_CLOEXEC, 0) };
    assert!(fd >= 0);
    if let Some(slice) = slice {
        let range = slices().range(slice);
        let both = u32::from(*range.start()) | u32::from(*range.end()) << 16;
        // SAFETY: the value is a u32, and its size is passed.
        let result =
            unsafe { libc::setsockopt(fd, libc::IPPROTO_IP, IP_LOCAL_PORT_RANGE, (&raw const both).cast(), 4) };
        if result != 0 {
            bind_in(fd, v6, &range);
        }
    }
    fd
}

/// Before Linux 6.3 a socket has no range of ports: binds it to a port of the slice, each port
/// once.
fn bind_in(fd: libc::c_int, v6: bool, range: &std::ops::RangeInclusive<u16>) {
    static USED: AtomicU16 = AtomicU16::new(0);
    let port = range.start() + USED.fetch_add(1, Ordering::Relaxed) % (range.end() - range.start());
    // SAFETY: a zeroed address is valid; an IPv4 address is shorter than an IPv6 one.
    let mut any: libc::sockaddr_in6 = unsafe { std::mem::zeroed() };
    any.sin6_family = if v6 { libc::AF_INET6 } else { libc::AF_INET } as u16;
    any.sin6_port = port.to_be();
    let size = if v6 { size_of::<libc::sockaddr_in6>() } else { size_of::<libc::sockaddr_in>() };
    // SAFETY: the address has at least the given size.
    let result = unsafe { libc::bind(fd, (&raw const any).cast(), size as u32) };
    assert_eq!(result, 0, "bind to {port}: {}", std::io::Error::last_os_error());
}

fn connect(to: SocketAddr, slice: Option<usize>) -> TcpStream {
    let fd = socket(to.is_ipv6(), slice);
    let (result, size) = match to {
        SocketAddr::V4(a) => {
            let raw = libc::sockaddr_in {
                sin_family: libc::AF_INET as u16,
                sin_port: a.port().to_be(),
                sin_addr: libc::in_addr { s_addr: u32::from_ne_bytes(a.ip().octets()) },
                sin_zero: [0; 8],
            };
            // SAFETY: the address has the given size.
            (unsafe { libc::connect(fd, (&raw const raw).cast(), size_of_val(&raw) as u32) }, size_of_val(&raw))
        }
        SocketAddr::V6(a) => {
            let raw = libc::sockaddr_in6 {
                sin6_family: libc::AF_INET6 as u16,
                sin6_port: a.port().to_be(),
                sin6_flowinfo: 0,
                sin6_addr: libc::in6_addr { s6_addr: a.ip().octets() },
                sin6_scope_id: 0,
            };
            // SAFETY: the address has the given size.
            (unsafe { libc::connect(fd, (&raw const raw).cast(), size_of_val(&raw) as u32) }, size_of_val(&raw))
        }
    };
    assert_eq!(result, 0, "connect to {to} ({size} bytes): {}", std::io::Error::last_os_error());
    // SAFETY: nothing else owns the new descriptor.
    unsafe { TcpStream::from_raw_fd(fd) }
}

/// The cookie of a host's network namespace.
fn cookie(host: &NetHost) -> u64 {
    host.within(|| {
        let fd = socket(false, None);
        let (mut cookie, mut size) = (0u64, 8u32);
        // SAFETY: `cookie` has room for the answer, and `size` is its size.
        let result =
            unsafe { libc::getsockopt(fd, libc::SOL_SOCKET, SO_NETNS_COOKIE, (&raw mut cookie).cast(), &mut size) };
        // SAFETY: no other value owns the descriptor.
        unsafe { libc::close(fd) };
        assert_eq!(result, 0);
        cookie
    })
}

/// Starts a thread, which may run on `cpus`. It echoes on `address` of `host`, for this number of
/// `connections`, one after the other.
fn echo(host: &NetHost, address: SocketAddr, cpus: &[usize], connections: usize) -> thread::JoinHandle<()> {
    let listener = host.within(|| TcpListener::bind(address)).expect("listen");
    let cpus = cpus.to_vec();
    thread::spawn(move || {
        process::set_affinity(0, &cpus).expect("affinity");
        for _ in 0..connections {
            let (mut stream, _) = listener.accept().expect("accept");
            stream.set_nodelay(true).expect("nodelay");
            let mut buffer = [0; 100];
            while let Ok(1..) = stream.read(&mut buffer) {
                stream.write_all(&buffer).expect("write");
            }
        }
    })
}

/// Opens connections from the middle host, on each CPU in turn. With `sliced`, the source port
/// comes from that CPU's slice.
fn talk(chain: &Chain, to: SocketAddr, sliced: bool) {
    let server = echo(&chain.backend, to, &cpus(), CONNECTIONS);
    for number in 0..CONNECTIONS {
        chain.middle.within(|| {
            let cpu = number % cpus().len();
            process::set_affinity(0, &[cpu]).expect("affinity");
            let mut stream = connect(to, sliced.then_some(cpu));
            stream.set_nodelay(true).expect("nodelay");
            let mut buffer = [7; 100];
            for _ in 0..ROUNDS {
                stream.write_all(&buffer).expect("write");
                stream.read_exact(&mut buffer).expect("read");
            }
            stream.shutdown(Shutdown::Both).expect("shutdown");
        });
    }
    server.join().expect("server");
}

fn active(cells: &[Cell]) -> (u64, u64) {
    let mine = || cells.iter().filter(|c| c.tgid == std::process::id() && c.kind == Kind::Active);
    // Printed for a failing test: CPU that handled the packets, CPU that used them, number of
    // packets.
    println!("{:?}", mine().map(|c| (c.handled, c.app, c.packets)).collect::<Vec<_>>());
    let sum = |local| mine().filter(|c| c.is_local() == local).map(|c| c.packets).sum();
    (sum(true), sum(false))
}

/// Runs `work`. Returns the number of packets of active connections that came to the right CPU
/// meanwhile, and the number of others.
fn measured(work: impl FnOnce()) -> (u64, u64) {
    let measuring = Locality::start().unwrap_or_else(|e| panic!("{e}"));
    work();
    active(&measuring.cells().expect("cells"))
}

fn request(device: &Interface, host: &NetHost, policy: Policy) -> Request {
    Request {
        device: device.device.clone(),
        policy,
        precise: false,
        cpus: cpu_numbers(),
        slices: true,
        mode: None,
        netns: cookie(host),
    }
}

fn verdicts(steering: &Steering) -> Vec<(&'static str, Vec<u64>)> {
    steering.counts().expect("counts").into_iter().map(|c| (c.name, c.by_cpu)).collect()
}

fn total(steering: &Steering, name: &str) -> u64 {
    let counts = steering.counts().expect("counts");
    counts.iter().find(|c| c.name == name).expect("a counter").total()
}

/// Number of segments that this host has retransmitted. A few may be only delayed; a path that
/// loses packets causes dozens.
fn retransmitted(host: &NetHost) -> u64 {
    let text = host.within(|| std::fs::read_to_string("/proc/thread-self/net/snmp")).expect("snmp");
    let mut tcp = text.lines().filter(|line| line.starts_with("Tcp:")).map(|line| line.split(' '));
    let (names, values) = (tcp.next().expect("names"), tcp.next().expect("values"));
    let found = names.zip(values).find(|(name, _)| *name == "RetransSegs").expect("RetransSegs");
    found.1.parse().expect("a number")
}

fn device(chain: &Chain) -> &Interface {
    &chain.middle.interfaces[1]
}

/// Held during a test, because all tests pin the same two CPUs and count packets of this process.
static TURN: std::sync::Mutex<()> = std::sync::Mutex::new(());

fn turn() -> std::sync::MutexGuard<'static, ()> {
    TURN.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
}

/// The network spreads the flows and clients use any port, so the only way left is to remember
/// the CPU.
fn remembered(policy: Policy, slices: bool) {
    let _turn = turn();
    let chain = chain();
    let request = Request { slices, ..request(device(&chain), &chain.middle, policy) };
    let steering = chain.middle.within(|| Steering::attach(&request)).unwrap_or_else(|e| panic!("{e}"));
    chain.middle.within(|| {
        for to in ["127.0.0.1", "::1"] {
            let listener = std::net::TcpListener::bind((to, 0)).expect("loopback");
            let mut stream = std::net::TcpStream::connect(listener.local_addr().expect("bound")).expect("loopback");
            let (mut other, _) = listener.accept().expect("loopback");
            other.write_all(b"x").and_then(|()| stream.read_exact(&mut [0])).expect("a byte");
        }
    });
    assert_eq!(steering.remembered(), 0, "no packet of loopback is ever steered");
    let v6 = SocketAddr::from((chain.backend.interfaces[0].v6, 80));
    for to in [SocketAddr::from((chain.backend_address(), 80)), v6] {
        let (local, remote) = measured(|| talk(&chain, to, false));
        assert!(local >= (CONNECTIONS * ROUNDS) as u64, "{to}: {local} local, {remote} elsewhere");
        assert_eq!(remote, 0, "{to}: beside {local} local ones");
    }
    assert!(total(&steering, "to_other") > 0 && total(&steering, "to_self") > 0);
    assert!(steering.remembered() >= 2 * CONNECTIONS, "{}", steering.remembered());
}

#[test]
fn ends_without_a_trace_and_tells_when_the_device_is_gone() {
    need_two_cpus_and_bpf!();
    let _turn = turn();
    let chain = chain();
    let request = request(device(&chain), &chain.middle, Policy::Rfd);
    let attach = || chain.middle.within(|| Steering::attach(&request));
    let shown = || {
        let mut ip = std::process::Command::new("ip");
        ip.args(["-d", "link", "show", "dev", &request.device]);
        chain.middle.place(&mut ip);
        String::from_utf8(ip.output().expect("ip").stdout).expect("text")
    };
    assert!(!shown().contains("xdp"), "{}", shown());
    let first = attach().unwrap_or_else(|e| panic!("{e}"));
    assert!(shown().contains("xdp") && first.is_alive(), "{}", shown());
    let busy = attach().err().expect("there is one already").to_string();
    assert!(busy.contains("another XDP program is attached already"), "{busy}");
    drop(first);
    assert!(!shown().contains("xdp"), "{}", shown());

    let second = attach().unwrap_or_else(|e| panic!("{e}"));
    chain.middle.inside("ip", &["link", "del", &request.device]).expect("ip link del");
    assert!(!second.is_alive());
    let gone = attach().err().expect("no device").to_string();
    assert!(gone.contains(&format!("no device {}", request.device)), "{gone}");
}

#[test]
fn the_test_itself_uses_the_sockets_it_says() {
    need_two_cpus_and_bpf!();
    let chain = chain();
    let to = SocketAddr::from((chain.backend_address(), 80));
    let server = echo(&chain.backend, to, &[0], 2);
    for slice in 0..2 {
        let stream = chain.middle.within(|| connect(to, Some(slice)));
        assert!(slices().range(slice).contains(&stream.local_addr().expect("bound").port()));
        assert!(stream.as_raw_fd() > 2);
    }
    server.join().expect("server");
}

/// [`Locality`] attaches a program to the root of all cgroups. Every monitor that looks for policies finds it there, and
/// asks the kernel first.
mod alone {
    use super::*;

    #[test]
    fn active_connections_are_local_with_slices_and_not_without() {
        need_two_cpus_and_bpf!();
        let _turn = turn();
        for mode in [Mode::Native, Mode::Generic] {
            let chain = chain();
            // The backend listens on a well-known port, on any port, and on an IPv6 address.
            let v4 = |port| SocketAddr::from((chain.backend_address(), port));
            let v6 = SocketAddr::from((chain.backend.interfaces[0].v6, 80));
            let (local, remote) = measured(|| talk(&chain, v4(80), false));
            let total_packets = local + remote;
            assert!(
                total_packets >= (CONNECTIONS * ROUNDS) as u64 && remote * 5 > total_packets,
                "stock should miss about half: {local} local, {remote} remote"
            );

            let request = Request { mode: Some(mode), ..request(device(&chain), &chain.middle, Policy::Rfd) };
            let steering = chain.middle.within(|| Steering::attach(&request)).unwrap_or_else(|e| panic!("{e}"));
            assert_eq!(steering.mode().0, mode);
            steering.set_slices(&slices()).expect("slices");
            for to in [v4(80), v4(5000), v6] {
                let (local, remote) = measured(|| talk(&chain, to, true));
                println!("{:?}", verdicts(&steering));
                assert!(local >= (CONNECTIONS * ROUNDS) as u64, "{mode:?} {to}: {local} local, {remote} elsewhere");
                assert_eq!(remote, 0, "{mode:?} {to}: beside {local} local ones");
            }
            assert!(total(&steering, "to_other") > 0 && total(&steering, "to_self") > 0);
            assert_eq!(total(&steering, "no_cpu") + total(&steering, "queue_full"), 0);
            let lost = retransmitted(&chain.middle) + retransmitted(&chain.backend);
            assert!(lost < 10, "{mode:?}: {lost} segments were sent again");
            println!(
                "{mode:?}: {:?}",
                steering.counts().map(|c| c.iter().map(|c| (c.name, c.total())).collect::<Vec<_>>())
            );
        }
    }

    #[test]
    fn receive_cpu_selection_follows_the_reader() {
        need_two_cpus_and_bpf!();
        remembered(Policy::RecvCpu, true);
    }

    #[test]
    fn active_connections_are_local_where_they_were_opened() {
        need_two_cpus_and_bpf!();
        remembered(Policy::ConnectCpu, true);
    }

    #[test]
    fn rfd_remembers_where_the_kernel_has_no_port_ranges() {
        need_two_cpus_and_bpf!();
        remembered(Policy::Rfd, false);
    }
}
