//! Turns answers of the library into results of libc: values, errno, panics. No panic leaves these
//! functions.

use super::threads;
use fsocket_runtime::Outcome;
use fsocket_shm::cancel;
use fsocket_sys::Result;
use libc::*;

/// Runs `f`. If `f` panics, the call fails with EIO. If `f` returned because the thread is
/// cancelled, the thread ends here.
#[inline]
pub(super) fn guarded<R: Failure>(f: impl FnOnce() -> R) -> R {
    completed(caught(f))
}

/// The last step of [`guarded`], for hooks that catch panics themselves.
#[inline]
pub(super) fn completed<R>(r: R) -> R {
    if cancel::careful() {
        threads::after();
    }
    r
}

/// Called when a wait of the library ended before the system call: because of a signal or a
/// cancellation, or after the time limit of the call.
#[cold]
pub(super) fn ended(e: fsocket_sys::Errno) {
    e.set();
    if cancel::careful() {
        threads::after();
    }
}

/// Cancellation may unwind the caller's frame, but not this one. It is separate, because a hook's
/// own frame must have nothing to clean up.
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

/// The return value of a failing function of this type.
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

/// Fails the call with this error.
#[cold]
pub(super) fn failed<R: Failure>(e: fsocket_sys::Errno) -> R {
    e.set();
    R::failure()
}

/// Converts an answer to what libc returns: a value, or -1 and errno.
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

/// Fails with EBADF if the program has no such descriptor: its placeholder waits for the next
/// connection, or the descriptor belongs to the library. (Programs check all numbers for inherited
/// descriptors.)
#[inline(always)]
pub(super) fn gone(fd: c_int) -> bool {
    let gone = fsocket_fdtable::pool::holds(fd) || fsocket_runtime::process::owns(fd);
    if gone {
        fsocket_sys::Errno::EBADF.set();
    }
    gone
}

/// Returns the library's answer, or else libc's.
pub(super) fn either<T, R>(o: Outcome<T>, real: impl FnOnce() -> R) -> R
where
    T: Answer<R>,
{
    o.or_kernel(T::answer, real)
}
