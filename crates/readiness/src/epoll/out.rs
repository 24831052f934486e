//! Fills the application's array of events, and adds the kernel's events. Events of the library's
//! own descriptors are removed.

use super::instance::{Ep, CTL_MARK, WAKER_MARK};
use super::{item, wrapper};
use crate::asleep::On;
use crate::wait::{self, Call, Deadline, Mask, Room, Sleep, Source};
use crate::zone::{balance, watch};
use crate::{ctl, user};
use core::sync::atomic::Ordering;
use fsocket_sys::{self as sys, cpu, Result};

/// Which of the library's descriptors were among the kernel's events.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Spoke {
    Nobody,
    /// The waker.
    Own,
    Control,
    /// Another worker's listen socket.
    Peer,
}

/// Up to this many events are written to an array of the library first, and copied to the
/// application's.
const FEW: usize = 128;

/// The application's array, filled from the front.
pub(super) struct Out {
    pub(super) evs: *mut libc::epoll_event,
    pub(super) max: usize,
    pub(super) n: usize,
    /// Number of events at the front of the array that come from the kernel.
    pub(super) from_kernel: usize,
}

impl Out {
    pub(super) fn push(&mut self, events: u32, data: u64) {
        debug_assert!(self.n < self.max);
        // SAFETY: the index is below `max`; the array may be unaligned (packed on x86-64).
        unsafe { self.evs.add(self.n).write_unaligned(libc::epoll_event { events, u64: data }) };
        self.n += 1;
    }
    pub(super) fn full(&self) -> bool {
        self.n >= self.max
    }
    /// Has an event with this data been reported? A listener can be ready both in the kernel and
    /// in shared memory.
    pub(super) fn has(&self, data: u64) -> bool {
        self.reported(data, self.from_kernel)
    }
    fn reported(&self, data: u64, upto: usize) -> bool {
        // SAFETY: the first `n` entries of the array are written.
        (0..upto.min(self.n)).any(|i| unsafe { self.evs.add(i).read_unaligned() }.u64 == data)
    }

    /// [`Out::sleep`] for an instance that has no items of the library, except local listen
    /// sockets. `left`: time until the deadline, nanoseconds.
    pub(super) fn plain(&mut self, ep: &Ep, mut left: Option<u64>, deadline: Deadline, mask: Mask) -> Result<Spoke> {
        loop {
            let zoned = ep.zoned.load(Ordering::Relaxed);
            if zoned && !ep.ctl_added.load(Ordering::Relaxed) {
                // A new monitor may have come meanwhile.
                ep.watch_ctl();
            }
            if !zoned {
                return self.sleep(ep, Sleep::of(Call::EpollKernel, left), mask);
            }
            let since = cpu::ticks();
            let own = ep.unsubscribed.sleep_limit();
            let spoke = self.sleep(ep, Sleep::of(Call::EpollZones, left).at_most(own), mask)?;
            ep.unsubscribed.waited(ep.fd.load(Ordering::Relaxed), since, self.n > 0);
            if self.n > 0 || spoke != Spoke::Nobody || deadline.is_over() {
                return Ok(spoke);
            }
            ep.unsubscribed.attend(ep.fd.load(Ordering::Relaxed));
            if ctl::is_unwatched() {
                watch::alone();
            }
            left = deadline.left();
        }
    }

    /// Adds listeners for which an `accept` would take a connection from another worker's queue.
    pub(super) fn peers(&mut self, ep: &Ep) {
        balance::look(ep.fd.load(Ordering::Relaxed), |events, data| {
            if !self.full() && !self.reported(data, self.n) {
                self.push(events, data);
            }
        });
    }

    /// Adds the events that the kernel has now.
    pub(super) fn ask(&mut self, ep: &Ep) -> Result<Spoke> {
        if self.full() {
            return Ok(Spoke::Nobody);
        }
        self.inside(ep, Sleep::of(Call::Epoll, Some(0)), Mask::NONE)
    }

