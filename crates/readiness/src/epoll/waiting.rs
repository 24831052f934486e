//! `epoll_wait`.

use super::instance::{of, Ep, Inner};
use super::item::ITEMS;
use super::out::{array, room, Out, Spoke};
use super::poll_list::{arm_all, collect, is_plain, marked, report, set_sleeping, settle, share};
use crate::signals::Held;
use crate::table::Desc;
use crate::waker;
use crate::zone::{balance, watch};
use crate::{chan, ctl, lengths, stats, Cause, Outcome};
use core::sync::atomic::Ordering;
use fsocket_abi::arena::Counter;
use fsocket_sys::{self as sys, cpu, Errno, Result};

/// More active items than this are armed even without a sleep.
const MANY_ACTIVE: usize = 64;
/// While connections of ours keep us busy, kernel descriptors are looked at
/// every so many calls, or after so many microseconds.
const KERNEL_TURNS: u32 = 8;
const KERNEL_US: u64 = 10;
/// And while we spin.
const SPIN_KERNEL_US: u64 = 5;

/// # Safety
/// `evs` is the program's for `max` events, or there is nothing; `mask` is null or a signal mask.
pub unsafe fn wait(
    d: &'static Desc,
    evs: *mut libc::epoll_event,
    mut max: i32,
    timeout_ns: Option<u64>,
    mask: *const libc::sigset_t,
) -> Outcome<Result<usize>> {
    let Some(ep) = of(d) else { return Outcome::Kernel(Cause::NotOurs) };
    if max > 0 && ep.array.load(Ordering::Relaxed) != array(evs, max as usize) {
        if !lengths::is_users(evs, (max as usize).saturating_mul(size_of::<libc::epoll_event>())) {
            ep.leave();
            return Outcome::Done(Err(Errno::EFAULT));
        }
        // SAFETY: the program says that `max` events fit at `evs`; `room` finds out how many do.
        match unsafe { room(ep, evs, max as usize) } {
            0 => {
                // SAFETY: the mask is null or a signal mask of the program's, which the kernel reads.
                let r = unsafe { nowhere(ep, timeout_ns, mask) };
                ep.leave();
                return r;
            }
            some => max = some as i32,
        }
    }
    // SAFETY: `room` has found that `max` events can be written at `evs`, in this call or an earlier one with the
    // same array; the mask is null or readable.
    let r = unsafe { wait_in(ep, evs, max, timeout_ns, mask) };
    ep.leave();
    r
}

/// Nothing can be reported: EFAULT if there is something. It stays.
///
/// # Safety
/// As [`wait`].
#[cold]
unsafe fn nowhere(ep: &'static Ep, timeout_ns: Option<u64>, mask: *const libc::sigset_t) -> Outcome<Result<usize>> {
    let mut p = libc::pollfd { fd: ep.fd.load(Ordering::Relaxed), events: libc::POLLIN, revents: 0 };
    let one = &raw mut p;
    // SAFETY: one pollfd; the mask is null or one of the program's.
    let r = unsafe {
        crate::poll::poll(one, 1, timeout_ns, mask).or_kernel(|r| r, || sys::ppoll(one, 1, timeout_ns, mask))
    };
    Outcome::Done(r.and_then(|n| if n > 0 { Err(Errno::EFAULT) } else { Ok(0) }))
}

