//! `epoll_ctl`.

use super::instance::{of, Ep, Inner};
use super::{also, has_kernel_fds, item, leave_to_kernel, wake_for_events};
use crate::lock::Guard;
use crate::table::{self, Desc, Kind};
use crate::upcalls::upcalls;
use crate::{listen, path, stage, Cause, Outcome};
use core::sync::atomic::Ordering;
use fsocket_abi::arena::Reason;
use fsocket_sys::{self as sys, Errno, Result};

/// `epoll_ctl` on an instance we know.
///
/// # Safety
/// `ev` is null or valid; to delete, it may be anything.
pub unsafe fn ctl(ed: &'static Desc, op: i32, fd: i32, ev: *const libc::epoll_event) -> Outcome<Result<()>> {
    let known = table::lookup(fd);
    if let Some(d) = known.filter(|d| d.kind() == Kind::Kernel && d.kernel().stays_everywhere()) {
        // The kernel's instance watches it already, and its items have no further use.
        if d.has_items() {
            leave_to_kernel(d);
        }
        has_kernel_fds(ed);
        return Outcome::Kernel(Cause::NotOurs);
    }
    if let Some(d) = known.filter(|d| op == libc::EPOLL_CTL_DEL && d.is_conn() && stage::can_follow(d)) {
        // A forked child that has followed the path before has added the kernel's socket to this very instance.
        let _ = path::follow(d);
    }
    // SAFETY: `ev` is null or readable, unless `op` does not look at it.
    let r = unsafe { ctl_one(ed, op, fd, ev) };
    let r = match r {
        Outcome::Done(Err(Errno::ENOMEM)) if op == libc::EPOLL_CTL_ADD => without_memory(ed, fd),
        r => r,
    };
    let (Some(d), Some(ep)) = (table::lookup(fd).filter(|d| crate::zone::of(d).is_some()), of(ed)) else { return r };
    // (EPOLL_CTL_DEL does not look at it.)
    // SAFETY: `ev` is null or readable, unless `op` does not look at it.
    let ev = if op == libc::EPOLL_CTL_DEL { None } else { unsafe { crate::user::get_if(ev) }.unwrap_or(None) };
    let kfd = ep.fd.load(Ordering::Relaxed);
    let r = r.or_kernel(|r| r, || sys::epoll_ctl(kfd, op, fd, ev.as_ref()));
    // Also where there is no local listen socket yet: the monitor says when.
    if r.is_ok() && crate::zone::watch::followed((kfd, ep.unsubscribed.waits()), op, fd, d, ev.as_ref()) {
        ep.zoned.store(true, Ordering::Relaxed);
        ep.watch_ctl();
    }
    Outcome::Done(r)
}

/// There is no memory for the item: the descriptor moves to the kernel, which may have some.
fn without_memory(ed: &Desc, fd: i32) -> Outcome<Result<()>> {
    (upcalls().used_below)(fd, Reason::Resource);
    match of(ed) {
        Some(ep) if !table::lookup(fd).is_some_and(|d| d.is_conn() || d.kind() == Kind::Epoll) => {
            ep.kernel.store(true, Ordering::Relaxed);
            Outcome::Kernel(Cause::Below)
        }
        _ => Outcome::Done(Err(Errno::ENOMEM)),
    }
}

