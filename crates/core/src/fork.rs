//! `fork`: both processes hold every socket afterwards.
//!
//! The parent announces the child *before* the fork (ADOPT, with the child's
//! own control socket) and enters its nonce as a holder of every connection, so
//! that whatever the two do next, in whatever order, the monitor and the peers
//! see a consistent count.

use crate::lock::Lock;
use crate::table::{kind, DESCS};
use crate::{chan, ctl, epoll, exec, listen, peers, pool, process, route, table, unhooked, upgrade, waker, zone};
use core::sync::atomic::Ordering;
use fsocket_proto::{kind as msg, Msg};
use fsocket_sys as sys;

/// What the parent prepared for the child.
struct Prepared {
    nonce: u64,
    /// The child's control socket, and the monitor's end until it is sent.
    fd: i32,
    locked: [bool; 4],
}
const NOTHING: Prepared = Prepared { nonce: 0, fd: -1, locked: [false; 4] };
static PREPARED: Lock<Prepared> = Lock::new(NOTHING);

/// Is there nothing of ours that a forked child or the next program would have to put in order, as in
/// a shell?
pub fn nothing_to_keep() -> bool {
    DESCS.is_empty() && epoll::is_unused() && zone::is_unused() && crate::uring::is_unused() && !process::has_arena()
}

/// ... and no other thread, which might just be about to begin something.
fn at_rest() -> bool {
    nothing_to_keep() && process::is_single_threaded()
}

/// Before the fork, in the parent.
#[link_section = ".text.fsocket_start"]
pub fn prepare() {
    if process::nonce() == 0 || crate::sandbox::sealed() || at_rest() {
        return;
    }
    prepare_all();
}

#[inline(never)]
fn prepare_all() {
    for d in (0..DESCS.len()).filter_map(|i| DESCS.get(i)) {
        if matches!(d.kind(), kind::FRESH | kind::BOUND) && d.refs.load(Ordering::Relaxed) > 0 {
            listen::keep_for_fork_group(d);
        }
    }
    upgrade::give_up_all();
    epoll::before_fork();
    let conns = || (0..DESCS.len()).filter_map(|i| DESCS.get(i)).filter(|d| d.is_conn());
    let nonce = sys::getrandom_u64() | 1;
    zone::prepare();
    let state = listen::any() || zone::any() || conns().next().is_some();
    let fd = if state && !ctl::dead() { announce(nonce, false).unwrap_or(-1) } else { -1 };
    for d in conns() {
        // The placeholder is one kernel socket in two processes.
        d.dirty.store(true, Ordering::Relaxed);
        d.forget_owners();
        peers::expect(d);
        let s = d.sock();
        let free = s.holders.iter().find(|h| {
            h.load(Ordering::Relaxed) == 0 && h.compare_exchange(0, nonce, Ordering::AcqRel, Ordering::Relaxed).is_ok()
        });
        if free.is_none() {
            s.extra_holders.fetch_add(1, Ordering::AcqRel);
        }
    }
    let locked = [ctl::lock_for_fork(), process::lock_for_fork(), pool::lock_for_fork(), route::lock_for_fork()];
    if let Ok(mut p) = PREPARED.lock() {
        *p = Prepared { nonce, fd, locked };
    }
}

/// Tell the monitor of a child, or of the `successor` that replaces this program.
/// Returns its control socket.
pub fn announce(nonce: u64, successor: bool) -> Option<i32> {
    let [child, monitor] = sys::socketpair(libc::AF_UNIX, libc::SOCK_SEQPACKET | libc::SOCK_CLOEXEC).ok()?;
    // What the child sends before the monitor has read this says already who the child is.
    let _ = sys::setsockopt(monitor, libc::SOL_SOCKET, libc::SO_PASSCRED, &1i32.to_ne_bytes());
    let mut m = Msg::new(msg::ADOPT);
    m.id = nonce;
    m.arg0 = successor.into();
    let sent = ctl::tell(m, Some(monitor));
    let _ = sys::close(monitor);
    if !sent {
        let _ = sys::close(child);
        return None;
    }
    Some(process::high_fd(child))
}

fn unlock(locked: [bool; 4]) {
    let undo: [fn(); 4] =
        [ctl::unlock_after_fork, process::unlock_after_fork, pool::unlock_after_fork, route::unlock_after_fork];
    for (l, u) in locked.iter().zip(undo) {
        if *l {
            u();
        }
    }
}

/// After the fork, in the parent (also when it failed: the monitor then sees
/// the child's socket closed and takes its holdings back).
#[link_section = ".text.fsocket_start"]
pub fn parent() {
    if process::nonce() == 0 || crate::sandbox::sealed() || at_rest() {
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
    if process::nonce() != 0 && !crate::sandbox::sealed() && at_rest() {
        // Each page that is written here is copied: as few as possible.
        process::become_another(sys::getrandom_u64() | 1);
        ctl::become_child(None);
        return;
    }
    child_of_all();
}

#[inline(never)]
fn child_of_all() {
    // A signal handler may have sent between `prepare` and the fork.
    (0..DESCS.len()).filter_map(|i| DESCS.get(i)).for_each(table::Desc::forget_owners);
    if process::nonce() == 0 || crate::sandbox::sealed() {
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
    process::become_child(nonce);
    exec::become_child();
    crate::uring::become_child();
    crate::cancel::become_child();
    peers::become_child();
    ctl::become_child((fd >= 0).then_some(fd));
    route::reset_after_fork();
    waker::become_child();
    for c in chan::all() {
        c.reset_lock_after_fork();
        if c.my_side() == fsocket_abi::channel::CLIENT {
            // The parent hands out its slots; what is open stays usable.
            c.retired.store(true, Ordering::Relaxed);
        }
    }
    listen::become_child();
    table::become_child();
    unhooked::become_child();
    crate::pidfd_transfer::become_child();
    upgrade::become_child();
    crate::opts::before::become_child();
    zone::become_child();
    epoll::become_child();
    pool::drain();
    crate::asleep::become_child();
}
