//! Connections that wait in an order which is not promised.

use super::errno;
use crate::shared::{Slot, AUX};
use libc::{c_int, c_void};
use std::ptr::null_mut;

/// Bytes that are looked at of each connection.
const LOOK: usize = 64;

/// Accepts what waits at a non-blocking listener, and closes it. For each connection: how many bytes it has sent, or the
/// error below zero, and the first byte. The error that ends it comes first.
pub(super) fn accept_all(s: &Slot, listener: c_int) -> i64 {
    let mut found = Vec::new();
    let end = loop {
        // SAFETY: no address is asked for.
        let fd = unsafe { libc::accept4(listener, null_mut(), null_mut(), libc::SOCK_NONBLOCK) };
        if fd < 0 {
            break errno();
        }
        if found.len() * 2 + 3 > AUX {
            break 0;
        }
        let mut bytes = [0u8; LOOK];
        // SAFETY: a buffer of ours.
        let n = unsafe { libc::recv(fd, bytes.as_mut_ptr() as *mut c_void, LOOK, 0) };
        let n = if n < 0 { -i64::from(errno()) } else { n as i64 };
        // SAFETY: a descriptor of ours.
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
