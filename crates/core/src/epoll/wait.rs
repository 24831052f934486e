//! `epoll_wait`.

use super::item::{self, ITEMS};
use super::{of, shell, Ep, Inner, BELL_MARK, CTL_MARK};
use crate::asleep::{self, On};
use crate::bell::{self, Bell};
use crate::signals::Held;
use crate::table::Desc;
use crate::{chan, ctl, stats, zone, Outcome};
use core::sync::atomic::Ordering;
use fsocket_abi::arena::Counter;
use fsocket_abi::channel::SUMMARY_SYN;
use fsocket_sys::{self as sys, cpu, Errno, Result};

/// More hot items than this are armed even without a sleep.
const MANY_HOT: usize = 64;
/// While connections of ours keep us busy, kernel descriptors are looked at
/// every so many calls, or after so many microseconds.
const KERNEL_TURNS: u32 = 8;
const KERNEL_US: u64 = 10;
/// Longest sleep while some item could not be armed, nanoseconds.
const UNARMED_NS: u64 = 2_000_000;

/// # Safety
/// `evs` has room for `max` events; `mask` is null or a signal mask.
pub unsafe fn wait(
    d: &'static Desc,
    evs: *mut libc::epoll_event,
    max: i32,
    timeout_ns: Option<u64>,
    mask: *const libc::sigset_t,
) -> Outcome<Result<usize>> {
    let Some(ep) = of(d) else { return Outcome::Kernel };
    zone::watch::before_sleep();
    if ep.zoned.load(Ordering::Relaxed) {
        ep.aloof.enter(ep.fd.load(Ordering::Relaxed));
    }
    if max <= 0 || evs.is_null() {
        return Outcome::Kernel;
    }
    let mut out = Out { evs, max: max as usize, n: 0 };
    let mut left = timeout_ns;
    if ep.items.load(Ordering::Relaxed) == 0 && !zone::balance::pending() {
        // Nothing of ours in it (yet). Another thread may add something while
        // we sleep; it then rings the bell.
        let start = if timeout_ns.is_some_and(|t| t > 0) { sys::now_ns() } else { 0 };
        ep.plain.fetch_add(1, Ordering::SeqCst);
        let r = if ep.items.load(Ordering::SeqCst) == 0 {
            // SAFETY: the caller's.
            unsafe { out.plain(ep, timeout_ns, mask) }
        } else {
            Ok(Spoke::Own)
        };
        ep.plain.fetch_sub(1, Ordering::SeqCst);
        match r {
            Err(e) => return Outcome::Done(Err(e)),
            Ok(Spoke::Nobody) => return Outcome::Done(Ok(out.n)),
            Ok(_) if out.n > 0 => return Outcome::Done(Ok(out.n)),
            Ok(s) => {
                if s == Spoke::Control {
                    control(ep);
                }
                left = timeout_ns.map(|t| t.saturating_sub(sys::now_ns().saturating_sub(start)));
            }
        }
    }
    // SAFETY: the caller's.
    Outcome::Done(unsafe { run(ep, out, left, mask) })
}

/// Which of our own descriptors were among the kernel's events.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Spoke {
    Nobody,
    /// The bell.
    Own,
    Control,
    /// Another worker's listen socket.
    Peer,
}

/// The application's array, filled from the front.
struct Out {
    evs: *mut libc::epoll_event,
    max: usize,
    n: usize,
}

impl Out {
    fn push(&mut self, events: u32, data: u64) {
        debug_assert!(self.n < self.max);
        // SAFETY: below `max`; the array may be unaligned (packed on x86-64).
        unsafe { self.evs.add(self.n).write_unaligned(libc::epoll_event { events, u64: data }) };
        self.n += 1;
    }
    fn full(&self) -> bool {
        self.n >= self.max
    }
    fn reported(&self, data: u64, upto: usize) -> bool {
        // SAFETY: entries below `n` are written.
        (0..upto.min(self.n)).any(|i| unsafe { self.evs.add(i).read_unaligned() }.u64 == data)
    }

