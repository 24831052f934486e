//! The program locks its memory (`mlockall`). Channels, arena and tables are larger than their
//! used parts. Locked, they would take memory in full, and count for RLIMIT_MEMLOCK (ADR 68).

use crate::{channels, exec, limit, listen, path, pool, process, registry, room, socks, space, stats, table, upgrade};
use fsocket_abi::arena::Reason;
use fsocket_sys as sys;

/// Runs `lock`, which is `mlockall` with these flags. If the library has started, the process
/// first changes to the kernel: its connections move, its mappings are removed, and its tables
/// stop growing. If the library has not started, only MCL_FUTURE matters. `alone`: there is no
/// second thread.
pub fn locking(flags: i32, alone: bool, lock: impl FnOnce() -> i32) -> i32 {
    if process::nonce() != 0 && flags & (libc::MCL_CURRENT | libc::MCL_FUTURE) != 0 {
        let _errno = sys::errno::Saved::errno();
        leave(alone);
    }
    let r = lock();
    if r == 0 {
        let _errno = sys::errno::Saved::errno();
        room::note_locks(flags & libc::MCL_FUTURE != 0);
        if process::nonce() != 0 {
            // Threads that are late may still reach that memory, which is empty.
            space::munlock_waiting();
            registry::munlock();
        }
    }
    r
}

/// Called after `munlockall`: later connections may use shared memory.
pub fn unlocked() {
    room::note_locks(false);
}

fn leave(alone: bool) {
    let was_enabled = process::enabled();
    process::disable();
    if listen::any() {
        path::give_up_all();
    }
    upgrade::give_up_all();
    exec::hand_over_all();
    pool::drain();
    // A connection whose other side does not answer cannot move, and its memory is locked, too.
    if !table::all().any(|d| d.is_conn()) {
        channels::forget_all();
        socks::forget();
    }
    if alone {
        space::give_back_all();
        registry::forget();
    }
    limit::trim_all();
    // Counted after the step that restarts the counters.
    if was_enabled {
        stats::fall_back(Reason::Disabled);
    }
}
