//! The application's array of events, and the kernel's part of it.

use super::instance::{Ep, CTL_MARK, WAKER_MARK};
use super::wrapper;
use crate::asleep::{self, On};
use crate::zone::{balance, watch};
use crate::{ctl, user};
use core::sync::atomic::Ordering;
use fsocket_sys::{self as sys, cpu, Result};

/// Which of our own descriptors were among the kernel's events.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Spoke {
    Nobody,
    /// The waker.
    Own,
    Control,
    /// Another worker's listen socket.
    Peer,
}

/// Events that are looked at before the caller's array is written to.
const FEW: usize = 128;

/// The application's array, filled from the front.
pub(super) struct Out {
    pub(super) evs: *mut libc::epoll_event,
    pub(super) max: usize,
    pub(super) n: usize,
    /// So many of the first are the kernel's.
    pub(super) from_kernel: usize,
}

impl Out {
    pub(super) fn push(&mut self, events: u32, data: u64) {
        debug_assert!(self.n < self.max);
        // SAFETY: below `max`; the array may be unaligned (packed on x86-64).
        unsafe { self.evs.add(self.n).write_unaligned(libc::epoll_event { events, u64: data }) };
        self.n += 1;
    }
    pub(super) fn full(&self) -> bool {
        self.n >= self.max
    }
    /// Is a listener, which can be ready in both worlds, in the array already?
    pub(super) fn has(&self, data: u64) -> bool {
        self.reported(data, self.from_kernel)
    }
    fn reported(&self, data: u64, upto: usize) -> bool {
        // SAFETY: entries below `n` are written.
        (0..upto.min(self.n)).any(|i| unsafe { self.evs.add(i).read_unaligned() }.u64 == data)
    }

    /// As [`Out::kernel`], where nothing is ours but perhaps local listen sockets.
    ///
    /// `start`: when a `timeout` that is not 0 has begun, nanoseconds.
    ///
    /// # Safety
    /// As [`super::wait()`].
    pub(super) unsafe fn plain(
        &mut self,
        ep: &Ep,
        timeout: Option<u64>,
        start: u64,
        mask: *const libc::sigset_t,
    ) -> Result<Spoke> {
        let end = timeout.map(|t| start.saturating_add(t));
        let mut left = timeout;
        loop {
            let zoned = ep.zoned.load(Ordering::Relaxed);
            if zoned && !ep.ctl_added.load(Ordering::Relaxed) {
                // There may be a monitor again.
                ep.watch_ctl();
            }
            if !zoned {
                // SAFETY: `out` leads to room for the program's events, which `wait` has looked at; the mask is null
                // or readable.
                return unsafe { self.kernel(ep, left, mask, true) };
            }
            let piece = if left == Some(0) { left } else { ep.unsubscribed.cut(ctl::unwatched()) };
            let whole = piece.is_none_or(|p| left.is_some_and(|l| l <= p));
            let since = cpu::ticks();
            // SAFETY: `out` leads to room for the program's events, which `wait` has looked at; the mask is null or
            // readable.
            let spoke = unsafe { self.kernel(ep, if whole { left } else { piece }, mask, true) }?;
            ep.unsubscribed.waited(ep.fd.load(Ordering::Relaxed), since, self.n > 0);
            if whole || self.n > 0 || spoke != Spoke::Nobody {
                return Ok(spoke);
            }
            ep.unsubscribed.attend(ep.fd.load(Ordering::Relaxed));
            if ctl::unwatched().is_some() {
                watch::alone();
            }
            left = end.map(|t| t.saturating_sub(sys::now_ns()));
        }
    }

    /// Add listeners that would get something from another worker's queue.
    pub(super) fn peers(&mut self, ep: &Ep) {
        balance::look(ep.fd.load(Ordering::Relaxed), |events, data| {
            if !self.full() && !self.reported(data, self.n) {
                self.push(events, data);
            }
        });
    }

    /// Add what the kernel has. `plain`: the caller is [`Out::plain`].
    ///
    /// # Safety
    /// As [`super::wait()`].
    pub(super) unsafe fn kernel(
        &mut self,
        ep: &Ep,
        timeout: Option<u64>,
        mask: *const libc::sigset_t,
        plain: bool,
    ) -> Result<Spoke> {
        if self.full() {
            return Ok(Spoke::Nobody);
        }
        if timeout == Some(0) {
            // SAFETY: `out` leads to room for the program's events, which `wait` has looked at; the mask is null or
            // readable.
            return unsafe { self.inside(ep, timeout, mask, plain) };
        }
        let Some(wrapper) = ep.sleeps_in() else {
            // SAFETY: `out` leads to room for the program's events, which `wait` has looked at; the mask is null or
            // readable.
            let r = unsafe { self.inside(ep, timeout, mask, plain) };
            ep.woken_inside();
            return r;
        };
        let mut few = [libc::epoll_event { events: 0, u64: 0 }; 16];
        // SAFETY: 16 entries; the caller's mask.
        let look = || unsafe { sys::epoll_wait(wrapper, few.as_mut_ptr(), few.len() as i32, timeout, mask) };
        let k = asleep::sleep(&On { ep: Some(ep.index()), plain, ..On::default() }, look)?;
        let mut spoke = if k > 0 { Spoke::Own } else { Spoke::Nobody };
        let mut inner = false;
        for e in &few[..k.min(few.len())] {
            match e.u64 {
                wrapper::INNER_MARK => inner = true,
                CTL_MARK => spoke = Spoke::Control,
                _ => {}
            }
        }
        if let Some(b) = ep.waker().filter(|_| few[..k.min(few.len())].iter().any(|e| e.u64 == WAKER_MARK)) {
            b.clear();
        }
        if inner {
            // SAFETY: `out` leads to room for the program's events, which `wait` has looked at; the mask is null or
            // readable.
            let own = unsafe { self.inside(ep, Some(0), core::ptr::null(), plain) }?;
            if spoke == Spoke::Own && own != Spoke::Nobody {
                spoke = own;
            }
        }
        Ok(spoke)
    }

