//! The io_uring rings of this process, and the addresses of their submission queues.

use crate::entry::{Entry, SIZE};
use crate::lock::Lock;
use core::sync::atomic::{AtomicU32, Ordering};
use fsocket_sys as sys;

/// Maximum number of rings at a time. [`crate::unhooked`] looks for further rings.
const MAX: usize = 64;

const SETUP_SQE128: u32 = 1 << 10;
const SETUP_NO_MMAP: u32 = 1 << 14;
const SETUP_REGISTERED_FD_ONLY: u32 = 1 << 15;
const SETUP_NO_SQARRAY: u32 = 1 << 16;
const OFF_SQ_RING: usize = 0;
const OFF_SQES: usize = 0x1000_0000;
/// Upper bound of the number of entries. It is above the kernel's (IORING_MAX_ENTRIES, doubled for a large entry).
const MOST: u32 = 65536;

/// The fields of `struct io_uring_params` (include/uapi/linux/io_uring.h) that are needed.
pub struct Params {
    pub flags: u32,
    entries: u32,
    head: usize,
    tail: usize,
    array: usize,
    /// With NO_MMAP: the addresses of the entries and of the rings.
    sqes: usize,
    rings: usize,
}

impl Params {
    /// # Safety
    /// `p` points to a `struct io_uring_params` that the kernel has filled.
    pub unsafe fn read(p: *const u8) -> Params {
        // SAFETY: the kernel has filled the 120 bytes of the structure, in which `at` lies.
        let u = |at: usize| unsafe { (p.add(at) as *const u32).read_unaligned() };
        // SAFETY: the kernel has filled the 120 bytes of the structure, in which `at` lies.
        let q = |at: usize| unsafe { (p.add(at) as *const u64).read_unaligned() } as usize;
        Params {
            entries: u(0),
            flags: u(8),
            head: u(40) as usize,
            tail: u(44) as usize,
            array: u(64) as usize,
            sqes: q(72),
            rings: q(112),
        }
    }
}

/// A submission queue.
#[derive(Clone, Copy)]
pub struct Queue {
    head: *const u32,
    tail: *const u32,
    /// Maps positions in the queue to numbers of entries. Null: position `i` is entry `i`.
    array: *const u32,
    sqes: *const u8,
    entries: u32,
    /// Is an entry twice as long?
    large: bool,
}
// SAFETY: the pointers lead to memory that is shared with the kernel, and that is accessed word by word.
unsafe impl Send for Queue {}

impl Queue {
    /// A queue as liburing's `struct io_uring` describes it. liburing fills the entries in order, whatever the
    /// ring's array contains before a submission.
    ///
    /// # Safety
    /// The pointers are those of a ring that lives until [`closed`].
    pub unsafe fn of_liburing(head: *const u32, tail: *const u32, sqes: *const u8, entries: u32, flags: u32) -> Queue {
        Queue { head, tail, array: core::ptr::null(), sqes, entries, large: flags & SETUP_SQE128 != 0 }
    }

    /// The position up to which the program has filled the queue.
    pub fn tail(&self) -> u32 {
        // SAFETY: an aligned word of the ring, which the program writes too.
        unsafe { AtomicU32::from_ptr(self.tail as *mut u32) }.load(Ordering::Acquire)
    }

    /// Calls `f` for each entry before `tail` that the kernel has not taken yet.
    pub fn each(&self, tail: u32, mut f: impl FnMut(&Entry)) {
        if self.entries == 0 || self.entries > MOST {
            return;
        }
        // SAFETY: an aligned word of the ring, which the kernel writes too.
        let head = unsafe { AtomicU32::from_ptr(self.head as *mut u32) }.load(Ordering::Acquire);
        let mask = self.entries - 1;
        for i in 0..tail.wrapping_sub(head).min(self.entries) {
            let mut at = head.wrapping_add(i) & mask;
            if !self.array.is_null() {
                // SAFETY: the index is below the number of entries.
                at = unsafe { self.array.add(at as usize).read_volatile() };
                if at >= self.entries {
                    continue; // the kernel drops it
                }
            }
            let size = if self.large { SIZE * 2 } else { SIZE };
            // SAFETY: the index is below the number of entries, and the kernel reads the same memory.
            f(&unsafe { Entry::read(self.sqes.add(at as usize * size)) });
        }
    }
}

#[derive(Clone, Copy)]
struct Ring {
    /// -1: the slot is free.
    fd: i32,
    queue: Option<Queue>,
    /// The library's mappings: address and length.
    own: [(usize, usize); 2],
}

const NONE: Ring = Ring { fd: -1, queue: None, own: [(0, 0); 2] };

