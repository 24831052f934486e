//! Why a send is refused: what it returns, and what is reported only once.

use super::notify;
use crate::table::Desc;
use crate::{conn, ready, values};
use core::sync::atomic::Ordering;
use fsocket_abi::channel::status;
use fsocket_abi::flags::FlagSet;
use fsocket_sys::{self as sys, Errno, Result};

/// Segment of the loopback device, bytes: MSG_MORE holds back less than that.
const MSS: usize = 32 * 1024;

/// What a send of `len` bytes, of which `done` are gone, returns because nothing
/// more can be sent; None: it can. A vectored send asks once for all its parts.
pub fn refused(d: &'static Desc, len: usize, done: usize, flags: i32) -> Option<Result<usize>> {
    if done > 0 && broken(d) {
        return Some(Ok(done)); // and why is the next call's
    }
    Some(match send_error(d, len, flags)? {
        // No more than a send buffer holds: what is longer meets the reset.
        Refused::Swallow => Ok(len.min(values::send_buffer(d))),
        _ if done > 0 => Ok(done),
        Refused::Pipe => {
            if flags & libc::MSG_NOSIGNAL == 0 {
                let _ = sys::tgkill(sys::getpid(), sys::gettid(), libc::SIGPIPE);
            }
            Err(Errno::EPIPE)
        }
        Refused::Error(e) => Err(e),
    })
}

/// The error of a send whose arguments have `e`: a connection that has ended says so first.
pub fn rather(d: &'static Desc, flags: i32, e: Errno) -> Errno {
    // (Of no bytes: nothing is sent.)
    refused(d, 0, 0, flags & !libc::MSG_MORE).and_then(Result::err).unwrap_or(e)
}

/// Would the peer, which is there and has shut down both directions, answer a send? To an urgent
/// one it does so in the kernel, and shows that it was urgent.
pub(super) fn only_shut_both(d: &Desc) -> bool {
    let f = d.sock().flags.get();
    let theirs = d.rx().1.prod.status.load(Ordering::Acquire);
    theirs & (status::SHUT_BOTH | status::CLOSED | status::RST) == status::SHUT_BOTH
        && !f.has(FlagSet::SHUT_WR.or(FlagSet::SENT_AFTER_CLOSE))
        && !f.is_poisoned()
        && d.sock().error() == 0
}

/// Has this side shut down, or is there an error?
fn broken(d: &Desc) -> bool {
    let s = d.sock();
    s.error() != 0 || s.flags.get().has(FlagSet::SHUT_WR) || ready::state(d).reset
}

enum Refused {
    /// The first send after the peer's close: the kernel takes the bytes, the
    /// peer answers with a reset.
    Swallow,
    Pipe,
    Error(Errno),
}

/// Why `len` bytes cannot be sent, if so; updates what is reported only once.
fn send_error(d: &'static Desc, len: usize, flags: i32) -> Option<Refused> {
    let s = d.sock();
    let f = s.flags.get();
    if d.is_unix() {
        // (An error that is pending is a receive's.)
        return (f.has(FlagSet::SHUT_WR) || f.is_poisoned() || ready::state(d).closed).then_some(Refused::Pipe);
    }
    match ready::swap_error(s) {
        0 => {}
        libc::EPIPE => return Some(Refused::Pipe),
        e => return Some(Refused::Error(Errno::new(e))),
    }
    let st = ready::state(d);
    if st.reset && !s.flags.set(FlagSet::RST_REPORTED).has(FlagSet::RST_REPORTED) {
        return Some(match ready::reset_error(st) {
            libc::EPIPE => Refused::Pipe,
            e => Refused::Error(Errno::new(e)),
        });
    }
    if f.has(FlagSet::SHUT_WR) || st.reset {
        return Some(Refused::Pipe);
    }
    if st.closed {
        let held = flags & libc::MSG_MORE != 0 && len < MSS;
        if !f.has(FlagSet::SENT_AFTER_CLOSE) && (len == 0 || held) {
            // No segment, no answer.
            return if held { Some(Refused::Swallow) } else { None };
        }
        if !s.flags.set(FlagSet::SENT_AFTER_CLOSE).has(FlagSet::SENT_AFTER_CLOSE) {
            // The reset that answers it finds us with the peer's FIN received.
            s.set_error(libc::EPIPE);
            // A peer that has closed does not care; one that only shut down
            // both directions has answered, and is reset itself.
            super::end(d, status::RST);
            notify(d, &d.tx().1.want_data);
            // Processes of the fork group that wait on it see the hang-up, too.
            conn::wake_own(d);
            return Some(Refused::Swallow);
        }
        return Some(Refused::Pipe);
    }
    None
}
