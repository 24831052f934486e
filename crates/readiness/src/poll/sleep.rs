//! The sleep of a `poll`: on connections over shared memory and on kernel descriptors at once,
//! or, for a single connection, on a futex word.

use super::kept::{any, ours, Kept};
use crate::table::{Desc, Kind};
use crate::wait::teased::Teased;
use crate::wait::{self, Call, Deadline, Mask, Sleep, Sleeper, Source, Word, LONG};
use crate::waker::{self, Waker};
use crate::{chan, ctl, epoll, listen, spin, zone};
use core::sync::atomic::Ordering;
use fsocket_abi::channel::sleeping;
use fsocket_ring as ring;
use fsocket_sync::block::{block, Wait};
use fsocket_sync::doorbell::{Batch, FUTEX_BIT};
use fsocket_sys::{self as sys, cpu, Errno, Result};

static SPIN: spin::Memory = spin::Memory::new();

/// The descriptors of a `poll` that sleeps.
pub(super) struct Sleeps<'a, 'k> {
    pub(super) fds: &'a [libc::pollfd],
    pub(super) kept: &'a Kept<'k>,
    /// The entries for the kernel: all of `fds`, then local listen sockets, and [`wait::BESIDE`]
    /// more.
    pub(super) kernel: &'a mut [libc::pollfd],
    pub(super) deadline: Deadline,
    pub(super) unarmed: &'a mut waker::Unarmed,
    pub(super) mask: Mask,
}

/// Sleeps until an event may have come. If a descriptor has become another file, the sleep still
/// ends only by an event of the kept description.
pub(super) fn sleep_on(s: Sleeps) -> Result<()> {
    block(&mut OnAll { s, sleeper: None, armed: false })
}

/// As [`sleep_on`], for a single connection and no kernel descriptor. The thread sleeps on the
/// futex word that the peer rings. This costs one system call, and uses none of the few waiters
/// that each side of a channel has.
///
/// (Signals need not be blocked: a signal that is handled just before the sleep counts as handled
/// before the call.)
///
/// True: the sleep has reached a limit of the library. The caller goes on with a sleep on
/// descriptors, since it can hold signals between such sleeps, so that none is missed.
pub(super) fn on_word(d: &'static Desc, fds: &[libc::pollfd], deadline: Deadline, kept: &Kept) -> Result<bool> {
    let t0 = cpu::ticks();
    let mut w = OnWord { d, fds, kept, deadline, seq: 0, slept: false, long: false, teased: Teased::default() };
    if block(&mut w)? {
        memory(fds).slept(t0, d.rx_dir().want_data.notified_at.load(Ordering::Relaxed));
    }
    Ok(w.long)
}

struct OnWord<'a, 'k> {
    d: &'static Desc,
    fds: &'a [libc::pollfd],
    kept: &'a Kept<'k>,
    deadline: Deadline,
    seq: u32,
    /// At least one sleep has begun.
    slept: bool,
    /// A sleep ended at a limit that the library had set.
    long: bool,
    teased: Teased,
}

impl Wait for OnWord<'_, '_> {
    type Woken = Result<usize>;
    /// True: an event has come.
    type End = Result<bool>;

    fn arm(&mut self) {
        let want = &self.d.rx_dir().want_data;
        self.seq = want.seq.load(Ordering::Acquire);
        // `kept` holds `d`, so the word still belongs to this connection.
        want.arm_and_fence(FUTEX_BIT, sys::heavy_fence);
    }

    fn look(&mut self) -> Option<Result<bool>> {
        if any(self.fds, self.kept) {
            return Some(Ok(true));
        }
        ctl::poll();
        ctl::notice();
        // Without a monitor, only a sleep on the waker notices a new monitor and the death of
        // peers, so this one ends. If the descriptor has become another file, that matters only
        // before the first sleep. (`seq` changes then, and this look comes after it was read.) A
        // sleep that has begun stays with its connection.
        let over = crate::peers::is_unwatched()
            || any(self.fds, self.kept)
            || !self.slept && self.kept.lost(self.fds).next().is_some()
            || self.deadline.is_over();
        over.then_some(Ok(false))
    }

    fn sleep(&mut self) -> Result<usize> {
        zone::balance::before_sleep();
        let (d, fds, kept) = (self.d, self.fds, self.kept);
        let (want, seq, teased) = (&d.rx_dir().want_data, self.seq, self.teased.is());
        let word = Word { d, want, seq, teased, long: &mut self.long, look: &mut || any(fds, kept) };
        // The sleep always has a limit, because the kernel does not restart a limited futex sleep
        // after a signal.
        let left = self.deadline.left().unwrap_or(LONG);
        wait::sleep(Source::Word(word), Sleep::of(Call::PollOne, Some(left)))
    }

    fn on_wake(&mut self, woken: Result<usize>) -> Option<Result<bool>> {
        self.slept |= woken != Err(Errno::EAGAIN);
        if any(self.fds, self.kept) || self.kept.woken() {
            return Some(Ok(true));
        }
        self.teased.woken_for_nothing(self.d, &self.d.rx_dir().want_data);
        match woken {
            Err(Errno::EINTR) => Some(Err(Errno::EINTR)),
            _ => self.long.then_some(Ok(false)),
        }
    }
}

/// The record of earlier waits, for a call with these descriptors.
pub(super) fn memory(fds: &[libc::pollfd]) -> &'static spin::Memory {
    match fds {
        [one] => ours(one.fd).filter(|d| d.is_conn()).map_or(&SPIN, |d| d.spin_rx()),
        _ => &SPIN,
    }
}

