//! An errno that cannot be zero.

use core::num::NonZeroI32;

#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Errno(NonZeroI32);

pub type Result<T> = core::result::Result<T, Errno>;

impl Errno {
    /// From a positive errno value; anything else becomes EIO.
    #[inline]
    pub const fn new(e: i32) -> Self {
        match NonZeroI32::new(e) {
            Some(v) if e > 0 => Errno(v),
            _ => Errno(NonZeroI32::new(libc::EIO).unwrap()),
        }
    }

    #[inline]
    pub const fn raw(self) -> i32 {
        self.0.get()
    }

    /// Decodes the kernel's return value: -4095..=-1 is an error.
    #[inline(always)]
    pub(crate) fn decode(ret: isize) -> Result<usize> {
        if (-4095..0).contains(&ret) {
            Err(Errno::new(-ret as i32))
        } else {
            Ok(ret as usize)
        }
    }

    /// The `errno` of the calling thread.
    pub fn last() -> Self {
        // SAFETY: glibc's errno location is valid for the life of the thread.
        Errno::new(unsafe { *libc::__errno_location() })
    }

    /// Store into the calling thread's `errno`.
    #[inline]
    pub fn set(self) {
        // SAFETY: glibc's errno location is valid for the life of the thread.
        unsafe { *libc::__errno_location() = self.raw() }
    }
}

impl core::fmt::Debug for Errno {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        write!(f, "errno {}", self.raw())
    }
}

/// Saves the application's errno while the library works, and restores it afterwards.
pub struct Saved(i32);

impl Saved {
    #[inline]
    pub fn errno() -> Self {
        // SAFETY: libc's errno location is valid for the life of the thread.
        Saved(unsafe { *libc::__errno_location() })
    }

    /// Is the saved value this error?
    #[inline]
    pub fn is(&self, e: Errno) -> bool {
        self.0 == e.raw()
    }
}

impl Drop for Saved {
    #[inline]
    fn drop(&mut self) {
        // (Written only if it has changed, because after a fork a write would copy the page.)
        // SAFETY: libc's errno location is valid for the life of the thread.
        unsafe {
            let errno = libc::__errno_location();
            if *errno != self.0 {
                *errno = self.0;
            }
        }
    }
}

macro_rules! known { ($($name:ident),* $(,)?) => { impl Errno { $(pub const $name: Errno = Errno::new(libc::$name);)* } } }
known!(
    EAGAIN,
    EINTR,
    EBADF,
    EINVAL,
    ENOMEM,
    EMFILE,
    EPIPE,
    ECONNRESET,
    ENOTCONN,
    EISCONN,
    EALREADY,
    EINPROGRESS,
    ETIME,
    ETIMEDOUT,
    ENOTSOCK,
    EFAULT,
    EEXIST,
    ENOKEY,
    EACCES,
    ENOENT,
    ENOTDIR,
    EOPNOTSUPP,
    ECONNABORTED,
    ECONNREFUSED,
    EIO,
    ENOTSUP,
    ESRCH,
    ENOSYS,
    EDOM,
    ENOPROTOOPT,
    EPROTO,
    EPERM,
    EXDEV,
    EADDRINUSE,
    EADDRNOTAVAIL,
    ENOBUFS,
    ENOSPC,
    ETOOMANYREFS
);
