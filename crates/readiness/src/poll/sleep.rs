//! The sleep of a `poll`: on what is ours and on the kernel's at once.

use super::kept::{any, ours, Kept};
use crate::table::{Desc, Kind};
use crate::wait::teased::{self, Teased};
use crate::wait::{self, word, Sleeper};
use crate::waker::{self, Waker};
use crate::{chan, ctl, epoll, listen, spin, stats, stuck, zone};
use core::sync::atomic::Ordering;
use fsocket_abi::arena::Counter;
use fsocket_abi::channel::sleeping;
use fsocket_ring as ring;
use fsocket_sync::doorbell::{Batch, FUTEX_BIT};
use fsocket_sys::{self as sys, cpu, Errno, Result};

static SPIN: spin::Memory = spin::Memory::new();

/// Sleeps until there may be something. Nobody but what it sleeps on makes it look at numbers that are something
/// else by now.
///
/// # Safety
/// As [`sleep`].
pub(super) unsafe fn sleep_on(
    fds: &[libc::pollfd],
    kernel: &mut [libc::pollfd],
    beside: usize,
    (deadline, unarmed): (Option<u64>, &mut waker::Unarmed),
    mask: *const libc::sigset_t,
    kept: &Kept,
) -> Result<()> {
    loop {
        // SAFETY: the mask is null or a signal mask of the program's, which the kernel reads.
        let ready = unsafe { sleep(fds, kernel, beside, (deadline, unarmed), mask, kept) }?;
        if ready || kept.woken() {
            return Ok(());
        }
        let mut lost = false;
        for i in kept.lost(fds) {
            lost = true;
            kernel[i].fd = -1;
        }
        if !lost || deadline.is_some_and(|t| sys::now_ns() >= t) {
            return Ok(());
        }
    }
}

/// As [`sleep_on`], for one connection and nothing of the kernel's: on the word that its peer rings. It costs a
/// system call and no waker, of which a side of a channel has but so many.
///
/// (Signals need not be held: one that is handled just before the sleep may as well have been handled before
/// the call.)
pub(super) fn on_word(d: &'static Desc, fds: &[libc::pollfd], deadline: Option<u64>, kept: &Kept) -> Result<()> {
    let want = &d.rx_dir().want_data;
    let (t0, mut slept, mut long) = (cpu::ticks(), false, false);
    let mut teased = Teased::default();
    loop {
        let seq = want.seq.load(Ordering::Acquire);
        // `kept` holds `d`, so the word stays its own.
        want.arm_and_fence(FUTEX_BIT, sys::heavy_fence);
        if any(fds, kept) {
            break;
        }
        ctl::poll();
        ctl::notice();
        if crate::peers::is_unwatched() {
            // A waker sees another monitor come, and peers end.
            return Ok(());
        }
        // Behind the look at `seq`, which changes when the number is something else. A sleep that has begun stays
        // with the connection.
        if any(fds, kept) || !slept && kept.lost(fds).next().is_some() {
            return Ok(());
        }
        let left = deadline.map_or(word::LONG, |t| t.saturating_sub(sys::now_ns()));
        if left == 0 {
            return Ok(());
        }
        stats::count(Counter::Sleeps);
        zone::balance::before_sleep();
        // With a limit, as no futex sleep with one is restarted after a signal.
        let cut = stuck::cut(word::piece(long, true));
        let (limit, idle) = crate::idle::cut(Some(cut.map_or(left, |c| c.min(left))));
        let second = if cut.is_none() { word::Second::arm(d) } else { None };
        if second.is_some() && any(fds, kept) {
            break;
        }
        let r = match teased.is() {
            true => teased::pause(limit),
            false => word::sleep(want, seq, limit, cut, long, second),
        };
        slept |= r != Err(Errno::EAGAIN);
        if any(fds, kept) || kept.woken() {
            break;
        }
        teased.woken_for_nothing(d, want);
        match r {
            Err(Errno::EINTR) => return r,
            Err(Errno::ETIMEDOUT) => {
                long = true;
                if idle {
                    crate::idle::give_back();
                }
            }
            _ => {}
        }
    }
    memory(fds).slept(t0, want.notified_at.load(Ordering::Relaxed));
    Ok(())
}

