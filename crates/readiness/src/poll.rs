//! `poll`, `ppoll`, `select`, `pselect`.

mod kept;

use crate::asleep::Mark;
use crate::path;
use crate::ready;
use crate::signals::Held;
use crate::stage;
use crate::stage::Path;
use crate::table::{self, kind, Desc};
use crate::wait::{self, Sleeper};
use crate::waker::{self, Waker};
use crate::zone::{self, watch::Beside};
use crate::{cancel, chan, ctl, epoll, listen, pool, spin, stats, upgrade, user, Outcome};
use core::sync::atomic::Ordering;
use fsocket_abi::arena::Counter;
use fsocket_ring as ring;
use fsocket_sync::doorbell::Batch;
use fsocket_sys::{self as sys, cpu, Errno, Result};
use kept::{events, ours, pending, Kept};

/// Descriptors handled on the stack; more take a mapping.
const STACK: usize = 128;
static SPIN: spin::Memory = spin::Memory::new();

/// Is there anything of ours among them?
fn concerns_us(fds: &[libc::pollfd]) -> bool {
    fds.iter().any(|p| ours(p.fd).is_some())
}

/// # Safety
/// `fds` points to `n` pollfds of the program's, or to nothing; `mask` is null or a signal mask.
pub unsafe fn poll(
    fds: *mut libc::pollfd,
    n: usize,
    timeout_ns: Option<u64>,
    mask: *const libc::sigset_t,
) -> Outcome<Result<usize>> {
    // SAFETY: the caller's.
    unsafe { poll_noting(fds, n, timeout_ns, mask, &mut false) }
}

/// `slept`: set if it has slept.
///
/// # Safety
/// As [`poll`].
unsafe fn poll_noting(
    fds: *mut libc::pollfd,
    n: usize,
    timeout_ns: Option<u64>,
    mask: *const libc::sigset_t,
    slept: &mut bool,
) -> Outcome<Result<usize>> {
    if n == 0 || n > table::MAX_FD || !user::readable(fds, n) {
        return Outcome::Kernel;
    }
    // SAFETY: they are there.
    let fds = unsafe { core::slice::from_raw_parts_mut(fds, n) };
    fds.iter().for_each(|p| pool::let_go(p.fd));
    if !writable(fds) {
        return Outcome::Kernel;
    }
    if !concerns_us(fds) {
        // SAFETY: the caller's mask.
        return unsafe { zone::watch::poll(fds, timeout_ns, mask) }.map_or(Outcome::Kernel, Outcome::Done);
    }
    let blank = libc::pollfd { fd: -1, events: 0, revents: 0 };
    let mut small = [blank; STACK];
    let room = n + 2 + zone::watch::EXTRA;
    if room <= STACK {
        // SAFETY: the caller's mask.
        return Outcome::Done(unsafe { run(fds, &mut small[..room], timeout_ns, mask, slept) });
    }
    let len = room * core::mem::size_of::<libc::pollfd>();
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
    let Ok(p) = sys::mmap(len, libc::PROT_READ | libc::PROT_WRITE, flags, -1, 0) else {
        return Outcome::Done(Err(Errno::ENOMEM));
    };
    // SAFETY: a fresh zeroed mapping of that size.
    let big = unsafe { core::slice::from_raw_parts_mut(p as *mut libc::pollfd, room) };
    // SAFETY: the caller's mask.
    let r = unsafe { run(fds, big, timeout_ns, mask, slept) };
    // SAFETY: `big` is not used again.
    let _ = unsafe { sys::munmap(p, len) };
    Outcome::Done(r)
}

/// Can `revents` be written, as far as one of each page says? That is written to.
fn writable(fds: &mut [libc::pollfd]) -> bool {
    const PAGE: usize = 4096;
    let last = fds.len() - 1;
    fds.iter_mut().enumerate().all(|(i, p)| {
        let at = &raw mut p.revents;
        // SAFETY: the caller's, or it cannot be written.
        i != 0 && i != last && at as usize % PAGE >= size_of::<libc::pollfd>() || unsafe { user::put(at, 0) }.is_ok()
    })
}

/// Events of ours, into `revents`; how many descriptors have any.
fn look(fds: &mut [libc::pollfd]) -> usize {
    let mut n = 0;
    for p in fds {
        p.revents = 0;
        if let Some(d) = ours(p.fd) {
            p.revents = events(d, p.events);
            n += (p.revents != 0) as usize;
        }
    }
    n
}

