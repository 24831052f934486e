//! Effects that the kernel brings about after a call has returned. A step waits for them.

use crate::call::Call;
use crate::shared::Slot;
use fsocket_sys as sys;
use libc::c_int;

/// Waits until the bytes that a send has accepted are in flight. Nagle's algorithm holds back small
/// segments until an acknowledgement, which may take 40 ms. The call goes through libc: if a
/// connection has bytes left in the ring, the library answers with the placeholder's number.
pub(super) fn drain_nagle(fd: c_int) {
    const SIOCOUTQNSD: libc::Ioctl = 0x894B;
    none_left(|left| {
        // SAFETY: the request writes one int, to `left`.
        unsafe { libc::ioctl(fd, SIOCOUTQNSD, left) == 0 }
    });
}

/// Does the program want the bytes of this call to be held back? Then no step waits for them.
pub(super) fn holds_back(call: Call, slot: &Slot) -> bool {
    let more = |i: usize| slot.arg(i) as c_int & libc::MSG_MORE != 0;
    let flagged = match call {
        Call::Send | Call::SendTo => more(2),
        Call::SendMsg | Call::SendMmsg => more(3),
        _ => false,
    };
    let mut on = [0u8; 4];
    let asked = sys::getsockopt(slot.arg(0) as c_int, libc::IPPROTO_TCP, libc::TCP_CORK, &mut on);
    flagged || (asked.is_ok() && on != [0; 4])
}

/// Waits until earlier bytes are acknowledged, before a call that sends several messages. Then the
/// first message leaves at once, and the next one meets its effect: a reset, if the peer receives
/// no more. A raw system call, which reports 0 at once for the placeholder of a connection on
/// shared memory.
pub(super) fn await_acks(fd: c_int) {
    none_left(|left| {
        // SAFETY: the request writes one int, to `left`.
        let r = unsafe {
            sys::raw(libc::SYS_ioctl, [fd as usize, libc::TIOCOUTQ as usize, left as *mut c_int as usize, 0, 0, 0])
        };
        r.is_ok()
    });
}

/// Waits until the number of bytes that `ask` gives is 0, or `ask` fails; 400 ms at most. (A closed
/// socket sends delayed bytes only with the first retransmission, after 200 ms.)
fn none_left(ask: impl Fn(&mut c_int) -> bool) {
    for _ in 0..800 {
        let mut left: c_int = 0;
        if !ask(&mut left) || left == 0 {
            return;
        }
        sys::nanosleep(500_000);
    }
}

/// Waits for the acknowledgement of a FIN, which may be delayed and wakes all that wait on the
/// socket. A raw system call, because the placeholder of a connection on shared memory is in state
/// CLOSE.
pub(super) fn await_ack(fd: c_int) {
    const WAITING: [u8; 3] = [4, 9, 11]; // FIN_WAIT1, LAST_ACK, CLOSING
    for _ in 0..120 {
        let mut info = [0u8; 8];
        let n = sys::getsockopt(fd, libc::IPPROTO_TCP, libc::TCP_INFO, &mut info);
        if n.is_err() || !WAITING.contains(&info[0]) {
            return;
        }
        sys::nanosleep(500_000);
    }
}
