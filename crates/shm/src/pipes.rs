//! Pipes by which this process wakes threads of others (ADR 38): one for each thread, whatever number of channels there
//! are with its process. The channels in which that thread waits count as its users; with the last of them it goes.

use crate::lock::Lock;
use crate::process;
use crate::slab::{Slab, Slot};
use core::sync::atomic::{AtomicI32, AtomicU32, AtomicU64, Ordering};
use fsocket_sys as sys;

/// Zero is valid.
#[repr(C)]
struct Pipe {
    /// Of the thread; 0: not in use.
    key: AtomicU64,
    fd: AtomicI32,
    users: AtomicU32,
    /// The next with the same head: index + 1.
    next: AtomicU32,
    link: AtomicU32,
}

// SAFETY: zero is valid for all fields; `link` is the slab's.
unsafe impl Slot for Pipe {
    fn link(&self) -> &AtomicU32 {
        &self.link
    }
}

/// There will be no more than now.
pub fn trim() {
    PIPES.trim();
}

static PIPES: Slab<Pipe, { 1 << 14 }, NEAR> = Slab::new();
const NEAR: usize = 16;
const HEADS: usize = 256;
static HEAD: [AtomicU32; HEADS] = [const { AtomicU32::new(0) }; HEADS];
/// Held by whoever changes which pipes there are, or how many users they have.
static CHANGING: Lock<()> = Lock::new(());

fn head(key: u64) -> &'static AtomicU32 {
    &HEAD[(key.wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 56) as usize % HEADS]
}

/// Under the lock.
fn find(key: u64) -> Option<(u32, &'static Pipe)> {
    let mut at = head(key).load(Ordering::Relaxed);
    while let Some((i, p)) = at.checked_sub(1).and_then(|i| Some((i, PIPES.get(i)?))) {
        if key != 0 && p.key.load(Ordering::Relaxed) == key {
            return Some((i, p));
        }
        at = p.next.load(Ordering::Relaxed);
    }
    None
}

/// A place in a channel where a thread of a peer's waits, and which pipe it has (plus one). Zero is valid.
pub struct Place {
    key: AtomicU64,
    pipe: AtomicU32,
}

impl Place {
    /// The pipe to the thread with `key`, which waits at this place.
    pub fn to(&self, key: u64) -> Option<i32> {
        if key == 0 || self.key.load(Ordering::Acquire) != key {
            return self.look_up(key);
        }
        PIPES.get(self.pipe.load(Ordering::Relaxed).wrapping_sub(1)).map(|p| p.fd.load(Ordering::Relaxed))
    }

    /// A place that has another thread's keeps that: its pipe may be in use this moment.
    #[cold]
    fn look_up(&self, key: u64) -> Option<i32> {
        let _changing = CHANGING.lock().ok()?;
        let (i, p) = find(key)?;
        if self.key.load(Ordering::Relaxed) == 0 {
            p.users.fetch_add(1, Ordering::Relaxed);
            self.begin(key, i);
        }
        Some(p.fd.load(Ordering::Relaxed))
    }

    /// There is a pipe to that thread, which waits here. False: there was one before, or it could not be written down;
    /// `fd` stays the caller's.
    pub fn put(&self, key: u64, fd: i32) -> bool {
        let Ok(_changing) = CHANGING.lock() else { return false };
        if find(key).is_some() {
            return false;
        }
        let Some((i, p)) = PIPES.alloc() else { return false };
        p.fd.store(fd, Ordering::Relaxed);
        p.users.store(1, Ordering::Relaxed);
        let head = head(key);
        p.next.store(head.load(Ordering::Relaxed), Ordering::Relaxed);
        p.key.store(key, Ordering::Relaxed);
        head.store(i + 1, Ordering::Relaxed);
        self.end();
        self.begin(key, i);
        true
    }

    fn begin(&self, key: u64, pipe: u32) {
        self.pipe.store(pipe + 1, Ordering::Relaxed);
        self.key.store(key, Ordering::Release);
    }

    /// Nobody waits here any more. (In a signal handler on top of a change the pipe stays for longer.)
    pub fn leave(&self) {
        if self.key.load(Ordering::Relaxed) != 0 {
            if let Ok(_changing) = CHANGING.lock() {
                self.end();
            }
        }
    }

