//! Waiting for another process that is in the middle of a path switch.

use crate::stage::peer_moves;
use crate::table::Desc;
use fsocket_abi::flags::FlagSet;
use fsocket_sys as sys;

/// How long to wait for the other side where it must act first, nanoseconds. It
/// is in the middle of a few system calls, or dead.
pub(super) const PATIENCE_NS: u64 = 2_000_000_000;
/// The same where the program has a non-blocking socket, and others to see to. It waits where it closes
/// one or shuts it down just then; then the connection is reset.
const NONBLOCKING_PATIENCE_NS: u64 = 100_000_000;

/// Until the other side has moved.
pub(super) fn await_peer(d: &Desc) {
    let nonblocking = d.sock().flags.get().has(FlagSet::NONBLOCK);
    patiently(if nonblocking { NONBLOCKING_PATIENCE_NS } else { PATIENCE_NS }, || peer_moves(d));
}

/// Wait while another thread or process is busy.
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
