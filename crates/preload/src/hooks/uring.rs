//! Functions of liburing, which makes its system calls inline, below all hooks of libc. Sockets
//! that an entry names move to the kernel before the entry is submitted (ADR 30).
//!
//! `struct io_uring` is part of liburing's ABI. The fields that this module reads have not moved
//! since version 2.0.

use fsocket_lifecycle::uring::{self, Queue};
use libc::*;

/// The first members of `struct io_uring_sq`.
#[repr(C)]
struct Sq {
    head: *const u32,
    tail: *const u32,
    mask: *const u32,
    entries: *const u32,
    flags: *const u32,
    dropped: *const u32,
    array: *const u32,
    sqes: *const u8,
    sqe_head: u32,
    sqe_tail: u32,
    ring_sz: size_t,
    ring_ptr: *const c_void,
    more: [u32; 4],
}
/// `struct io_uring_cq`.
#[repr(C)]
struct Cq {
    pointers: [*const c_void; 7],
    ring_sz: size_t,
    ring_ptr: *const c_void,
    more: [u32; 4],
}
/// The first members of `struct io_uring`.
#[repr(C)]
struct Ring {
    sq: Sq,
    cq: Cq,
    flags: u32,
    fd: c_int,
}

unsafe fn queue(r: &Ring) -> Option<Queue> {
    if r.sq.mask.is_null() || r.sq.head.is_null() || r.sq.tail.is_null() || r.sq.sqes.is_null() {
        return None;
    }
    // SAFETY: liburing has mapped the queue to which the pointers lead. The program keeps the ring
    // while it uses it.
    unsafe { Some(Queue::of_liburing(r.sq.head, r.sq.tail, r.sq.sqes, (*r.sq.mask).wrapping_add(1), r.flags)) }
}

/// Called when a function of liburing has returned `r` for this ring.
pub unsafe fn made(ring: *const c_void, r: c_int) -> c_int {
    // SAFETY: null, or a ring that liburing has filled, whose first members are declared here.
    if let Some(ring) = unsafe { (ring as *const Ring).as_ref() }.filter(|_| r >= 0) {
        // SAFETY: liburing has filled the ring.
        if let Some(q) = unsafe { queue(ring) } {
            uring::made_by_liburing(ring.fd, q);
        }
    }
    r
}

/// Called when entries that the program has filled are about to be submitted.
pub unsafe fn submitting(ring: *const c_void) {
    // SAFETY: null, or a ring that liburing has filled, whose first members are declared here.
    if let Some(ring) = unsafe { (ring as *const Ring).as_ref() } {
        // SAFETY: liburing has filled the ring.
        if let Some(q) = unsafe { queue(ring) } {
            uring::submitting(&q, ring.sq.sqe_tail);
        }
    }
}

/// Called when io_uring_setup(2) has returned `r`.
pub unsafe fn setup(params: c_ulong, r: c_long) -> c_long {
    if r >= 0 && params != 0 {
        let _errno = fsocket_sys::errno::Saved::errno();
        // SAFETY: the call has succeeded, so the kernel has filled `params`.
        unsafe { uring::made(r as c_int, params as *const u8) };
    }
    r
}

/// Called before io_uring_enter(2).
pub fn enter(fd: c_int, to_submit: c_uint, flags: c_uint) {
    uring::entering(fd, to_submit, flags);
}

/// Called before io_uring_register(2).
pub unsafe fn register(op: c_uint, arg: *const u8, n: c_uint) {
    // SAFETY: the program's arguments of io_uring_register(2).
    unsafe { uring::registering(op, arg, n) };
}

/// Called before descriptors are registered with a ring.
pub unsafe fn named(files: *const c_int, n: c_uint) {
    // SAFETY: the program passes `n` numbers at `files`.
    unsafe { uring::named(files, n) };
}

pub unsafe fn io_uring_queue_exit(ring: *mut c_void) {
    // SAFETY: null, or a ring that liburing has filled, whose first members are declared here.
    let fd = unsafe { (ring as *const Ring).as_ref() }.map(|r| r.fd);
    if let Some(fd) = fd {
        uring::closed(fd);
    }
    real!(io_uring_queue_exit(ring));
    if let Some(fd) = fd {
        fsocket_fdtable::pool::kernel_freed(fd);
    }
}
