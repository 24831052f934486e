//! Waiting for another process that is in the middle of a path switch.

use crate::table::Desc;
use fsocket_abi::flags::FlagSet;
use fsocket_abi::path_switch;
use fsocket_sys as sys;

/// How long this process waits for another process that must act first, nanoseconds. The other
/// process needs a few system calls, or is dead.
pub(super) const PATIENCE_NS: u64 = 2_000_000_000;
/// The same if the program's socket is non-blocking, because the program has other sockets to
/// serve. Only `close` and `shutdown` wait in this case. If the peer takes longer, the connection
/// is reset.
const NONBLOCKING_PATIENCE_NS: u64 = 100_000_000;

/// Waits until the other side has moved.
pub(super) fn await_peer(d: &Desc) {
    let nonblocking = d.sock().flags.get().has(FlagSet::NONBLOCK);
    patiently(if nonblocking { NONBLOCKING_PATIENCE_NS } else { PATIENCE_NS }, || d.peer_status().is_moving());
}

/// Waits until the thread, or the process of the fork group, that moves the connection has
/// finished.
pub(super) fn await_group(d: &Desc) {
    patiently(PATIENCE_NS, || path_switch::group_moves(&d.sock().flags));
}

/// Waits while `busy` returns true, at most `ns` nanoseconds.
pub(super) fn patiently(ns: u64, mut busy: impl FnMut() -> bool) {
    let until = sys::now_ns() + ns;
    let mut ns = 1000;
    loop {
        if !busy() || sys::now_ns() > until {
            return;
        }
        sys::nanosleep(ns);
        ns = (ns * 2).min(1_000_000);
    }
}
