//! `epoll_wait`: looks at the active items and at the kernel by turns, then spins, then sleeps.
//! This is the hot path of a server.

use super::instance::{of, Ep, Inner};
use super::item::ITEMS;
use super::out::{array, room, Out, Spoke};
use super::poll_list::{arm_all, collect, is_plain, marked, report, settle, share};
use super::sleep::{self, control};
use crate::asleep::On;
use crate::signals::Held;
use crate::table::Desc;
use crate::wait::{in_kernel, Call, Deadline, Mask, Room, Sleep, Source};
use crate::waker;
use crate::zone::{balance, watch};
use crate::{chan, ctl, lengths, Cause, Outcome};
use core::sync::atomic::Ordering;
use fsocket_sys::{self as sys, cpu, Errno, Result};

/// If more items than this are active, they are armed even before a call that does not sleep.
const MANY_ACTIVE: usize = 64;
/// While connections over shared memory keep the thread busy, it asks the kernel after this many calls, or after this
/// many microseconds.
const KERNEL_TURNS: u32 = 8;
const KERNEL_US: u64 = 10;
/// The same interval during a spin.
const SPIN_KERNEL_US: u64 = 5;

/// # Safety
/// `evs` has room for `max` events of the program, or points to no memory; `mask` is null or a
/// signal mask.
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
                // SAFETY: the mask is null or the program's signal mask, which only the kernel
                // reads.
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

/// The array is not writable. Returns EFAULT if an event is ready; the event then stays.
///
/// # Safety
/// As [`wait`].
#[cold]
unsafe fn nowhere(ep: &'static Ep, timeout_ns: Option<u64>, mask: *const libc::sigset_t) -> Outcome<Result<usize>> {
    let mut p = libc::pollfd { fd: ep.fd.load(Ordering::Relaxed), events: libc::POLLIN, revents: 0 };
    // SAFETY: one pollfd; the mask is null or one of the program's.
    let r = unsafe { crate::poll::poll(&raw mut p, 1, timeout_ns, mask) }.or_kernel(
        |r| r,
        || {
            // SAFETY: the mask is null or a signal mask of the program.
            let mask = unsafe { Mask::at(mask) };
            in_kernel(core::slice::from_mut(&mut p), Deadline::within(timeout_ns), mask)
        },
    );
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
    // SAFETY: null, or a signal mask of the program, which stays valid during the call.
    let mask = unsafe { Mask::at(mask) };
    let mut out = Out { evs, max: max as usize, n: 0, from_kernel: 0 };
    let mut left = timeout_ns;
    if is_plain(ep) && !balance::pending() {
        // No item of the instance is over shared memory yet. A thread that changes this during
        // the sleep rings the waker.
        let deadline = Deadline::within(timeout_ns);
        ep.hear_of_offers();
        ep.plain.fetch_add(1, Ordering::SeqCst);
        let r = if ep.is_plain() { out.plain(ep, timeout_ns, deadline, mask) } else { Ok(Spoke::Own) };
        ep.plain.fetch_sub(1, Ordering::SeqCst);
        match r {
            Err(e) => return Outcome::Done(Err(e)),
            Ok(Spoke::Nobody) => return Outcome::Done(Ok(out.n)),
            Ok(s) => {
                // This is done even if there are events: otherwise a busy thread would never read
                // the monitor's messages.
                if s == Spoke::Control {
                    control(ep);
                }
                if out.n > 0 {
                    return Outcome::Done(Ok(out.n));
                }
                left = deadline.left();
            }
        }
    }
    Outcome::Done(run(ep, out, left, mask))
}

fn run(ep: &'static Ep, mut out: Out, timeout_ns: Option<u64>, mask: Mask) -> Result<usize> {
    let (mut deadline, mut held) = (None, None);
    let (mut slept, mut unarmed) = (false, waker::Unarmed::default());
    // Start of the last sleep, in ticks; None once the cause of its end was noted.
    let mut since: Option<u64> = None;
    if timeout_ns == Some(0) {
        ep.miss_nothing();
    }
    loop {
        ctl::poll();
        watch::look_if_asked();
        let peer = match look(ep, &mut out, timeout_ns, mask, &mut since)? {
            Look::Again => continue,
            Look::Found => return Ok(out.n),
            Look::Nothing(peer) => peer,
        };
        let deadline = *deadline.get_or_insert_with(|| Deadline::within(timeout_ns));
        if slept && deadline.is_over() {
            return Ok(0);
        }
        if let Some(cpu) = peer {
            let mut ask_at = cpu::ticks() + SPIN_KERNEL_US * cpu::ticks_per_us();
            if ep.spin.spin(cpu, || something(ep, &mut ask_at)) {
                continue;
            }
        }
        if !mask.is_none() {
            held.get_or_insert_with(Held::all);
        }
        sleep::sleep(ep, &mut out, deadline, (&mut unarmed, &mut since), mask)?;
        slept = true;
        if out.n > 0 {
            if let Ok(mut g) = ep.lock.lock() {
                let now = cpu::ticks();
                collect(ep, &mut g, now);
                report(ep, &mut g, &mut out, now);
                share(ep, &mut g);
            }
            return Ok(out.n);
        }
    }
}

