//! `select`, implemented by `poll`.

use super::{ours, poll_noting};
use crate::zone::{self, poll::Beside};
use crate::{pool, user, Cause, Outcome};
use fsocket_sys::{Errno, Result};

/// Size of a set in bits. A call with more than FD_SETSIZE descriptors is left to the kernel.
const MAX: usize = 1024;

/// The bits of one `fd_set`; empty if the program passed none.
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
        // SAFETY: the program says that its set has `n` bits, and `n` is at most MAX; the copy
        // returns EFAULT where no memory is mapped.
        unsafe { user::read(s.of, s.bits.as_mut_ptr() as *mut u8, bytes) }?;
        Ok(s)
    }
    fn write(&self) -> Result<()> {
        // SAFETY: the program says that its set has these bytes; the copy returns EFAULT where no
        // memory is mapped.
        unsafe { user::write(self.bits.as_ptr() as *const u8, self.of, self.bytes) }
    }
    fn has(&self, fd: usize) -> bool {
        self.bits[fd / 64] >> (fd % 64) & 1 != 0
    }
    fn put(&mut self, fd: usize) {
        self.bits[fd / 64] |= 1 << (fd % 64);
    }
}

/// The descriptors below `n` that are in one of the sets, in order.
fn numbers(n: usize, sets: [&Set; 3]) -> impl Iterator<Item = usize> + '_ {
    (0..n.div_ceil(64)).flat_map(move |word| {
        let below = match n - word * 64 {
            left @ 0..64 => (1 << left) - 1,
            _ => u64::MAX,
        };
        let all = sets.iter().fold(0, |all, set| all | set.bits[word]) & below;
        core::iter::successors(Some(all), |bits| Some(bits & bits.wrapping_sub(1)))
            .take_while(|bits| *bits != 0)
            .map(move |bits| word * 64 + bits.trailing_zeros() as usize)
    })
}

/// `select`, implemented by `poll` with the kernel's mapping of events. Returns the number of
/// bits set.
///
/// # Safety
/// Each set is null or has `nfds` bits of the program's memory, rounded up to 64.
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
        return Outcome::Kernel(Cause::NotOurs);
    }
    // SAFETY: each set is null or has `n` bits of the program's memory; it is copied.
    let [Ok(mut r), Ok(mut w), Ok(mut x)] = [read, write, except].map(|p| unsafe { Set::read(p, n) }) else {
        return Outcome::Kernel(Cause::Invalid);
    };
    let mut is_ours = false;
    for fd in numbers(n, [&r, &w, &x]) {
        pool::let_go(fd as i32);
        is_ours |= ours(fd as i32).is_some();
    }
    if !is_ours && !zone::poll::is_used() {
        return Outcome::Kernel(Cause::NotOurs);
    }
    let mut fds = [libc::pollfd { fd: -1, events: 0, revents: 0 }; MAX];
    let m = asked(n, [&r, &w, &x], &mut fds);
    if !is_ours && Beside::of(&fds[..m], timeout_ns != Some(0)).n == 0 {
        return Outcome::Kernel(Cause::NotOurs);
    }
    let mut slept = false;
    // SAFETY: `fds` has m entries; the mask is null or the program's.
    let r0 = unsafe { poll_noting(fds.as_mut_ptr(), m, timeout_ns, mask, &mut slept) };
    match r0 {
        Outcome::Kernel(why) => return Outcome::Kernel(why),
        Outcome::Done(Err(e)) => return Outcome::Done(Err(e)),
        Outcome::Done(Ok(_)) => {}
    }
    if !slept && fds[..m].iter().any(|p| p.revents & libc::POLLNVAL != 0) {
        return Outcome::Done(Err(Errno::EBADF));
    }
    let bits = answer(&fds[..m], [&mut r, &mut w, &mut x]);
    Outcome::Done(r.write().and(w.write()).and(x.write()).map(|()| bits))
}

/// Turns the bits of the sets into entries for `poll`. Returns the number of entries.
fn asked(n: usize, [r, w, x]: [&Set; 3], fds: &mut [libc::pollfd; MAX]) -> usize {
    let mut m = 0;
    for fd in numbers(n, [r, w, x]) {
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
        fds[m] = libc::pollfd { fd: fd as i32, events: e, revents: 0 };
        m += 1;
    }
    m
}

/// Turns the results of `poll` into the bits of the sets. Returns the number of bits set.
fn answer(fds: &[libc::pollfd], [r, w, x]: [&mut Set; 3]) -> usize {
    let mut bits = 0;
    for s in [&mut *r, &mut *w, &mut *x] {
        s.bits = [0; MAX / 64];
    }
    for p in fds {
        let (fd, e, ev) = (p.fd as usize, p.events, p.revents);
        let mut put = |s: &mut Set, asked: i16, events: i16| {
            if e & asked != 0 && ev & events != 0 {
                s.put(fd);
                bits += 1;
            }
        };
        put(
            r,
            libc::POLLIN,
            libc::POLLIN | libc::POLLRDNORM | libc::POLLRDBAND | libc::POLLHUP | libc::POLLERR | libc::POLLNVAL,
        );
        put(w, libc::POLLOUT, libc::POLLOUT | libc::POLLWRNORM | libc::POLLWRBAND | libc::POLLERR | libc::POLLNVAL);
        put(x, libc::POLLPRI, libc::POLLPRI | libc::POLLNVAL);
    }
    bits
}
