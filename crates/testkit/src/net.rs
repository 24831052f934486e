//! Ports, and ways to wait until a process listens, without opening a connection.

use std::net::{Ipv4Addr, TcpListener};
use std::sync::atomic::{AtomicU16, Ordering};
use std::time::{Duration, Instant};

/// These ports are outside of the kernel's range for connections (hosts reserve them) and of the
/// monitor's leases. So no client can have one of them.
pub(crate) const FIRST: u16 = 5000;
pub(crate) const COUNT: u16 = 3000;

/// A TCP port on which no process listens. One test program never gets a port twice.
pub fn free_port() -> u16 {
    static NEXT: AtomicU16 = AtomicU16::new(0);
    for _ in 0..COUNT {
        let step = NEXT.fetch_add(1, Ordering::Relaxed);
        let start = (std::process::id() % u32::from(COUNT)) as u16;
        let port = FIRST + (start.wrapping_mul(61).wrapping_add(step)) % COUNT;
        if TcpListener::bind((Ipv4Addr::UNSPECIFIED, port)).is_ok() {
            return port;
        }
    }
    panic!("no free port");
}

/// Number of kernel TCP sockets with this local port and state, in the network namespace of the
/// calling thread. The state is as in `/proc/net/tcp`: `0A` is LISTEN, `01` is ESTABLISHED.
pub fn kernel_sockets(port: u16, state: &str) -> usize {
    let suffix = format!(":{port:04X}");
    ["/proc/thread-self/net/tcp", "/proc/thread-self/net/tcp6"]
        .iter()
        .filter_map(|file| std::fs::read_to_string(file).ok())
        .flat_map(|text| text.lines().skip(1).map(str::to_owned).collect::<Vec<_>>())
        .filter(|line| {
            let mut fields = line.split_whitespace().skip(1);
            let local = fields.next().unwrap_or("");
            fields.next();
            local.ends_with(&suffix) && fields.next() == Some(state)
        })
        .count()
}

/// Whether a Unix socket listens at `path`. (The path appears a little earlier.)
pub fn unix_listens(path: &std::path::Path) -> bool {
    let listening = |line: &str| line.split_whitespace().nth(3) == Some("00010000");
    let name = path.display().to_string();
    let all = std::fs::read_to_string("/proc/thread-self/net/unix").unwrap_or_default();
    all.lines().any(|line| listening(line) && line.ends_with(&name))
}

/// Waits until a kernel socket listens on `port`.
pub fn wait_for_port(port: u16, limit: Duration) -> Result<(), String> {
    wait_until(limit, || kernel_sockets(port, "0A") > 0).map_err(|_| format!("nobody listens on port {port}"))
}

/// Polls `condition` every few milliseconds, for at most `limit`.
pub fn wait_until(limit: Duration, mut condition: impl FnMut() -> bool) -> Result<(), String> {
    let end = Instant::now() + limit;
    loop {
        if condition() {
            return Ok(());
        }
        if Instant::now() > end {
            return Err(format!("condition not met within {limit:?}"));
        }
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// Whether a SOCK_SEQPACKET socket listens at `path`: a stream connect to it fails with
/// EPROTOTYPE.
pub fn is_seqpacket(path: &std::path::Path) -> bool {
    match std::os::unix::net::UnixStream::connect(path) {
        Err(error) => error.raw_os_error() == Some(libc::EPROTOTYPE),
        Ok(_) => true,
    }
}
