//! `epoll_ctl`: adds, changes and removes items. The kernel's instance and the items agree after
//! each call, because the program gets the kernel's result.

use super::instance::{of, Ep, Inner};
use super::{also, has_kernel_fds, item, leave_to_kernel, wake_for_events};
use crate::lock::Guard;
use crate::table::{self, Desc, Kind};
use crate::upcalls::upcalls;
use crate::{listen, path, Cause, Outcome};
use core::sync::atomic::Ordering;
use fsocket_abi::arena::Reason;
use fsocket_abi::path_switch::{Event, Next};
use fsocket_sys::{self as sys, Errno, Result};

const ONESHOT: u32 = libc::EPOLLONESHOT as u32;

/// `epoll_ctl` on an instance that the library tracks.
///
/// # Safety
/// `ev` is null or valid; EPOLL_CTL_DEL does not look at it.
pub unsafe fn ctl(ed: &'static Desc, op: i32, fd: i32, ev: *const libc::epoll_event) -> Outcome<Result<()>> {
    let known = table::lookup(fd);
    if let Some(d) = known.filter(|d| d.kind() == Kind::Kernel && d.kernel().stays_everywhere()) {
        // The kernel's instance watches the connection already, so items would have no use.
        if d.has_items() {
            leave_to_kernel(d);
        }
        has_kernel_fds(ed);
        return Outcome::Kernel(Cause::NotOurs);
    }
    if let Some(d) = known.filter(|d| op == libc::EPOLL_CTL_DEL && d.path_state().next(Event::Look) == Next::Follow) {
        // A forked child that moved to the kernel earlier has added the kernel's socket to this
        // very instance.
        let _ = path::follow(d);
    }
    // SAFETY: `ev` is null or readable, unless `op` ignores it.
    let r = unsafe { ctl_one(ed, op, fd, ev) };
    let r = match r {
        Outcome::Done(Err(Errno::ENOMEM)) if op == libc::EPOLL_CTL_ADD => without_memory(ed, fd),
        r => r,
    };
    let (Some(d), Some(ep)) = (table::lookup(fd).filter(|d| crate::zone::of(d).is_some()), of(ed)) else { return r };
    // SAFETY: `ev` is null or readable, unless `op` does not look at it.
    let ev = if op == libc::EPOLL_CTL_DEL { None } else { unsafe { crate::user::get_if(ev) }.unwrap_or(None) };
    let kfd = ep.fd.load(Ordering::Relaxed);
    let r = r.or_kernel(|r| r, || sys::epoll_ctl(kfd, op, fd, ev.as_ref()));
    // This also covers a listener without a local socket; the monitor sends a message when there
    // is one.
    if r.is_ok() && crate::zone::watch::followed((kfd, ep.unsubscribed.waits()), op, fd, d, ev.as_ref()) {
        ep.zoned.store(true, Ordering::Relaxed);
        ep.watch_ctl();
    }
    Outcome::Done(r)
}

/// There is no memory for the item. The descriptor moves to the kernel, which may still have
/// memory.
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

/// Is the entry allowed? (The kernel refuses EPOLLEXCLUSIVE together with certain events and
/// objects.)
fn may_be_exclusive(op: i32, d: &Desc, events: u32) -> bool {
    const LEGAL: i32 = libc::EPOLLIN
        | libc::EPOLLOUT
        | libc::EPOLLERR
        | libc::EPOLLHUP
        | libc::EPOLLWAKEUP
        | libc::EPOLLET
        | libc::EPOLLEXCLUSIVE;
    let exclusive = events & libc::EPOLLEXCLUSIVE as u32 != 0;
    !exclusive || op != libc::EPOLL_CTL_MOD && d.kind() != Kind::Epoll && events & !(LEGAL as u32) == 0
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
        // If another process of the fork group listens later, this instance would not notice it.
        table::forget(d);
        ep.kernel.store(true, Ordering::Relaxed);
        return Outcome::Kernel(Cause::NotOurs);
    }
    let Ok(mut g) = ep.lock.lock() else { return Outcome::Done(Err(Errno::EAGAIN)) };
    let have = item::find(d, ep.index(), fd);
    // SAFETY: `ev` is not null, and the program says that it points to an event.
    let ev = if op == libc::EPOLL_CTL_DEL { None } else { Some(unsafe { ev.read_unaligned() }) };
    let illegal = ev.is_some_and(|ev| !may_be_exclusive(op, d, ev.events));
    if illegal || op == libc::EPOLL_CTL_MOD && have.is_some_and(|it| it.is_exclusive()) {
        return Outcome::Done(Err(Errno::EINVAL));
    }
    let kfd = ep.fd.load(Ordering::Relaxed);
    let conn = d.is_conn();
    also(d, kfd, op, ev.as_ref());
    Outcome::Done(match (op, have, ev) {
        (libc::EPOLL_CTL_ADD, Some(_), _) => Err(Errno::EEXIST),
        (libc::EPOLL_CTL_ADD, None, Some(ev)) => add(ep, &mut g, d, fd, &ev),
        (libc::EPOLL_CTL_MOD, Some(it), Some(ev)) => {
            if it.kernel.load(Ordering::Relaxed) && ev.events & ONESHOT != 0 {
                ep.one_shot.store(true, Ordering::Relaxed);
                it.rearm();
            }
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
    if !conn && ev.events & ONESHOT != 0 {
        ep.one_shot.store(true, Ordering::Relaxed);
    }
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
        // `join` may bring channels, which changes the items of this very instance. But it does
        // not take the lock (see `listener_changed`).
        l.join();
    }
    if matches!(d.kind(), Kind::Kernel | Kind::Listener) {
        // Another process may ask for a kernel connection to change its path while all threads
        // sleep here.
        ep.watch_ctl();
    }
    wake_for_events(ep, g);
    Ok(())
}
