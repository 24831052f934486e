//! The sleep of `epoll_wait`, on the waker and on the kernel's descriptors. It looks at all items
//! once more after arming them, so that no event is missed.

use super::instance::Ep;
use super::out::{Out, Spoke};
use super::poll_list::{arm_all, marked, set_sleeping};
use crate::wait::{Call, Deadline, Mask, Sleep};
use crate::zone::watch;
use crate::{ctl, waker};
use core::sync::atomic::Ordering;
use fsocket_sync::block::{block, Wait};
use fsocket_sys::{cpu, Errno, Result};

/// Sleeps in the kernel until a waker or a kernel descriptor is ready, a signal comes, or the
/// deadline is over. `since`: receives the time when the sleep began, ticks.
pub(super) fn sleep(
    ep: &'static Ep,
    out: &mut Out,
    deadline: Deadline,
    (unarmed, since): (&mut waker::Unarmed, &mut Option<u64>),
    mask: Mask,
) -> Result<()> {
    block(&mut InInstance { ep, out, deadline, unarmed, since, mask, entered: false, armed: false })
}

struct InInstance<'a> {
    ep: &'static Ep,
    out: &'a mut Out,
    deadline: Deadline,
    unarmed: &'a mut waker::Unarmed,
    since: &'a mut Option<u64>,
    mask: Mask,
    /// This thread is counted in `sleepers`.
    entered: bool,
    /// All peers and the monitor have been asked to ring.
    armed: bool,
}

impl InInstance<'_> {
    /// Called when the sleep in the kernel is over: notes whether it was useful.
    fn account(&self, since: u64, r: Result<Spoke>) {
        let (ep, found) = (self.ep, self.out.n > 0);
        if ep.zoned.load(Ordering::Relaxed) {
            ep.unsubscribed.waited(ep.fd.load(Ordering::Relaxed), since, found);
            if !found && r == Ok(Spoke::Nobody) {
                ep.unsubscribed.attend(ep.fd.load(Ordering::Relaxed));
            }
        }
    }
}

impl Wait for InInstance<'_> {
    type Woken = Result<Spoke>;
    type End = Result<()>;

    fn arm(&mut self) {
        let ep = self.ep;
        // Checks all connections of the process for dead peers, because inactive items are in no
        // list of the instance.
        crate::peers::look_at_all();
        let Ok(mut g) = ep.lock.lock() else { return };
        // Without a monitor there are no wakers, and [`crate::wait`] limits the sleep.
        let armed = arm_all(ep, &mut g, ep);
        // The monitor announces a listener's new clients, so the control socket must be watched.
        let heard = !g.may_listen || ep.watch_ctl();
        self.armed = ctl::dead() || armed && heard;
        g.sleepers += 1;
        g.links.before_sleep();
        set_sleeping(&g, true);
        self.entered = true;
        drop(g);
        if ctl::is_unwatched() {
            watch::alone();
        }
    }

    fn look(&mut self) -> Option<Result<()>> {
        // This is a signal handler, which has interrupted this very thread while it held the
        // lock.
        if !self.entered {
            return Some(Err(Errno::EINTR));
        }
        let something = self.ep.lock.lock().map_or(true, |g| marked(self.ep, &g) || g.any_ready());
        something.then_some(Ok(()))
    }

    fn sleep(&mut self) -> Result<Spoke> {
        let own = self.ep.unsubscribed.sleep_limit();
        let unarmed = (!self.armed).then_some(&mut *self.unarmed);
        let t0 = cpu::ticks();
        let s = Sleep::of(Call::Epoll, self.deadline.left()).at_most(own).unarmed(unarmed);
        let r = self.out.sleep(self.ep, s, self.mask);
        *self.since = Some(t0);
        self.account(t0, r);
        r
    }

    fn disarm(&mut self) {
        if !core::mem::take(&mut self.entered) {
            return;
        }
        if let Ok(mut g) = self.ep.lock.lock() {
            g.sleepers = g.sleepers.saturating_sub(1);
            set_sleeping(&g, g.sleepers > 0);
            g.last_kernel = cpu::ticks();
            g.kernel_busy = self.out.n > 0;
        }
    }

    fn on_wake(&mut self, woken: Result<Spoke>) -> Option<Result<()>> {
        match woken {
            Ok(Spoke::Control) => control(self.ep),
            Ok(_) => {}
            Err(e) => return Some(Err(e)),
        }
        Some(Ok(()))
    }
}

/// A message of the monitor has come: reads and handles it.
pub(super) fn control(ep: &Ep) {
    ctl::readable();
    if ep.zoned.load(Ordering::Relaxed) {
        ep.unsubscribed.woken(ep.fd.load(Ordering::Relaxed));
        watch::late();
    }
    if ctl::dead() {
        ep.unwatch_ctl();
    }
}
