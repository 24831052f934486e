//! What has become of the path of a connection.

use crate::conn;
use crate::table::Desc;
use core::sync::atomic::Ordering;
use fsocket_abi::channel::status;
use fsocket_sys as sys;

/// What has become of the path, as far as this process has looked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Path {
    /// The rings.
    Shm,
    /// It has been switched and this process has not followed yet.
    Pending,
    /// The kernel, except for what is left to read in the ring.
    Draining(i32),
}

/// Cheap: two loads of lines that every operation reads anyway.
#[inline]
pub fn of(d: &Desc) -> Path {
    if let Some(mine) = d.path().kernel_end() {
        return Path::Draining(mine);
    }
    let f = d.sock().flags.get();
    if f.is_poisoned() {
        // It could not follow: what is left is a reset.
        return Path::Shm;
    }
    if f.has_left() || peer_status(d) & (status::MIGRATING | status::MIGRATED) != 0 {
        return Path::Pending;
    }
    Path::Shm
}

pub fn peer_status(d: &Desc) -> u32 {
    // Acquire: what the mover did before it said so.
    d.rx().1.prod.status.load(Ordering::Acquire)
}

/// Where a connection that was one of ours when the caller looked it up has
/// gone: a descriptor number of the kernel connection.
pub fn went_to(d: &Desc) -> Option<i32> {
    d.path().went_to()
}

/// The kernel's part of a connection of which the ring has something left.
pub fn kernel_part(d: &Desc) -> Option<i32> {
    d.path().kernel_end()
}

/// Has the path been switched so far that `path::follow` need not wait for the peer? One that says that it
/// moves and never that it has must not stop a thread that has other things to do.
pub fn can_follow(d: &Desc) -> bool {
    of(d) == Path::Pending && (d.sock().flags.get().has_left() || !peer_moves(d))
}

/// Is it being switched by the peer, so that nothing can be said or done until that is over?
pub fn is_moving(d: &Desc) -> bool {
    d.is_conn() && of(d) == Path::Pending && !can_follow(d)
}

/// Is the peer in the middle of it?
pub fn peer_moves(d: &Desc) -> bool {
    let st = peer_status(d);
    st & status::MIGRATING != 0 && st & (status::MIGRATED | status::CLOSED | status::RST) == 0
}

/// Events of a connection whose path has been switched, and that this process
/// has followed; the ring's part and the kernel's.
pub fn events(d: &Desc, fd: i32, wanted: u32) -> u32 {
    let mut p = libc::pollfd { fd, events: wanted as u16 as i16, revents: 0 };
    // SAFETY: one pollfd.
    let _ = unsafe { sys::ppoll(&mut p, 1, Some(0), core::ptr::null()) };
    let data = if conn::ring_has(d) { (libc::EPOLLIN | libc::EPOLLRDNORM) as u32 } else { 0 };
    p.revents as u16 as u32 | data & wanted
}
