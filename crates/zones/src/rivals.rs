//! `accept` on a global listen socket that blocks, by threads that must not block: they also wait
//! for a queue of their own, or for shared memory. The kernel has no non-blocking `accept` for
//! such a socket. If another thread takes the connection first, the thread blocks until the next
//! connection comes, and does not see its other queues.
//!
//! The other threads belong to the fork group. (If a program without the library also accepts
//! there, no local sockets exist.) Threads without a queue of their own block in the kernel
//! ([`Zoned::block`]), and a connection wakes one of them. Threads that must not block accept
//! under the page's lock, and only while no thread blocks ([`Zoned::take_if_sure`]). Otherwise
//! they leave the connection to the blocked threads.

use super::listener::{Rivals, Zoned};
use super::page::is_alive;
use core::sync::atomic::Ordering;
use fsocket_sys::{self as sys, Errno, Result};

/// A connection waits too long if the blocked thread is stopped. After this time another thread
/// takes the connection, at the risk of blocking: ns.
const PATIENCE: u64 = 20_000_000;
/// A thread that has left a connection to the blocked threads sleeps for this time: ns.
const PAUSE: u64 = 1_000_000;

impl Rivals {
    /// A connection waits that was left to the blocked threads, of which `out` have returned so
    /// far. True: it has waited for too long.
    fn wait_too_long(&self, out: u32) -> bool {
        let now = sys::now_ns();
        let since = self.since.load(Ordering::Relaxed);
        let others = self.out.swap(out, Ordering::Relaxed) != out;
        if since == 0 || others {
            self.since.store(now, Ordering::Relaxed);
            return false;
        }
        now.saturating_sub(since) > PATIENCE
    }

    fn have_nothing(&self) {
        if self.since.load(Ordering::Relaxed) != 0 {
            self.since.store(0, Ordering::Relaxed);
        }
    }
}

impl Zoned {
    /// May other processes accept from the global socket, too?
    pub fn is_shared_by_fork(&self) -> bool {
        self.page().is_some()
    }

    /// Calls `accept`, which accepts from the global socket and may block there. None: the page
    /// has no room for another blocked thread, so the caller must wait in `poll`.
    pub fn block<T>(&self, accept: impl FnOnce() -> T) -> Option<T> {
        let Some(page) = self.page() else { return Some(accept()) };
        let place = page.blocked.enter(sys::gettid() as u32, || page.wait_until_free())?;
        let r = accept();
        page.blocked.leave(place);
        Some(r)
    }

    /// Calls `accept` if a connection waits in the global socket `fd`, and no other thread can
    /// take it first.
    ///
    /// # Errors
    /// EAGAIN if no connection waits or it is left to blocked threads; and those of `accept`.
    pub fn take_if_sure<T>(&self, fd: i32, accept: impl FnOnce() -> Result<T>) -> Result<T> {
        if !super::accept::is_ready(fd) {
            self.rivals.have_nothing();
            return Err(Errno::EAGAIN);
        }
        let turn = self.page().map(|page| (page, page.lock()));
        let is_theirs =
            |blocked: &super::page::Blocked| !blocked.is_empty(is_alive) && !self.rivals.wait_too_long(blocked.out());
        if turn.as_ref().is_some_and(|(page, _)| is_theirs(&page.blocked)) {
            return Err(Errno::EAGAIN);
        }
        self.rivals.have_nothing();
        if super::accept::is_ready(fd) {
            accept()
        } else {
            Err(Errno::EAGAIN)
        }
    }

    /// For a sleep on the global socket `fd`: returns the descriptor to poll, and a limit in ns.
    /// While a connection is left to blocked threads, the descriptor is left out (it would be
    /// ready at once), and the sleep is short.
    pub fn to_sleep_on(&self, fd: i32) -> (i32, Option<u64>) {
        match self.rivals.since.load(Ordering::Relaxed) {
            0 => (fd, None),
            _ => (-1, Some(PAUSE)),
        }
    }
}

#[cfg(test)]
mod tests {
    extern crate std;
    use super::*;
    use crate::listener::{MAX, ZONED};
    use crate::page;
    use core::sync::atomic::{AtomicU32, AtomicU64};
    use std::net::{TcpListener, TcpStream};
    use std::os::fd::AsRawFd;

    /// A waiting connection is left to the blocked thread until [`PATIENCE`] is over.
    #[test]
    fn what_waits_is_left_to_who_blocks() {
        let z = ZONED.make(MAX - 1).unwrap();
        z.page.store(page::make().unwrap(), Ordering::Release);
        let l = TcpListener::bind("127.0.0.1:0").unwrap();
        let take = || z.take_if_sure(l.as_raw_fd(), || l.accept().map(drop).map_err(|_| Errno::EINVAL));
        assert_eq!(take(), Err(Errno::EAGAIN), "nothing waits");
        let _c = TcpStream::connect(l.local_addr().unwrap()).unwrap();
        let blocked = z.block(|| (take(), z.to_sleep_on(7), take()));
        assert_eq!(blocked, Some((Err(Errno::EAGAIN), (-1, Some(PAUSE)), Err(Errno::EAGAIN))));
        assert_eq!((take(), z.to_sleep_on(7)), (Ok(()), (7, None)));
        let _c = TcpStream::connect(l.local_addr().unwrap()).unwrap();
        let late = z.block(|| {
            assert_eq!(take(), Err(Errno::EAGAIN));
            z.rivals.since.fetch_sub(PATIENCE + 1, Ordering::Relaxed);
            take()
        });
        assert_eq!(late, Some(Ok(())));
    }

    #[test]
    fn patience_begins_anew_when_one_has_come_out() {
        let r = Rivals { since: AtomicU64::new(0), out: AtomicU32::new(0) };
        assert!(!r.wait_too_long(0));
        r.since.store(1, Ordering::Relaxed);
        assert!(r.wait_too_long(0));
        assert!(!r.wait_too_long(1));
        r.since.store(1, Ordering::Relaxed);
        r.have_nothing();
        assert!(!r.wait_too_long(1));
    }
}