/// The earliest time (ticks) after `since` at which a peer rang for one of the connections. 0:
/// none did.
fn notified_since(fds: &[libc::pollfd], kept: &Kept, since: u64) -> u64 {
    let conns = kept.each(fds).map(|(d, _)| d).filter(|d| d.is_conn());
    let notified = conns.map(|d| d.rx_dir().want_data.notified_at.load(Ordering::Relaxed));
    notified.filter(|at| *at >= since).min().unwrap_or(0)
}

/// A wait on wakers and kernel descriptors.
struct OnAll<'a, 'k> {
    s: Sleeps<'a, 'k>,
    sleeper: Option<Sleeper>,
    /// All peers were asked to ring the waker.
    armed: bool,
}

impl Wait for OnAll<'_, '_> {
    /// True: a kernel descriptor has an event.
    type Woken = Result<bool>;
    type End = Result<()>;

    fn arm(&mut self) {
        let (fds, kept) = (self.s.fds, self.s.kept);
        if ctl::dead() {
            kept.each(fds).for_each(|(d, _)| crate::peers::look(d));
        }
        self.sleeper = Sleeper::new();
        self.armed = self.sleeper.as_ref().is_some_and(|s| {
            s.arm(|b, batch| kept.each(fds).fold(true, |all, (d, wanted)| arm(d, wanted, b, batch) && all))
        });
    }

    fn look(&mut self) -> Option<Result<()>> {
        any(self.s.fds, self.s.kept).then_some(Ok(()))
    }

    fn sleep(&mut self) -> Result<bool> {
        let Sleeps { fds, kept, kernel, deadline, unarmed, mask } = &mut self.s;
        zone::balance::before_sleep();
        in_wrappers(fds, kernel, true);
        // Without a waker the thread has to look again and again. Instances without items are
        // left out, because a new item rings a new waker.
        let watched = |d: &Desc| !matches!(d.kind(), Kind::Epoll | Kind::Kernel) || epoll::has_items(d);
        // (Without a monitor there is no waker, and [`wait`] limits the sleep.)
        let looks = !self.armed && !ctl::is_unwatched() && kept.each(fds).any(|(d, _)| watched(d));
        let unarmed = looks.then_some(&mut **unarmed);
        let t0 = cpu::ticks();
        let source = Source::Set { fds: kernel, sleeper: self.sleeper.as_mut(), mask: *mask };
        let r = wait::sleep(source, Sleep::of(Call::Poll, deadline.left()).unarmed(unarmed));
        memory(fds).slept(t0, notified_since(fds, kept, t0));
        let ready = kernel[..kernel.len() - wait::BESIDE].iter().any(|k| k.revents != 0);
        in_wrappers(fds, kernel, false);
        r.map(|_| ready)
    }

    fn disarm(&mut self) {
        if let Some(s) = self.sleeper.take() {
            s.end(|b| self.s.kept.each(self.s.fds).for_each(|(d, _)| disarm(d, b)));
        }
    }

    fn on_wake(&mut self, woken: Result<bool>) -> Option<Result<()>> {
        let ready = match woken {
            Ok(ready) => ready,
            Err(e) => return Some(Err(e)),
        };
        let Sleeps { fds, kept, kernel, deadline, .. } = &mut self.s;
        wait::heed(kernel);
        if ready || kept.woken() {
            return Some(Ok(()));
        }
        let mut lost = false;
        for i in kept.lost(fds) {
            lost = true;
            kernel[i].fd = -1;
        }
        (!lost || deadline.is_over()).then_some(Ok(()))
    }
}

/// Replaces tracked instances by their wrappers for the sleep (`on`), because the wrapper also
/// contains the wakers.
fn in_wrappers(fds: &[libc::pollfd], kernel: &mut [libc::pollfd], on: bool) {
    for (p, k) in fds.iter().zip(kernel) {
        if p.events & (libc::POLLIN | libc::POLLRDNORM) != 0 {
            if let Some(s) = ours(p.fd).filter(|d| d.kind() == Kind::Epoll).and_then(epoll::wrapper_of) {
                (k.fd, k.revents) = (if on { s } else { p.fd }, 0);
            }
        }
    }
}

/// Asks the peer to ring `b`. False: there is no free waiter.
fn arm(d: &Desc, wanted: i16, b: &Waker, batch: &mut Batch<'static>) -> bool {
    match d.kind() {
        Kind::Shm => {
            let Some(c) = chan::of(d) else { return false };
            let Some(w) = c.sleep_on(b, sleeping::YES) else { return false };
            batch.arm(&d.rx().1.want_data, 1 << w);
            if wanted & libc::POLLOUT != 0 {
                let (_, tx, h) = d.tx();
                tx.prod.space_at.store(ring::space_target(tx, h), Ordering::Relaxed);
                batch.arm(&tx.want_space, 1 << w);
            }
            true
        }
        Kind::Listener => {
            if let Some(l) = listen::of(d).filter(|_| wanted & (libc::POLLIN | libc::POLLRDNORM) != 0) {
                l.sleep_on(b, batch);
            }
            true
        }
        Kind::Epoll => {
            epoll::before_outer_sleep(d);
            true
        }
        _ => true,
    }
}

fn disarm(d: &Desc, b: &Waker) {
    match d.kind() {
        Kind::Shm => {
            let Some(c) = chan::of(d) else { return };
            if let Some(w) = c.slept_on(b) {
                d.rx().1.want_data.disarm(1 << w);
                d.tx().1.want_space.disarm(1 << w);
            }
        }
        Kind::Listener => {
            if let Some(l) = listen::of(d) {
                l.disarm(b);
            }
        }
        Kind::Epoll => epoll::after_outer_sleep(d),
        _ => {}
    }
}
