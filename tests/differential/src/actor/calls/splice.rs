//! `splice` between a socket and a pipe that lives for one step.

use super::bytes::{source, take};
use super::errno;
use crate::shared::Slot;
use fsocket_sys as sys;
use libc::c_int;
use std::ptr::null_mut;

/// Size of the pipe in bytes. It has more pages than the parts in which a step's bytes may arrive.
const ROOM: c_int = 1 << 20;

/// Makes `call` with the read end and the write end of a new pipe.
unsafe fn with_pipe(call: impl FnOnce(c_int, c_int) -> isize) -> isize {
    let mut p = [-1; 2];
    // SAFETY: the array has room for both descriptors, which are closed again.
    unsafe {
        if libc::pipe2(p.as_mut_ptr(), libc::O_CLOEXEC) < 0 {
            return -1;
        }
        libc::fcntl(p[1], libc::F_SETPIPE_SZ, ROOM);
        let r = call(p[0], p[1]);
        let saved = errno();
        libc::close(p[0]);
        libc::close(p[1]);
        *libc::__errno_location() = saved;
        r
    }
}

/// Splices `n` bytes from a pipe to a socket. The second result is the number of bytes left in the
/// pipe.
pub(super) unsafe fn to(s: &Slot, fd: c_int, n: usize, flags: u32) -> i64 {
    // SAFETY: this actor has exclusive use of the slot, which has `n` bytes.
    unsafe {
        let p = source(s, n);
        with_pipe(|r, w| {
            if libc::write(w, p, n) != n as isize {
                return -1;
            }
            let done = libc::splice(r, null_mut(), fd, null_mut(), n, flags);
            let saved = errno();
            let mut left: c_int = -1;
            libc::ioctl(r, libc::FIONREAD, &mut left);
            s.put_aux(left.into());
            *libc::__errno_location() = saved;
            done
        }) as i64
    }
}

pub(super) unsafe fn from(s: &Slot, fd: c_int, n: usize, flags: u32) -> i64 {
    // SAFETY: this actor has exclusive use of the slot, and `take` gives room for `n` bytes.
    unsafe {
        take(s, n, |p| {
            with_pipe(|r, w| {
                let done = libc::splice(fd, null_mut(), w, null_mut(), n, flags);
                if done > 0 && sys::read(r, p.cast(), n) != Ok(done as usize) {
                    s.put_aux(-88);
                }
                done
            })
        })
    }
}