    /// Under the lock.
    fn end(&self) {
        if self.key.swap(0, Ordering::AcqRel) == 0 {
            return;
        }
        let Some(p) = PIPES.get(self.pipe.load(Ordering::Relaxed).wrapping_sub(1)) else { return };
        if p.users.fetch_sub(1, Ordering::Relaxed) == 1 {
            unlink(p);
            process::close_own(p.fd.load(Ordering::Relaxed));
        }
    }

    /// In a forked child, see [`become_child`].
    pub fn forget(&self) {
        use crate::cow::Sparing;
        self.key.put(0);
    }
}

fn unlink(p: &'static Pipe) {
    let i = PIPES.index(p);
    let mut at = head(p.key.swap(0, Ordering::Relaxed));
    while at.load(Ordering::Relaxed) != 0 && at.load(Ordering::Relaxed) != i + 1 {
        let Some(next) = PIPES.get(at.load(Ordering::Relaxed) - 1) else { break };
        at = &next.next;
    }
    at.store(p.next.load(Ordering::Relaxed), Ordering::Relaxed);
    PIPES.free(i);
}

/// Rings in channel `id`. False: the pipe is full, and is rung by way of the monitor: what is in it may have been
/// heard.
pub fn ring(fd: i32, id: u32) -> bool {
    sys::write(fd, &id.to_ne_bytes()).is_ok()
}

fn all() -> impl Iterator<Item = &'static Pipe> {
    (0..PIPES.len()).filter_map(|i| PIPES.get(i)).filter(|p| p.key.load(Ordering::Relaxed) != 0)
}

/// In a forked child: they are the parent's. (A process that shares a description could make it blocking.)
pub fn become_child() {
    use crate::cow::Sparing;
    CHANGING.reset_after_fork();
    if PIPES.is_empty() {
        return; // (Nothing is read: a page less to map.)
    }
    for p in all() {
        process::close_own(p.fd.load(Ordering::Relaxed));
        p.key.store(0, Ordering::Relaxed);
        PIPES.free(PIPES.index(p));
    }
    HEAD.iter().for_each(|h| h.put(0));
}

/// One got another number.
pub fn renumbered(old: i32, new: i32) -> bool {
    all().any(|p| p.fd.compare_exchange(old, new, Ordering::AcqRel, Ordering::Relaxed).is_ok())
}

#[cfg(test)]
mod tests {
    extern crate std;
    use super::*;

    fn place() -> Place {
        Place { key: AtomicU64::new(0), pipe: AtomicU32::new(0) }
    }

    fn is_open(fd: i32) -> bool {
        sys::fcntl(fd, libc::F_GETFD, 0).is_ok()
    }

    /// Places of many channels share a pipe; it is closed with the last of them, and another may take its place.
    #[test]
    fn places_of_one_thread_share_its_pipe() {
        let [a, b, c] = [place(), place(), place()];
        let fd = sys::eventfd().unwrap();
        assert_eq!(a.to(77), None);
        assert!(a.put(77, fd));
        assert_eq!((a.to(77), b.to(77), b.to(78), c.to(77)), (Some(fd), Some(fd), None, Some(fd)));
        a.leave();
        c.leave();
        c.leave();
        assert_eq!((b.to(77), is_open(fd)), (Some(fd), true));
        // A second one is not needed.
        let other = sys::eventfd().unwrap();
        assert!(!c.put(77, other));
        // Another thread waits where it did.
        assert!(c.put(1 << 40, other));
        assert_eq!((c.to(1 << 40), a.to(77), b.to(77)), (Some(other), Some(fd), Some(fd)));
        // Now and then the first one does again.
        assert_eq!((c.to(77), c.to(1 << 40)), (Some(fd), Some(other)));
        a.leave();
        b.leave();
        assert!(!is_open(fd) && is_open(other));
        assert_eq!(c.to(77), None);
        c.leave();
        assert!(!is_open(other));
        assert_eq!((a.to(77), b.to(1 << 40), b.to(0)), (None, None, None));
    }
}
