//! The end of an instance: its last descriptor is closed, and no thread sleeps in it.

use super::instance::{of, Ep, EPS, MAX_ACTIVE};
use super::item::{self, ITEMS};
use crate::table::{self, Desc};
use crate::{asleep, process};
use core::sync::atomic::Ordering;
use fsocket_sys::{self as sys, Errno};

/// If the application closes an instance, the library's copy gets a descriptor from here on,
/// above those that the application gets meanwhile.
const ABOVE: usize = 512;

/// The last descriptor of an instance has been overwritten (`dup2`), and belongs to another file
/// already.
pub fn overwritten(d: &Desc) {
    if let Some(ep) = of(d) {
        ep.fd.store(-1, Ordering::Relaxed);
    }
}

/// The application closed an instance.
pub fn destroy(d: &Desc) {
    let Some(ep) = of(d) else { return };
    if !ep.goes_on() {
        end(ep);
    }
}

impl Ep {
    /// Continues a closed instance if threads sleep in it. As in the kernel, such threads still
    /// get its events. True: such threads exist.
    fn goes_on(&self) -> bool {
        // The end is put off while a thread is in the instance.
        let may = self.plain.load(Ordering::SeqCst) > 0 || self.lock.lock().is_ok_and(|g| g.sleepers > 0);
        let asleep = if may { asleep::threads_in(self.index()) } else { 0 };
        if asleep == 0 {
            return false;
        }
        let fd = self.fd.load(Ordering::Relaxed);
        let own = if fd < 0 { Err(Errno::EBADF) } else { sys::fcntl(fd, libc::F_DUPFD_CLOEXEC, ABOVE) };
        self.fd.store(own.map_or(-1, process::high_fd), Ordering::Relaxed);
        self.left_in.store(asleep, Ordering::Release);
        true
    }

    /// Called when the calling thread leaves [`wait()`].
    #[inline]
    pub(super) fn leave(&'static self) {
        if self.left_in.load(Ordering::Acquire) != 0 {
            self.leave_closed();
        }
    }

    #[cold]
    fn leave_closed(&'static self) {
        let less = |n: u32| n.checked_sub(1);
        if self.left_in.fetch_update(Ordering::AcqRel, Ordering::Acquire, less) == Ok(1) {
            let fd = self.fd.swap(-1, Ordering::Relaxed);
            end(self);
            if fd >= 0 {
                process::close_own(fd);
            }
        }
    }
}

/// Frees an instance that no thread uses any more.
fn end(ep: &Ep) {
    for i in 0..if ep.items.load(Ordering::Relaxed) == 0 { 0 } else { ITEMS.len() } {
        let Some(it) = ITEMS.get(i) else { continue };
        if it.live.load(Ordering::Relaxed) && it.ep.load(Ordering::Relaxed) == ep.index() {
            if let Some(w) = table::DESCS.get(it.desc.load(Ordering::Relaxed)) {
                item::unlink(w, it);
            }
            if let Ok(mut g) = ep.lock.lock() {
                item::kill(ep, &mut g, it);
            }
        }
    }
    if let Ok(mut g) = ep.lock.lock() {
        for k in 0..g.n {
            item::reclaim(g.at(k));
        }
        (g.n, g.dead) = (0, 0);
        if !g.active.is_null() {
            // SAFETY: the lock is held, and the list is empty.
            let _ = unsafe { sys::munmap(g.active as *mut u8, MAX_ACTIVE * 4) };
            g.active = core::ptr::null_mut();
        }
        g.links.free();
    }
    if let Some(b) = ep.waker() {
        ep.waker.store(0, Ordering::Release);
        for other in (0..EPS.len()).filter_map(|i| EPS.get(i)) {
            other.unhear(b);
        }
        let _ = sys::epoll_ctl(ep.home(), libc::EPOLL_CTL_DEL, b.fd(), None);
        b.retire();
    }
    ep.wrapper.close();
    EPS.free(ep.index());
}
