//! `epoll` over connections in shared memory and kernel descriptors together.
//!
//! The application's epoll instance is a real kernel instance. It watches kernel descriptors, the
//! library's waker and the control socket. For connections over shared memory the library keeps
//! *items*:
//!
//! - *active*: the library looks at the ring of the item on every call. An item becomes active
//!   when it is added or when its peer marks it ready.
//! - *armed*: the library has asked the peer to set a ready bit. Items are armed, in one batch
//!   with one fence, before a thread sleeps or when too many are active.
//!
//! So the cost of a call grows with the number of ready connections, not with the number of open
//! ones.

mod change;
mod create;
mod end;
mod instance;
mod item;
mod links;
mod out;
mod outer;
mod poll_list;
mod sleep;
mod successor;
mod waiting;
mod wrapper;

use crate::lock::Guard;
use crate::table::{self, Desc};
use crate::upcalls::upcalls;
use crate::{listen, process};
use core::sync::atomic::{fence, Ordering};
use fsocket_abi::arena::Reason;
use fsocket_sys::{self as sys, Errno};
use item::{Item, ITEMS};

pub use change::ctl;
pub use create::track as created;
pub use end::{destroy, overwritten};
pub use instance::is_unused;
use instance::{of, Ep, Inner, EPS};
pub use outer::{after_outer_sleep, before_outer_sleep, readable};
pub use waiting::wait;
pub use wrapper::{is_polled, renumbered, wrapper_of};

/// Frees the unused parts of the tables, which do not grow any more.
pub fn trim() {
    instance::EPS.trim();
    item::ITEMS.trim();
}

pub fn has_items(d: &Desc) -> bool {
    of(d).is_some_and(|ep| ep.items.load(Ordering::Relaxed) > 0)
}

/// A thread that slept in instance `i` has left the sleep by a `longjmp`, and will not return to
/// it.
pub fn sleep_abandoned(i: u32, plain: bool, inside: bool) {
    let Some(ep) = EPS.get(i) else { return };
    if inside {
        ep.woken_inside();
    }
    if plain {
        ep.plain.fetch_sub(1, Ordering::SeqCst);
    } else if let Ok(mut g) = ep.lock.lock() {
        g.sleepers = g.sleepers.saturating_sub(1);
    }
    ep.leave();
}

/// The program or the library has added a descriptor to the kernel's instance.
pub fn has_kernel_fds(d: &Desc) {
    if let Some(ep) = of(d).filter(|ep| !ep.kernel.load(Ordering::Relaxed)) {
        ep.kernel.store(true, Ordering::Relaxed);
    }
}

/// The kernel instance that belongs to `ed`, and a descriptor that the library has added to it.
/// (Adding this descriptor again fails with `EEXIST`.)
pub fn member(ed: &Desc) -> Option<(i32, i32)> {
    let ep = of(ed)?;
    let _g = ep.lock.lock().ok()?;
    Some((ep.home(), ep.need_waker()?.fd()))
}

/// Called before `epoll_ctl` on an instance that the library tracks. True: only the kernel knows
/// the descriptor `fd`, as is usual, and the caller calls the kernel. False: [`ctl`] handles it.
#[inline]
pub fn ctl_of_kernel_fd(ed: &Desc, fd: i32) -> bool {
    let its = table::lookup(fd).is_none() && !crate::process::owns(fd);
    if its {
        has_kernel_fds(ed);
    }
    its
}

/// Called for `epoll_ctl` on an instance that the library does not track, which only the kernel
/// handles. A descriptor of the library moves to the kernel first.
pub fn ctl_elsewhere(op: i32, fd: i32) {
    let Some(d) = table::lookup(fd) else { return };
    d.placeholder().mark_changed();
    if op != libc::EPOLL_CTL_DEL {
        (upcalls().used_below)(fd, Reason::Resource);
    }
}

/// Wakes a thread that sleeps in this instance, so that it looks at its items again.
fn wake_for_events(ep: &Ep, g: &Guard<'_, Inner>) {
    if g.sleepers > 0 || ep.plain.load(Ordering::SeqCst) > 0 || ep.nested.load(Ordering::Relaxed) {
        if let Some(b) = ep.need_waker() {
            b.ring_self();
        }
    }
}

