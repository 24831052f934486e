//! Finds out which two sockets of this host are the ends of one connection; see `pairs.bpf.c`.

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

/// The loaded programs. They record until this value is dropped.
pub struct Recorder {
    // Dropped before the skeleton, so that the programs are detached while they still exist.
    changes: Option<Link>,
    _errors: Link,
    skel: skel::pairs::PairsSkel<'static>,
}

/// Descriptors of the maps with the records. Using them takes no privilege.
#[derive(Debug)]
pub struct Parts {
    pub peers: OwnedFd,
    pub watched: OwnedFd,
    pub ended: OwnedFd,
    pub reasons: OwnedFd,
}

/// Reads the records of a [`Recorder`], which may belong to another process.
pub struct Pairs {
    parts: Parts,
    ring: Ring,
    /// The cookies that the ring's callback has received. In a box, because the callback has its
    /// address.
    heard: Box<RefCell<Vec<u64>>>,
}

/// libbpf's view of the ring buffer.
struct Ring(NonNull<libbpf::ring_buffer>);

impl Drop for Ring {
    fn drop(&mut self) {
        // SAFETY: `Pairs::of` has made the ring, and it is freed once.
        unsafe { libbpf::ring_buffer__free(self.0.as_ptr()) };
    }
}

unsafe extern "C" fn hear(heard: *mut c_void, data: *mut c_void, size: libbpf::size_t) -> libc::c_int {
    if size as usize >= size_of::<u64>() {
        // SAFETY: `heard` is the box that `Pairs::of` has passed. It lives as long as the ring,
        // and nothing borrows it while the ring is consumed; the record has at least eight bytes.
        unsafe { (*heard.cast::<RefCell<Vec<u64>>>()).borrow_mut().push(data.cast::<u64>().read_unaligned()) };
    }
    0
}

impl Recorder {
    /// Loads and attaches the programs.
    ///
    /// # Errors
    /// [`Error::Missing`] with the reason if this kernel or process cannot do it.
    pub fn start() -> Result<Recorder> {
        probe::permitted()?;
        probe::btf()?;
        let skel = load::logged("pairs", || skel::pairs::PairsSkelBuilder::default().open(load::storage())?.load())?;
        let failed = |e| Error::attach("pairs", e);
        let changes = Some(skel.progs.changes.attach().map_err(failed)?);
        let errors = skel.progs.errors.attach().map_err(failed)?;
        Ok(Recorder { changes, _errors: errors, skel })
    }

    /// For tests: from now on the program that sees all changes of state misses them, which can
    /// happen.
    pub fn miss_changes(&mut self) {
        self.changes = None;
    }

    /// Begins to record, and does not stop until this process ends.
    ///
    /// # Errors
    /// Those of [`Recorder::start`].
    pub fn start_for_good() -> Result<Parts> {
        let recorder = Recorder::start()?;
        let parts = recorder.parts();
        std::mem::forget(recorder);
        parts
    }

    /// # Errors
    /// No descriptor is left.
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
    /// No descriptor is left.
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
        // SAFETY: the descriptor lives during the call, and the context as long as the ring; no
        // options are passed.
        let ring = unsafe { libbpf::ring_buffer__new(parts.ended.as_raw_fd(), Some(hear), context, std::ptr::null()) };
        let ring = NonNull::new(ring).map(Ring);
        let ring = ring.ok_or_else(|| Error::map("ended", std::io::Error::last_os_error().into()))?;
        Ok(Pairs { parts, ring, heard })
    }

    /// Cookie of the socket at the other end, for the socket with this cookie. `None`: the other
    /// end is on another host, or the connection is older than the recorder, or its record cannot
    /// be trusted.
    pub fn peer_of(&self, cookie: u64) -> Option<u64> {
        let mut peer = 0u64;
        let (key, value) = ((&raw const cookie).cast(), (&raw mut peer).cast());
        // SAFETY: key and value are as large as the map's, and live during the call.
        let found = unsafe { libbpf::bpf_map_lookup_elem(self.parts.peers.as_raw_fd(), key, value) };
        (found == 0).then_some(peer)
    }

    /// Asks to report the end of this socket in [`Pairs::ended`], if the kernel ends the
    /// connection and not a close by a program.
    ///
    /// # Errors
    /// [`Error::Map`]: the end will not be reported.
    pub fn watch(&self, socket: BorrowedFd<'_>) -> Result<()> {
        let (fd, value) = (socket.as_raw_fd(), 0u64);
        let (key, value) = ((&raw const fd).cast(), (&raw const value).cast());
        // SAFETY: key (a descriptor) and value are as large as the map's, and live during the call.
        match unsafe { libbpf::bpf_map_update_elem(self.parts.watched.as_raw_fd(), key, value, 0) } {
            0 => Ok(()),
            _ => Err(Error::map("watched", std::io::Error::last_os_error().into())),
        }
    }

    /// Number of handshakes by result: `paired`, or the reason why not.
    pub fn counts(&self) -> [(&'static str, u64); 4] {
        let mut key = 0;
        REASONS.map(|name| {
            let n = sum(self.parts.reasons.as_fd(), key);
            key += 1;
            (name, n)
        })
    }

    /// Readable while [`Pairs::ended`] would return something.
    pub fn events(&self) -> BorrowedFd<'_> {
        self.parts.ended.as_fd()
    }

    /// Cookies of watched sockets that have ended since the last call.
    pub fn ended(&self) -> Vec<u64> {
        // SAFETY: the buffer lives as long as `self`, which is used by one thread.
        unsafe { libbpf::ring_buffer__consume(self.ring.0.as_ptr()) };
        self.heard.take()
    }
}