/// Of the waits of such a call.
pub(super) fn memory(fds: &[libc::pollfd]) -> &'static spin::Memory {
    match fds {
        [one] => ours(one.fd).filter(|d| d.is_conn()).map_or(&SPIN, |d| d.spin_rx()),
        _ => &SPIN,
    }
}

/// When a peer first told one of them after `since`; 0: none has. Ticks.
fn notified_since(fds: &[libc::pollfd], kept: &Kept, since: u64) -> u64 {
    let conns = kept.each(fds).map(|(d, _)| d).filter(|d| d.is_conn());
    let notified = conns.map(|d| d.rx_dir().want_data.notified_at.load(Ordering::Relaxed));
    notified.filter(|at| *at >= since).min().unwrap_or(0)
}

/// True: something of the kernel's has happened.
///
/// # Safety
/// `mask` is null or a signal mask.
unsafe fn sleep(
    fds: &[libc::pollfd],
    kernel: &mut [libc::pollfd],
    beside: usize,
    (deadline, unarmed): (Option<u64>, &mut waker::Unarmed),
    mask: *const libc::sigset_t,
    kept: &Kept,
) -> Result<bool> {
    let n = fds.len() + beside;
    let left = deadline.map(|t| t.saturating_sub(sys::now_ns()));
    let mut limit = match (left, ctl::unwatched()) {
        (Some(a), Some(b)) => Some(a.min(b)),
        (a, b) => a.or(b),
    };
    if ctl::dead() {
        kept.each(fds).for_each(|(d, _)| crate::peers::look(d));
    }
    let mut sleeper = Sleeper::new();
    let armed = sleeper.as_ref().is_some_and(|s| {
        s.arm(|b, batch| kept.each(fds).fold(true, |all, (d, wanted)| arm(d, wanted, b, batch) && all))
    });
    // Without a waker we look again and again; not for an instance in which
    // nothing is ours, where what is added rings a new one.
    let watched = |d: &Desc| !matches!(d.kind(), Kind::Epoll | Kind::Kernel) || epoll::has_items(d);
    // (Without a monitor there is none: it may be that which we have just noticed.)
    if !armed && kept.each(fds).any(|(d, _)| watched(d)) {
        let piece = ctl::unwatched().unwrap_or_else(|| unarmed.piece());
        limit = Some(limit.map_or(piece, |l| l.min(piece)));
    }
    let (mut r, mut ready) = (Ok(0), false);
    let kernel = &mut kernel[..n + wait::BESIDE];
    if !any(fds, kept) {
        stats::count(Counter::Sleeps);
        zone::balance::before_sleep();
        let (limit, idle) = crate::idle::cut(zone::balance::cut(limit));
        in_wrappers(fds, kernel, true);
        let t0 = cpu::ticks();
        // SAFETY: the mask is null or a signal mask of the program's, which the kernel reads.
        r = unsafe { wait::sleep(kernel, sleeper.as_mut(), limit, mask) };
        memory(fds).slept(t0, notified_since(fds, kept, t0));
        ready = r.is_ok() && kernel[..n].iter().any(|k| k.revents != 0);
        in_wrappers(fds, kernel, false);
        if idle && r == Ok(0) {
            crate::idle::give_back();
        }
    }
    if let Some(s) = sleeper {
        s.end(|b| kept.each(fds).for_each(|(d, _)| disarm(d, b)));
    }
    if r.is_ok() {
        wait::heed(kernel);
    }
    r.map(|_| ready)
}

/// Instances of ours are waited for in their wrappers, which hear the wakers, too.
fn in_wrappers(fds: &[libc::pollfd], kernel: &mut [libc::pollfd], on: bool) {
    for (p, k) in fds.iter().zip(kernel) {
        if p.events & (libc::POLLIN | libc::POLLRDNORM) != 0 {
            if let Some(s) = ours(p.fd).filter(|d| d.kind() == Kind::Epoll).and_then(epoll::wrapper_of) {
                (k.fd, k.revents) = (if on { s } else { p.fd }, 0);
            }
        }
    }
}

/// Ask the peer to ring `b`; false: not possible.
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
