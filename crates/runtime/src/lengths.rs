//! Checks and limits the buffers of the program (start and length) as the kernel does before it
//! looks at the socket. Each call that takes a buffer, or vectors of buffers, uses this module.
//! The result is never longer than what the kernel would transfer.
//!
//! | kernel | calls | order |
//! | --- | --- | --- |
//! | `vfs_read`, `vfs_write` | `read`, `write` | [`whole`]: checks, then limits |
//! | `import_ubuf` | `send`, `recv` and the like; one vector | [`buffer`]: limits, then checks |
//! | `import_iovec` | several vectors | [`Vectors`]: checks each, limits the sum |

use crate::user;
use fsocket_sys::{self as sys, Errno, Result};

/// The most bytes that one call transfers: MAX_RW_COUNT (include/linux/fs.h).
pub const MOST: usize = 0x7fff_f000;
/// The most vectors of one call: UIO_MAXIOV.
pub const MOST_VECTORS: usize = 1024;

/// Every x86-64 processor leaves addresses of this many bits to programs.
const BITS: u32 = 47;

/// Do all these bytes lie where any processor lets programs have memory? False: [`is_users`] must
/// decide. For hot paths: this is a single branch.
#[inline(always)]
pub fn is_plain<T>(p: *const T, n: usize) -> bool {
    // The kernel excludes the last page. Start and length are below the limit, so their sum does
    // not wrap.
    let (at, end) = (p as usize, (p as usize).wrapping_add(n).wrapping_add(4095));
    (at | n | end) >> BITS == 0
}

/// Like the kernel's `access_ok`: may a program have `n` bytes at `p`? Does not say whether there
/// is memory.
#[inline]
pub fn is_users<T>(p: *const T, n: usize) -> bool {
    is_plain(p, n) || is_users_by_kernel(p as usize, n)
}

/// Asks the kernel, because the limit depends on the processor (five levels of pages, masked
/// addresses) and on the kernel's version. The kernel checks the buffer before the descriptor, so
/// descriptor -1 does no harm.
#[cold]
fn is_users_by_kernel(at: usize, n: usize) -> bool {
    // SAFETY: the descriptor -1 is invalid, so the kernel writes nothing.
    let ok = |p: usize| unsafe { sys::recv(-1, p as *mut u8, 0, 0) } != Err(Errno::EFAULT);
    at.checked_add(n).is_some_and(|end| (n as isize) >= 0 && ok(at) && ok(end))
}

/// The part of a single buffer that a socket call transfers.
///
/// # Errors
/// EFAULT: a program cannot have memory there.
#[inline]
pub fn buffer<T>(p: *const T, n: usize) -> Result<usize> {
    whole(p, n.min(MOST))
}

/// The part of a single buffer that `read` or `write` transfers. Differs from [`buffer`] for
/// lengths above [`MOST`].
///
/// # Errors
/// EFAULT, as for [`buffer`].
#[inline]
pub fn whole<T>(p: *const T, n: usize) -> Result<usize> {
    match is_users(p, n) {
        true => Ok(n.min(MOST)),
        false => Err(Errno::EFAULT),
    }
}

/// The vectors of a call. They stay in the program's memory, where another thread may change them.
/// Then the call transfers other bytes, but never more than [`Vectors::total`].
#[derive(Clone, Copy)]
pub struct Vectors {
    at: *const libc::iovec,
    n: usize,
    total: usize,
}

impl Vectors {
    /// # Errors
    /// `too_many` for more than [`MOST_VECTORS`]; EINVAL for a length below zero; EFAULT.
    ///
    /// # Safety
    /// `at` points to `n` vectors of the program, or to no memory.
    #[inline(always)]
    pub unsafe fn of(at: *const libc::iovec, n: usize, too_many: Errno) -> Result<Vectors> {
        if n > MOST_VECTORS {
            return Err(too_many);
        }
        if n > 0 && !user::readable(at, n) {
            return Err(Errno::EFAULT);
        }
        let all = Vectors { at, n, total: 0 };
        let (mut total, mut plain, mut negative) = (0usize, true, false);
        for v in all.raw() {
            negative |= (v.iov_len as isize) < 0;
            plain &= is_plain(v.iov_base, v.iov_len);
            total = total.saturating_add(v.iov_len);
        }
        match plain || !negative && all.are_users() {
            true => Ok(Vectors { total: total.min(MOST), ..all }),
            false if negative => Err(Errno::EINVAL),
            false => Err(Errno::EFAULT),
        }
    }

    /// Checks each vector separately, when the quick check was not enough.
    #[cold]
    fn are_users(&self) -> bool {
        match self.n {
            1 => self.raw().all(|v| buffer(v.iov_base, v.iov_len).is_ok()),
            _ => self.raw().all(|v| is_users(v.iov_base, v.iov_len)),
        }
    }

    #[inline(always)]
    fn raw(&self) -> Raw {
        Raw { at: self.at, end: self.at.wrapping_add(self.n) }
    }

    /// The address of the vectors, for the kernel.
    #[inline]
    pub fn at(&self) -> *const libc::iovec {
        self.at
    }

