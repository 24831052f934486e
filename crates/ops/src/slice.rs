//! Source-port slices for kernel TCP connections. A connection takes its source port from the
//! slice of the CPU that opens it, and the steering program sends the connection's packets to
//! that CPU (Receive Flow Deliver).
//!
//! This is active only while the monitor steers a device of this network namespace; otherwise it
//! costs one load. The kernel picks the port within the slice (`IP_LOCAL_PORT_RANGE`, Linux 6.3),
//! so it still respects reserved ports and `ip_local_port_range`.

use crate::table::{Desc, Kind};
use crate::{ctl, inspect, name, process, registry, route, socks, stats, zone};
use core::sync::atomic::{fence, AtomicBool, Ordering};
use fsocket_abi::arena::Counter;
use fsocket_proto::registry::{Registry, SLICED, SLICE_CPUS};
use fsocket_proto::Addr;
use fsocket_sys::{self as sys, Errno};

const IP_LOCAL_PORT_RANGE: i32 = 51;

/// The kernel has no port range for single sockets.
static REFUSED: AtomicBool = AtomicBool::new(false);

/// [`choose`] for a socket that the library does not track, because shared memory is switched
/// off. The state of the socket is read from the kernel.
///
/// # Safety
/// `addr` is readable for `len` bytes.
pub unsafe fn choose_unknown(fd: i32, addr: *const libc::sockaddr, len: u32) {
    // (If the library is on, this socket was tracked before, and this is not its first
    // `connect`.)
    if process::enabled() || !zone::enabled() || ctl::registry().is_none() || active().is_none() {
        return;
    }
    let mut protocol = [0; 4];
    let is_tcp = sys::getsockopt(fd, libc::SOL_SOCKET, libc::SO_PROTOCOL, &mut protocol).is_ok()
        && i32::from_ne_bytes(protocol) == libc::IPPROTO_TCP;
    // SAFETY: the program says that `len` bytes are at `addr`; they are copied.
    if let (true, Some(dst)) = (is_tcp, unsafe { name::parse(addr, len) }) {
        take(fd, &dst, true, true);
    }
}

/// Called before the kernel connects the socket: limits its source port to this CPU's slice. If
/// that is impossible, the connection takes any port.
pub fn choose(fd: i32, d: &Desc, dst: &Addr) {
    take(fd, dst, d.kind() == Kind::Bound, d.placeholder().is_changed());
}

/// `bound`: the socket may have a port already; `touched`: the program may have set options.
fn take(fd: i32, dst: &Addr, bound: bool, touched: bool) {
    let Some(reg) = active() else { return };
    // The loopback device is never steered.
    if REFUSED.load(Ordering::Relaxed) || name::is_loopback(&dst.ip) {
        return;
    }
    if bound && inspect::bound_address(fd).is_none_or(|address| address.port != 0) {
        return;
    }
    let mut own = [0; 4];
    if touched && sys::getsockopt(fd, libc::IPPROTO_IP, IP_LOCAL_PORT_RANGE, &mut own).is_ok() && own != [0; 4] {
        return;
    }
    // The CPU's number plus one, or 0.
    let (Some(cpu), Ok(netns)) = (sys::cpu::current().checked_sub(1), route::netns(fd)) else { return };
    let Some((low, high)) = range(reg, netns, cpu) else { return };
    // The arena makes the monitor see the counter, even if this process uses only the kernel.
    let _ = socks::arena();
    match sys::setsockopt(fd, libc::IPPROTO_IP, IP_LOCAL_PORT_RANGE, &value(low, high)) {
        Ok(()) => stats::count(Counter::ConnectSlice),
        Err(_) => {
            REFUSED.store(true, Ordering::Relaxed);
            stats::count(Counter::SliceRefused);
        }
    }
}

/// Called when the kernel's `connect` has failed. True: no port of the slice was free. The socket
/// may now take any port, so the caller should try once more.
pub fn widen(fd: i32) -> bool {
    let Some(reg) = active() else { return false };
    let saved = sys::errno::Saved::errno();
    if !saved.is(Errno::EADDRNOTAVAIL) {
        return false;
    }
    let Ok(netns) = route::netns(fd) else { return false };
    // A port range that the program itself has set must stay.
    let ours = |value: [u8; 4]| {
        (0..SLICE_CPUS as u32).any(|cpu| range(reg, netns, cpu).is_some_and(|r| self::value(r.0, r.1) == value))
    };
    let mut now = [0; 4];
    if sys::getsockopt(fd, libc::IPPROTO_IP, IP_LOCAL_PORT_RANGE, &mut now).is_err() || now == [0; 4] || !ours(now) {
        return false;
    }
    if sys::setsockopt(fd, libc::IPPROTO_IP, IP_LOCAL_PORT_RANGE, &value(0, 0)).is_err() {
        return false;
    }
    stats::count(Counter::SliceFull);
    true
}

/// The registry, if any network namespace has slices.
#[inline]
fn active() -> Option<&'static Registry> {
    registry::mapped().filter(|reg| route::volatile(&reg.sliced) != 0)
}

/// The option's value: the low port is in the lower half.
fn value(low: u16, high: u16) -> [u8; 4] {
    (u32::from(low) | u32::from(high) << 16).to_ne_bytes()
}

/// Lowest and highest port of a CPU's slice.
fn range(reg: &Registry, netns: u64, cpu: u32) -> Option<(u16, u16)> {
    let generation = reg.generation.load(Ordering::Acquire);
    let count = (route::volatile(&reg.sliced) as usize).min(SLICED);
    let slices = reg.slices.iter().take(count).find(|s| route::volatile(&s.netns) == netns)?;
    let slice = u32::from(route::volatile(slices.by_cpu.get(cpu as usize)?)).checked_sub(1)?;
    let (first, ports) = (route::volatile(&slices.first), route::volatile(&slices.ports));
    fence(Ordering::Acquire);
    // The monitor is changing the slices, so this connection takes any port.
    if generation & 1 != 0 || reg.generation.load(Ordering::Relaxed) != generation || ports == 0 {
        return None;
    }
    let low = first.checked_add(slice.checked_mul(ports)?)?;
    Some((u16::try_from(low).ok()?, u16::try_from(low.checked_add(ports - 1)?).ok()?))
}
