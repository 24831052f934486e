//! Counts for each port how often a socket has begun or stopped to listen; see `closings.bpf.c`.

use crate::{load, probe, skel, Error, Result};
use libbpf_rs::skel::{OpenSkel, SkelBuilder};
use libbpf_rs::Link;
use rustix::mm::{MapFlags, ProtFlags};
use std::os::fd::{AsFd, BorrowedFd};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU32, Ordering};

const PORTS: usize = 1 << 16;
/// Size in bytes of the mapping of [`Closings::page`]: one count for each port.
pub const SIZE: usize = PORTS * size_of::<AtomicU32>();

/// The loaded program. It counts until this value is dropped.
pub struct Closings {
    // Dropped before the skeleton, so that the program is detached while it still exists.
    _link: Link,
    skel: skel::closings::ClosingsSkel<'static>,
    counts: Counts,
}

/// A mapping of the counts of [`Closings::page`].
pub struct Counts(NonNull<[AtomicU32; PORTS]>);

impl Closings {
    /// Loads and attaches the program.
    ///
    /// # Errors
    /// [`Error::Missing`] with the reason if this kernel or process cannot do it.
    pub fn start() -> Result<Closings> {
        probe::permitted()?;
        probe::btf()?;
        let skel =
            load::logged("closings", || skel::closings::ClosingsSkelBuilder::default().open(load::storage())?.load())?;
        let map = &skel.maps.closings;
        // From now on only the BPF program can write, so any process may have the descriptor.
        libbpf_rs::MapHandle::try_from(map).and_then(|m| m.freeze()).map_err(|e| Error::map("closings", e))?;
        let counts = Counts::of(map.as_fd())?;
        let link = skel.progs.closes.attach().map_err(|e| Error::attach("closings", e))?;
        Ok(Closings { _link: link, skel, counts })
    }

    /// How often a socket has begun or stopped to listen on this port.
    pub fn count(&self, port: u16) -> u32 {
        self.counts.count(port)
    }

    /// The page of counts, which other processes may map for reading.
    pub fn page(&self) -> BorrowedFd<'_> {
        self.skel.maps.closings.as_fd()
    }
}

impl Counts {
    /// Maps the page of a [`Closings`], which may belong to another process.
    ///
    /// # Errors
    /// [`Error::Map`].
    pub fn of(page: BorrowedFd<'_>) -> Result<Counts> {
        // SAFETY: this makes a new mapping at an address that the kernel chooses, so it aliases
        // no memory of this program.
        let at = unsafe { rustix::mm::mmap(std::ptr::null_mut(), SIZE, ProtFlags::READ, MapFlags::SHARED, page, 0) };
        let failed = |e: std::io::Error| Error::map("closings", e.into());
        let at = at.map_err(|e| failed(e.into()))?;
        NonNull::new(at.cast()).map(Counts).ok_or_else(|| failed(std::io::ErrorKind::OutOfMemory.into()))
    }

    /// As [`Closings::count`].
    pub fn count(&self, port: u16) -> u32 {
        // SAFETY: the mapping has this size and lasts until `self` is dropped; only the BPF
        // program writes it, atomically.
        let counts = unsafe { self.0.as_ref() };
        counts[usize::from(port)].load(Ordering::Acquire)
    }
}

impl Drop for Counts {
    fn drop(&mut self) {
        // SAFETY: `of` has made this mapping, and no reference into it is left.
        let _ = unsafe { rustix::mm::munmap(self.0.as_ptr().cast(), SIZE) };
    }
}