    /// The number of vectors, including empty ones.
    #[inline]
    pub fn count(&self) -> usize {
        self.n
    }

    /// The sum of the lengths, at most [`MOST`].
    #[inline]
    pub fn total(&self) -> usize {
        self.total
    }

    /// The vector, if there is only one.
    #[inline]
    pub fn single(&self) -> Option<(*mut u8, usize)> {
        (self.n == 1).then(|| self.pieces().next().unwrap_or((core::ptr::null_mut(), 0)))
    }

    /// The address and length of each vector that is not empty, together at most
    /// [`Vectors::total`] bytes.
    #[inline(always)]
    pub fn pieces(&self) -> Pieces {
        Pieces { raw: self.raw(), left: self.total }
    }
}

/// Iterator over the vectors in the program's memory. (The loop is hot; iterators made of closures
/// cost 10 ns a call.)
struct Raw {
    at: *const libc::iovec,
    end: *const libc::iovec,
}

impl Iterator for Raw {
    type Item = libc::iovec;
    #[inline(always)]
    fn next(&mut self) -> Option<libc::iovec> {
        if self.at == self.end {
            return None;
        }
        // SAFETY: `of` has found the vectors readable. Each is read once, so another thread's
        // write cannot change it after the check.
        let v = unsafe { self.at.read_volatile() };
        self.at = self.at.wrapping_add(1);
        Some(v)
    }
}

/// Iterator of [`Vectors::pieces`].
pub struct Pieces {
    raw: Raw,
    left: usize,
}

impl Iterator for Pieces {
    type Item = (*mut u8, usize);
    #[inline(always)]
    fn next(&mut self) -> Option<(*mut u8, usize)> {
        loop {
            let v = self.raw.next()?;
            let n = if v.iov_len < self.left { v.iov_len } else { self.left };
            self.left -= n;
            if n > 0 {
                return Some((v.iov_base as *mut u8, n));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use core::ptr::null;

    static HERE: u64 = 0;

    fn is(at: usize, n: usize) -> bool {
        is_users(at as *const u8, n)
    }

    /// If the quick check accepts a buffer, the kernel accepts it, too, whatever the limit of this
    /// machine is.
    #[test]
    fn the_quick_answer_is_the_kernels() {
        let here = &raw const HERE as usize;
        let edges = (0..64).flat_map(|bit| [(1usize << bit) - 1, 1 << bit, (1 << bit) + 1]);
        for n in edges.clone().chain([usize::MAX, usize::MAX - 8]) {
            for at in edges.clone().chain([here, usize::MAX]) {
                let (quick, kernel) = (is_plain(at as *const u8, n), is_users_by_kernel(at, n));
                assert!(!quick || kernel, "{at:x} {n:x}");
            }
        }
        assert!(is(here, 8) && is(here, 1 << 30) && !is(here, usize::MAX) && !is(here, 1 << 63));
        assert!(!is(usize::MAX, 2) && !is(1 << 63, 0) && is(0, 0));
    }

    #[test]
    fn read_checks_before_it_cuts_and_recv_behind() {
        let here = (&raw const HERE).cast::<u8>();
        assert_eq!(whole(here, usize::MAX), Err(Errno::EFAULT));
        assert_eq!(whole(here, MOST + 1), Ok(MOST));
        assert_eq!(buffer(here, MOST - 1), Ok(MOST - 1));
        // Near address 0, so that the end is still in the program's half of the address space.
        assert_eq!(buffer(4096 as *const u8, usize::MAX), Ok(MOST));
    }

    #[test]
    fn vectors_are_cut_at_their_sum() {
        let v = |at: usize, iov_len| libc::iovec { iov_base: at as *mut _, iov_len };
        let einval = Errno::EINVAL;
        let total = |v: &[libc::iovec]| {
            // SAFETY: the slice has that many vectors.
            let all = unsafe { Vectors::of(v.as_ptr(), v.len(), einval) }?;
            assert_eq!(all.pieces().map(|(_, n)| n).sum::<usize>(), all.total());
            Ok(all.total())
        };
        assert_eq!(total(&[]), Ok(0));
        assert_eq!(total(&[v(1 << 20, 7), v(0, 0), v(1 << 20, 9)]), Ok(16));
        assert_eq!(total(&[v(1 << 20, 1 << 30); 3]), Ok(MOST));
        assert_eq!(total(&[v(1 << 20, 1 << 62); 2]), Err(Errno::EFAULT));
        // The kernel limits a single vector before it checks its end.
        assert_eq!(total(&[v(1 << 20, 1 << 62)]), Ok(MOST));
        assert_eq!(total(&[v(usize::MAX, 8), v(1 << 20, usize::MAX)]), Err(einval));
        // SAFETY: there may be no memory at the address; this is what the function detects.
        assert_eq!(unsafe { Vectors::of(4096 as *const _, 1, einval) }.map(drop), Err(Errno::EFAULT));
        // SAFETY: the function refuses the number before it reads a vector.
        assert_eq!(unsafe { Vectors::of(null(), 1025, einval) }.map(drop), Err(einval));
    }
}
