//! Single packets to and from the monitor, and the effects of messages that nobody asked for.

use super::state::{dead, died, fd, is_late, long_patience, patience, unmet, LATER, MISMATCH, SILENT, SLOW_UNTIL};
use crate::upcalls::upcalls;
use crate::{process, registry};
use core::sync::atomic::Ordering;
use fsocket_proto::{request, Message, Msg, MSG_SIZE};
use fsocket_sys::{self as sys, Errno, Result};
use zerocopy::{FromBytes, IntoBytes};

/// The longest pause before a packet is sent again if the kernel had no room. All pauses together
/// take twice as long.
const ROOM_PAUSE: u64 = 32_000_000;

/// Sends a message to a monitor that is not this process's monitor yet.
pub fn show(m: impl Into<Msg>, attach: i32) -> bool {
    send(&m.into(), Some(attach), sys::now_ns() + long_patience()).is_ok()
}

/// Sends a message that has no answer.
#[inline]
pub fn tell(m: impl Into<Msg>, attach: Option<i32>) -> bool {
    tell_packet(&m.into(), attach)
}

fn tell_packet(m: &Msg, attach: Option<i32>) -> bool {
    // SEQPACKET sends are atomic, so they need no lock, and this works even if a caller holds the
    // lock.
    if unmet() {
        return false; // Nothing has died: the first that is found is the one.
    }
    if dead() {
        died();
        return false;
    }
    let now = sys::now_ns();
    // A sleeper that misses a ring checks by itself. Rings are frequent, so none of them waits
    // long for room.
    let short = m.is::<request::Ring>();
    let limit = match short {
        true if now < SLOW_UNTIL.load(Ordering::Relaxed) => now,
        true => now + patience(),
        false => now + long_patience(),
    };
    let sent = send(m, attach, limit);
    if sent == Err(Errno::EAGAIN) && SILENT.load(Ordering::Relaxed) == 0 && now < limit {
        is_late(short);
    }
    sent.is_ok()
}

/// Sends one packet to the monitor.
pub(super) fn send(m: &Msg, attach: Option<i32>, limit: u64) -> Result<()> {
    let sent = send_on(fd(), m, attach, limit);
    if sent.is_err_and(|e| e != Errno::EAGAIN && !passes(e)) {
        died();
    }
    sent
}

/// The same over a socket that is not this process's control socket yet. Some errors say nothing
/// about the monitor: a signal, no memory for the packet, too many descriptors in flight. After
/// these the packet is sent again, and the monitor does not count as dead. (Otherwise this
/// process would stop waking its peers, while the monitor still names it to them.)
pub(super) fn send_on(fd: i32, m: &Msg, attach: Option<i32>, limit: u64) -> Result<()> {
    let mut pause = 1_000_000;
    loop {
        match sys::send_with_fd(fd, m.as_bytes(), attach, libc::MSG_DONTWAIT) {
            Ok(_) => return Ok(()),
            Err(Errno::EINTR) => {}
            Err(Errno::EAGAIN) if SILENT.load(Ordering::Relaxed) == 0 && ready_before(fd, libc::POLLOUT, limit) => {}
            Err(e) if passes(e) && pause <= ROOM_PAUSE => {
                sys::nanosleep(pause);
                pause *= 2;
            }
            Err(e) => return Err(e),
        }
    }
}

/// Does this error concern the kernel's memory, and not the monitor?
pub(super) fn passes(e: Errno) -> bool {
    matches!(e, Errno::ENOMEM | Errno::ENOBUFS | Errno::ETOOMANYREFS)
}

/// Waits until a socket is ready, until time `limit` at most. False: it is not ready.
pub(super) fn ready_before(fd: i32, events: i16, limit: u64) -> bool {
    let mut p = libc::pollfd { fd, events, revents: 0 };
    loop {
        let left = limit.saturating_sub(sys::now_ns());
        // SAFETY: one pollfd.
        match unsafe { sys::ppoll(&mut p, 1, Some(left), core::ptr::null()) } {
            Ok(0) => return false,
            Err(Errno::EINTR) => {}
            // (After an error, the caller's next call on the socket returns it.)
            _ => return true,
        }
    }
}

pub(super) fn receive(flags: i32) -> Result<(Msg, Option<i32>)> {
    let mut buf = [0u8; MSG_SIZE];
    let (n, got) = sys::recv_with_fd(fd(), &mut buf, flags)?;
    match Msg::read_from_bytes(&buf) {
        Ok(m) if n == MSG_SIZE && m.is_of_our_version() => {
            if SILENT.load(Ordering::Relaxed) != 0 {
                SILENT.store(0, Ordering::Relaxed);
            }
            Ok((m, got))
        }
        _ => {
            close_opt(got);
            Err(Errno::EPROTO)
        }
    }
}

pub(super) fn unasked(m: &Msg, got: Option<i32>) {
    let message = match m.refusal() {
        None => Message::decode(m),
        Some(_) => {
            if m.is::<request::Hello>() {
                // The monitor has another version, so the library cannot use it.
                MISMATCH.store(true, Ordering::Relaxed);
                LATER.store(false, Ordering::Release);
                process::disable();
                died();
            }
            return close_opt(got);
        }
    };
    match message {
        Ok(Message::Hello(hello)) => {
            process::set_program(hello.program);
            forget(registry::forget_closings(), fsocket_proto::CLOSINGS_SIZE);
            if let Some(fd) = got {
                forget(registry::map(fd), fsocket_proto::registry::SIZE);
            }
        }
        Ok(Message::Closings(_)) => {
            if let Some(fd) = got {
                registry::map_closings(fd);
            }
        }
        // The answer came too late: the listener has been left to the kernel, so it is withdrawn.
        Ok(Message::Listen(late)) => {
            tell(request::Unlisten { listener: late.listener, for_all: false }, None);
        }
        // The same for a local listen socket.
        Ok(Message::Local(late)) => {
            tell(request::Left { group: late.group, place: late.place }, None);
        }
        Ok(message) if (upcalls().message)(message, got) => return,
        // (A newer monitor may send messages that this library does not know.)
        Ok(_) | Err(_) => {}
    }
    close_opt(got);
}

/// Blanks memory of a monitor that has died. A thread that still has a pointer reads zeros.
fn forget(memory: *mut u8, size: usize) {
    if !memory.is_null() {
        // SAFETY: the registry has mapped it with that size, and no new pointer to it is handed out. A thread
        // that reads it late finds zeros.
        unsafe { crate::space::blank(memory, size) };
    }
}

pub(super) fn close_opt(fd: Option<i32>) {
    if let Some(fd) = fd {
        let _ = sys::close(fd);
    }
}
