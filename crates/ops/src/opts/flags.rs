//! `fcntl` and `ioctl` of the library's descriptors.

use super::extra;
use crate::options::INQ;
use crate::table::{Desc, Kind};
use crate::{user, Cause, Outcome};
use fsocket_abi::flags::FlagSet;
use fsocket_abi::path_switch::PathState;
use fsocket_sys::{self as sys, Result};

const F_SETSIG: i32 = 10;
const F_SETOWN_EX: i32 = 15;
/// Flags that F_SETFL changes beside O_NONBLOCK and O_ASYNC.
const OTHERS: i32 = libc::O_APPEND | libc::O_DIRECT | libc::O_NOATIME;

/// Would [`fcntl`] leave this call to the kernel? Asked in a child that serves a kernel
/// connection.
#[inline]
pub fn is_kernels(d: &Desc, cmd: i32, arg: usize) -> bool {
    d.kind() == Kind::Kernel && (cmd == libc::F_GETFL || cmd == libc::F_SETFL && arg as i32 & libc::O_ASYNC == 0)
}

/// Handles the commands of `fcntl` that the library must decide.
pub fn fcntl(fd: i32, d: &'static Desc, cmd: i32, arg: usize) -> Outcome<Result<i32>> {
    let nb = libc::O_NONBLOCK;
    // Only the kernel can send signals for arriving data.
    let signals = match cmd {
        libc::F_SETFL => arg as i32 & libc::O_ASYNC != 0,
        F_SETSIG | libc::F_SETOWN | F_SETOWN_EX => true,
        _ => false,
    };
    if signals {
        extra::leave(d);
    }
    if cmd == libc::F_SETFD && arg as i32 & libc::FD_CLOEXEC == 0 {
        survives(d);
    }
    if matches!(cmd, libc::F_GETFL | libc::F_SETFL) && d.is_conn() && !crate::path::still_ours(d) {
        // The flags belong to the kernel's socket, which another process of the fork group may
        // have moved to already.
        return Outcome::Kernel(Cause::NotOurs);
    }
    match (d.kind(), cmd) {
        (Kind::Shm, libc::F_GETFL) => Outcome::Done(sys::fcntl(fd, cmd, 0).map(|v| {
            let on = d.sock().flags.get().has(FlagSet::NONBLOCK);
            if on {
                v | nb
            } else {
                v & !nb
            }
        })),
        (Kind::Shm, libc::F_SETFL) => {
            // The placeholder keeps the other flags, and refuses those that a socket cannot have.
            let others = arg as i32 & OTHERS;
            if others != 0 || d.placeholder().is_changed() {
                d.placeholder().mark_changed();
                let below = others | if d.placeholder().nonblock() { nb } else { 0 };
                if let Err(e) = sys::fcntl(fd, cmd, below as usize) {
                    return Outcome::Done(Err(e));
                }
            }
            set_nonblock(d, arg as i32 & nb != 0);
            Outcome::Done(Ok(0))
        }
        (Kind::Fresh | Kind::Bound | Kind::Listener, libc::F_SETFL) => {
            let r = sys::fcntl(fd, cmd, arg);
            if r.is_ok() {
                set_nonblock(d, arg as i32 & nb != 0);
                d.placeholder().set_nonblock(arg as i32 & nb != 0);
            }
            Outcome::Done(r)
        }
        _ => Outcome::Kernel(Cause::Below),
    }
}

/// The program clears close-on-exec, so the next program must find this descriptor.
pub fn survives(d: &Desc) {
    d.listening().prepare_exec();
}

/// Reads O_NONBLOCK of the placeholder, which the program may have changed without the library.
pub fn nonblock_from_below(d: &Desc, fd: i32) {
    let Ok(flags) = sys::fcntl(fd, libc::F_GETFL, 0) else { return };
    let on = flags & libc::O_NONBLOCK != 0;
    if on != d.placeholder().nonblock() {
        set_nonblock(d, on);
    }
}

fn set_nonblock(d: &Desc, on: bool) {
    d.unconnected().set_nonblock(on);
    if d.is_conn() {
        if let PathState::Draining(k) = d.path_state() {
            let _ = sys::fcntl(k, libc::F_SETFL, if on { libc::O_NONBLOCK as usize } else { 0 });
        }
        let f = &d.sock().flags;
        match on {
            true => f.set(FlagSet::NONBLOCK),
            false => f.clear(FlagSet::NONBLOCK),
        };
    }
}

