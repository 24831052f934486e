//! Starts to track an epoll instance when the program makes it.

use super::instance::EPS;
use crate::table::{self, Kind};
use crate::{process, zone};
use core::sync::atomic::Ordering;

/// The kernel has created an instance. If there is no memory to track it, the kernel alone serves the instance and its
/// entries (`ctl_elsewhere`).
pub fn track(fd: i32) {
    if !process::enabled() && !zone::enabled() {
        return;
    }
    let Some((i, ep)) = EPS.alloc() else { return };
    let Some(d) = table::alloc(Kind::Epoll) else {
        EPS.free(i);
        return;
    };
    ep.fd.store(fd, Ordering::Relaxed);
    ep.waker.store(0, Ordering::Relaxed);
    ep.items.store(0, Ordering::Relaxed);
    ep.looked_at.store(0, Ordering::Relaxed);
    ep.plain.store(0, Ordering::Relaxed);
    ep.left_in.store(0, Ordering::Relaxed);
    ep.kernel.store(false, Ordering::Relaxed);
    ep.ctl_added.store(false, Ordering::Relaxed);
    ep.zoned.store(false, Ordering::Relaxed);
    ep.array.store(0, Ordering::Relaxed);
    ep.unsubscribed.reset();
    ep.shared.store(false, Ordering::Relaxed);
    ep.nested.store(false, Ordering::Relaxed);
    ep.inherited.store(false, Ordering::Relaxed);
    ep.recheck.store(false, Ordering::Relaxed);
    ep.wrapper.reset();
    ep.pulses.store(0, Ordering::Relaxed);
    ep.one_shot.store(false, Ordering::Relaxed);
    ep.spin.reset();
    ep.lock.reset_after_fork();
    if let Ok(mut g) = ep.lock.lock() {
        (g.n, g.sleepers, g.may_listen, g.crowded, g.kernel_busy) = (0, 0, false, false, false);
        g.links.clear();
    }
    d.become_instance(i);
    if !table::install(fd, d) {
        table::release(d);
        EPS.free(i);
    }
}
