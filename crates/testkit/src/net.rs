//! Ports, and waiting for somebody to listen, without opening a connection.

use std::net::{Ipv4Addr, TcpListener};
use std::sync::atomic::{AtomicU16, Ordering};
use std::time::{Duration, Instant};

/// Outside the kernel's range for connections (hosts reserve these) and that of the monitor's leases, so that no client
/// holds one.
pub(crate) const FIRST: u16 = 5000;
pub(crate) const COUNT: u16 = 3000;

/// A TCP port that nobody listens on, never twice in one test program.
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

/// Kernel TCP sockets with this local port, by state as `/proc/net/tcp` has
/// it (`0A` is LISTEN, `01` ESTABLISHED), in the calling thread's network
/// namespace.
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

/// Waits until a kernel socket listens on `port`.
pub fn wait_for_port(port: u16, limit: Duration) -> Result<(), String> {
    wait_until(limit, || kernel_sockets(port, "0A") > 0).map_err(|_| format!("nobody listens on port {port}"))
}

/// Polls `condition` every few milliseconds.
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
