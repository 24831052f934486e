//! Shared memory: sealed memfds and mappings of them.
//!
//! Other processes can write this memory at any time. So a mapping hands out references to atomics
//! only, and checks every offset. The seals forbid to shrink the file, so no access ends in
//! SIGBUS.

use fsocket_abi::{arena, balance, channel};
use fsocket_sync::atomic::{AtomicU32, AtomicU64};
use fsocket_sync::news::News;
use rustix::fd::{AsFd, OwnedFd};
use rustix::fs::{MemfdFlags, SealFlags};
use rustix::io::{retry_on_intr, Errno};
use rustix::mm::{MapFlags, ProtFlags};
use std::io;
use std::ptr::NonNull;

/// A type that may be read in memory that other processes write.
///
/// # Safety
/// Every bit pattern must be a valid value, and every field that is read must be an atomic.
pub unsafe trait Shared {}
// SAFETY: an atomic, for which every bit pattern is valid.
unsafe impl Shared for AtomicU32 {}
// SAFETY: an atomic, for which every bit pattern is valid.
unsafe impl Shared for AtomicU64 {}
// SAFETY: consists of an atomic, for which every bit pattern is valid.
unsafe impl Shared for News {}
// SAFETY: all fields that are read are atomics. The padding is never read.
unsafe impl Shared for fsocket_abi::sock::Sock {}
// SAFETY: all fields are atomics.
unsafe impl Shared for arena::Stats {}
// SAFETY: all fields are atomics.
unsafe impl Shared for arena::Zone {}
// SAFETY: all fields that are read are atomics. The padding is never read.
unsafe impl Shared for balance::Queue {}
// SAFETY: all fields that are read are atomics. The padding is never read.
unsafe impl Shared for channel::SynQueue {}
// SAFETY: all fields that are read are atomics. The padding is never read.
unsafe impl Shared for channel::Waiter {}
// SAFETY: all fields that are read are atomics. The padding is never read.
unsafe impl Shared for channel::Slot {}

/// A shared, writable mapping of the first bytes of a memfd.
pub struct Mapping {
    ptr: NonNull<u8>,
    len: usize,
}

impl Mapping {
    /// Maps the first `len` bytes of `fd`. A seal must forbid to shrink the file below `len`.
    pub fn new(fd: impl AsFd, len: usize) -> io::Result<Mapping> {
        Mapping::part(fd, 0, len)
    }

    /// Maps `len` bytes of `fd` from byte `at`, a multiple of the page size.
    pub fn part(fd: impl AsFd, at: usize, len: usize) -> io::Result<Mapping> {
        // SAFETY: this maps a new range at an address that the kernel chooses, so it aliases no
        // memory of this program.
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

    /// Address of the first byte, for code that does its own checks. It is valid for `len` bytes,
    /// as long as `self` lives.
    pub fn start(&self) -> *mut u8 {
        self.ptr.as_ptr()
    }

    /// The `T` at byte `off`.
    ///
    /// # Panics
    /// If it lies outside of the mapping, or is not aligned. Callers compute offsets from checked
    /// indices and never take them from shared memory, so this does not happen.
    pub fn at<T: Shared>(&self, off: usize) -> &T {
        assert!(
            off.checked_add(size_of::<T>()).is_some_and(|end| end <= self.len) && off.is_multiple_of(align_of::<T>())
        );
        // SAFETY: the assertion guarantees that the value is inside the mapping and aligned (the
        // mapping is page-aligned). `T: Shared` is valid for any bytes and allows concurrent
        // writers. The mapping lives as long as the reference, which borrows `self`.
        unsafe { self.ptr.add(off).cast().as_ref() }
    }
}

// SAFETY: the mapping owns its range of addresses. Other processes write to it anyway, so all
// access goes through atomics, which any thread may use.
unsafe impl Send for Mapping {}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: `self` owns the mapping, and no reference into it outlives `self`.
        let _ = unsafe { rustix::mm::munmap(self.ptr.as_ptr().cast(), self.len) };
    }
}

/// Makes a zero-filled memfd of `size` bytes with `seals` (and F_SEAL_SEAL).
pub fn memfd(name: &str, size: usize, seals: SealFlags) -> io::Result<OwnedFd> {
    let fd = new(name)?;
    retry_on_intr(|| rustix::fs::ftruncate(&fd, size as u64))?;
    seal(&fd, seals)?;
    Ok(fd)
}

// (None of these calls waits for a client. But where a supervisor answers system calls (seccomp),
// a signal may interrupt them.)
fn new(name: &str) -> Result<OwnedFd, Errno> {
    retry_on_intr(|| rustix::fs::memfd_create(name, MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING))
}

fn seal(fd: &OwnedFd, seals: SealFlags) -> Result<(), Errno> {
    retry_on_intr(|| rustix::fs::fcntl_add_seals(fd, seals | SealFlags::SEAL))
}

/// Makes a read-only memfd with these bytes.
pub fn memfd_of(name: &str, bytes: &[u8]) -> io::Result<OwnedFd> {
    let fd = new(name)?;
    let mut rest = bytes;
    while !rest.is_empty() {
        let n = retry_on_intr(|| rustix::io::write(&fd, rest))?;
        rest = &rest[n..];
    }
    // The reader shares the file offset, and starts reading at it.
    rustix::fs::seek(&fd, rustix::fs::SeekFrom::Start(0))?;
    seal(&fd, SealFlags::WRITE | SealFlags::SHRINK | SealFlags::GROW)?;
    Ok(fd)
}

/// Identifies a file by device and inode: the same for all its descriptors.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FileId(u64, u64);

impl FileId {
    /// # Errors
    /// Those of `fstat`.
    pub fn of(fd: impl AsFd) -> Result<FileId, Errno> {
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