    /// Add what is in the application's instance itself.
    ///
    /// # Safety
    /// As [`super::wait()`].
    unsafe fn inside(
        &mut self,
        ep: &Ep,
        timeout: Option<u64>,
        mask: *const libc::sigset_t,
        plain: bool,
    ) -> Result<Spoke> {
        let before = self.n;
        let (fd, room) = (ep.fd.load(Ordering::Relaxed), self.max - before);
        // What is ours among the events must not be left in the caller's array, which a program may
        // use again as it is: so they come into one of ours. One that is too large for that is
        // mended below.
        let mut few = [const { core::mem::MaybeUninit::<libc::epoll_event>::uninit() }; FEW];
        let to = match room <= FEW {
            true => few.as_mut_ptr() as *mut libc::epoll_event,
            // SAFETY: the rest of the array.
            false => unsafe { self.evs.add(before) },
        };
        // SAFETY: `to` has this much room.
        let look = || unsafe { sys::epoll_wait(fd, to, room as i32, timeout, mask) };
        let k = match timeout {
            Some(0) => look(),
            _ => asleep::sleep(&On { ep: Some(ep.index()), plain, inside: true, ..On::default() }, look),
        }?;
        let mut spoke = Spoke::Nobody;
        let zoned = k > 1 && ep.zoned.load(Ordering::Relaxed);
        for i in 0..k {
            // SAFETY: the kernel has written k entries. (In the caller's array none of them is
            // overwritten before it is read: as many have been read as are pushed, or more.)
            let e = unsafe { to.add(i).read_unaligned() };
            let data = e.u64;
            match data {
                WAKER_MARK => {
                    if let Some(b) = ep.waker() {
                        match ep.is_alone_in() {
                            true => b.rang(),
                            false => b.clear(),
                        }
                    }
                    if spoke == Spoke::Nobody {
                        spoke = Spoke::Own;
                    }
                }
                CTL_MARK => spoke = Spoke::Control,
                balance::PEER_MARK => {
                    balance::spoke();
                    if spoke == Spoke::Nobody {
                        spoke = Spoke::Peer;
                    }
                }
                // A listener can be ready in both worlds, and in several sockets of
                // the kernel's; report it once.
                _ if self.reported(data, before) => {}
                _ if zoned && watch::is_double(data) && self.reported(data, self.n) => {}
                _ => self.push(e.events, data),
            }
        }
        if room > FEW {
            for i in self.n..before + k {
                // SAFETY: below `max`; the kernel has written it.
                unsafe { self.evs.add(i).write_unaligned(libc::epoll_event { events: 0, u64: 0 }) };
            }
        }
        Ok(spoke)
    }
}

/// One word for an array and its length; 0 is none.
#[inline(always)]
pub(super) fn array(evs: *mut libc::epoll_event, max: usize) -> usize {
    !(evs as usize ^ max << 32)
}

/// How many of these events can be written? Asked once for each array, which a program uses again and
/// again: one that is no longer there then ends the process.
///
/// # Safety
/// As [`wait`].
#[cold]
pub(super) unsafe fn room(ep: &Ep, evs: *mut libc::epoll_event, max: usize) -> usize {
    /// Events that are looked for; of more than are ever reported at a time a program may have fewer.
    const MOST: usize = 4096;
    // SAFETY: the program says that this is its memory; the copy returns EFAULT where nothing is. Only where an event
    // is read as well as written is it the program's.
    let writable = |i: usize| unsafe { user::get(evs.wrapping_add(i)).and_then(|e| user::put(evs.wrapping_add(i), e)) };
    if writable(0).is_err() {
        return 0;
    }
    let asked = max.min(MOST);
    if user::readable(evs, asked) {
        ep.array.store(array(evs, max), Ordering::Relaxed);
        return max;
    }
    (1..asked).take_while(|i| user::readable(evs.wrapping_add(*i), 1)).last().map_or(1, |i| i + 1)
}
