//! Pipes through which this process wakes threads of other processes (ADR 38). Each such thread
//! has one pipe, which all channels to its process share. The users of a pipe are the channels in
//! which its thread waits; the last user closes the pipe.

use crate::lock::Lock;
use crate::process;
use crate::slab::{Slab, Slot};
use core::sync::atomic::{AtomicI32, AtomicU32, AtomicU64, Ordering};
use fsocket_sys as sys;

/// A pipe to one thread. All bytes zero is a valid value.
#[repr(C)]
struct Pipe {
    /// Key of the thread; 0: not in use.
    key: AtomicU64,
    fd: AtomicI32,
    users: AtomicU32,
    /// The next pipe in the same hash chain: index + 1.
    next: AtomicU32,
    link: AtomicU32,
}

// SAFETY: zero is a valid value of all fields, and only the slab uses `link`.
unsafe impl Slot for Pipe {
    fn link(&self) -> &AtomicU32 {
        &self.link
    }
}

/// Gives back unused address space. The table cannot grow afterwards.
pub fn trim() {
    PIPES.trim();
}

static PIPES: Slab<Pipe, { 1 << 14 }, NEAR> = Slab::new();
const NEAR: usize = 16;
const HEADS: usize = 256;
static HEAD: [AtomicU32; HEADS] = [const { AtomicU32::new(0) }; HEADS];
/// Held while pipes, or their numbers of users, change.
static CHANGING: Lock<()> = Lock::new(());

fn head(key: u64) -> &'static AtomicU32 {
    &HEAD[(key.wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 56) as usize % HEADS]
}

/// Called under the lock.
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

/// A waiter of the peer in a channel, with the pipe to its thread (index + 1). All bytes zero is a
/// valid value.
pub struct Place {
    key: AtomicU64,
    pipe: AtomicU32,
}

impl Place {
    /// The pipe to the thread with `key`, which waits here.
    pub fn to(&self, key: u64) -> Option<i32> {
        if key == 0 || self.key.load(Ordering::Acquire) != key {
            return self.look_up(key);
        }
        PIPES.get(self.pipe.load(Ordering::Relaxed).wrapping_sub(1)).map(|p| p.fd.load(Ordering::Relaxed))
    }

    /// Finds the pipe among all pipes. A place that has another thread's pipe keeps that one,
    /// which another thread may be using now.
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

    /// Stores a new pipe to the thread with `key`, which waits here. False: a pipe exists already,
    /// or there is no room. Then the caller still owns `fd`.
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

    /// Drops the pipe, because the thread does not wait here any more. (In a signal handler that
    /// has interrupted a change, the pipe stays open longer.)
    pub fn leave(&self) {
        if self.key.load(Ordering::Relaxed) != 0 {
            if let Ok(_changing) = CHANGING.lock() {
                self.end();
            }
        }
    }

    /// Called under the lock.
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

    /// Called in a forked child; see [`become_child`].
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

/// Writes a wake-up for channel `id`. False: the pipe is full, and the caller must use the
/// monitor: the thread may have seen the bytes in the pipe already.
pub fn ring(fd: i32, id: u32) -> bool {
    sys::write(fd, &id.to_ne_bytes()).is_ok()
}

fn all() -> impl Iterator<Item = &'static Pipe> {
    (0..PIPES.len()).filter_map(|i| PIPES.get(i)).filter(|p| p.key.load(Ordering::Relaxed) != 0)
}

/// Called in a forked child: closes the pipes, which belong to the parent. (Any process that
/// shares the pipe could make it blocking.)
pub fn become_child() {
    use crate::cow::Sparing;
    CHANGING.reset_after_fork();
    if PIPES.is_empty() {
        return; // Nothing is read: the child needs one page less.
    }
    for p in all() {
        process::close_own(p.fd.load(Ordering::Relaxed));
        p.key.store(0, Ordering::Relaxed);
        PIPES.free(PIPES.index(p));
    }
    HEAD.iter().for_each(|h| h.put(0));
}

/// The library has moved a descriptor from `old` to `new`. True: it is one of these pipes.
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

    /// Places of many channels share a pipe. The last of them closes it. A place can then get
    /// another pipe.
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
        // A second pipe to the same thread is refused.
        let other = sys::eventfd().unwrap();
        assert!(!c.put(77, other));
        // Another thread waits at the same place.
        assert!(c.put(1 << 40, other));
        assert_eq!((c.to(1 << 40), a.to(77), b.to(77)), (Some(other), Some(fd), Some(fd)));
        // The first thread may wait there again at times.
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