/// # Safety
/// As [`wait`].
#[inline(always)]
unsafe fn wait_in(
    ep: &'static Ep,
    evs: *mut libc::epoll_event,
    max: i32,
    timeout_ns: Option<u64>,
    mask: *const libc::sigset_t,
) -> Outcome<Result<usize>> {
    ep.join_inherited();
    watch::before_sleep();
    if ep.zoned.load(Ordering::Relaxed) {
        ep.unsubscribed.enter(ep.fd.load(Ordering::Relaxed));
    }
    if max <= 0 {
        return Outcome::Kernel(Cause::Invalid);
    }
    let mut out = Out { evs, max: max as usize, n: 0, from_kernel: 0 };
    let mut left = timeout_ns;
    if is_plain(ep) && !balance::pending() {
        // Nothing in it is over shared memory (yet). If another thread changes that while this one sleeps, that thread
        // rings the waker.
        let start = if timeout_ns.is_some_and(|t| t > 0) { sys::now_ns() } else { 0 };
        ep.hear_of_offers();
        ep.plain.fetch_add(1, Ordering::SeqCst);
        let r = if ep.is_plain() {
            // SAFETY: `out` leads to room that `wait` has looked at; the mask is null or readable.
            unsafe { out.plain(ep, timeout_ns, start, mask) }
        } else {
            Ok(Spoke::Own)
        };
        ep.plain.fetch_sub(1, Ordering::SeqCst);
        match r {
            Err(e) => return Outcome::Done(Err(e)),
            Ok(Spoke::Nobody) => return Outcome::Done(Ok(out.n)),
            Ok(s) => {
                // Also with events: where there always are some, nobody would hear of the monitor.
                if s == Spoke::Control {
                    control(ep);
                }
                if out.n > 0 {
                    return Outcome::Done(Ok(out.n));
                }
                left = timeout_ns.map(|t| t.saturating_sub(sys::now_ns().saturating_sub(start)));
            }
        }
    }
    // SAFETY: `out` leads to room for the program's events, which `wait` has looked at; the mask is null or readable.
    Outcome::Done(unsafe { run(ep, out, left, mask) })
}

/// # Safety
/// As [`wait`].
unsafe fn run(ep: &'static Ep, mut out: Out, timeout_ns: Option<u64>, mask: *const libc::sigset_t) -> Result<usize> {
    let (mut deadline, mut held) = (None, None);
    let (mut slept, mut unarmed) = (false, waker::Unarmed::default());
    // When the last sleep began, until it is known what ended it; ticks.
    let mut since: Option<u64> = None;
    if timeout_ns == Some(0) {
        ep.miss_nothing();
    }
    loop {
        ctl::poll();
        watch::look_if_asked();
        // SAFETY: `out` leads to room that `wait` has looked at; the mask is null or readable.
        let peer = match unsafe { look(ep, &mut out, timeout_ns, mask, &mut since) }? {
            Look::Again => continue,
            Look::Found => return Ok(out.n),
            Look::Nothing(peer) => peer,
        };
        if deadline.is_none() {
            deadline = timeout_ns.map(|t| sys::now_ns().saturating_add(t));
        }
        if deadline.is_some_and(|t| slept && sys::now_ns() >= t) {
            return Ok(0);
        }
        if let Some(cpu) = peer {
            let mut ask_at = cpu::ticks() + SPIN_KERNEL_US * cpu::ticks_per_us();
            if ep.spin.spin(cpu, || something(ep, &mut ask_at)) {
                continue;
            }
        }
        if !mask.is_null() {
            held.get_or_insert_with(Held::all);
        }
        // SAFETY: `out` leads to room that `wait` has looked at; the mask is null or readable.
        unsafe { sleep(ep, &mut out, (deadline, &mut unarmed, &mut since), mask) }?;
        slept = true;
        if out.n > 0 {
            if let Ok(mut g) = ep.lock.lock() {
                let now = cpu::ticks();
                collect(ep, &mut g, now);
                report(&mut g, &mut out, now);
                share(ep, &mut g);
            }
            return Ok(out.n);
        }
    }
}

/// What a look at an instance says.
enum Look {
    /// Look again.
    Again,
    Found,
    /// There is nothing. With the CPU of a peer for which to spin.
    Nothing(Option<u32>),
}