fn any(fds: &[libc::pollfd], kept: &Kept) -> bool {
    kept.each(fds).any(|(d, wanted)| events(d, wanted) != 0 || pending(d))
}

/// `kernel` has room for all of `fds`, for local listen sockets, and two more.
///
/// # Safety
/// `mask` is null or a signal mask.
unsafe fn run(
    fds: &mut [libc::pollfd],
    kernel: &mut [libc::pollfd],
    timeout_ns: Option<u64>,
    mask: *const libc::sigset_t,
    slept: &mut bool,
) -> Result<usize> {
    let n = fds.len();
    let mark = Mark::new();
    let mut kept = Kept::new(&mark);
    let mut epoch = upgrade::epoch();
    let mut kernel_n = kernel_fds(fds, kernel);
    let beside = Beside::of(fds, timeout_ns != Some(0));
    for (k, &(_, fd)) in kernel[n..].iter_mut().zip(&beside.at[..beside.n]) {
        *k = libc::pollfd { fd, events: libc::POLLIN, revents: 0 };
    }
    let (mut deadline, mut held) = (None, None);
    let (mut interrupted, mut unarmed) = (None, waker::Unarmed::default());
    loop {
        ctl::poll();
        let before = core::mem::replace(&mut epoch, upgrade::epoch());
        let lost = kept.lost(fds).count();
        if settle(fds) || before != epoch || went(fds, kernel) || lost > 0 {
            kernel_n = kernel_fds(fds, kernel);
        }
        let mut found = look(fds);
        if kernel_n > 0 {
            // SAFETY: `kernel` has as many entries and more.
            unsafe { sys::ppoll(kernel.as_mut_ptr(), n + beside.n, Some(0), core::ptr::null()) }?;
            merge(fds, kernel);
            zone::watch::fold(fds, &beside, &kernel[n..]);
            found = fds.iter().filter(|p| p.revents != 0).count();
        }
        if found == 0 && timeout_ns == Some(0) && !mask.is_null() {
            // A signal that is pending and that the mask lets through.
            // SAFETY: no descriptors; the caller's mask.
            unsafe { sys::ppoll(kernel.as_mut_ptr(), 0, Some(0), mask) }?;
        }
        if found > 0 || timeout_ns == Some(0) {
            ctl::progress();
            return Ok(found);
        }
        if let Some(e) = interrupted {
            return Err(e);
        }
        if deadline.is_none() {
            deadline = timeout_ns.map(|t| sys::now_ns().saturating_add(t));
        }
        if *slept && deadline.is_some_and(|t| sys::now_ns() >= t) {
            return Ok(0);
        }
        let peer = fds.iter().find_map(|p| ours(p.fd).filter(|d| d.is_conn()).map(ready::peer_cpu));
        if let Some(c) = peer {
            let keep = core::cell::RefCell::new(&mut kept);
            if memory(fds).spin_noting(c, || any(fds, &keep.borrow()), || keep.borrow_mut().take(fds)) {
                continue;
            }
        }
        kept.take(fds);
        if held.is_none() && (!mask.is_null() || kept.any()) {
            held = Some(Held::all());
            // From here on a signal ends the sleep; who has put something else into a number's place
            // before may have sent it already.
            if went(fds, kernel) || kept.lost(fds).count() != lost {
                continue;
            }
        }
        let own = held.as_ref().map(Held::before);
        let mask = match (&own, mask.is_null()) {
            (Some(own), true) => own as *const u64 as *const libc::sigset_t,
            _ => mask,
        };
        beside.arm(&mut kernel[n..]);
        loop {
            // SAFETY: the caller's mask, or `own`, as long as the kernel's set.
            let ready = unsafe { sleep(fds, kernel, beside.n, (deadline, &mut unarmed), mask, &kept) };
            *slept = true;
            interrupted = ready.err();
            if interrupted.is_some_and(|e| e != Errno::EINTR || cancel::hit()) {
                return Err(interrupted.unwrap_or(Errno::EINTR));
            }
            // Nobody but what it sleeps on makes it look at numbers that are something else by now.
            let (mut lost, none) = (false, ready == Ok(false) && !kept.woken());
            for i in kept.lost(fds) {
                lost = true;
                if none {
                    kernel[i].fd = -1;
                }
            }
            if !lost || !none || deadline.is_some_and(|t| sys::now_ns() >= t) {
                break;
            }
        }
        kept.settle();
    }
}

