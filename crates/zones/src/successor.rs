//! Listeners that the next program inherits: binary upgrades, socket activation.
//!
//! The reservation (ADR 17) is inherited together with the listener if the next program will load
//! the library. So its workers can join as before, with local listen sockets in the same group of
//! the kernel and of the monitor. If only the previous program had the reservation, they could
//! not join, because the reservation closes the address to others as long as that program lives.

use super::life::listened_with;
use super::listener::{enabled, state, used};
use crate::process;
use core::sync::atomic::Ordering;
use fsocket_reuseport::listener::{reuse_port_of, Shape};
use fsocket_reuseport::reservation;
use fsocket_sys as sys;

/// Number of descriptors that are searched for a reservation, from the first number of the
/// library's own range.
const LOOK: i32 = 256;

/// Called before `exec` of a program that will load the library: reservations survive with their
/// listeners. (In a program without the library they would keep the address from others.)
/// `survives`: does the next program inherit this descriptor?
pub fn before_exec(survives: impl Fn(i32) -> bool) {
    for z in used().filter(|z| survives(z.fd.load(Ordering::Relaxed))) {
        set_flags(z.reservation.load(Ordering::Relaxed), 0);
    }
}

/// Does the next program inherit a listener that has zones?
pub fn any(survives: impl Fn(i32) -> bool) -> bool {
    used().any(|z| z.state() != state::FREE && survives(z.fd.load(Ordering::Relaxed)))
}

/// Reservations must not survive a later `exec`: this `exec` has failed, or a child did it.
pub fn after_exec() {
    for z in used() {
        set_flags(z.reservation.load(Ordering::Relaxed), libc::FD_CLOEXEC as usize);
    }
}

fn set_flags(reservation: i32, flags: usize) {
    if reservation >= 0 {
        let _ = sys::fcntl(reservation, libc::F_SETFD, flags);
    }
}

/// This program has inherited the listening socket `fd`, from a program with or without the
/// library. The listener is handled as if this program had called `listen`.
pub fn inherited(fd: i32) {
    if enabled() {
        listened_with(fd, reservation_of(fd));
    }
}

/// Finds the reservation that was inherited with the listener: a socket bound to the same
/// address, not listening, and closed to others.
fn reservation_of(fd: i32) -> Option<i32> {
    if !reservation::is_open_anyway(fd) {
        return None;
    }
    let shape = Shape::of(fd).ok()?;
    let first = process::high();
    let is_reservation = |n: &i32| {
        *n != fd
            && sys::fcntl(*n, libc::F_GETFD, 0) == Ok(0)
            && Shape::of(*n).is_ok_and(|s| s.addr() == shape.addr() && s.v6only == shape.v6only)
            && reuse_port_of(*n) == Ok(false)
            && !listens(*n)
    };
    (first..first + LOOK).find(is_reservation).map(process::high_fd)
}

fn listens(fd: i32) -> bool {
    let mut v = [0u8; 4];
    sys::getsockopt(fd, libc::SOL_SOCKET, libc::SO_ACCEPTCONN, &mut v).is_ok() && v != [0; 4]
}
