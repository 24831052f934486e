//! `select` by way of `poll`.

use super::{ours, poll_noting};
use crate::zone::{self, poll::Beside};
use crate::{pool, user, Cause, Outcome};
use fsocket_sys::{Errno, Result};

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
        // SAFETY: the set is the program's for `n` bits, and `n` is at most MAX; the copy returns EFAULT where
        // nothing is.
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

/// The numbers below `n` that are in one of the sets, in order.
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
        return Outcome::Kernel(Cause::NotOurs);
    }
    // SAFETY: each set is null or the program's for `n` bits; it is copied.
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
    let mut m = 0;
    for fd in numbers(n, [&r, &w, &x]) {
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
    if !is_ours && Beside::of(&fds[..m], timeout_ns != Some(0)).n == 0 {
        return Outcome::Kernel(Cause::NotOurs);
    }
    let mut slept = false;
    // SAFETY: m entries; the caller's mask.
    let r0 = unsafe { poll_noting(fds.as_mut_ptr(), m, timeout_ns, mask, &mut slept) };
    match r0 {
        Outcome::Kernel(why) => return Outcome::Kernel(why),
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