/// # Safety
/// As [`ctl`].
unsafe fn ctl_one(ed: &'static Desc, op: i32, fd: i32, ev: *const libc::epoll_event) -> Outcome<Result<()>> {
    let Some(ep) = of(ed) else { return Outcome::Kernel(Cause::NotOurs) };
    let Some(d) = table::lookup(fd).filter(|d| !core::ptr::eq(*d, ed) && d.kind() != Kind::KernelListener) else {
        if crate::process::owns(fd) {
            return Outcome::Done(Err(Errno::EBADF));
        }
        ep.kernel.store(true, Ordering::Relaxed);
        return Outcome::Kernel(Cause::NotOurs);
    };
    if op != libc::EPOLL_CTL_DEL && ev.is_null() {
        return Outcome::Done(Err(Errno::EFAULT));
    }
    listen::look_at_fork_group(fd, d);
    if d.unconnected().was_forked() && d.kind() == Kind::Bound {
        // Another process of the fork group that listens later would not tell this instance.
        table::forget(d);
        ep.kernel.store(true, Ordering::Relaxed);
        return Outcome::Kernel(Cause::NotOurs);
    }
    let Ok(mut g) = ep.lock.lock() else { return Outcome::Done(Err(Errno::EAGAIN)) };
    let have = item::find(d, ep.index(), fd);
    // SAFETY: checked above; the caller's pointer.
    let ev = if op == libc::EPOLL_CTL_DEL { None } else { Some(unsafe { ev.read_unaligned() }) };
    if let Some(ev) = ev.filter(|ev| ev.events & libc::EPOLLEXCLUSIVE as u32 != 0) {
        const LEGAL: i32 = libc::EPOLLIN
            | libc::EPOLLOUT
            | libc::EPOLLERR
            | libc::EPOLLHUP
            | libc::EPOLLWAKEUP
            | libc::EPOLLET
            | libc::EPOLLEXCLUSIVE;
        if op == libc::EPOLL_CTL_MOD || d.kind() == Kind::Epoll || { ev.events } & !(LEGAL as u32) != 0 {
            return Outcome::Done(Err(Errno::EINVAL));
        }
    }
    if op == libc::EPOLL_CTL_MOD && have.is_some_and(|it| it.is_exclusive()) {
        return Outcome::Done(Err(Errno::EINVAL));
    }
    let kfd = ep.fd.load(Ordering::Relaxed);
    let conn = d.is_conn();
    also(d, kfd, op, ev.as_ref());
    Outcome::Done(match (op, have, ev) {
        (libc::EPOLL_CTL_ADD, Some(_), _) => Err(Errno::EEXIST),
        (libc::EPOLL_CTL_ADD, None, Some(ev)) => add(ep, &mut g, d, fd, &ev),
        (libc::EPOLL_CTL_MOD, Some(it), Some(ev)) => {
            let r = if it.kernel.load(Ordering::Relaxed) { sys::epoll_ctl(kfd, op, fd, Some(&ev)) } else { Ok(()) };
            r.map(|()| {
                it.set(&ev);
                g.activate(it);
                if it.enlist() {
                    g.put_last(it);
                }
                wake_for_events(ep, &g);
            })
        }
        (libc::EPOLL_CTL_DEL, Some(it), _) => {
            let r = if it.kernel.load(Ordering::Relaxed) { sys::epoll_ctl(kfd, op, fd, None) } else { Ok(()) };
            item::unlink(d, it);
            item::kill(ep, &mut g, it);
            r
        }
        (libc::EPOLL_CTL_MOD | libc::EPOLL_CTL_DEL, None, _) if conn => Err(Errno::ENOENT),
        _ => return Outcome::Kernel(Cause::Below),
    })
}

fn add(ep: &Ep, g: &mut Guard<'_, Inner>, d: &'static Desc, fd: i32, ev: &libc::epoll_event) -> Result<()> {
    if let Some(inner) = of(d) {
        inner.is_watched();
    }
    let conn = d.is_conn();
    if !conn {
        d.placeholder().set_watched(true);
    }
    let kernels = ep.fd.load(Ordering::Relaxed);
    if !conn {
        sys::epoll_ctl(kernels, libc::EPOLL_CTL_ADD, fd, Some(ev))?;
    }
    if let Err(e) = item::add(ep, g, d, fd, ev, !conn) {
        if !conn {
            let _ = sys::epoll_ctl(kernels, libc::EPOLL_CTL_DEL, fd, None);
        }
        return Err(e);
    }
    if let Some(l) = listen::of(d) {
        // That may hand us channels, which touches this very instance: items only, never the lock (see
        // `listener_changed`).
        l.join();
    }
    if matches!(d.kind(), Kind::Kernel | Kind::Listener) {
        // Of a kernel connection, somebody may ask for it to go over while all of us sleep here.
        ep.watch_ctl();
    }
    wake_for_events(ep, g);
    Ok(())
}