/// What the kernel is asked about; how many of them there are.
fn kernel_fds(fds: &[libc::pollfd], kernel: &mut [libc::pollfd]) -> usize {
    let mut count = 0;
    for (k, p) in kernel.iter_mut().zip(fds.iter()) {
        *k = *p;
        k.revents = 0;
        match ours(p.fd).map(|d| (d, d.kind())) {
            Some((d, kind::CONN)) => match stage::of(d) {
                Path::Draining(end) => {
                    k.fd = end;
                    count += 1;
                }
                _ => k.fd = -1,
            },
            Some((d, kind::LISTENER)) => {
                count += 1;
                if let Some(l) = listen::of(d) {
                    l.join();
                }
            }
            other => {
                if let Some((d, kind::EPOLL)) = other {
                    epoll::is_polled(d);
                }
                count += (p.fd >= 0) as usize;
            }
        }
    }
    count
}

/// Has anybody else made one the kernel's, about which the kernel was not asked so far?
fn went(fds: &[libc::pollfd], kernel: &[libc::pollfd]) -> bool {
    let mut pairs = fds.iter().zip(kernel);
    pairs.any(|(p, k)| p.fd >= 0 && k.fd < 0 && !ours(p.fd).is_some_and(|d| d.is_conn() && stage::of(d) == Path::Shm))
}

/// Follow connections that have changed their path; true if any has.
fn settle(fds: &[libc::pollfd]) -> bool {
    let mut any = false;
    for p in fds {
        if let Some(d) = ours(p.fd).filter(|d| pending(d)) {
            any |= path::follow(d) != Err(Errno::EAGAIN);
        }
    }
    any
}

/// Kernel results into the application's array.
fn merge(fds: &mut [libc::pollfd], kernel: &[libc::pollfd]) {
    for (p, k) in fds.iter_mut().zip(kernel) {
        if k.fd < 0 || k.revents == 0 {
            continue;
        }
        p.revents |= k.revents;
    }
}

/// Of the waits of such a call.
fn memory(fds: &[libc::pollfd]) -> &'static spin::Memory {
    match fds {
        [one] => ours(one.fd).filter(|d| d.is_conn()).map_or(&SPIN, |d| &d.spin_rx),
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
    let watched = |d: &Desc| !matches!(d.kind(), kind::EPOLL | kind::KERNEL) || epoll::has_items(d);
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
        // SAFETY: the caller's mask.
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
            if let Some(s) = ours(p.fd).filter(|d| d.kind() == kind::EPOLL).and_then(epoll::wrapper_of) {
                (k.fd, k.revents) = (if on { s } else { p.fd }, 0);
            }
        }
    }
}

/// Ask the peer to ring `b`; false: not possible.
fn arm(d: &Desc, wanted: i16, b: &Waker, batch: &mut Batch<'static>) -> bool {
    match d.kind() {
        kind::CONN => {
            let Some(c) = chan::CHANS.get(d.chan.load(Ordering::Relaxed).wrapping_sub(1)) else { return false };
            let Some(w) = c.waiter_for(b) else { return false };
            batch.arm(&d.rx().1.want_data, 1 << w);
            if wanted & libc::POLLOUT != 0 {
                let (_, tx, h) = d.tx();
                tx.prod.space_at.store(ring::space_target(tx, h), Ordering::Relaxed);
                batch.arm(&tx.want_space, 1 << w);
            }
            true
        }
        kind::LISTENER => {
            if let Some(l) = listen::of(d).filter(|_| wanted & (libc::POLLIN | libc::POLLRDNORM) != 0) {
                l.arm(b, batch);
            }
            true
        }
        kind::EPOLL => {
            epoll::before_outer_sleep(d);
            true
        }
        _ => true,
    }
}

fn disarm(d: &Desc, b: &Waker) {
    match d.kind() {
        kind::CONN => {
            let Some(c) = chan::CHANS.get(d.chan.load(Ordering::Relaxed).wrapping_sub(1)) else { return };
            if let Some(w) = c.waiter_for(b) {
                d.rx().1.want_data.disarm(1 << w);
                d.tx().1.want_space.disarm(1 << w);
            }
        }
        kind::LISTENER => {
            if let Some(l) = listen::of(d) {
                l.disarm(b);
            }
        }
        kind::EPOLL => epoll::after_outer_sleep(d),
        _ => {}
    }
}

/// As the kernel has them: more than FD_SETSIZE are left to it.
const MAX: usize = 1024;

