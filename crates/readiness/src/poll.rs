//! `poll`, `ppoll`, `select` and `pselect` over descriptors of the library and of the kernel
//! together. Each pass looks at both, then spins, then sleeps on all.

mod kept;
mod sets;
mod sleep;

use crate::asleep::Mark;
use crate::path;
use crate::process;
use crate::ready;
use crate::signals::Held;
use crate::table::{Desc, Kind};
use crate::wait::{self, Deadline, Mask};
use crate::zone::{self, poll::Beside};
use crate::{cancel, ctl, epoll, listen, pool, upgrade, user, waker, Cause, Outcome};
use fsocket_abi::path_switch::PathState;
use fsocket_sys::{self as sys, Errno, Result};
use kept::{any, events, ours, pending, Kept};
pub use sets::select;
use sleep::{memory, on_word, sleep_on, Sleeps};

/// Up to this many descriptors are handled on the stack; more take a mapping.
const STACK: usize = 128;

/// Is a descriptor of the library among them?
fn concerns_us(fds: &[libc::pollfd]) -> bool {
    fds.iter().any(|p| ours(p.fd).is_some())
}

/// # Safety
/// `fds` points to `n` pollfds of the program, or to no memory; `mask` is null or a signal mask.
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

/// `slept`: set to true if the call has slept.
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
    // SAFETY: the check above has found `n` pollfds readable at `fds`.
    let fds = unsafe { core::slice::from_raw_parts_mut(fds, n) };
    fds.iter().for_each(|p| pool::let_go(p.fd));
    if !writable(fds) {
        return Outcome::Kernel(Cause::Invalid);
    }
    if !concerns_us(fds) {
        // SAFETY: the mask is null or the program's signal mask, which only the kernel reads.
        let mask = unsafe { Mask::at(mask) };
        return zone::poll::poll(fds, timeout_ns, mask).map_or(Outcome::Kernel(Cause::NotOurs), Outcome::Done);
    }
    let blank = libc::pollfd { fd: -1, events: 0, revents: 0 };
    let mut small = [blank; STACK];
    let room = n + 2 + zone::poll::EXTRA;
    if room <= STACK {
        // SAFETY: the mask is null or the program's signal mask, which only the kernel reads.
        return Outcome::Done(unsafe { run(fds, &mut small[..room], timeout_ns, mask, slept) });
    }
    let len = room * core::mem::size_of::<libc::pollfd>();
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
    let Ok(p) = sys::mmap_briefly(len, libc::PROT_READ | libc::PROT_WRITE, flags, -1, 0) else {
        return Outcome::Done(Err(Errno::ENOMEM));
    };
    // SAFETY: a fresh zeroed mapping of that size.
    let big = unsafe { core::slice::from_raw_parts_mut(p as *mut libc::pollfd, room) };
    // SAFETY: the mask is null or the program's signal mask, which only the kernel reads.
    let r = unsafe { run(fds, big, timeout_ns, mask, slept) };
    // SAFETY: `big` is not used again.
    let _ = unsafe { sys::munmap(p, len) };
    Outcome::Done(r)
}

/// Can `revents` of all entries be written? The first entry, the last one and one on each page
/// are tested by a write.
fn writable(fds: &mut [libc::pollfd]) -> bool {
    const PAGE: usize = 4096;
    let last = fds.len() - 1;
    fds.iter_mut().enumerate().all(|(i, p)| {
        let at = &raw mut p.revents;
        // SAFETY: the program says that this is its memory; the copy returns EFAULT where nothing is.
        i != 0 && i != last && at as usize % PAGE >= size_of::<libc::pollfd>() || unsafe { user::put(at, 0) }.is_ok()
    })
}

/// Writes events of the library's descriptors to `revents`. Returns the number of descriptors with events.
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