/// Has the peer closed its end, or was it killed?
fn has_closed(d: &Desc) -> bool {
    let peer = d.peer_status();
    peer.has_ended() && !peer.has_moved()
}

/// Asks the kernel socket behind a connection by an `ioctl` that returns a number; 0 if there is
/// no such socket.
fn in_kernel(d: &Desc, request: u64) -> i32 {
    d.path_state().kernel_socket().map_or(0, |k| {
        let mut n = 0i32;
        let a = [k as usize, request as usize, &raw mut n as usize, 0, 0, 0];
        // SAFETY: the kernel writes an int to `n`, a local variable.
        unsafe { sys::raw(libc::SYS_ioctl, a) }.map_or(0, |_| n)
    })
}

/// Number of bytes that have arrived and are unread.
fn unread(d: &Desc) -> i32 {
    let (r, rx, h) = d.rx();
    let here = match crate::token::enter(h) {
        Ok(_t) => fsocket_ring::available(r, rx, h, 1 << 20).unwrap_or(0) as i32,
        Err(_) => 0,
    };
    here + in_kernel(d, libc::FIONREAD)
}

/// If TCP_INQ is set: the number of bytes that `recvmsg` reports as left. The end of the peer's
/// stream counts as one byte.
pub fn inquired(d: &Desc) -> Option<i32> {
    if d.is_unix() || d.sock().option(INQ) == 0 {
        return None;
    }
    let ended = crate::ready::events(d, libc::POLLRDHUP as u32) != 0 && !d.sock().flags.get().ends_receives();
    Some(unread(d) + i32::from(ended))
}

/// `ioctl` on a connection. The `int` argument is read or written through `p`.
///
/// # Safety
/// `p` points to what the request wants. For the requests handled here, that is an `int` of the
/// program.
pub unsafe fn ioctl(fd: i32, d: &'static Desc, request: u64, p: *mut i32) -> Outcome<Result<i32>> {
    const FIONBIO: u64 = libc::FIONBIO;
    const FIONREAD: u64 = libc::FIONREAD;
    const SIOCOUTQ: u64 = libc::TIOCOUTQ;
    const SIOCATMARK: u64 = 0x8905;
    const SIOCOUTQNSD: u64 = 0x894B;
    const FIOASYNC: u64 = 0x5452;
    const FIOSETOWN: u64 = 0x8901;
    const SIOCSPGRP: u64 = 0x8902;
    // SAFETY: the program says that this is its memory; the copy returns EFAULT where nothing is.
    let given = || unsafe { user::get(p) };
    if matches!(request, FIOSETOWN | SIOCSPGRP) || request == FIOASYNC && given().is_ok_and(|on| on != 0) {
        extra::leave(d);
    }
    match request {
        FIONBIO => {
            let on = match given() {
                Ok(on) => on != 0,
                Err(e) => return Outcome::Done(Err(e)),
            };
            if d.is_conn() {
                if !crate::path::still_ours(d) {
                    return Outcome::Kernel(Cause::NotOurs);
                }
                set_nonblock(d, on);
                return Outcome::Done(Ok(0));
            }
            // SAFETY: the kernel checks the program's addresses.
            let r = unsafe { sys::raw(libc::SYS_ioctl, [fd as usize, request as usize, p as usize, 0, 0, 0]) };
            if r.is_ok() {
                set_nonblock(d, on);
                d.placeholder().set_nonblock(on);
            }
            Outcome::Done(r.map(|v| v as i32))
        }
        FIONREAD | SIOCOUTQ | SIOCATMARK | SIOCOUTQNSD if crate::path::still_ours(d) => {
            let in_kernel = || in_kernel(d, request);
            let v = match request {
                FIONREAD => unread(d),
                SIOCATMARK => 0, // the ring's bytes come first, so not at the mark
                _ if d.path_state().kernel_socket().is_some() => in_kernel(),
                SIOCOUTQ => {
                    let (_, tx, h) = d.tx();
                    // For a Unix socket this is the number of bytes that the peer has not read.
                    // They are freed when the peer closes.
                    match d.is_unix() {
                        true if has_closed(d) => 0,
                        true => fsocket_ring::unread(tx, h) as i32,
                        false => fsocket_ring::unacknowledged(tx, h) as i32,
                    }
                }
                _ => 0,
            };
            // SAFETY: the program says that this is its memory; the copy returns EFAULT where nothing is.
            Outcome::Done(unsafe { user::put(p, v) }.map(|()| 0))
        }
        _ => Outcome::Kernel(Cause::Below),
    }
}
