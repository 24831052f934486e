//! `fork`: afterwards both processes hold every socket.
//!
//! The parent announces the child to the monitor *before* the fork (ADOPT, with the child's own
//! control socket), and enters the child's nonce as a holder of every connection. So the monitor
//! and the peers see a correct count of holders, whatever parent and child do next.

use crate::exec::nothing_to_keep;
use crate::lifecycle::AT_REST;
use crate::lifecycle::{CHILD_AFTER, CHILD_BEFORE, LOCKS};
use crate::lock::Lock;
use crate::table::{Kind, DESCS};
use crate::{arena, chan, ctl, epoll, listen, path, peers, process, rings, route, short_lived, table, upgrade, zone};
use core::sync::atomic::{AtomicBool, Ordering};
use fsocket_abi::arena::Reason;
use fsocket_sys as sys;

/// State that the parent prepared for the child.
struct Prepared {
    nonce: u64,
    /// The child's control socket.
    fd: i32,
    locked: [bool; LOCKS.len()],
}
const NOTHING: Prepared = Prepared { nonce: 0, fd: -1, locked: [false; LOCKS.len()] };
#[link_section = ".data.fsocket_start"]
static PREPARED: Lock<Prepared> = Lock::new(NOTHING);
/// Is this fork one as in [`has_had`]?
#[link_section = ".data.fsocket_start"]
static HAS_HAD: AtomicBool = AtomicBool::new(false);

/// Has the library no state to keep, and is there no other thread that could begin to use it?
fn at_rest() -> bool {
    process::is_single_threaded() && nothing_to_keep()
}

/// Is no state of the library in use, although the process has used it before? Listeners in the
/// kernel do not count.
#[link_section = ".text.fsocket_start"]
fn has_had() -> bool {
    process::is_single_threaded()
        && epoll::is_unused()
        && rings::is_unused()
        && table::all().all(|d| d.is(Kind::KernelListener))
        && zone::none()
        && chan::none()
}

/// Called in the parent, before the fork.
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
        // From now on two processes share the placeholder.
        d.placeholder().mark_changed();
        d.forget_owners();
        peers::expect(d);
        let s = d.sock();
        if !s.add_holder(nonce) {
            s.add_extra_holder();
        }
    }
    // Without another thread none of these locks can be held. Taking one would write a page, which
    // the kernel then copies.
    let alone = process::is_single_threaded();
    process::note_alone(alone);
    let locked = LOCKS.map(|lock| !alone && (lock.take)());
    if let Ok(mut p) = PREPARED.lock() {
        *p = Prepared { nonce, fd, locked };
    }
}

/// Moves the listener to the kernel, because its connections are too short for shared memory.
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

/// Called in the parent, after the fork. If the fork failed, the monitor sees that the child's
/// control socket is closed, and removes the child as a holder.
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

/// Called in the child, after the fork.
#[link_section = ".text.fsocket_start"]
pub fn child() {
    crate::faults::become_child();
    crate::lent::become_child();
    if process::nonce() != 0 && !crate::sealed::sealed() && (HAS_HAD.load(Ordering::Relaxed) || at_rest()) {
        // Writes few pages, because the kernel copies each page that is written here.
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
    // A signal handler may have used a connection between `prepare` and the fork.
    (0..DESCS.len()).filter_map(|i| DESCS.get(i)).for_each(table::Desc::forget_owners);
    if process::nonce() == 0 || crate::sealed::sealed() {
        return;
    }
    PREPARED.reset_after_fork();
    let Ok(p) = PREPARED.lock() else { return };
    let (nonce, fd, locked) = (p.nonce, p.fd, p.locked);
    drop(p);
    // The nonce is 0 if a signal handler made the first socket during the fork, so `prepare` did
    // nothing.
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