/// `kernel` has room for all of `fds`, for local listen sockets, and for two more entries.
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
    let mark = Mark::new();
    let mut kept = Kept::new(&mark);
    let mut kernel = Kernel::new(fds, kernel, timeout_ns != Some(0));
    let (mut deadline, mut held) = (None, None);
    let (mut interrupted, mut unarmed, mut long) = (None, waker::Unarmed::default(), false);
    loop {
        ctl::poll();
        let lost = kept.lost(fds).count();
        let found = kernel.look(fds, lost)?;
        if found == 0 && timeout_ns == Some(0) && !mask.is_null() {
            // Returns EINTR if a signal is pending that `mask` lets through.
            // SAFETY: no descriptors; the mask is the program's, and the kernel checks it.
            unsafe { sys::ppoll(kernel.all.as_mut_ptr(), 0, Some(0), mask) }?;
        }
        if found > 0 || timeout_ns == Some(0) {
            ctl::progress();
            return Ok(found);
        }
        if let Some(e) = interrupted {
            return Err(e);
        }
        let deadline = *deadline.get_or_insert_with(|| Deadline::within(timeout_ns));
        if *slept && deadline.is_over() {
            return Ok(0);
        }
        if spin(fds, &mut kept) {
            continue;
        }
        let alone = mask.is_null() && held.is_none() && !long && kernel.has_none() && !crate::peers::is_unwatched();
        let one = kept.alone(fds).filter(|_| alone);
        if one.is_none() && held.is_none() && (!mask.is_null() || kept.any()) {
            held = Some(Held::all());
            // From here on a signal ends the sleep. Before, a descriptor may have been replaced.
            if went(fds, kernel.all) || kept.lost(fds).count() != lost {
                continue;
            }
        }
        let own = held.as_ref().map(Held::before);
        // SAFETY: `own` outlives the sleep, and the program's mask is valid during the call.
        let mask = unsafe { own.as_ref().filter(|_| mask.is_null()).map_or(Mask::at(mask), |own| Mask::of(own)) };
        *slept = true;
        let (all, unarmed) = (kernel.for_sleep(), &mut unarmed);
        let r = match one {
            Some(d) => on_word(d, fds, deadline, &kept).map(|reached| long = reached),
            None => sleep_on(Sleeps { fds, kept: &kept, kernel: all, deadline, unarmed, mask }),
        };
        interrupted = kernel.slept(r.err());
        if let Some(e) = interrupted.filter(|e| *e != Errno::EINTR || cancel::hit()) {
            return Err(e);
        }
        kept.settle();
    }
}

/// The descriptors that are passed to the kernel's `poll`.
struct Kernel<'a> {
    all: &'a mut [libc::pollfd],
    /// Number of the program's descriptors, which come first.
    fds: usize,
    /// Local listen sockets, which come after the program's descriptors.
    beside: Beside,
    /// The number of the program's descriptors for which the kernel may have events.
    n: usize,
    /// The kernel reports all events of the program's descriptors, since these are kernel connections and listeners.
    simple: bool,
    /// `all` has the kernel's answer: the sleep that has just ended has asked it.
    told: bool,
    /// The value of the epoch (count of moved connections) when `n` was counted.
    epoch: u32,
}

/// No answer of the kernel: it has these events in no entry.
const NO_ANSWER: i16 = -1;

impl<'a> Kernel<'a> {
    fn new(fds: &[libc::pollfd], all: &'a mut [libc::pollfd], sleeps: bool) -> Self {
        let epoch = upgrade::epoch();
        let (n, simple) = kernel_fds(fds, all);
        let beside = Beside::of(fds, sleeps);
        for (k, &(_, fd)) in all[fds.len()..].iter_mut().zip(&beside.at[..beside.n]) {
            *k = libc::pollfd { fd, events: libc::POLLIN, revents: 0 };
        }
        Kernel { all, fds: fds.len(), beside, n, simple, told: false, epoch }
    }

