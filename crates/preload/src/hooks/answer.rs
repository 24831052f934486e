//! From what core answers to what libc returns: values, errno, panics.

use super::threads;
use fsocket_runtime::Outcome;
use fsocket_shm::cancel;
use fsocket_sys::Result;
use libc::*;

/// Run `f`; should it panic, the call fails with EIO. Ends the thread if `f` has
/// come back because it is cancelled.
#[inline]
pub(super) fn guarded<R: Failure>(f: impl FnOnce() -> R) -> R {
    completed(caught(f))
}

/// The end of [`guarded`].
#[inline]
pub(super) fn completed<R>(r: R) -> R {
    if cancel::careful() {
        threads::after();
    }
    r
}

/// A wait of ours has ended before the call that it was for: by a signal, or because the
/// thread is cancelled.
#[cold]
pub(super) fn interrupted() {
    fsocket_sys::Errno::EINTR.set();
    if cancel::careful() {
        threads::after();
    }
}

/// In a frame of its own: a thread that is cancelled is unwound through those of the
/// hooks, and must find nothing to do there.
#[inline(never)]
fn caught<R: Failure>(f: impl FnOnce() -> R) -> R {
    caught_here(f)
}

#[inline(always)]
pub(super) fn caught_here<R: Failure>(f: impl FnOnce() -> R) -> R {
    std::panic::catch_unwind(std::panic::AssertUnwindSafe(f)).unwrap_or_else(|_| {
        fsocket_sys::Errno::EIO.set();
        R::failure()
    })
}

/// What a function of this type returns when it fails.
pub(super) trait Failure {
    fn failure() -> Self;
}
impl Failure for sighandler_t {
    fn failure() -> Self {
        SIG_ERR
    }
}
impl Failure for c_int {
    fn failure() -> Self {
        -1
    }
}
impl Failure for ssize_t {
    fn failure() -> Self {
        -1
    }
}
impl Failure for c_longlong {
    fn failure() -> Self {
        -1
    }
}
impl Failure for () {
    fn failure() -> Self {}
}
impl Failure for *mut c_void {
    fn failure() -> Self {
        core::ptr::null_mut()
    }
}

impl<T> Failure for Outcome<Result<T>> {
    fn failure() -> Self {
        Outcome::Done(Err(fsocket_sys::Errno::EIO))
    }
}

/// A call that fails.
#[cold]
pub(super) fn failed<R: Failure>(e: fsocket_sys::Errno) -> R {
    e.set();
    R::failure()
}

/// An answer as libc gives it: a value, or -1 and errno.
pub(super) trait Answer<R> {
    fn answer(self) -> R;
}
impl Answer<ssize_t> for Result<usize> {
    #[inline(always)]
    fn answer(self) -> ssize_t {
        match self {
            Ok(v) => v as ssize_t,
            Err(e) => {
                e.set();
                -1
            }
        }
    }
}
impl Answer<c_int> for Result<usize> {
    fn answer(self) -> c_int {
        Answer::<ssize_t>::answer(self) as c_int
    }
}
impl Answer<c_int> for Result<i32> {
    fn answer(self) -> c_int {
        self.map(|v| v as usize).answer()
    }
}
impl Answer<c_int> for Result<()> {
    fn answer(self) -> c_int {
        self.map(|()| 0usize).answer()
    }
}

/// A number that the application has closed while its placeholder waits for the next
/// connection, or that it never had, because it is the library's: EBADF, as it would be.
/// Programs look through all numbers for what they have inherited.
#[inline(always)]
pub(super) fn gone(fd: c_int) -> bool {
    let gone = fsocket_fdtable::pool::holds(fd) || fsocket_runtime::process::owns(fd);
    if gone {
        fsocket_sys::Errno::EBADF.set();
    }
    gone
}

/// Ours, or libc's.
pub(super) fn either<T, R>(o: Outcome<T>, real: impl FnOnce() -> R) -> R
where
    T: Answer<R>,
{
    o.or_kernel(T::answer, real)
}
