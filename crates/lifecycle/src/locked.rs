//! The program locks its memory (`mlockall`). Channels, arena and tables are larger than what is used of them: locked,
//! all of it would be memory, and count for RLIMIT_MEMLOCK.

use crate::{channels, exec, limit, listen, path, pool, process, registry, room, socks, space, stats, table, upgrade};
use fsocket_abi::arena::Reason;
use fsocket_sys as sys;

/// `lock` is `mlockall` with these flags. A process in which the library has begun uses the kernel from before the call
/// on: its connections change their path, its mappings go, and its tables become no longer than they are. In one in which
/// it has not, only MCL_FUTURE matters.
/// `alone`: there is no second thread.
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
            // (For threads that come late: it is empty.)
            space::munlock_waiting();
            registry::munlock();
        }
    }
    r
}

/// `munlockall` has succeeded: what begins from now on may use shared memory.
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
    // A connection whose other side does not answer stays where it is, and is locked with the rest.
    if !table::all().any(|d| d.is_conn()) {
        channels::forget_all();
        socks::forget();
    }
    if alone {
        space::give_back_all();
        registry::forget();
    }
    limit::trim_all();
    // (Behind what begins the counters again.)
    if was_enabled {
        stats::fall_back(Reason::Disabled);
    }
}
