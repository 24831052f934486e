//! What the sleeps of all calls have in common: until when, how a signal ends them, and the waker and
//! the monitor beside what they wait for.

#![no_std]

pub mod teased;
pub mod unjoined;
pub mod word;

use fsocket_fdtable::ctl;
use fsocket_runtime::signals;
use fsocket_shm::asleep::{self, On};
use fsocket_shm::waker::{self, Waker};
use fsocket_shm::{cancel, chan, trim};
use fsocket_sync::doorbell::Batch;
use fsocket_sys::{self as sys, Result};

/// Until when a call waits: nanoseconds of the clock, or for ever.
#[derive(Clone, Copy, Default)]
pub struct Deadline(Option<u64>);

impl Deadline {
    /// From now on; None: for ever.
    pub fn within(ns: Option<u64>) -> Self {
        Deadline(ns.map(|ns| sys::now_ns().saturating_add(ns)))
    }
    /// As SO_RCVTIMEO and SO_SNDTIMEO say it: 0 is for ever.
    pub fn of_option(ns: u64) -> Self {
        Deadline::within((ns != 0).then_some(ns))
    }
    pub fn left(self) -> Option<u64> {
        self.0.map(|t| t.saturating_sub(sys::now_ns()))
    }
    pub fn is_over(self) -> bool {
        self.left() == Some(0)
    }
    pub fn is_limited(self) -> bool {
        self.0.is_some()
    }
}

/// After EINTR: would the kernel have restarted a call on a socket that we stand in for? One with a
/// time limit never (`sock_intr_errno`).
pub fn restarts(limited: bool) -> bool {
    !limited && !cancel::hit() && signals::all_restart()
}

/// A waker for one sleep.
pub struct Sleeper {
    waker: &'static Waker,
    rang: bool,
}

impl Sleeper {
    pub fn new() -> Option<Self> {
        let waker = waker::get()?;
        waker.for_one_sleep();
        Some(Sleeper { waker, rang: false })
    }

    /// For an `accept` on this listener alone.
    pub fn in_accept(listener: u64) -> Option<Self> {
        let waker = waker::get()?;
        waker.for_listener(listener);
        Some(Sleeper { waker, rang: false })
    }

    /// Peers are asked to ring by `arm`, which also says in each channel that the waker sleeps
    /// ([`chan::Chan::sleep_on`]). What they publish from then on rings, and what they
    /// published before is seen by a look behind this.
    pub fn arm<R>(&self, arm: impl FnOnce(&'static Waker, &mut Batch<'static>) -> R) -> R {
        let mut batch = waker::arming();
        let r = arm(self.waker, &mut batch);
        batch.fence();
        r
    }

    /// Does `f` hold for its waker?
    pub fn is(&self, f: impl FnOnce(&'static Waker) -> bool) -> bool {
        f(self.waker)
    }

    /// The caller disarms by `disarm`, and gives the waker back.
    pub fn end(self, disarm: impl FnOnce(&'static Waker)) {
        disarm(self.waker);
        // A ring that comes only now ends a later sleep, which looks in vain.
        if self.rang {
            self.waker.clear();
        }
        self.waker.release();
    }
}

/// Room at the end of an array for [`sleep`].
pub const BESIDE: usize = 2;

/// `ppoll` on what is in `p`, on the waker and on the monitor; those two go into the last
/// [`BESIDE`] entries. [`heed`] comes afterwards.
///
/// # Safety
/// `mask` is null or a mask of the kernel's size.
pub unsafe fn sleep(
    p: &mut [libc::pollfd],
    sleeper: Option<&mut Sleeper>,
    left: Option<u64>,
    mask: *const libc::sigset_t,
) -> Result<usize> {
    let at = p.len() - BESIDE;
    let control = if ctl::dead() { -1 } else { ctl::fd() };
    for (p, fd) in p[at..].iter_mut().zip([sleeper.as_ref().map_or(-1, |s| s.waker.fd()), control]) {
        *p = libc::pollfd { fd, events: libc::POLLIN, revents: 0 };
    }
    trim::look_if_due();
    let left = unjoined::cut(if sleeper.is_some() { chan::cut(left) } else { left });
    let on = On { waker: sleeper.as_ref().map(|s| s.waker), ..On::default() };
    // SAFETY: `p` is a slice; the caller's mask.
    let r = asleep::sleep(&on, || unsafe { sys::ppoll(p.as_mut_ptr(), p.len(), left, mask) });
    if let Some(s) = sleeper {
        s.rang |= p[at].revents != 0;
    }
    r
}

/// After [`sleep`], when the waker is given back: what the monitor has said.
pub fn heed(p: &[libc::pollfd]) {
    if p.last().is_some_and(|control| control.revents != 0) {
        ctl::readable();
    }
}
