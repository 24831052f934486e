//! Tables of the steps that each part of the library takes at an event in the life of the process
//! (fork, dup2, end). The entries are in the order of the layers, so a part finds the parts below
//! it ready.

use crate::{
    arena, asleep, cancel, chan, ctl, epoll, exec, identity, lent, making, operator, opts, peers, pidfd_transfer, pool,
    process, route, table, unhooked, upgrade, uring, waker, zone,
};

/// Called when a descriptor of the library gets another number. The part that has the descriptor
/// returns true.
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

/// Moves the library's descriptor `fd` to another number, because the program wants this number
/// (dup2).
pub fn make_way(fd: i32) {
    let Some(new) = process::duplicate_own(fd) else { return };
    if RENUMBERED.iter().any(|renumbered| renumbered(fd, new)) {
        process::note_own(new);
    } else {
        let _ = fsocket_sys::close(new);
    }
}

/// Locks that must be free in a forked child. They are taken before the fork, and released in both
/// processes.
pub const LOCKS: [ForkLock; 3] = [
    ForkLock { take: ctl::lock_for_fork, give_back: ctl::unlock_after_fork },
    ForkLock { take: arena::lock_for_fork, give_back: arena::unlock_after_fork },
    ForkLock { take: pool::lock_for_fork, give_back: pool::unlock_after_fork },
];

/// See [`LOCKS`].
pub struct ForkLock {
    /// Takes the lock. False: the calling thread already has it.
    pub take: fn() -> bool,
    pub give_back: fn(),
}

/// Steps in a forked child that has a new identity, before it talks to the monitor.
pub const CHILD_BEFORE: [fn(); 5] =
    [arena::become_child, exec::become_child, uring::become_child, cancel::become_child, peers::become_child];

/// Steps in the child after that, from the lowest layer to the highest.
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

/// Steps before a fork in a process where the library has no state left: releases what a child
/// would have to release.
pub const AT_REST: [fn(); 4] = [peers::become_child, waker::become_child, identity::become_child, drop_placeholders];

fn drop_placeholders() {
    let _ = pool::drain();
}
