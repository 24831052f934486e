//! What each part of the library does at a turn of the process's life: one table for each.

use crate::{
    arena, asleep, cancel, chan, ctl, epoll, exec, identity, lent, making, operator, opts, peers, pidfd_transfer, pool,
    process, route, table, unhooked, upgrade, uring, waker, zone,
};

/// A descriptor of ours got another number. The first that has it answers true.
const RENUMBERED: [fn(i32, i32) -> bool; 10] = [
    ctl::renumbered,
    arena::renumbered,
    waker::renumbered,
    chan::renumbered,
    zone::renumbered,
    epoll::renumbered,
    peers::renumbered,
    asleep::renumbered,
    lent::renumbered,
    identity::renumbered,
];

/// The application wants number `fd` for itself (dup2) and we use it: move.
pub fn make_way(fd: i32) {
    let Some(new) = process::duplicate_own(fd) else { return };
    if RENUMBERED.iter().any(|renumbered| renumbered(fd, new)) {
        process::note_own(new);
    } else {
        let _ = fsocket_sys::close(new);
    }
}

/// Locks that a fork must find free: taken before it, and given back on both sides.
pub const LOCKS: [ForkLock; 3] = [
    ForkLock { take: ctl::lock_for_fork, give_back: ctl::unlock_after_fork },
    ForkLock { take: arena::lock_for_fork, give_back: arena::unlock_after_fork },
    ForkLock { take: pool::lock_for_fork, give_back: pool::unlock_after_fork },
];

/// See [`LOCKS`].
pub struct ForkLock {
    /// False: the calling thread has it already.
    pub take: fn() -> bool,
    pub give_back: fn(),
}

/// In a forked child that has a new identity, before it talks to the monitor.
pub const CHILD_BEFORE: [fn(); 5] =
    [arena::become_child, exec::become_child, uring::become_child, cancel::become_child, peers::become_child];

/// After that, from the bottom to the top.
pub const CHILD_AFTER: [fn(); 14] = [
    identity::become_child,
    route::reset_after_fork,
    waker::become_child,
    chan::become_child,
    table::become_child,
    making::become_child,
    unhooked::become_child,
    pidfd_transfer::become_child,
    operator::become_child,
    upgrade::become_child,
    opts::before::become_child,
    epoll::become_child,
    drop_placeholders,
    asleep::become_child,
];

/// In a process that has nothing of ours left, before it forks: what a child would have to give back.
pub const AT_REST: [fn(); 4] = [peers::become_child, waker::become_child, identity::become_child, drop_placeholders];

fn drop_placeholders() {
    let _ = pool::drain();
}