    /// Sleeps until the kernel has events, and adds them.
    pub(super) fn sleep(&mut self, ep: &Ep, s: Sleep, mask: Mask) -> Result<Spoke> {
        if self.full() {
            return Ok(Spoke::Nobody);
        }
        if s.is_look() {
            return self.inside(ep, s, mask);
        }
        let Some(wrapper) = ep.sleeps_in() else {
            let r = self.inside(ep, s, mask);
            ep.woken_inside();
            return r;
        };
        let mut few = [libc::epoll_event { events: 0, u64: 0 }; 16];
        // SAFETY: `few` has 16 entries.
        let room = unsafe { Room::at(few.as_mut_ptr(), few.len()) };
        let on = On { ep: Some(ep.index()), plain: s.is_plain(), ..On::default() };
        let k = wait::sleep(Source::Epoll { fd: wrapper, room, mask, on }, s)?;
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
            let own = self.ask(ep)?;
            if spoke == Spoke::Own && own != Spoke::Nobody {
                spoke = own;
            }
        }
        Ok(spoke)
    }

    /// Adds the events of the application's instance itself, with a sleep or without.
    fn inside(&mut self, ep: &Ep, s: Sleep, mask: Mask) -> Result<Spoke> {
        let (fd, room) = (ep.fd.load(Ordering::Relaxed), self.max - self.n);
        // Events of the library's descriptors must not stay in the caller's array, even behind
        // its end, because a program may reuse the array as it is. So a short result goes to an
        // array of this function first. If there is room for more events than that array holds,
        // the kernel writes to the caller's array, and `take` clears unused entries.
        let mut few = [const { core::mem::MaybeUninit::<libc::epoll_event>::uninit() }; FEW];
        let to = match room <= FEW {
            true => few.as_mut_ptr() as *mut libc::epoll_event,
            // SAFETY: `n` is at most `max`, so this is the rest of the array.
            false => unsafe { self.evs.add(self.n) },
        };
        let k = match s.is_look() {
            // SAFETY: `to` has room for `room` events; `mask` is null or readable by the kernel.
            true => unsafe { sys::epoll_wait(fd, to, room as i32, Some(0), mask.as_ptr()) },
            false => {
                let on = On { ep: Some(ep.index()), plain: s.is_plain(), inside: true, ..On::default() };
                // SAFETY: `to` has room for `room` events.
                let room = unsafe { Room::at(to, room) };
                wait::sleep(Source::Epoll { fd, room, mask, on }, s)
            }
        }?;
        // SAFETY: the kernel has written k entries. Those in the program's array begin at `n`.
        Ok(unsafe { self.take(ep, to, k, room > FEW) })
    }

    /// Adds `k` events that the kernel has written at `from`; `within`: `from` is the rest of the
    /// caller's array.
    ///
    /// # Safety
    /// `k` events are at `from`, which has as much room as the array. With `within`, `from` is
    /// entry `n` of the array.
    unsafe fn take(&mut self, ep: &Ep, from: *mut libc::epoll_event, k: usize, within: bool) -> Spoke {
        let before = self.n;
        let mut spoke = Spoke::Nobody;
        let zoned = k > 1 && ep.zoned.load(Ordering::Relaxed);
        let one_shot = k > 0 && ep.one_shot.load(Ordering::Relaxed);
        for i in 0..k {
            // SAFETY: the kernel has written `k` entries at `from`. (With `within`, no entry is
            // overwritten before it is read, because at least as many entries were read as
            // pushed.)
            let e = unsafe { from.add(i).read_unaligned() };
            let data = e.u64;
            if one_shot {
                item::of_listeners(ep, |_| true).for_each(|it| it.fired_in_kernel(data));
            }
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
                // A listener can be ready in the kernel, in shared memory, and in several kernel
                // sockets. It must be reported once.
                _ if self.reported(data, before) => {}
                _ if zoned && watch::is_double(data) && self.reported(data, self.n) => {}
                _ => self.push(e.events, data),
            }
        }
        if within {
            for i in self.n..before + k {
                // SAFETY: the index is below `max`, and the kernel has written the entry.
                unsafe { self.evs.add(i).write_unaligned(libc::epoll_event { events: 0, u64: 0 }) };
            }
        }
        spoke
    }
}

/// Packs the address of an array and its length into one word; 0 means none.
#[inline(always)]
pub(super) fn array(evs: *mut libc::epoll_event, max: usize) -> usize {
    !(evs as usize ^ max << 32)
}

/// How many of these events are writable? The check runs once for each array, because a program
/// uses the same array again and again. If the program unmaps the array later, a write crashes
/// the process.
///
/// # Safety
/// As [`wait`].
#[cold]
pub(super) unsafe fn room(ep: &Ep, evs: *mut libc::epoll_event, max: usize) -> usize {
    /// At most this many events are checked. `wait` never reports more at a time, so the
    /// program's array may be smaller than its `maxevents` claims.
    const MOST: usize = 4096;
    // SAFETY: the program says that this is its memory; the copy returns EFAULT where no memory
    // is mapped. The event is read and written back, so a page that is only writable or only
    // readable fails.
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