/// Bits of one `fd_set`, or none.
struct Set {
    of: *mut u8,
    bytes: usize,
    bits: [u64; MAX / 64],
}
impl Set {
    /// # Safety
    /// As [`select`].
    unsafe fn read(of: *mut libc::fd_set, n: usize) -> Result<Set> {
        let bytes = if of.is_null() { 0 } else { n.div_ceil(64) * 8 };
        let mut s = Set { of: of as *mut u8, bytes, bits: [0; MAX / 64] };
        // SAFETY: the caller's; `n` is at most MAX.
        unsafe { user::read(s.of, s.bits.as_mut_ptr() as *mut u8, bytes) }?;
        Ok(s)
    }
    fn write(&self) -> Result<()> {
        // SAFETY: as in `read`.
        unsafe { user::write(self.bits.as_ptr() as *const u8, self.of, self.bytes) }
    }
    fn has(&self, fd: usize) -> bool {
        self.bits[fd / 64] >> (fd % 64) & 1 != 0
    }
    fn put(&mut self, fd: usize) {
        self.bits[fd / 64] |= 1 << (fd % 64);
    }
}

/// `select` by way of `poll`, with the kernel's mapping of events. Returns the
/// number of bits set.
///
/// # Safety
/// Each set is null or the program's for `nfds` bits, rounded up to 64.
pub unsafe fn select(
    nfds: i32,
    read: *mut libc::fd_set,
    write: *mut libc::fd_set,
    except: *mut libc::fd_set,
    timeout_ns: Option<u64>,
    mask: *const libc::sigset_t,
) -> Outcome<Result<usize>> {
    let n = nfds.max(0) as usize;
    if n == 0 || n > MAX {
        return Outcome::Kernel;
    }
    // SAFETY: the caller's.
    let [Ok(mut r), Ok(mut w), Ok(mut x)] = [read, write, except].map(|p| unsafe { Set::read(p, n) }) else {
        return Outcome::Kernel;
    };
    let mut fds = [libc::pollfd { fd: -1, events: 0, revents: 0 }; MAX];
    let mut m = 0;
    for fd in 0..n {
        let mut e = 0;
        if r.has(fd) {
            e |= libc::POLLIN | libc::POLLRDNORM;
        }
        if w.has(fd) {
            e |= libc::POLLOUT | libc::POLLWRNORM;
        }
        if x.has(fd) {
            e |= libc::POLLPRI;
        }
        if e != 0 {
            fds[m] = libc::pollfd { fd: fd as i32, events: e, revents: 0 };
            m += 1;
        }
    }
    fds[..m].iter().for_each(|p| pool::let_go(p.fd));
    if !concerns_us(&fds[..m]) && Beside::of(&fds[..m], timeout_ns != Some(0)).n == 0 {
        return Outcome::Kernel;
    }
    let mut slept = false;
    // SAFETY: m entries; the caller's mask.
    let r0 = unsafe { poll_noting(fds.as_mut_ptr(), m, timeout_ns, mask, &mut slept) };
    match r0 {
        Outcome::Kernel => return Outcome::Kernel,
        Outcome::Done(Err(e)) => return Outcome::Done(Err(e)),
        Outcome::Done(Ok(_)) => {}
    }
    if !slept && fds[..m].iter().any(|p| p.revents & libc::POLLNVAL != 0) {
        return Outcome::Done(Err(Errno::EBADF));
    }
    let mut bits = 0;
    for s in [&mut r, &mut w, &mut x] {
        s.bits = [0; MAX / 64];
    }
    for p in &fds[..m] {
        let (fd, e, ev) = (p.fd as usize, p.events, p.revents);
        let mut put = |s: &mut Set, asked: i16, events: i16| {
            if e & asked != 0 && ev & events != 0 {
                s.put(fd);
                bits += 1;
            }
        };
        put(
            &mut r,
            libc::POLLIN,
            libc::POLLIN | libc::POLLRDNORM | libc::POLLRDBAND | libc::POLLHUP | libc::POLLERR | libc::POLLNVAL,
        );
        put(
            &mut w,
            libc::POLLOUT,
            libc::POLLOUT | libc::POLLWRNORM | libc::POLLWRBAND | libc::POLLERR | libc::POLLNVAL,
        );
        put(&mut x, libc::POLLPRI, libc::POLLPRI | libc::POLLNVAL);
    }
    Outcome::Done(r.write().and(w.write()).and(x.write()).map(|()| bits))
}
