//! A conversation that is long enough for a connection to move to shared memory (ADR 27, 78).

use super::errno;
use libc::{c_int, c_void};

const MESSAGE: [u8; 4] = *b"ping";

/// Sends a message and waits for its answer, `times` times. Returns the number of answers, or -1.
pub(super) fn ping(fd: c_int, times: i64) -> i64 {
    (0..times).find_map(|done| given(send(fd) && receive(fd), done)).unwrap_or(times)
}

/// The other end of [`ping`].
pub(super) fn echo(fd: c_int, times: i64) -> i64 {
    (0..times).find_map(|done| given(receive(fd) && send(fd), done)).unwrap_or(times)
}

/// The result of a conversation that has ended too early, if it has.
fn given(went_on: bool, done: i64) -> Option<i64> {
    (!went_on).then(|| if errno() == 0 { done } else { -1 })
}

fn send(fd: c_int) -> bool {
    // SAFETY: the buffer lives during the call.
    unsafe {
        libc::send(fd, MESSAGE.as_ptr() as *const c_void, MESSAGE.len(), libc::MSG_NOSIGNAL) == MESSAGE.len() as isize
    }
}

fn receive(fd: c_int) -> bool {
    let mut got = 0;
    let mut bytes = [0u8; MESSAGE.len()];
    while got < MESSAGE.len() {
        // SAFETY: the call writes into the rest of a local buffer.
        let n = unsafe {
            *libc::__errno_location() = 0;
            libc::recv(fd, bytes[got..].as_mut_ptr() as *mut c_void, MESSAGE.len() - got, 0)
        };
        match n {
            1.. => got += n as usize,
            -1 if errno() == libc::EAGAIN => {
                let mut p = libc::pollfd { fd, events: libc::POLLIN, revents: 0 };
                // SAFETY: the call uses one local `pollfd`.
                if unsafe { libc::poll(&mut p, 1, -1) } < 0 {
                    return false;
                }
            }
            _ => return false,
        }
    }
    true
}
