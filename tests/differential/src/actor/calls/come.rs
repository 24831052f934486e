//! Connections that wait at a listener in an order that is not promised.

use super::errno;
use crate::shared::{Slot, AUX};
use libc::{c_int, c_void};
use std::ptr::null_mut;

/// Upper limit of the bytes that are read from each connection.
const LOOK: usize = 64;

/// Accepts and closes all connections that wait at a non-blocking listener. The answer begins with
/// the error of the last `accept`. For each connection follow the number of bytes that it has sent,
/// or the negated error, and its first byte.
pub(super) fn accept_all(s: &Slot, listener: c_int) -> i64 {
    let mut found = Vec::new();
    let end = loop {
        // SAFETY: the address pointers are null.
        let fd = unsafe { libc::accept4(listener, null_mut(), null_mut(), libc::SOCK_NONBLOCK) };
        if fd < 0 {
            break errno();
        }
        if found.len() * 2 + 3 > AUX {
            break 0;
        }
        let mut bytes = [0u8; LOOK];
        // SAFETY: the buffer is a local variable.
        let n = unsafe { libc::recv(fd, bytes.as_mut_ptr() as *mut c_void, LOOK, 0) };
        let n = if n < 0 { -i64::from(errno()) } else { n as i64 };
        // SAFETY: this function owns the descriptor.
        unsafe { libc::close(fd) };
        found.push((n, i64::from(bytes[0])));
    };
    found.sort_unstable();
    s.put_aux(end.into());
    for (n, first) in &found {
        s.put_aux(*n);
        s.put_aux(*first);
    }
    found.len() as i64
}