/// Collects what is ready, here and, at its turn, in the kernel. `since`: as in [`run`].
///
/// # Safety
/// As [`wait`].
#[inline(always)]
unsafe fn look(
    ep: &'static Ep,
    out: &mut Out,
    timeout_ns: Option<u64>,
    mask: *const libc::sigset_t,
    since: &mut Option<u64>,
) -> Result<Look> {
    let Ok(mut g) = ep.lock.lock() else {
        // In a signal handler on top of ourselves.
        // SAFETY: the kernel checks the program's addresses.
        out.n = unsafe { sys::epoll_wait(ep.fd.load(Ordering::Relaxed), out.evs, out.max as i32, timeout_ns, mask) }?;
        return Ok(Look::Found);
    };
    let first = core::mem::take(&mut g.crowded) && out.n == 0;
    if first {
        // SAFETY: `out` leads to room that `wait` has looked at; the mask is null or readable.
        let spoke = unsafe { out.kernel(ep, Some(0), core::ptr::null(), false) };
        out.from_kernel = out.n;
        (g.turns, g.last_kernel) = (0, cpu::ticks());
        if spoke == Ok(Spoke::Control) {
            drop(g);
            control(ep);
            return Ok(Look::Again);
        }
    }
    let now = cpu::ticks();
    collect(ep, &mut g, now);
    if let Some(since) = since.take() {
        ep.spin.slept(since, g.notified_since(since));
    }
    report(&mut g, out, now);
    if out.n == 0 && g.n > MANY_ACTIVE {
        arm_all(ep, &mut g, ep);
        collect(ep, &mut g, now);
        report(&mut g, out, now);
    }
    if core::mem::take(&mut g.pending) {
        drop(g);
        settle(ep);
        if out.n > 0 && !out.full() {
            // What has just become the kernel's is reported with the rest.
            // SAFETY: `out` leads to room that `wait` has looked at; the mask is null or readable.
            let _ = unsafe { out.kernel(ep, Some(0), core::ptr::null(), false) };
        }
        return Ok(if out.n > 0 { Look::Found } else { Look::Again });
    }
    // The sleep asks the kernel as well: before it, only if it may well have something.
    let ask = timeout_ns == Some(0) || balance::pending() || (g.kernel_busy && !alone(ep));
    g.turns += 1;
    let due = g.turns >= KERNEL_TURNS || now - g.last_kernel > KERNEL_US * cpu::ticks_per_us();
    if (out.n == 0 && ask) || (due && !first && speaks(ep, &g)) {
        (g.turns, g.last_kernel, g.crowded) = (0, now, out.full());
        let (nothing, before) = (out.n == 0, out.n);
        // SAFETY: `out` leads to room that `wait` has looked at; the mask is null or readable.
        let spoke = unsafe { out.kernel(ep, Some(0), core::ptr::null(), false) };
        g.kernel_busy = out.n > before;
        if nothing && ep.zoned.load(Ordering::Relaxed) && (out.n > 0 || timeout_ns == Some(0)) {
            ep.unsubscribed.waited(ep.fd.load(Ordering::Relaxed), now, out.n > 0);
        }
        if let Ok(Spoke::Control) = spoke {
            drop(g);
            control(ep);
            return Ok(if out.n > 0 { Look::Found } else { Look::Again });
        }
        if out.n == 0 && spoke? == Spoke::Own && ep.waker().is_some_and(waker::Waker::has_rung) {
            return Ok(Look::Again); // in a channel that was not looked at
        }
        if balance::pending() {
            out.peers(ep);
        }
    }
    if out.n > 0 || timeout_ns == Some(0) {
        if out.n > 0 {
            ctl::progress();
        }
        share(ep, &mut g);
        return Ok(Look::Found);
    }
    Ok(Look::Nothing(if alone(ep) { None } else { spin_target(&g) }))
}

/// May the kernel say something that is seen nowhere else?
#[inline]
fn speaks(ep: &Ep, g: &Inner) -> bool {
    ep.kernel.load(Ordering::Relaxed) || g.links.parks()
}

fn control(ep: &Ep) {
    ctl::readable();
    if ep.zoned.load(Ordering::Relaxed) {
        ep.unsubscribed.woken(ep.fd.load(Ordering::Relaxed));
        watch::late();
    }
    if ctl::dead() {
        ep.unwatch_ctl();
    }
}