    /// As [`Out::kernel`], where nothing is ours but perhaps local listen sockets.
    ///
    /// # Safety
    /// As [`wait`].
    unsafe fn plain(&mut self, ep: &Ep, timeout: Option<u64>, mask: *const libc::sigset_t) -> Result<Spoke> {
        let end = timeout.map(|t| sys::now_ns().saturating_add(t));
        let mut left = timeout;
        loop {
            let zoned = ep.zoned.load(Ordering::Relaxed);
            if zoned && !ep.ctl_added.load(Ordering::Relaxed) {
                // There may be a monitor again.
                ep.watch_ctl();
            }
            if !zoned {
                // SAFETY: the caller's.
                return unsafe { self.kernel(ep, left, mask, true) };
            }
            let piece = if left == Some(0) { left } else { ep.aloof.cut(ctl::unwatched()) };
            let whole = piece.is_none_or(|p| left.is_some_and(|l| l <= p));
            let since = cpu::ticks();
            // SAFETY: the caller's.
            let spoke = unsafe { self.kernel(ep, if whole { left } else { piece }, mask, true) }?;
            ep.aloof.waited(ep.fd.load(Ordering::Relaxed), since, self.n > 0);
            if whole || self.n > 0 || spoke != Spoke::Nobody {
                return Ok(spoke);
            }
            ep.aloof.attend(ep.fd.load(Ordering::Relaxed));
            if ctl::unwatched().is_some() {
                zone::watch::alone();
            }
            left = end.map(|t| t.saturating_sub(sys::now_ns()));
        }
    }

    /// Add listeners that would get something from another worker's queue.
    fn peers(&mut self, ep: &Ep) {
        zone::balance::look(ep.fd.load(Ordering::Relaxed), |events, data| {
            if !self.full() && !self.reported(data, self.n) {
                self.push(events, data);
            }
        });
    }