    /// Writes events of the library and of the kernel to `revents`. Returns the number of
    /// descriptors with events. `lost`: the number of `fds` that refer to other files by now.
    fn look(&mut self, fds: &mut [libc::pollfd], lost: usize) -> Result<usize> {
        let before = core::mem::replace(&mut self.epoch, upgrade::epoch());
        if settle(fds) || before != self.epoch || went(fds, self.all) || lost > 0 {
            (self.n, self.simple) = kernel_fds(fds, self.all);
            self.told = false;
        }
        let found = look(fds);
        if self.n == 0 {
            return Ok(found);
        }
        if !core::mem::take(&mut self.told) {
            ask(&mut self.all[..fds.len() + self.beside.n])?;
        }
        Ok(fold(fds, self.all, &self.beside))
    }

    fn has_none(&self) -> bool {
        self.n + self.beside.n == 0
    }

    fn for_sleep(&mut self) -> &mut [libc::pollfd] {
        self.all[0].revents = NO_ANSWER;
        self.beside.arm(&mut self.all[self.fds..]);
        &mut self.all[..self.fds + self.beside.n + wait::BESIDE]
    }

    /// A sleep has ended, in `error` if there is one.
    fn slept(&mut self, error: Option<Errno>) -> Option<Errno> {
        let answered = self.all[0].revents != NO_ANSWER;
        self.told = error.is_none() && answered && self.simple && self.beside.n == 0;
        error
    }
}

/// Spins until an event comes. False: the spin ended without one; `kept` then has everything on
/// which the call will sleep.
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

/// Fills in the entries for the kernel's `poll`. Returns the number of the program's descriptors
/// that the kernel checks, and whether it checks all and reports all that it finds.
fn kernel_fds(fds: &[libc::pollfd], kernel: &mut [libc::pollfd]) -> (usize, bool) {
    let (mut count, mut simple) = (0, true);
    for (k, p) in kernel.iter_mut().zip(fds.iter()) {
        *k = *p;
        k.revents = 0;
        match ours(p.fd).map(|d| (d, d.kind())) {
            Some((d, Kind::Shm)) => {
                simple = false;
                match d.path_state() {
                    PathState::Draining(end) => {
                        k.fd = end;
                        count += 1;
                    }
                    _ => k.fd = -1,
                }
            }
            Some((d, Kind::Listener)) => {
                count += 1;
                if let Some(l) = listen::of(d) {
                    l.join();
                }
            }
            other => {
                if let Some((d, Kind::Epoll)) = other {
                    simple = false;
                    epoll::is_polled(d);
                }
                count += (p.fd >= 0) as usize;
            }
        }
    }
    (count, simple)
}

/// Has another thread moved a connection to the kernel whose descriptor is not among the entries
/// for the kernel yet?
fn went(fds: &[libc::pollfd], kernel: &[libc::pollfd]) -> bool {
    let mut pairs = fds.iter().zip(kernel);
    pairs.any(|(p, k)| p.fd >= 0 && k.fd < 0 && !ours(p.fd).is_some_and(Desc::is_in_rings))
}

/// Follows connections that have changed their path. True: there was one.
fn settle(fds: &[libc::pollfd]) -> bool {
    let mut any = false;
    for p in fds {
        if let Some(d) = ours(p.fd).filter(|d| pending(d)) {
            any |= path::follow(d) != Err(Errno::EAGAIN);
        }
    }
    any
}

/// Asks the kernel for the events of these entries.
fn ask(kernel: &mut [libc::pollfd]) -> Result<()> {
    // SAFETY: the slice has so many entries; no mask.
    unsafe { sys::ppoll(kernel.as_mut_ptr(), kernel.len(), Some(0), core::ptr::null()) }.map(drop)
}

/// Adds the kernel's events. Returns the number of descriptors with events.
fn fold(fds: &mut [libc::pollfd], kernel: &[libc::pollfd], beside: &Beside) -> usize {
    for (p, k) in fds.iter_mut().zip(kernel).filter(|(_, k)| k.fd >= 0) {
        p.revents |= k.revents;
    }
    zone::poll::fold(fds, beside, &kernel[fds.len()..]);
    fds.iter().filter(|p| p.revents != 0).count()
}
