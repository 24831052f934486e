//! Why a send is refused: the result it gets, and state that is reported only once.

use super::notify;
use crate::table::Desc;
use crate::{conn, ready, values};
use fsocket_abi::channel::status;
use fsocket_abi::flags::FlagSet;
use fsocket_sys::{self as sys, Errno, Result};

/// Size of a segment on the loopback device, bytes: MSG_MORE holds back less than this.
const MSS: usize = 32 * 1024;

/// The result of a send of `len` bytes if no more bytes can be sent; `done` bytes were sent
/// already. None: the send can go on. A vectored send asks once for all its parts.
pub fn refused(d: &'static Desc, len: usize, done: usize, flags: i32) -> Option<Result<usize>> {
    if done > 0 && broken(d) {
        return Some(Ok(done)); // the next call gets the error
    }
    Some(match send_error(d, len, flags)? {
        // At most as many bytes as a send buffer holds: the others would meet the peer's reset.
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

/// The error of a send whose arguments are wrong (`e`). If the connection has ended, that error
/// comes first.
pub fn rather(d: &'static Desc, flags: i32, e: Errno) -> Errno {
    // (A send of zero bytes sends nothing.)
    refused(d, 0, 0, flags & !libc::MSG_MORE).and_then(Result::err).unwrap_or(e)
}

/// Would [`refused`] let a send pass? This function changes nothing.
pub(super) fn takes_sends(d: &Desc) -> bool {
    let (s, st) = (d.sock(), ready::state(d));
    let f = s.flags.get();
    let fails = !d.is_unix() && (s.error() != 0 || st.reset);
    !(fails || st.closed || f.has(FlagSet::SHUT_WR) || f.is_poisoned())
}

/// Would a living peer, which has shut down both directions, answer a send with a reset? If so,
/// urgent data must go through the kernel, because its answer shows that they were urgent.
pub(super) fn only_shut_both(d: &Desc) -> bool {
    let f = d.sock().flags.get();
    let peer = d.peer_status();
    peer.has(status::SHUT_BOTH)
        && !peer.has_ended()
        && !f.has(FlagSet::SHUT_WR.or(FlagSet::SENT_AFTER_CLOSE))
        && !f.is_poisoned()
        && d.sock().error() == 0
}

/// Has this side shut down for sending, or is there an error?
fn broken(d: &Desc) -> bool {
    let s = d.sock();
    s.error() != 0 || s.flags.get().has(FlagSet::SHUT_WR) || ready::state(d).reset
}

enum Refused {
    /// The first send after the peer's close. As in the kernel it succeeds, and the peer answers
    /// with a reset.
    Swallow,
    Pipe,
    Error(Errno),
}

/// Why `len` bytes cannot be sent; None: they can. Updates the state that is reported only once.
fn send_error(d: &'static Desc, len: usize, flags: i32) -> Option<Refused> {
    let s = d.sock();
    let f = s.flags.get();
    if d.is_unix() {
        // (A receive reports a pending error.)
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
            // No segment is sent, so the peer does not answer.
            return if held { Some(Refused::Swallow) } else { None };
        }
        if !s.flags.set(FlagSet::SENT_AFTER_CLOSE).has(FlagSet::SENT_AFTER_CLOSE) {
            // The reset comes after the peer's FIN.
            s.set_error(libc::EPIPE);
            // A closed peer does not see this. A peer that has only shut down both directions has
            // answered with a reset, and its own end is reset as well.
            super::end(d, status::RST);
            notify(d, &d.tx().1.want_data);
            // Processes of the fork group that sleep see the hang-up, too.
            conn::wake_own(d);
            return Some(Refused::Swallow);
        }
        return Some(Refused::Pipe);
    }
    None
}