    /// Add what the kernel has. `plain`: the caller is [`Out::plain`].
    ///
    /// # Safety
    /// As [`wait`].
    unsafe fn kernel(
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
            // SAFETY: the caller's.
            return unsafe { self.inside(ep, timeout, mask, plain) };
        }
        let Some(shell) = ep.sleeps_in() else {
            // SAFETY: the caller's.
            let r = unsafe { self.inside(ep, timeout, mask, plain) };
            ep.woken_inside();
            return r;
        };
        let mut few = [libc::epoll_event { events: 0, u64: 0 }; 16];
        // SAFETY: 16 entries; the caller's mask.
        let look = || unsafe { sys::epoll_wait(shell, few.as_mut_ptr(), few.len() as i32, timeout, mask) };
        let k = asleep::sleep(&On { ep: Some(ep.index()), plain, ..On::default() }, look)?;
        let mut spoke = if k > 0 { Spoke::Own } else { Spoke::Nobody };
        let mut inner = false;
        for e in &few[..k.min(few.len())] {
            match e.u64 {
                shell::INNER_MARK => inner = true,
                CTL_MARK => spoke = Spoke::Control,
                _ => {}
            }
        }
        if let Some(b) = ep.bell().filter(|_| few[..k.min(few.len())].iter().any(|e| e.u64 == BELL_MARK)) {
            sys::eventfd_clear(b.fd());
        }
        if inner {
            // SAFETY: the caller's.
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
    /// As [`wait`].
    unsafe fn inside(
        &mut self,
        ep: &Ep,
        timeout: Option<u64>,
        mask: *const libc::sigset_t,
        plain: bool,
    ) -> Result<Spoke> {
        let before = self.n;
        let (fd, room) = (ep.fd.load(Ordering::Relaxed), (self.max - before) as i32);
        // SAFETY: the rest of the array.
        let look = || unsafe { sys::epoll_wait(fd, self.evs.add(before), room, timeout, mask) };
        let k = match timeout {
            Some(0) => look(),
            _ => asleep::sleep(&On { ep: Some(ep.index()), plain, inside: true, ..On::default() }, look),
        }?;
        let mut spoke = Spoke::Nobody;
        let zoned = k > 1 && ep.zoned.load(Ordering::Relaxed);
        for i in before..before + k {
            // SAFETY: the kernel has written k entries from `before` on.
            let e = unsafe { self.evs.add(i).read_unaligned() };
            let data = e.u64;
            match data {
                BELL_MARK => {
                    if let Some(b) = ep.bell() {
                        sys::eventfd_clear(b.fd());
                    }
                    if spoke == Spoke::Nobody {
                        spoke = Spoke::Own;
                    }
                }
                CTL_MARK => spoke = Spoke::Control,
                zone::balance::PEER_MARK => {
                    zone::balance::spoke();
                    if spoke == Spoke::Nobody {
                        spoke = Spoke::Peer;
                    }
                }
                // A listener can be ready in both worlds, and in several sockets of
                // the kernel's; report it once.
                _ if self.reported(data, before) => {}
                _ if zoned && zone::watch::is_double(data) && self.reported(data, self.n) => {}
                _ => self.push(e.events, data),
            }
        }
        Ok(spoke)
    }
}

/// # Safety
/// As [`wait`].
unsafe fn run(ep: &'static Ep, mut out: Out, timeout_ns: Option<u64>, mask: *const libc::sigset_t) -> Result<usize> {
    let (mut deadline, mut held) = (None, None);
    let mut slept = false;
    loop {
        ctl::poll();
        zone::watch::told();
        let peer;
        {
            let Ok(mut g) = ep.lock.lock() else {
                // In a signal handler on top of ourselves.
                // SAFETY: the caller's.
                return unsafe {
                    sys::epoll_wait(ep.fd.load(Ordering::Relaxed), out.evs, out.max as i32, timeout_ns, mask)
                };
            };
            collect(ep, &mut g);
            report(&mut g, &mut out);
            if out.n == 0 && g.n > MANY_HOT {
                arm_all(ep, &mut g, ep);
                bell::before_sleep();
                collect(ep, &mut g);
                report(&mut g, &mut out);
            }
            if core::mem::take(&mut g.unsettled) {
                drop(g);
                settle(ep);
                if out.n > 0 && !out.full() {
                    // What has just become the kernel's is reported with the rest.
                    // SAFETY: the caller's.
                    let _ = unsafe { out.kernel(ep, Some(0), core::ptr::null(), false) };
                }
                if out.n > 0 {
                    return Ok(out.n);
                }
                continue;
            }
            // Only the kernel can have something: it is asked once, by the sleep.
            let ask = timeout_ns == Some(0) || !alone(ep) || zone::balance::pending();
            let now = cpu::ticks();
            g.turns += 1;
            let turn = g.turns >= KERNEL_TURNS || now - g.last_kernel > KERNEL_US * cpu::ticks_per_us();
            if (out.n == 0 && ask) || (turn && ep.kernel.load(Ordering::Relaxed)) {
                g.turns = 0;
                g.last_kernel = now;
                let nothing = out.n == 0;
                // SAFETY: the caller's.
                let spoke = unsafe { out.kernel(ep, Some(0), core::ptr::null(), false) };
                if nothing && ep.zoned.load(Ordering::Relaxed) && (out.n > 0 || timeout_ns == Some(0)) {
                    ep.aloof.waited(ep.fd.load(Ordering::Relaxed), now, out.n > 0);
                }
                if let Ok(Spoke::Control) = spoke {
                    drop(g);
                    control(ep);
                    if out.n == 0 {
                        continue;
                    }
                    return Ok(out.n);
                }
                if out.n == 0 {
                    spoke?;
                }
                if zone::balance::pending() {
                    out.peers(ep);
                }
            }
            if out.n > 0 {
                ctl::progress();
                share(ep, &mut g);
                return Ok(out.n);
            }
            peer = if ask { spin_target(&g) } else { None };
        }
        if timeout_ns == Some(0) {
            return Ok(0);
        }
        if deadline.is_none() {
            deadline = timeout_ns.map(|t| sys::now_ns().saturating_add(t));
        }
        if deadline.is_some_and(|t| slept && sys::now_ns() >= t) {
            return Ok(0);
        }
        if let Some(cpu) = peer {
            if ep.spin.spin(cpu, || something(ep)) {
                continue;
            }
        }
        if !mask.is_null() {
            held.get_or_insert_with(Held::all);
        }
        // SAFETY: the caller's.
        unsafe { sleep(ep, &mut out, deadline, mask) }?;
        slept = true;
        if out.n > 0 {
            if let Ok(mut g) = ep.lock.lock() {
                collect(ep, &mut g);
                report(&mut g, &mut out);
                share(ep, &mut g);
            }
            return Ok(out.n);
        }
    }
}

/// Follow the connections of this instance that have changed their path. It
/// changes the items, so the lock is not held.
fn settle(ep: &Ep) {
    for _ in 0..ITEMS.len() {
        let found = {
            let Ok(g) = ep.lock.lock() else { return };
            (0..g.n).find_map(|k| ITEMS.get(g.at(k)).and_then(|it| it.unsettled()))
        };
        let Some(d) = found else { return };
        if crate::path::follow(d) == Err(Errno::EAGAIN) {
            return; // in a signal handler on top of an operation on it
        }
    }
}

fn control(ep: &Ep) {
    ctl::readable();
    if ep.zoned.load(Ordering::Relaxed) {
        zone::watch::late();
    }
    if ctl::dead() {
        ep.unwatch_ctl();
    }
}

/// Turn the marks that peers have set into hot items.
fn collect(ep: &Ep, g: &mut Inner) {
    let Some(b) = ep.bell() else {
        recheck_listeners(g);
        return;
    };
    for word in 0..g.chans.len() {
        let mut bits = g.chans[word];
        while bits != 0 {
            let i = word * 64 + bits.trailing_zeros() as usize;
            bits &= bits - 1;
            let Some(c) = chan::CHANS.get(i as u32).filter(|c| c.id.load(Ordering::Relaxed) != 0) else {
                g.chans[word] &= !(1 << (i % 64));
                continue;
            };
            let Some(w) = c.waiter_of(b) else { continue };
            if w.summary.load(Ordering::Relaxed) == 0 {
                continue;
            }
            // Acquire: the marks below, and what was published before them.
            let s = w.summary.swap(0, Ordering::Acquire);
            if s & SUMMARY_SYN != 0 {
                for k in 0..g.n_listeners {
                    if let Some(it) = ITEMS.get(g.listeners[k]) {
                        it.was_marked();
                        g.heat(it);
                    }
                }
            }
            for (k, r) in w.ready.iter().enumerate().filter(|(k, _)| s >> k & 1 != 0) {
                let mut slots = r.swap(0, Ordering::Acquire);
                while slots != 0 {
                    let slot = k * 64 + slots.trailing_zeros() as usize;
                    slots &= slots - 1;
                    heat_slot(ep, g, c, slot);
                }
            }
        }
    }
    recheck_listeners(g);
}

fn heat_slot(ep: &Ep, g: &mut Inner, c: &chan::Chan, slot: usize) {
    let Some(d) = c.desc(slot) else { return };
    let mut it = item::first(d);
    for _ in 0..64 {
        let Some(i) = it else { return };
        if i.is(d, ep.index()) {
            i.was_marked();
            g.heat(i);
        }
        it = i.next();
    }
}

fn recheck_listeners(g: &mut Inner) {
    for k in 0..g.n_listeners {
        if let Some(it) = ITEMS.get(g.listeners[k]) {
            if it.recheck.load(Ordering::Acquire) {
                g.heat(it);
            }
        }
    }
}

/// Report ready hot items; those that are armed and not ready cool down.
///
/// What is reported goes behind all others. So everybody has a turn when the array is smaller
/// than what is ready; and as we do not know when an item became ready, who was answered long
/// ago comes before who was answered just now, and has likely asked before.
fn report(g: &mut Inner, out: &mut Out) {
    let n = g.n;
    if n == 0 {
        return;
    }
    for k in 0..n {
        if out.full() {
            break;
        }
        let i = g.at(k);
        let Some(it) = ITEMS.get(i) else { continue };
        let ev = it.take();
        if ev == crate::ready::UNSETTLED {
            g.unsettled = true;
            continue;
        }
        it.idle.store(ev == 0, Ordering::Relaxed);
        if ev != 0 {
            out.push(ev, it.data.load(Ordering::Relaxed));
            it.was_marked();
            // With others only: alone it is first and last.
            if n > 1 && g.push(i) {
                g.set(k, NOBODY);
            }
        }
    }
    compact(g);
}

/// No item has this index.
const NOBODY: u32 = u32::MAX;

/// Drop dead items from the hot list, and idle ones that are armed or the
/// kernel's alone.
fn compact(g: &mut Inner) {
    let mut keep = 0;
    for k in 0..g.n {
        let i = g.at(k);
        let Some(it) = ITEMS.get(i) else { continue };
        // An item that was not looked at may be ready although it is armed.
        let cold = it.idle.swap(false, Ordering::Relaxed) && (it.is_armed() || it.passive());
        if cold || !it.live.load(Ordering::Relaxed) {
            item::bury(i);
        } else {
            g.set(keep, i);
            keep += 1;
        }
    }
    g.n = keep;
}

/// Arm every hot item. They stay in the list until the next look.
///
/// `root`: the instance that will sleep; it hears this one's bell and those inside.
fn arm_all(ep: &Ep, g: &mut Inner, root: &Ep) -> bool {
    let Some(b) = ep.need_bell() else { return g.n == 0 };
    let mut all = true;
    for k in 0..g.n {
        if let Some(it) = ITEMS.get(g.at(k)) {
            it.arm(b, g, root);
            all &= it.is_armed() || it.passive() || it.nested();
        }
    }
    all
}

/// Is any item ready, or any mark set? For spinning; changes nothing.
fn something(ep: &Ep) -> bool {
    let Ok(mut g) = ep.lock.lock() else { return true };
    if marked(ep, &g) || (0..g.n).any(|k| ITEMS.get(g.at(k)).is_some_and(|it| it.ready())) {
        return true;
    }
    let now = cpu::ticks();
    if ep.kernel.load(Ordering::Relaxed) && now - g.last_kernel > 5 * cpu::ticks_per_us() {
        g.last_kernel = now;
        let mut p = libc::pollfd { fd: ep.fd.load(Ordering::Relaxed), events: libc::POLLIN, revents: 0 };
        // SAFETY: one pollfd.
        return unsafe { sys::ppoll(&mut p, 1, Some(0), core::ptr::null()) } == Ok(1);
    }
    false
}

fn marked(ep: &Ep, g: &Inner) -> bool {
    let Some(b) = ep.bell() else { return false };
    each_waiter(g, b, |w| w.summary.load(Ordering::Relaxed) != 0)
}

fn each_waiter(g: &Inner, b: &Bell, mut f: impl FnMut(&fsocket_abi::channel::Waiter) -> bool) -> bool {
    for (word, &bits) in g.chans.iter().enumerate() {
        let mut bits = bits;
        while bits != 0 {
            let i = word * 64 + bits.trailing_zeros() as usize;
            bits &= bits - 1;
            if let Some(w) = chan::CHANS.get(i as u32).and_then(|c| c.waiter_of(b)) {
                if f(w) {
                    return true;
                }
            }
        }
    }
    false
}

fn set_sleeping(g: &Inner, b: &Bell, on: bool) {
    each_waiter(g, b, |w| {
        w.sleeping.store(on as u32, Ordering::Relaxed);
        false
    });
}

/// Nobody shares memory with us: no peer can mark anything. With a bell, as a
/// channel that comes rings it.
fn alone(ep: &Ep) -> bool {
    ep.bell().is_some() && chan::none()
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

/// Sleep in the kernel until a bell, a kernel descriptor, a signal, or the
/// deadline.
///
/// # Safety
/// As [`wait`].
unsafe fn sleep(ep: &'static Ep, out: &mut Out, deadline: Option<u64>, mask: *const libc::sigset_t) -> Result<()> {
    // Items that are not hot are in no list of the instance.
    crate::peers::look_at_all();
    let mut limit = deadline.map(|t| t.saturating_sub(sys::now_ns()));
    {
        let Ok(mut g) = ep.lock.lock() else { return Err(Errno::EINTR) };
        // Without a monitor there are no bells, and the sleep is cut below.
        if !arm_all(ep, &mut g, ep) && !ctl::dead() {
            limit = Some(limit.map_or(UNARMED_NS, |l| l.min(UNARMED_NS)));
        }
        g.sleepers += 1;
        if let Some(b) = ep.bell() {
            set_sleeping(&g, b, true);
        }
    }
    if let Some(ns) = ctl::unwatched() {
        zone::watch::alone();
        limit = Some(limit.map_or(ns, |l| l.min(ns)));
    }
    bell::before_sleep();
    let r = if something_after_arming(ep) {
        Ok(Spoke::Nobody)
    } else {
        stats::count(Counter::Sleeps);
        let (limit, idle) = crate::idle::cut(ep.aloof.cut(zone::balance::cut(limit)));
        let t0 = cpu::ticks();
        // SAFETY: the caller's.
        let r = unsafe { out.kernel(ep, limit, mask, false) };
        ep.spin.slept(cpu::ticks() - t0);
        if ep.zoned.load(Ordering::Relaxed) {
            ep.aloof.waited(ep.fd.load(Ordering::Relaxed), t0, out.n > 0);
            if out.n == 0 && r == Ok(Spoke::Nobody) {
                ep.aloof.attend(ep.fd.load(Ordering::Relaxed));
            }
        }
        if idle && out.n == 0 && r == Ok(Spoke::Nobody) {
            crate::idle::give_back();
        }
        r
    };
    if let Ok(mut g) = ep.lock.lock() {
        g.sleepers = g.sleepers.saturating_sub(1);
        if let Some(b) = ep.bell() {
            set_sleeping(&g, b, g.sleepers > 0);
        }
        g.last_kernel = cpu::ticks();
    }
    match r {
        Ok(Spoke::Control) => control(ep),
        Ok(_) => {}
        Err(e) => return Err(e),
    }
    Ok(())
}

fn something_after_arming(ep: &Ep) -> bool {
    let Ok(g) = ep.lock.lock() else { return true };
    marked(ep, &g) || (0..g.n).any(|k| ITEMS.get(g.at(k)).is_some_and(|it| it.ready()))
}

/// Other threads sleep in this instance while we return with events: what we
/// leave hot must be able to wake them.
fn share(ep: &Ep, g: &mut Inner) {
    if g.sleepers == 0 {
        return;
    }
    arm_all(ep, g, ep);
    if let Some(b) = ep.bell() {
        set_sleeping(g, b, true);
        sys::heavy_fence();
        if (0..g.n).any(|k| ITEMS.get(g.at(k)).is_some_and(|it| it.ready())) {
            b.ring_self();
        }
    }
}

/// Is an instance itself readable, as `poll` sees it? For connections of ours and SYN
/// queues; of the rest the kernel says it.
pub fn readable(d: &Desc) -> bool {
    let Some(ep) = of(d).filter(|ep| ep.items.load(Ordering::Relaxed) > 0) else { return false };
    let Ok(mut g) = ep.lock.lock() else { return true };
    // A mark says that something happened, not that it was asked for.
    collect(ep, &mut g);
    if (0..g.n).any(|k| ITEMS.get(g.at(k)).is_some_and(|it| it.unsettled().is_some())) {
        // What has gone over to the kernel is the kernel's instance to report.
        drop(g);
        settle(ep);
        let Ok(again) = ep.lock.lock() else { return true };
        g = again;
    }
    (0..g.n).any(|k| ITEMS.get(g.at(k)).is_some_and(|it| it.ready()))
}

/// How often something came for an instance, as one that watches it by its
/// edges is told.
pub fn pulses(d: &Desc) -> u32 {
    let Some(ep) = of(d) else { return 0 };
    if let Ok(mut g) = ep.lock.lock() {
        collect(ep, &mut g);
        // What is not hot is armed: nothing has come for it.
        for it in (0..g.n).filter_map(|k| ITEMS.get(g.at(k))) {
            ep.pulses.fetch_add(it.pulse() as u32, Ordering::Relaxed);
        }
    }
    ep.pulses.load(Ordering::Relaxed)
}

/// An instance that watches this one is about to sleep.
pub fn arm_inner(d: &Desc, root: &Ep) {
    let Some(ep) = of(d).filter(|ep| !core::ptr::eq(*ep, root)) else { return };
    ep.nested.store(true, Ordering::Relaxed);
    // Also if nothing of ours is in it yet: what is added then is told of.
    if let Some(b) = ep.need_bell() {
        root.hear(b);
    }
    if ep.items.load(Ordering::Relaxed) == 0 {
        return;
    }
    if let Ok(mut g) = ep.lock.lock() {
        arm_all(ep, &mut g, root);
        if let Some(b) = ep.bell() {
            set_sleeping(&g, b, true);
        }
    };
}

/// Before a `poll` that includes the instance sleeps, in its shell: its bell must ring for our
/// items. The caller runs the heavy fence and asks [`readable`] again.
pub fn before_outer_sleep(d: &Desc) {
    let Some(ep) = of(d) else { return };
    if let Ok(mut g) = ep.lock.lock() {
        arm_all(ep, &mut g, ep);
        g.sleepers += 1;
        if let Some(b) = ep.bell() {
            set_sleeping(&g, b, true);
        }
    };
}

pub fn after_outer_sleep(d: &Desc) {
    let Some(ep) = of(d) else { return };
    if let Ok(mut g) = ep.lock.lock() {
        g.sleepers = g.sleepers.saturating_sub(1);
        if let Some(b) = ep.bell() {
            set_sleeping(&g, b, g.sleepers > 0);
            // Not if it is for a thread that sleeps in there.
            if g.sleepers == 0 {
                sys::eventfd_clear(b.fd());
            }
        }
    };
    ep.drain_shell();
}