/// The result of a look at an instance.
enum Look {
    /// Look once more.
    Again,
    Found,
    /// There is no event. Contains the CPU of a peer for which spinning may pay.
    Nothing(Option<u32>),
}

/// Collects ready items and, when it is time, the kernel's events. `since`: as in [`run`].
#[inline(always)]
fn look(ep: &'static Ep, out: &mut Out, timeout_ns: Option<u64>, mask: Mask, since: &mut Option<u64>) -> Result<Look> {
    let Ok(mut g) = ep.lock.lock() else { return reentered(ep, out, timeout_ns, mask) };
    let first = core::mem::take(&mut g.crowded) && out.n == 0;
    if first {
        let spoke = out.ask(ep);
        out.from_kernel = out.n;
        (g.turns, g.last_kernel) = (0, cpu::ticks());
        if spoke == Ok(Spoke::Control) {
            drop(g);
            control(ep);
            return Ok(Look::Again);
        }
    }
    let now = cpu::ticks();
    gather(ep, &mut g, out, now, since);
    if core::mem::take(&mut g.pending) {
        drop(g);
        settle(ep);
        if out.n > 0 && !out.full() {
            // A connection that has just moved to the kernel is reported with the others.
            let _ = out.ask(ep);
        }
        return Ok(if out.n > 0 { Look::Found } else { Look::Again });
    }
    // The sleep looks at the kernel as well, so the thread does so before it only if an event is
    // likely.
    let ask = timeout_ns == Some(0) || balance::pending() || (g.kernel_busy && !alone(ep));
    g.turns += 1;
    let due = g.turns >= KERNEL_TURNS || now - g.last_kernel > KERNEL_US * cpu::ticks_per_us();
    if (out.n == 0 && ask) || (due && !first && speaks(ep, &g)) {
        let spoke = ask_kernel(ep, &mut g, out, timeout_ns == Some(0), now);
        if spoke == Ok(Spoke::Control) {
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

/// A wait in a signal handler that has interrupted another wait in the same instance. The
/// interrupted thread holds the instance's lock, so this wait sees only the kernel's events.
#[cold]
fn reentered(ep: &Ep, out: &mut Out, timeout_ns: Option<u64>, mask: Mask) -> Result<Look> {
    // SAFETY: `wait` has checked that the array at `out.evs` is writable for `out.max` events.
    let room = unsafe { Room::at(out.evs, out.max.min(i32::MAX as usize)) };
    let source = Source::Epoll { fd: ep.fd.load(Ordering::Relaxed), room, mask, on: On::default() };
    out.n = crate::wait::sleep(source, Sleep::of(Call::EpollKernel, timeout_ns))?;
    Ok(Look::Found)
}

/// Puts ready items into `out`.
#[inline(always)]
fn gather(ep: &'static Ep, g: &mut Inner, out: &mut Out, now: u64, since: &mut Option<u64>) {
    collect(ep, g, now);
    if let Some(since) = since.take() {
        ep.spin.slept(since, g.notified_since(since));
    }
    report(ep, g, out, now);
    if out.n == 0 && g.n > MANY_ACTIVE {
        arm_all(ep, g, ep);
        collect(ep, g, now);
        report(ep, g, out, now);
    }
}

/// Puts the kernel's events into `out`; `only`: the call will not sleep.
fn ask_kernel(ep: &Ep, g: &mut Inner, out: &mut Out, only: bool, now: u64) -> Result<Spoke> {
    (g.turns, g.last_kernel, g.crowded) = (0, now, out.full());
    let before = out.n;
    let spoke = out.ask(ep);
    g.kernel_busy = out.n > before;
    if before == 0 && ep.zoned.load(Ordering::Relaxed) && (out.n > 0 || only) {
        ep.unsubscribed.waited(ep.fd.load(Ordering::Relaxed), now, out.n > 0);
    }
    spoke
}

/// Can the kernel have an event that no active item shows?
#[inline]
fn speaks(ep: &Ep, g: &Inner) -> bool {
    ep.kernel.load(Ordering::Relaxed) || g.links.parks()
}

/// Is any item ready, or any mark set? Used during a spin; changes nothing. `ask_at`: time of the
/// next look at the kernel, ticks.
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

/// Has the process no channel, so that no peer can mark an item? A waker must exist, which a new
/// channel rings.
fn alone(ep: &Ep) -> bool {
    ep.waker().is_some() && chan::none()
}

/// May spinning pay? Some: the CPU of the peer, or 0. None: no peer is known, or every peer needs
/// this CPU.
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
