//! Which two sockets of this host are the ends of one connection; see `pairs.bpf.c`.

use crate::counters::sum;
use crate::{load, probe, skel, Error, Result};
use libbpf_rs::libbpf_sys as libbpf;
use libbpf_rs::skel::{OpenSkel, SkelBuilder};
use libbpf_rs::Link;
use std::cell::RefCell;
use std::ffi::c_void;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::ptr::NonNull;

/// The order of `enum reason` in `pairs.bpf.c`.
const REASONS: [&str; 4] = ["paired", "repaired", "foreign", "duplicate"];

/// The programs; they record until this is dropped.
pub struct Recorder {
    // Before the skeleton: detached while the programs still exist.
    changes: Option<Link>,
    _errors: Link,
    skel: skel::pairs::PairsSkel<'static>,
}

/// What it records, by the maps' descriptors. It takes no privilege to use them.
#[derive(Debug)]
pub struct Parts {
    pub peers: OwnedFd,
    pub watched: OwnedFd,
    pub ended: OwnedFd,
    pub reasons: OwnedFd,
}

/// Reads what a [`Recorder`] records, perhaps another process's.
pub struct Pairs {
    parts: Parts,
    ring: Ring,
    /// Written by the ring's callback; boxed, since that has its address.
    heard: Box<RefCell<Vec<u64>>>,
}

/// libbpf's view of the ring buffer.
struct Ring(NonNull<libbpf::ring_buffer>);

impl Drop for Ring {
    fn drop(&mut self) {
        // SAFETY: made in `Pairs::of`, freed once.
        unsafe { libbpf::ring_buffer__free(self.0.as_ptr()) };
    }
}

unsafe extern "C" fn hear(heard: *mut c_void, data: *mut c_void, size: libbpf::size_t) -> libc::c_int {
    if size as usize >= size_of::<u64>() {
        // SAFETY: `Pairs::of` has given the box, which lives as long as the ring, and nothing borrows
        // it while the ring is consumed; the record has that many bytes.
        unsafe { (*heard.cast::<RefCell<Vec<u64>>>()).borrow_mut().push(data.cast::<u64>().read_unaligned()) };
    }
    0
}

impl Recorder {
    /// Loads and attaches.
    ///
    /// # Errors
    /// [`Error::Missing`] with the reason where it cannot be had.
    pub fn start() -> Result<Recorder> {
        probe::permitted()?;
        probe::btf()?;
        let skel = load::logged("pairs", || skel::pairs::PairsSkelBuilder::default().open(load::storage())?.load())?;
        let failed = |e| Error::attach("pairs", e);
        let changes = Some(skel.progs.changes.attach().map_err(failed)?);
        let errors = skel.progs.errors.attach().map_err(failed)?;
        Ok(Recorder { changes, _errors: errors, skel })
    }

    /// For tests: from here on as if the program that sees all changes of state had missed each, as it may.
    pub fn miss_changes(&mut self) {
        self.changes = None;
    }

    /// Begins to record, until this process ends.
    ///
    /// # Errors
    /// As of [`Recorder::start`].
    pub fn start_for_good() -> Result<Parts> {
        let recorder = Recorder::start()?;
        let parts = recorder.parts();
        std::mem::forget(recorder);
        parts
    }

    /// # Errors
    /// Out of descriptors.
    pub fn parts(&self) -> Result<Parts> {
        let own = |fd: BorrowedFd<'_>| fd.try_clone_to_owned().map_err(|e| Error::map("pairs", e.into()));
        let maps = &self.skel.maps;
        Ok(Parts {
            peers: own(maps.peers.as_fd())?,
            watched: own(maps.watched.as_fd())?,
            ended: own(maps.ended.as_fd())?,
            reasons: own(maps.reasons.as_fd())?,
        })
    }
}

impl Parts {
    /// # Errors
    /// Out of descriptors.
    pub fn try_clone(&self) -> std::io::Result<Parts> {
        let Parts { peers, watched, ended, reasons } = self;
        Ok(Parts {
            peers: peers.try_clone()?,
            watched: watched.try_clone()?,
            ended: ended.try_clone()?,
            reasons: reasons.try_clone()?,
        })
    }
}

impl Pairs {
    /// # Errors
    /// [`Error::Map`].
    pub fn of(parts: Parts) -> Result<Pairs> {
        let heard = Box::new(RefCell::new(Vec::new()));
        let context = (&raw const *heard).cast_mut().cast();
        // SAFETY: the descriptor lives during the call; the context as long as the ring; no options.
        let ring = unsafe { libbpf::ring_buffer__new(parts.ended.as_raw_fd(), Some(hear), context, std::ptr::null()) };
        let ring = NonNull::new(ring).map(Ring);
        let ring = ring.ok_or_else(|| Error::map("ended", std::io::Error::last_os_error().into()))?;
        Ok(Pairs { parts, ring, heard })
    }

    /// Cookie of the socket at the other end of the one with this cookie. `None`: that is on another
    /// host, or the connection is older than the recorder, or not to be trusted.
    pub fn peer_of(&self, cookie: u64) -> Option<u64> {
        let mut peer = 0u64;
        let (key, value) = ((&raw const cookie).cast(), (&raw mut peer).cast());
        // SAFETY: key and value are as large as the map's, and live during the call.
        let found = unsafe { libbpf::bpf_map_lookup_elem(self.parts.peers.as_raw_fd(), key, value) };
        (found == 0).then_some(peer)
    }

    /// Its end by the kernel, and not by a program that closes it, is heard of by [`Pairs::ended`].
    pub fn watch(&self, socket: BorrowedFd<'_>) {
        let (fd, value) = (socket.as_raw_fd(), 0u64);
        let (key, value) = ((&raw const fd).cast(), (&raw const value).cast());
        // SAFETY: as in `peer_of`; the key of such a map is a descriptor. (If there is no memory it is not heard of.)
        unsafe { libbpf::bpf_map_update_elem(self.parts.watched.as_raw_fd(), key, value, 0) };
    }

    /// Handshakes by what became of them: `paired`, or why not.
    pub fn counts(&self) -> [(&'static str, u64); 4] {
        let mut key = 0;
        REASONS.map(|name| {
            let n = sum(self.parts.reasons.as_fd(), key);
            key += 1;
            (name, n)
        })
    }

    /// Readable while [`Pairs::ended`] has something to say.
    pub fn events(&self) -> BorrowedFd<'_> {
        self.parts.ended.as_fd()
    }

    /// Cookies of watched sockets that have ended since.
    pub fn ended(&self) -> Vec<u64> {
        // SAFETY: the buffer lives as long as `self`, which is used by one thread.
        unsafe { libbpf::ring_buffer__consume(self.ring.0.as_ptr()) };
        self.heard.take()
    }
}
