//! Finds the listeners in the registry that serve a destination.

use crate::name;
use fsocket_abi::arena::Reason;
use fsocket_proto::registry::{Registry, ENTRIES, LOCALS};
use fsocket_proto::Addr;

/// Listeners in the registry to which a connection could go.
#[derive(Clone, Copy, Default)]
pub struct Best {
    pub count: usize,
    /// These listeners as one number. (It does not depend on their order, which changes when other
    /// listeners end.)
    pub(super) listeners: u64,
}

/// The listeners to which a connection to `dst` could go, or the reason why there are none.
pub fn scan(reg: &Registry, dst: &Addr, netns: u64) -> Result<Best, Reason> {
    let v4 = name::is_v4(&dst.ip);
    let local = name::is_loopback(&dst.ip) || {
        let n = (volatile(&reg.locals) as usize).min(LOCALS);
        reg.local.iter().take(n).any(|l| volatile(l) == dst.ip)
    };
    let [mut exact, mut any4, mut any6] = [Best::default(); 3];
    let n = (volatile(&reg.entries) as usize).min(ENTRIES);
    for e in reg.entry.iter().take(n) {
        let a = volatile(&e.addr);
        if a.port != dst.port {
            continue;
        }
        let (listener, ns) = (volatile(&e.listener), volatile(&e.netns));
        if listener == 0 || ns != netns {
            continue;
        }
        let class = if a.ip == dst.ip {
            &mut exact
        } else if v4 && name::is_v4(&a.ip) && name::is_any(&a.ip) {
            &mut any4
        } else if !name::is_v4(&a.ip) && name::is_any(&a.ip) && (!v4 || a.v6only == 0) {
            &mut any6
        } else {
            continue;
        };
        class.count += 1;
        class.listeners ^= listener.wrapping_mul(0x9e37_79b9_7f4a_7c15);
    }
    if exact.count > 0 {
        return Ok(exact);
    }
    match (local, any4.count + any6.count) {
        (false, _) => Err(Reason::Remote),
        (true, 0) => Err(Reason::NoListener),
        (true, _) => Ok(if any4.count > 0 { any4 } else { any6 }),
    }
}

/// Reads a value that the monitor may change at the same time. The registry's generation tells
/// whether it did.
pub fn volatile<T: Copy>(p: &T) -> T {
    // SAFETY: a reference is valid for reads.
    unsafe { core::ptr::read_volatile(p) }
}
