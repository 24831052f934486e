//! Shared memory: sealed memfds and mappings of them.
//!
//! Everything here is written by other processes at any time. A mapping hands
//! out references to atomics only, every offset is checked, and the seals
//! (no shrink) are what keeps an access from ending in SIGBUS.

use fsocket_abi::{arena, balance, channel};
use fsocket_sync::atomic::{AtomicU32, AtomicU64};
use fsocket_sync::news::News;
use rustix::fd::{AsFd, OwnedFd};
use rustix::fs::{MemfdFlags, SealFlags};
use rustix::mm::{MapFlags, ProtFlags};
use std::io;
use std::ptr::NonNull;

/// A type that may be looked at in memory that others write.
///
/// # Safety
/// Every bit pattern must be a valid value, and every field that is ever read
/// must be an atomic.
pub unsafe trait Shared {}
// SAFETY: plain atomics.
unsafe impl Shared for AtomicU32 {}
// SAFETY: plain atomics.
unsafe impl Shared for AtomicU64 {}
// SAFETY: an atomic.
unsafe impl Shared for News {}
// SAFETY: atomics and padding that nobody reads.
unsafe impl Shared for fsocket_abi::sock::Sock {}
// SAFETY: only atomics.
unsafe impl Shared for arena::Stats {}
// SAFETY: only atomics.
unsafe impl Shared for arena::Zone {}
// SAFETY: atomics and padding that nobody reads.
unsafe impl Shared for balance::Queue {}
// SAFETY: atomics and padding that nobody reads.
unsafe impl Shared for channel::SynQueue {}
// SAFETY: atomics and padding that nobody reads.
unsafe impl Shared for channel::Waiter {}
// SAFETY: atomics and padding that nobody reads.
unsafe impl Shared for channel::Slot {}

/// A shared, writable mapping of the first bytes of a memfd.
pub struct Mapping {
    ptr: NonNull<u8>,
    len: usize,
}

impl Mapping {
    /// Maps `len` bytes of `fd`, which must be sealed against shrinking below
    /// that.
    pub fn new(fd: impl AsFd, len: usize) -> io::Result<Mapping> {
        Mapping::part(fd, 0, len)
    }

    /// The same for `len` bytes from `at`, a multiple of the page size.
    pub fn part(fd: impl AsFd, at: usize, len: usize) -> io::Result<Mapping> {
        // SAFETY: a fresh mapping at an address of the kernel's choice aliases
        // no memory of this program.
        let ptr = unsafe {
            rustix::mm::mmap(
                std::ptr::null_mut(),
                len,
                ProtFlags::READ | ProtFlags::WRITE,
                MapFlags::SHARED | MapFlags::NORESERVE,
                fd,
                at as u64,
            )?
        };
        let ptr = NonNull::new(ptr.cast()).ok_or_else(|| io::Error::from(io::ErrorKind::OutOfMemory))?;
        Ok(Mapping { ptr, len })
    }

    /// Where it begins, for code that does its own checks; `len` bytes, as long as `self`.
    pub fn start(&self) -> *mut u8 {
        self.ptr.as_ptr()
    }

    /// The `T` at byte `off`.
    ///
    /// # Panics
    /// If it lies outside or is not aligned: offsets are computed by us from
    /// checked indices, never taken from shared memory.
    pub fn at<T: Shared>(&self, off: usize) -> &T {
        assert!(
            off.checked_add(size_of::<T>()).is_some_and(|end| end <= self.len) && off.is_multiple_of(align_of::<T>())
        );
        // SAFETY: inside the mapping and aligned (asserted; the mapping itself
        // is page-aligned), valid for any bytes and safe to share with
        // concurrent writers (`Shared`), and mapped until `self` is dropped.
        unsafe { self.ptr.add(off).cast().as_ref() }
    }
}

// SAFETY: it owns its range of addresses, and what is there is atomics that other processes write, too.
unsafe impl Send for Mapping {}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: our own mapping, and no reference outlives `self`.
        let _ = unsafe { rustix::mm::munmap(self.ptr.as_ptr().cast(), self.len) };
    }
}

/// A zero-filled memfd of `size` bytes with `seals` (and F_SEAL_SEAL).
pub fn memfd(name: &str, size: usize, seals: SealFlags) -> io::Result<OwnedFd> {
    let fd = rustix::fs::memfd_create(name, MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
    rustix::fs::ftruncate(&fd, size as u64)?;
    rustix::fs::fcntl_add_seals(&fd, seals | SealFlags::SEAL)?;
    Ok(fd)
}

/// A read-only memfd with these bytes.
pub fn memfd_of(name: &str, bytes: &[u8]) -> io::Result<OwnedFd> {
    let fd = rustix::fs::memfd_create(name, MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
    let mut rest = bytes;
    while !rest.is_empty() {
        let n = rustix::io::retry_on_intr(|| rustix::io::write(&fd, rest))?;
        rest = &rest[n..];
    }
    // The reader starts where the offset is.
    rustix::fs::seek(&fd, rustix::fs::SeekFrom::Start(0))?;
    rustix::fs::fcntl_add_seals(&fd, SealFlags::WRITE | SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)?;
    Ok(fd)
}

/// Device and inode: the same for all descriptors of one file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FileId(u64, u64);

impl FileId {
    /// # Errors
    /// Of `fstat`.
    pub fn of(fd: impl AsFd) -> Result<FileId, rustix::io::Errno> {
        rustix::fs::fstat(fd).map(|st| FileId(st.st_dev, st.st_ino))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use fsocket_sync::atomic::Ordering;

    #[test]
    fn mapping_is_shared_and_sized() {
        let fd = memfd("t", 8192, SealFlags::SHRINK | SealFlags::GROW).unwrap();
        assert!(rustix::fs::ftruncate(&fd, 0).is_err());
        let a = Mapping::new(&fd, 8192).unwrap();
        let b = Mapping::new(&fd, 8192).unwrap();
        a.at::<AtomicU64>(8184).store(7, Ordering::Relaxed);
        assert_eq!(b.at::<AtomicU64>(8184).load(Ordering::Relaxed), 7);
    }

    #[test]
    #[should_panic]
    fn outside_is_refused() {
        let fd = memfd("t", 4096, SealFlags::SHRINK).unwrap();
        let _ = Mapping::new(&fd, 4096).unwrap().at::<AtomicU64>(4092);
    }
}
