//! Connections that wait in an order which is not promised.

use super::errno;
use crate::shared::{state, Slot, AUX};
use libc::{c_int, c_void};
use std::ptr::null_mut;
use std::sync::atomic::Ordering::Release;

/// Bytes that are looked at of each connection.
const LOOK: usize = 64;

/// A connection that has come may be seen so much later.
const MOMENT_MS: c_int = 2;

/// Accepts what waits at a non-blocking listener, and closes it. For each connection: how many bytes it has sent, or the
/// error below zero, and the first byte. The error that ends it comes first.
pub(super) fn accept_all(s: &Slot, listener: c_int) -> i64 {
    let (mut found, mut waited) = (Vec::new(), false);
    let end = loop {
        // SAFETY: no address is asked for.
        let fd = unsafe { libc::accept4(listener, null_mut(), null_mut(), libc::SOCK_NONBLOCK) };
        if fd < 0 {
            let error = errno();
            // (README.md, known gaps. Once: a listener that stays ready without a connection is a fault.)
            if error == libc::EAGAIN && !waited && comes(s, listener) {
                waited = true;
                continue;
            }
            break error;
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

/// Does one come within a moment?
fn comes(s: &Slot, listener: c_int) -> bool {
    let mut p = libc::pollfd { fd: listener, events: libc::POLLIN, revents: 0 };
    s.state.store(state::SETTLING, Release);
    // SAFETY: one item of ours.
    let n = unsafe { libc::poll(&mut p, 1, MOMENT_MS) };
    s.state.store(state::BUSY, Release);
    n > 0
}