/// Is any item ready, or any mark set? For spinning; changes nothing.
/// `ask_at`: when the kernel is asked next, ticks.
fn something(ep: &Ep, ask_at: &mut u64) -> bool {
    let Ok(g) = ep.lock.lock() else { return true };
    if marked(ep, &g) || g.any_ready() {
        return true;
    }
    let now = cpu::ticks();
    if speaks(ep, &g) && now >= *ask_at {
        *ask_at = now + SPIN_KERNEL_US * cpu::ticks_per_us();
        let mut p = libc::pollfd { fd: ep.fd.load(Ordering::Relaxed), events: libc::POLLIN, revents: 0 };
        // SAFETY: one pollfd.
        return unsafe { sys::ppoll(&mut p, 1, Some(0), core::ptr::null()) } == Ok(1);
    }
    false
}

/// Nobody shares memory with us: no peer can mark anything. With a waker, as a
/// channel that comes rings it.
fn alone(ep: &Ep) -> bool {
    ep.waker().is_some() && chan::none()
}

/// Whether spinning may pay: Some(cpu of the peer, or 0). None: every peer we
/// know of needs this CPU, or there is none.
fn spin_target(g: &Inner) -> Option<u32> {
    let me = cpu::current();
    let mut listener = false;
    let mut other = false;
    let mut conns = 0;
    for k in 0..g.n.min(8) {
        match ITEMS.get(g.at(k)).and_then(|it| it.peer_cpu()) {
            Some(c) => {
                conns += 1;
                other |= c != me;
            }
            None => listener = true,
        }
    }
    if conns == 0 {
        return listener.then_some(0);
    }
    other.then_some(0)
}

/// Sleep in the kernel until a waker, a kernel descriptor, a signal, or the
/// deadline.
///
/// # Safety
/// As [`wait`].
unsafe fn sleep(
    ep: &'static Ep,
    out: &mut Out,
    (deadline, unarmed, since): (Option<u64>, &mut waker::Unarmed, &mut Option<u64>),
    mask: *const libc::sigset_t,
) -> Result<()> {
    // Items that are not active are in no list of the instance.
    crate::peers::look_at_all();
    let mut limit = deadline.map(|t| t.saturating_sub(sys::now_ns()));
    {
        let Ok(mut g) = ep.lock.lock() else { return Err(Errno::EINTR) };
        // Without a monitor there are no wakers, and the sleep is cut below.
        let armed = arm_all(ep, &mut g, ep);
        // New clients of a listener are announced by the monitor.
        let heard = !g.may_listen || ep.watch_ctl();
        if !(ctl::dead() || armed && heard) {
            let piece = unarmed.piece();
            limit = Some(limit.map_or(piece, |l| l.min(piece)));
        }
        g.sleepers += 1;
        g.links.before_sleep();
        set_sleeping(&g, true);
    }
    if let Some(ns) = ctl::unwatched() {
        watch::alone();
        limit = Some(limit.map_or(ns, |l| l.min(ns)));
    }
    let r = if something_after_arming(ep) {
        Ok(Spoke::Nobody)
    } else {
        stats::count(Counter::Sleeps);
        let limit = balance::cut(crate::unjoined::cut(chan::cut(limit)));
        let (limit, idle) = crate::idle::cut(ep.unsubscribed.cut(limit));
        let t0 = cpu::ticks();
        // SAFETY: `out` leads to room that `wait` has looked at; the mask is null or readable.
        let r = unsafe { out.kernel(ep, limit, mask, false) };
        *since = Some(t0);
        if ep.zoned.load(Ordering::Relaxed) {
            ep.unsubscribed.waited(ep.fd.load(Ordering::Relaxed), t0, out.n > 0);
            if out.n == 0 && r == Ok(Spoke::Nobody) {
                ep.unsubscribed.attend(ep.fd.load(Ordering::Relaxed));
            }
        }
        if idle && out.n == 0 && r == Ok(Spoke::Nobody) {
            crate::idle::give_back();
        }
        r
    };
    if let Ok(mut g) = ep.lock.lock() {
        g.sleepers = g.sleepers.saturating_sub(1);
        set_sleeping(&g, g.sleepers > 0);
        g.last_kernel = cpu::ticks();
        g.kernel_busy = out.n > 0;
    }
    if r? == Spoke::Control {
        control(ep);
    }
    Ok(())
}

fn something_after_arming(ep: &Ep) -> bool {
    let Ok(g) = ep.lock.lock() else { return true };
    marked(ep, &g) || g.any_ready()
}
