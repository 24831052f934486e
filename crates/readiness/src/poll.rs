//! `poll`, `ppoll`, `select`, `pselect`.

mod kept;
mod sets;
mod sleep;

use crate::asleep::Mark;
use crate::path;
use crate::process;
use crate::ready;
use crate::signals::Held;
use crate::stage;
use crate::stage::Path;
use crate::table::Kind;
use crate::zone::{self, poll::Beside};
use crate::{cancel, ctl, epoll, listen, pool, upgrade, user, waker, Cause, Outcome};
use fsocket_sys::{self as sys, Errno, Result};
use kept::{any, events, ours, pending, Kept};
pub use sets::select;
use sleep::{memory, on_word, sleep_on};

/// Descriptors handled on the stack; more take a mapping.
const STACK: usize = 128;

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
    // SAFETY: the program says that `n` pollfds are at `fds`, which are checked before they are used; the mask is
    // null or readable.
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
    if n == 0 || n > process::MAX_FD || !user::readable(fds, n) {
        return Outcome::Kernel(Cause::NotOurs);
    }
    // SAFETY: they are there.
    let fds = unsafe { core::slice::from_raw_parts_mut(fds, n) };
    fds.iter().for_each(|p| pool::let_go(p.fd));
    if !writable(fds) {
        return Outcome::Kernel(Cause::Invalid);
    }
    if !concerns_us(fds) {
        // SAFETY: the mask is null or a signal mask of the program's, which the kernel reads.
        return unsafe { zone::poll::poll(fds, timeout_ns, mask) }
            .map_or(Outcome::Kernel(Cause::NotOurs), Outcome::Done);
    }
    let blank = libc::pollfd { fd: -1, events: 0, revents: 0 };
    let mut small = [blank; STACK];
    let room = n + 2 + zone::poll::EXTRA;
    if room <= STACK {
        // SAFETY: the mask is null or a signal mask of the program's, which the kernel reads.
        return Outcome::Done(unsafe { run(fds, &mut small[..room], timeout_ns, mask, slept) });
    }
    let len = room * core::mem::size_of::<libc::pollfd>();
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
    let Ok(p) = sys::mmap_briefly(len, libc::PROT_READ | libc::PROT_WRITE, flags, -1, 0) else {
        return Outcome::Done(Err(Errno::ENOMEM));
    };
    // SAFETY: a fresh zeroed mapping of that size.
    let big = unsafe { core::slice::from_raw_parts_mut(p as *mut libc::pollfd, room) };
    // SAFETY: the mask is null or a signal mask of the program's, which the kernel reads.
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
        // SAFETY: the program says that this is its memory; the copy returns EFAULT where nothing is.
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
            found = ask(fds, kernel, &beside)?;
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
        if spin(fds, &mut kept) {
            continue;
        }
        let alone = mask.is_null() && held.is_none() && kernel_n + beside.n == 0 && !crate::peers::is_unwatched();
        let one = kept.alone(fds).filter(|_| alone);
        if one.is_none() && held.is_none() && (!mask.is_null() || kept.any()) {
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
        *slept = true;
        interrupted = match one {
            Some(d) => on_word(d, fds, deadline, &kept),
            // SAFETY: the mask is null, the program's, or `own`, which has as many bits as the kernel reads.
            None => unsafe { sleep_on(fds, kernel, beside.n, (deadline, &mut unarmed), mask, &kept) },
        }
        .err();
        if let Some(e) = interrupted.filter(|e| *e != Errno::EINTR || cancel::hit()) {
            return Err(e);
        }
        kept.settle();
    }
}

/// True: something is there. Else all is kept that the sleep will be on.
fn spin(fds: &[libc::pollfd], kept: &mut Kept) -> bool {
    if let Some(cpu) = fds.iter().find_map(|p| ours(p.fd).filter(|d| d.is_conn()).map(ready::peer_cpu)) {
        let keep = core::cell::RefCell::new(&mut *kept);
        if memory(fds).spin_noting(cpu, || any(fds, &keep.borrow()), || keep.borrow_mut().take(fds)) {
            return true;
        }
    }
    kept.take(fds);
    false
}

/// What the kernel is asked about; how many of them there are.
fn kernel_fds(fds: &[libc::pollfd], kernel: &mut [libc::pollfd]) -> usize {
    let mut count = 0;
    for (k, p) in kernel.iter_mut().zip(fds.iter()) {
        *k = *p;
        k.revents = 0;
        match ours(p.fd).map(|d| (d, d.kind())) {
            Some((d, Kind::Shm)) => match stage::of(d) {
                Path::Draining(end) => {
                    k.fd = end;
                    count += 1;
                }
                _ => k.fd = -1,
            },
            Some((d, Kind::Listener)) => {
                count += 1;
                if let Some(l) = listen::of(d) {
                    l.join();
                }
            }
            other => {
                if let Some((d, Kind::Epoll)) = other {
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

/// What the kernel has, too. How many descriptors have anything.
fn ask(fds: &mut [libc::pollfd], kernel: &mut [libc::pollfd], beside: &Beside) -> Result<usize> {
    let n = fds.len();
    // SAFETY: `kernel` has as many entries and more; no mask.
    unsafe { sys::ppoll(kernel.as_mut_ptr(), n + beside.n, Some(0), core::ptr::null()) }?;
    for (p, k) in fds.iter_mut().zip(&*kernel).filter(|(_, k)| k.fd >= 0) {
        p.revents |= k.revents;
    }
    zone::poll::fold(fds, beside, &kernel[n..]);
    Ok(fds.iter().filter(|p| p.revents != 0).count())
}
