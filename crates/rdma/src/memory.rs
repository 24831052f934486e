//! Shared memory, and the parts of it that a peer may write.

use crate::device::Domain;
use crate::Error;
use rdma_mummy_sys as verbs;
use rustix::fs::{fcntl_get_seals, fstat, SealFlags};
use rustix::mm::{mmap, munmap, MapFlags, ProtFlags};
use std::io;
use std::ops::Range;
use std::os::fd::AsFd;
use std::ptr::{self, NonNull};
use std::rc::Rc;

/// A mapping of a memfd that cannot shrink.
pub struct Mapping {
    base: NonNull<u8>,
    len: usize,
}

impl Mapping {
    /// Maps the first `len` bytes of `fd`.
    pub fn new(fd: impl AsFd, len: usize) -> Result<Rc<Mapping>, Error> {
        let seals = fcntl_get_seals(&fd).map_err(|_| Error::Memory)?;
        let size = fstat(&fd).map_err(|_| Error::Memory)?.st_size;
        if !seals.contains(SealFlags::SHRINK) || len == 0 || (size as u64) < len as u64 {
            return Err(Error::Memory);
        }
        // SAFETY: the kernel chooses the address, so the new mapping replaces nothing.
        let base = unsafe { mmap(ptr::null_mut(), len, ProtFlags::READ | ProtFlags::WRITE, MapFlags::SHARED, fd, 0) };
        let base = base.map_err(|e| Error::Verbs("mmap", e.into()))?;
        Ok(Rc::new(Mapping { base: NonNull::new(base.cast()).ok_or(Error::Memory)?, len }))
    }

    /// The start of the mapping. Other processes may read and write this memory at any time.
    pub fn base(&self) -> *mut u8 {
        self.base.as_ptr()
    }

    /// Size in bytes.
    pub fn size(&self) -> usize {
        self.len
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: `new` made this mapping. A region that a device uses holds the mapping, so no
        // device uses it any more.
        let _ = unsafe { munmap(self.base.as_ptr().cast(), self.len) };
    }
}

/// Whether the peer may access a region.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Access {
    /// No access: the region is only a source of sends.
    None,
    /// The peer may write.
    Write,
}

/// Part of a mapping that a link's device reads from or writes to. Its pages are pinned as long as
/// the region lives.
#[derive(Clone)]
pub struct Region(Rc<Registered>);

struct Registered {
    mr: NonNull<verbs::ibv_mr>,
    start: NonNull<u8>,
    len: usize,
    _mapping: Rc<Mapping>,
    _domain: Rc<Domain>,
}

/// A region as its peer knows it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Window {
    pub addr: u64,
    pub rkey: u32,
    pub len: u32,
}

impl Region {
    pub(crate) fn new(
        domain: &Rc<Domain>,
        mapping: &Rc<Mapping>,
        range: Range<usize>,
        access: Access,
    ) -> Result<Region, Error> {
        if range.is_empty() || range.end > mapping.len || range.len() > u32::MAX as usize {
            return Err(Error::Memory);
        }
        let access = match access {
            Access::None => 0,
            // The verbs require that a remotely writable region is locally writable, too.
            Access::Write => {
                verbs::ibv_access_flags::IBV_ACCESS_REMOTE_WRITE.0 | verbs::ibv_access_flags::IBV_ACCESS_LOCAL_WRITE.0
            }
        };
        // SAFETY: the range is not empty and ends within the mapping.
        let start = unsafe { mapping.base.add(range.start) };
        // SAFETY: the range stays mapped as long as `_mapping` is held, and the domain is live.
        let mr = unsafe { verbs::ibv_reg_mr(domain.pd(), start.as_ptr().cast(), range.len(), access as i32) };
        let mr = NonNull::new(mr).ok_or_else(|| Error::Verbs("ibv_reg_mr", io::Error::last_os_error()))?;
        let held = (mapping.clone(), domain.clone());
        Ok(Region(Rc::new(Registered { mr, start, len: range.len(), _mapping: held.0, _domain: held.1 })))
    }

    /// The region as the peer needs to know it.
    pub fn window(&self) -> Window {
        // SAFETY: the region stays registered as long as `self` lives.
        let rkey = unsafe { self.0.mr.as_ref().rkey };
        Window { addr: self.0.start.as_ptr() as u64, rkey, len: self.0.len as u32 }
    }

    pub(crate) fn lkey(&self) -> u32 {
        // SAFETY: the region stays registered as long as `self` lives.
        unsafe { self.0.mr.as_ref().lkey }
    }

    /// Address of the region in this process.
    pub fn start(&self) -> *mut u8 {
        self.0.start.as_ptr()
    }

    /// Size in bytes.
    pub fn size(&self) -> usize {
        self.0.len
    }
}

impl Drop for Registered {
    fn drop(&mut self) {
        // SAFETY: `new` registered the region, and only this drop ends it. A write that uses the
        // region holds it until the write is complete or its queue pair is destroyed.
        unsafe { verbs::ibv_dereg_mr(self.mr.as_ptr()) };
    }
}
