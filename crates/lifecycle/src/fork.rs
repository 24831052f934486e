//! `fork`: both processes hold every socket afterwards.
//!
//! The parent announces the child *before* the fork (ADOPT, with the child's
//! own control socket) and enters its nonce as a holder of every connection, so
//! that whatever the two do next, in whatever order, the monitor and the peers
//! see a consistent count.

use crate::exec::nothing_to_keep;
use crate::lifecycle::AT_REST;
use crate::lifecycle::{CHILD_AFTER, CHILD_BEFORE, LOCKS};
use crate::lock::Lock;
use crate::table::{Kind, DESCS};
use crate::{arena, chan, ctl, epoll, listen, path, peers, process, rings, route, short_lived, table, upgrade, zone};
use core::sync::atomic::{AtomicBool, Ordering};
use fsocket_abi::arena::Reason;
use fsocket_sys as sys;

/// What the parent prepared for the child.
struct Prepared {
    nonce: u64,
    /// The child's control socket, and the monitor's end until it is sent.
    fd: i32,
    locked: [bool; LOCKS.len()],
}
const NOTHING: Prepared = Prepared { nonce: 0, fd: -1, locked: [false; LOCKS.len()] };
#[link_section = ".data.fsocket_start"]
static PREPARED: Lock<Prepared> = Lock::new(NOTHING);
/// Of the fork that is under way: see [`has_had`].
#[link_section = ".data.fsocket_start"]
static HAS_HAD: AtomicBool = AtomicBool::new(false);

/// Is there nothing to keep, and no other thread, which might just be about to begin something?
fn at_rest() -> bool {
    process::is_single_threaded() && nothing_to_keep()
}

/// Is nothing of ours in use, in a process that has had something? Listeners that are the kernel's do not count.
#[link_section = ".text.fsocket_start"]
fn has_had() -> bool {
    process::is_single_threaded()
        && epoll::is_unused()
        && rings::is_unused()
        && table::all().all(|d| d.is(Kind::KernelListener))
        && zone::none()
        && chan::none()
}

/// Before the fork, in the parent.
#[link_section = ".text.fsocket_start"]
pub fn prepare() {
    upgrade::unix::before_fork();
    if process::nonce() == 0 || crate::sealed::sealed() || at_rest() {
        return;
    }
    prepare_all();
}

#[inline(never)]
fn prepare_all() {
    if let Some(listener) = short_lived::before_fork() {
        give_to_kernel(listener);
    }
    if has_had() {
        process::note_alone(true);
        HAS_HAD.store(true, Ordering::Relaxed);
        return AT_REST.iter().for_each(|step| step());
    }
    HAS_HAD.store(false, Ordering::Relaxed);
    for d in (0..DESCS.len()).filter_map(|i| DESCS.get(i)) {
        if d.is_unconnected() && d.is_used() {
            listen::keep_for_fork_group(d);
        }
    }
    upgrade::before_fork();
    epoll::before_fork();
    let conns = || (0..DESCS.len()).filter_map(|i| DESCS.get(i)).filter(|d| d.is_conn());
    let nonce = sys::getrandom_u64() | 1;
    zone::prepare();
    let state = listen::any() || zone::any() || conns().next().is_some();
    let fd = if state && !ctl::dead() { ctl::announce(nonce, false).unwrap_or(-1) } else { -1 };
    for d in conns() {
        // The placeholder is one kernel socket in two processes.
        d.placeholder().mark_changed();
        d.forget_owners();
        peers::expect(d);
        let s = d.sock();
        if !s.add_holder(nonce) {
            s.add_extra_holder();
        }
    }
    // Without another thread nobody is in the middle of what these locks guard, and each of them
    // would be another page that both processes write.
    let alone = process::is_single_threaded();
    process::note_alone(alone);
    let locked = LOCKS.map(|lock| !alone && (lock.take)());
    if let Ok(mut p) = PREPARED.lock() {
        *p = Prepared { nonce, fd, locked };
    }
}

/// The connections of this listener are too short for us.
fn give_to_kernel(listener: &'static table::Desc) {
    path::abandon(listener, Reason::ShortLived);
    listener.unlisten(true);
    zone::leave(listener, Reason::ShortLived);
}

fn unlock(locked: [bool; LOCKS.len()]) {
    for (taken, lock) in locked.iter().zip(LOCKS) {
        if *taken {
            (lock.give_back)();
        }
    }
}

/// After the fork, in the parent (also when it failed: the monitor then sees
/// the child's socket closed and takes its holdings back).
#[link_section = ".text.fsocket_start"]
pub fn parent() {
    if process::nonce() == 0 || crate::sealed::sealed() || at_rest() {
        return;
    }
    short_lived::after_fork();
    if HAS_HAD.load(Ordering::Relaxed) {
        return;
    }
    if let Ok(mut p) = PREPARED.lock() {
        unlock(p.locked);
        if p.fd >= 0 {
            process::close_own(p.fd);
        }
        *p = NOTHING;
    }
}

/// After the fork, in the child.
#[link_section = ".text.fsocket_start"]
pub fn child() {
    crate::faults::become_child();
    crate::lent::become_child();
    if process::nonce() != 0 && !crate::sealed::sealed() && (HAS_HAD.load(Ordering::Relaxed) || at_rest()) {
        // Each page that is written here is copied: as few as possible.
        process::become_another(sys::getrandom_u64() | 1);
        route::clear();
        if HAS_HAD.load(Ordering::Relaxed) {
            arena::become_child();
        }
        ctl::become_child(None);
        return;
    }
    child_of_all();
}

#[inline(never)]
#[link_section = ".text.fsocket_start"]
fn child_of_all() {
    // A signal handler may have sent between `prepare` and the fork.
    (0..DESCS.len()).filter_map(|i| DESCS.get(i)).for_each(table::Desc::forget_owners);
    if process::nonce() == 0 || crate::sealed::sealed() {
        return;
    }
    PREPARED.reset_after_fork();
    let Ok(p) = PREPARED.lock() else { return };
    let (nonce, fd, locked) = (p.nonce, p.fd, p.locked);
    drop(p);
    // (A handler on top of the fork has made the first socket: nothing was prepared.)
    let nonce = if nonce == 0 { sys::getrandom_u64() | 1 } else { nonce };
    unlock(locked);
    ctl::unlock_after_fork();
    process::become_another(nonce);
    let _errno = sys::errno::Saved::errno();
    CHILD_BEFORE.iter().for_each(|step| step());
    ctl::become_child((fd >= 0).then_some(fd));
    CHILD_AFTER.iter().for_each(|step| step());
    listen::become_child();
}
