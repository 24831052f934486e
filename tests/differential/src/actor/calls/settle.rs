//! Effects of a call that the kernel brings about after it has returned; a step waits for them.

use crate::call::Call;
use crate::shared::Slot;
use fsocket_sys as sys;
use libc::c_int;

/// The kernel holds back small segments (Nagle) until an acknowledgement, which
/// may take 40 ms. What a send has accepted is on its way when the step ends.
/// Through libc: of a connection that has something left in the ring the number is the placeholder's.
pub(super) fn drain_nagle(fd: c_int) {
    const SIOCOUTQNSD: libc::Ioctl = 0x894B;
    none_left(|left| {
        // SAFETY: the request writes one int.
        unsafe { libc::ioctl(fd, SIOCOUTQNSD, left) == 0 }
    });
}

/// Is what this call has sent still to be held back? Then nobody waits for it.
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

/// Earlier bytes are acknowledged before a call that sends several messages, so that the first of them
/// is on its way at once, and the next meets what it has led to: a reset, where nobody receives any more.
/// By system call: on shared memory the placeholder says 0 at once.
pub(super) fn await_acks(fd: c_int) {
    none_left(|left| {
        // SAFETY: the request writes one int.
        let r = unsafe {
            sys::raw(libc::SYS_ioctl, [fd as usize, libc::TIOCOUTQ as usize, left as *mut c_int as usize, 0, 0, 0])
        };
        r.is_ok()
    });
}

/// Until the number of bytes that `ask` gives is 0, or it fails; 400 ms at most. (What a socket that is closed owed, as
/// it would have been delayed, it sends for the first retransmission only, after 200 ms.)
fn none_left(ask: impl Fn(&mut c_int) -> bool) {
    for _ in 0..800 {
        let mut left: c_int = 0;
        if !ask(&mut left) || left == 0 {
            return;
        }
        sys::nanosleep(500_000);
    }
}

/// The acknowledgement of a FIN may be delayed, and wakes whoever waits on the
/// socket. It is there when the step ends. By system call: the placeholder of a
/// connection on shared memory is in state CLOSE.
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