struct Rings([Ring; MAX]);
static RINGS: Lock<Rings> = Lock::new(Rings([NONE; MAX]));
/// Number of slots in use.
#[link_section = ".data.fsocket_start"]
static COUNT: AtomicU32 = AtomicU32::new(0);

/// Is there no ring?
pub fn is_unused() -> bool {
    COUNT.load(Ordering::Relaxed) == 0
}

/// Is `fd` a ring that the library knows?
pub fn known(fd: i32) -> bool {
    COUNT.load(Ordering::Relaxed) != 0 && RINGS.lock().is_ok_and(|r| r.0.iter().any(|r| r.fd == fd))
}

pub fn queue(fd: i32) -> Option<Queue> {
    RINGS.lock().ok()?.0.iter().find(|r| r.fd == fd)?.queue
}

pub fn each(mut f: impl FnMut(&Queue)) {
    for i in 0..MAX {
        let q = RINGS.lock().ok().and_then(|r| r.0[i].queue);
        if let Some(q) = q {
            f(&q);
        }
    }
}

/// Records a ring. `queue`: None if the library cannot see the submission queue.
pub fn remember(fd: i32, queue: Option<Queue>) {
    put(Ring { fd, queue, own: [(0, 0); 2] });
}

fn put(ring: Ring) -> bool {
    closed(ring.fd);
    let Ok(mut r) = RINGS.lock() else { return false };
    let Some(free) = r.0.iter_mut().find(|r| r.fd < 0) else { return false };
    *free = ring;
    COUNT.fetch_add(1, Ordering::Relaxed);
    true
}

/// Maps the ring's memory, as the program does, and records the ring. False: this is impossible.
pub fn map(fd: i32, p: &Params) -> bool {
    let array = |base: usize| match p.flags & SETUP_NO_SQARRAY {
        0 => (base + p.array) as *const u32,
        _ => core::ptr::null(),
    };
    let large = p.flags & SETUP_SQE128 != 0;
    let queue = |rings: usize, sqes: usize| Queue {
        head: (rings + p.head) as *const u32,
        tail: (rings + p.tail) as *const u32,
        array: array(rings),
        sqes: sqes as *const u8,
        entries: p.entries,
        large,
    };
    if p.flags & SETUP_REGISTERED_FD_ONLY != 0 {
        return false;
    }
    if p.flags & SETUP_NO_MMAP != 0 {
        return put(Ring { fd, queue: Some(queue(p.rings, p.sqes)), own: [(0, 0); 2] });
    }
    let behind = if p.flags & SETUP_NO_SQARRAY == 0 { p.array + p.entries as usize * 4 } else { 0 };
    let lengths = [behind.max(p.head + 4).max(p.tail + 4), p.entries as usize * if large { SIZE * 2 } else { SIZE }];
    let view = |len, off, how| sys::mmap(len, libc::PROT_READ | how, libc::MAP_SHARED, fd, off);
    let Ok(rings) = view(lengths[0], OFF_SQ_RING, 0) else { return false };
    // The library marks entries as done in there; see `Entry::is_done`.
    let Ok(sqes) = view(lengths[1], OFF_SQES, libc::PROT_WRITE) else {
        unmap((rings as usize, lengths[0]));
        return false;
    };
    let own = [(rings as usize, lengths[0]), (sqes as usize, lengths[1])];
    let done = put(Ring { fd, queue: Some(queue(own[0].0, own[1].0)), own });
    if !done {
        own.into_iter().for_each(unmap);
    }
    done
}

fn unmap((at, len): (usize, usize)) {
    if len > 0 {
        // SAFETY: `map` made this mapping, and its ring is not used any more.
        let _ = unsafe { sys::munmap(at as *mut u8, len) };
    }
}

/// Called when the program closes `fd`. Removes the library's mappings, which would keep the ring alive.
#[inline]
pub fn closed(fd: i32) {
    if COUNT.load(Ordering::Relaxed) != 0 {
        closed_range(fd as u32, fd as u32);
    }
}

#[cold]
pub fn closed_range(first: u32, last: u32) {
    if COUNT.load(Ordering::Relaxed) == 0 {
        return;
    }
    let Ok(mut r) = RINGS.lock() else { return };
    for e in r.0.iter_mut().filter(|e| e.fd >= 0 && (first..=last).contains(&(e.fd as u32))) {
        e.own.into_iter().for_each(unmap);
        *e = NONE;
        COUNT.fetch_sub(1, Ordering::Relaxed);
    }
}

/// Called in a forked child.
pub fn become_child() {
    RINGS.reset_after_fork();
}