/// Calls `f` for each item of a descriptor, under its instance's lock.
fn for_items(d: &Desc, mut f: impl FnMut(&'static Ep, &mut Guard<'_, Inner>, &'static Item)) {
    let mut it = item::first(d);
    let mut n = 0;
    while let Some(i) = it {
        it = i.next();
        if let Some(ep) = EPS.get(i.ep.load(Ordering::Relaxed)) {
            if let Ok(mut g) = ep.lock.lock() {
                f(ep, &mut g, i);
            }
        }
        n += 1;
        if n > 4096 {
            break;
        }
    }
}

/// This side of `d` has changed (shutdown, a full ring), so its items are looked at again.
pub fn changed(d: &Desc) {
    if !d.has_items() {
        return;
    }
    for_items(d, |ep, g, it| {
        g.activate(it);
        wake_for_events(ep, g);
    });
}

/// A descriptor that instances already watch in the kernel has become a connection over shared
/// memory.
pub fn became_conn(d: &Desc) {
    // As in `item::add`, the fence stands between the change and the look at the items.
    fence(Ordering::SeqCst);
    if !d.has_items() {
        return;
    }
    for_items(d, |ep, g, it| {
        it.is_ours_now(ep);
        if it.kernel.swap(false, Ordering::Relaxed) {
            d.placeholder().set_watched(false);
            let _ =
                sys::epoll_ctl(ep.fd.load(Ordering::Relaxed), libc::EPOLL_CTL_DEL, it.fd.load(Ordering::Relaxed), None);
        }
        // Earlier reports concerned another connection, or none.
        it.forget_edges();
        g.activate(it);
        wake_for_events(ep, g);
    });
}

/// A connection has moved to the kernel, so its descriptors are kernel sockets now. `also`: the
/// descriptor under which the kernel end was watched until now.
pub fn migrated_to_kernel(d: &Desc, also: Option<i32>) {
    while let Some(it) = item::pop(d) {
        let Some(ep) = EPS.get(it.ep.load(Ordering::Relaxed)) else { continue };
        ep.kernel.store(true, Ordering::Relaxed);
        let kfd = ep.fd.load(Ordering::Relaxed);
        if let Some(also) = also {
            let _ = sys::epoll_ctl(kfd, libc::EPOLL_CTL_DEL, also, None);
        }
        let (ev, fd) = (it.event(), it.fd.load(Ordering::Relaxed));
        watch_in_kernel(ep, d, fd, &ev);
        if let Ok(mut g) = ep.lock.lock() {
            item::kill(ep, &mut g, it);
        };
    }
}

/// A forked child may have moved to the kernel first. It has then added the same socket to the
/// shared instance, with the events that were set at the time of the fork.
fn watch_in_kernel(ep: &Ep, d: &Desc, fd: i32, ev: &libc::epoll_event) {
    let kfd = ep.fd.load(Ordering::Relaxed);
    if !table::lookup(fd).is_some_and(|now| core::ptr::eq(now, d)) {
        // The program has closed this descriptor, and has the connection under another one. The
        // kernel keeps an entry of an instance as long as the file is open, even if the
        // descriptor is closed.
        let copy = |other| sys::fcntl(other, libc::F_DUPFD_CLOEXEC, 0).map(process::high_fd);
        if let Some(Ok(copy)) = table::fd_of(d).map(copy) {
            let _ = sys::epoll_ctl(kfd, libc::EPOLL_CTL_ADD, copy, Some(ev));
            process::close_own(copy);
        }
        return;
    }
    let added = sys::epoll_ctl(kfd, libc::EPOLL_CTL_ADD, fd, Some(ev));
    if added == Err(Errno::EEXIST) && !ep.inherited.load(Ordering::Relaxed) {
        let _ = sys::epoll_ctl(kfd, libc::EPOLL_CTL_MOD, fd, Some(ev));
    }
}

/// A connection has moved to the kernel for some time only. Instances that watched `d`, or `also`
/// as its kernel end, watch `next` from now on, in the kernel.
pub fn watched_in_kernel(d: &Desc, next: &Desc, also: Option<i32>) {
    while let Some(it) = item::pop(d) {
        let Some(ep) = EPS.get(it.ep.load(Ordering::Relaxed)) else { continue };
        let kfd = ep.fd.load(Ordering::Relaxed);
        if let Some(also) = also {
            let _ = sys::epoll_ctl(kfd, libc::EPOLL_CTL_DEL, also, None);
        }
        let (ev, fd) = (it.event(), it.fd.load(Ordering::Relaxed));
        watch_in_kernel(ep, d, fd, &ev);
        next.placeholder().set_watched(true);
        if let Ok(mut g) = ep.lock.lock() {
            item::kill(ep, &mut g, it);
            let _ = item::add(ep, &mut g, next, fd, &ev, true);
        };
        // Another process may ask for the connection to move back while all threads sleep here.
        ep.watch_ctl();
    }
}

/// From now on the kernel end of a connection is watched beside its ring.
pub fn also_kernel(d: &Desc, fd: i32) {
    for_items(d, |ep, g, it| {
        let _ = sys::epoll_ctl(ep.fd.load(Ordering::Relaxed), libc::EPOLL_CTL_ADD, fd, Some(&it.event()));
        ep.kernel.store(true, Ordering::Relaxed);
        g.activate(it);
    });
}

/// Does the `epoll_ctl` call of the program for the kernel end, too.
fn also(d: &Desc, kfd: i32, op: i32, ev: Option<&libc::epoll_event>) {
    if let Some(end) = table::end_of(d).filter(|_| d.is_conn()) {
        let _ = sys::epoll_ctl(kfd, op, end, ev);
    }
}

/// A descriptor stays with the kernel, which watches it already, so its items are removed.
pub fn leave_to_kernel(d: &Desc) {
    forget_items(d, true);
}

fn forget_items(d: &Desc, to_kernel: bool) {
    while let Some(it) = item::pop(d) {
        if let Some(ep) = EPS.get(it.ep.load(Ordering::Relaxed)) {
            if to_kernel {
                ep.kernel.store(true, Ordering::Relaxed);
            }
            if let Ok(mut g) = ep.lock.lock() {
                item::kill(ep, &mut g, it);
            }
        }
    }
}

/// The program has closed a descriptor. The items are removed with the last descriptor of a
/// description.
pub fn fd_closed(fd: i32, d: &Desc, last: bool) {
    if let Some(ep) = of(d).filter(|ep| !last && ep.fd.load(Ordering::Relaxed) == fd) {
        // The instance continues under another descriptor.
        if let Some(other) = table::fd_of(d) {
            ep.fd.store(other, Ordering::Relaxed);
        }
    }
    if last && d.has_items() {
        forget_items(d, false);
    }
}

/// A listener has another channel, so threads that wait for it must look again and arm its items
/// there.
pub fn listener_changed(id: u64) {
    // This is the order that `waker::arming` relies on: change, fence, look.
    fence(Ordering::SeqCst);
    let those = listen::used().filter(|l| l.id.load(Ordering::Relaxed) == id);
    those.filter_map(listen::Listener::desc).for_each(|d| look_again(d, false));
}

/// Called when a listener is shut down for writing. The kernel then wakes the listener's watchers
/// although nothing changes, so waiting connections count as an edge again.
pub fn stirred(d: &Desc) {
    look_again(d, true);
}

fn look_again(d: &Desc, edge: bool) {
    let mut it = item::first(d);
    while let Some(i) = it {
        it = i.next();
        if edge {
            i.forget_edges();
        }
        // The next wait activates the item; a sleeping thread is woken.
        i.recheck.store(true, Ordering::Release);
        let Some(ep) = EPS.get(i.ep.load(Ordering::Relaxed)) else { continue };
        if !edge {
            i.is_ours_now(ep);
        }
        ep.recheck.store(true, Ordering::Release);
        if let Some(b) = ep.waker() {
            b.ring_self();
        }
    }
}

/// A socket that instances already watch has become a listener of the library.
pub fn became_listener(d: &Desc) {
    if !d.has_items() {
        return;
    }
    if let Some(l) = listen::of(d) {
        l.join();
    }
    for_items(d, |ep, g, it| {
        ep.watch_ctl();
        it.forget_edges();
        g.activate(it);
        wake_for_events(ep, g);
    });
}

/// The control socket has been replaced: instances watch the new one. (The old one is closed, so
/// no instance watches it any more.)
pub fn another_control() {
    for i in 0..EPS.len() {
        let Some(ep) = EPS.get(i) else { continue };
        if ep.ctl_added.swap(false, Ordering::AcqRel) || ep.waker().is_some() {
            ep.watch_ctl();
        }
    }
}

/// Called before a fork: the child will have all instances, and may wait in them.
pub fn before_fork() {
    for ep in (0..EPS.len()).filter_map(|i| EPS.get(i)) {
        if ep.shared.swap(true, Ordering::SeqCst) {
            continue;
        }
        if let Some(b) = ep.waker() {
            // (If the instance has a wrapper, the waker is there and not in the instance.)
            let _ = sys::epoll_ctl(ep.fd.load(Ordering::Relaxed), libc::EPOLL_CTL_MOD, b.fd(), Some(&ep.waker_event()));
        }
    }
}

/// In a forked child: no wakers exist, and no item is armed.
#[link_section = ".text.fsocket_start"]
pub fn become_child() {
    item::reset_lock_after_fork();
    for i in 0..EPS.len() {
        let Some(ep) = EPS.get(i) else { continue };
        ep.lock.reset_after_fork();
        ep.waker.store(0, Ordering::Relaxed);
        if ep.left_in.load(Ordering::Relaxed) != 0 {
            // The threads that slept in the instance are not in this process.
            ep.left_in.store(1, Ordering::Relaxed);
            ep.leave();
            continue;
        }
        ep.ctl_added.store(false, Ordering::Relaxed);
        ep.inherited.store(true, Ordering::Relaxed);
        ep.wrapper.become_child();
        if let Ok(mut g) = ep.lock.lock() {
            g.sleepers = 0;
            g.links.clear();
        }
    }
    for i in 0..ITEMS.len() {
        let Some(it) = ITEMS.get(i) else { continue };
        if it.live.load(Ordering::Relaxed) {
            if let Some(ep) = EPS.get(it.ep.load(Ordering::Relaxed)) {
                if it.listener().is_some() {
                    // The child has no waker, so the item counts as active.
                    it.is_ours_now(ep);
                }
                if let Ok(mut g) = ep.lock.lock() {
                    g.activate(it);
                }
            }
        }
    }
}
