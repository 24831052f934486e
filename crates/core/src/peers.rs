//! Is the other side still there? The monitor says so; while none lives, each
//! side looks for itself, where it would otherwise wait for ever.
//!
//! Each side names the processes that hold its end, and the namespace in which
//! their numbers mean something. Only if each of them is certainly gone the end
//! is closed in their name, as the monitor would. Whatever is uncertain (another
//! namespace, a child that has not entered itself, more processes than there is
//! room for) counts as alive. A peer that lies ends nobody's connection but its
//! own.

use crate::table::{Desc, DESCS};
use crate::{ctl, path, process};
use core::sync::atomic::{AtomicU64, Ordering};
use fsocket_abi::channel::{status, Prod};
use fsocket_sys::{self as sys, Errno};

/// A child is being forked and will enter itself; if it cannot, this stays.
const EXPECTED: u32 = u32::MAX;

fn own(d: &Desc) -> &Prod {
    &d.tx().1.prod
}

/// This process has a new connection.
pub fn enter(d: &Desc) {
    let p = own(d);
    p.ns.store(process::pid_namespace(), Ordering::Relaxed);
    p.pids[0].store(process::pid(), Ordering::Relaxed);
}

/// This process has a connection of the program before it (`exec`: the number
/// stands there already; `posix_spawn`: it does not).
pub fn join(d: &Desc) {
    let (p, me) = (own(d), process::pid());
    if p.pids.iter().any(|n| n.load(Ordering::Acquire) == me) {
        return;
    }
    expect(d);
    settle_in(p, me);
}

/// Before a fork: another process is about to hold the connection.
pub fn expect(d: &Desc) {
    let p = own(d);
    let free = p.pids.iter().find(|n| n.compare_exchange(0, EXPECTED, Ordering::AcqRel, Ordering::Relaxed).is_ok());
    if free.is_none() {
        p.ns.store(0, Ordering::Release);
    }
}

/// In the forked child.
pub fn become_child() {
    for d in (0..DESCS.len()).filter_map(|i| DESCS.get(i)).filter(|d| d.is_conn()) {
        settle_in(own(d), process::pid());
    }
}

fn settle_in(p: &Prod, me: u32) {
    if p.ns.load(Ordering::Relaxed) != process::pid_namespace() {
        p.ns.store(0, Ordering::Release);
    }
    let _ = p.pids.iter().find(|n| n.compare_exchange(EXPECTED, me, Ordering::AcqRel, Ordering::Relaxed).is_ok());
}

/// This process closes the connection; relatives may go on.
pub fn leave(d: &Desc) {
    let me = process::pid();
    for n in &own(d).pids {
        let _ = n.compare_exchange(me, 0, Ordering::AcqRel, Ordering::Relaxed);
    }
}

/// While no monitor lives: close the connection in the name of the other side if
/// nobody is there any more. Called before and between sleeps.
pub fn look(d: &'static Desc) {
    if !ctl::dead() || !d.is_conn() || path::of(d) != path::Path::Shm {
        return;
    }
    let (_, tx, h) = d.tx();
    let p = &d.rx().1.prod;
    let over = status::CLOSED | status::RST | status::MOVING | status::MOVED;
    if p.status.load(Ordering::Acquire) & over != 0 || !gone(p) {
        return;
    }
    // As the kernel: what the dead had not read makes it a reset.
    let unread = fsocket_ring::unread(tx, h) != 0;
    let bits = status::CLOSED | if unread { status::RST } else { status::FIN };
    p.status.fetch_or(bits, Ordering::AcqRel);
    path::wake_own(d);
}

/// The same for every connection of this process, a few times a second at most.
pub fn look_at_all() {
    const EVERY_US: u64 = 100_000;
    static LAST: AtomicU64 = AtomicU64::new(0);
    if !ctl::dead() {
        return;
    }
    let now = sys::cpu::ticks();
    if now.wrapping_sub(LAST.load(Ordering::Relaxed)) >= EVERY_US * sys::cpu::ticks_per_us() {
        LAST.store(now, Ordering::Relaxed);
        (0..DESCS.len()).filter_map(|i| DESCS.get(i)).for_each(look);
    }
}

fn gone(p: &Prod) -> bool {
    let ns = p.ns.load(Ordering::Acquire);
    if ns == 0 || ns != process::pid_namespace() {
        return false;
    }
    let mut any = false;
    for n in &p.pids {
        match n.load(Ordering::Acquire) {
            0 => continue,
            pid if pid <= i32::MAX as u32 && has_ended(pid as i32) => any = true,
            _ => return false,
        }
    }
    any
}

/// Also if nobody has waited for it yet: its number is still there, its sockets would not be.
fn has_ended(pid: i32) -> bool {
    // SAFETY: no memory is involved.
    let pidfd = unsafe { sys::raw(libc::SYS_pidfd_open, [pid as usize, 0, 0, 0, 0, 0]) };
    let Ok(pidfd) = pidfd.map(|fd| fd as i32) else { return sys::kill(pid, 0) == Err(Errno::ESRCH) };
    let mut p = libc::pollfd { fd: pidfd, events: libc::POLLIN, revents: 0 };
    // SAFETY: one pollfd.
    let ended = unsafe { sys::ppoll(&mut p, 1, Some(0), core::ptr::null()) } == Ok(1);
    let _ = sys::close(pidfd);
    ended
}
