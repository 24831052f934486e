//! How many sockets have begun to listen, or stopped, by port; see `closings.bpf.c`.

use crate::{load, probe, skel, Error, Result};
use libbpf_rs::skel::{OpenSkel, SkelBuilder};
use libbpf_rs::Link;
use rustix::mm::{MapFlags, ProtFlags};
use std::os::fd::{AsFd, BorrowedFd};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU32, Ordering};

const PORTS: usize = 1 << 16;
/// Bytes of what [`Closings::page`] is mapped as: a count for each port.
pub const SIZE: usize = PORTS * size_of::<AtomicU32>();

/// The count, which goes on until this is dropped.
pub struct Closings {
    // Before the skeleton: detached while the program still exists.
    _link: Link,
    skel: skel::closings::ClosingsSkel<'static>,
    counts: Counts,
}

/// What is counted, mapped from [`Closings::page`].
pub struct Counts(NonNull<[AtomicU32; PORTS]>);

impl Closings {
    /// Loads and attaches.
    ///
    /// # Errors
    /// [`Error::Missing`] with the reason where it cannot be had.
    pub fn start() -> Result<Closings> {
        probe::permitted()?;
        probe::btf()?;
        let skel =
            load::logged("closings", || skel::closings::ClosingsSkelBuilder::default().open(load::storage())?.load())?;
        let map = &skel.maps.closings;
        // From here on only the program writes: everybody may have the descriptor.
        libbpf_rs::MapHandle::try_from(map).and_then(|m| m.freeze()).map_err(|e| Error::map("closings", e))?;
        let counts = Counts::of(map.as_fd())?;
        let link = skel.progs.closes.attach().map_err(|e| Error::attach("closings", e))?;
        Ok(Closings { _link: link, skel, counts })
    }

    /// Listening sockets that had this port and listen no more.
    pub fn count(&self, port: u16) -> u32 {
        self.counts.count(port)
    }

    /// To be mapped by others, to read.
    pub fn page(&self) -> BorrowedFd<'_> {
        self.skel.maps.closings.as_fd()
    }
}

impl Counts {
    /// Maps a page of [`Closings`], perhaps another process's.
    ///
    /// # Errors
    /// [`Error::Map`].
    pub fn of(page: BorrowedFd<'_>) -> Result<Counts> {
        // SAFETY: a fresh mapping at an address of the kernel's choice aliases no memory of this program.
        let at = unsafe { rustix::mm::mmap(std::ptr::null_mut(), SIZE, ProtFlags::READ, MapFlags::SHARED, page, 0) };
        let failed = |e: std::io::Error| Error::map("closings", e.into());
        let at = at.map_err(|e| failed(e.into()))?;
        NonNull::new(at.cast()).map(Counts).ok_or_else(|| failed(std::io::ErrorKind::OutOfMemory.into()))
    }

    /// As [`Closings::count`].
    pub fn count(&self, port: u16) -> u32 {
        // SAFETY: mapped with this size until `self` is dropped; written by atomics of the program alone.
        let counts = unsafe { self.0.as_ref() };
        counts[usize::from(port)].load(Ordering::Acquire)
    }
}

impl Drop for Counts {
    fn drop(&mut self) {
        // SAFETY: the mapping of `of`, and no reference into it is left.
        let _ = unsafe { rustix::mm::munmap(self.0.as_ptr().cast(), SIZE) };
    }
}
