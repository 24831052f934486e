//! Making a listener ready for workers: its reservation and its page.

use super::listener::{count, state, Zoned};
use super::page;
use crate::{ctl, process};
use core::sync::atomic::Ordering;
use fsocket_abi::arena::Reason;
use fsocket_proto::request;
use fsocket_reuseport::listener::{reuse_port, Shape};
use fsocket_reuseport::reservation::{self, ReuseWindow};
use fsocket_sys::{self as sys, Errno};

impl Zoned {
    /// Makes the reservation and the page, which children inherit.
    pub(super) fn make_ready(&self) {
        let Ok(_l) = self.change.lock() else { return };
        if self.state() != state::PLAIN {
            return;
        }
        let fd = self.fd.load(Ordering::Relaxed);
        if self.is_shared() {
            // The program lets others use its address, so there is nothing to reserve.
            if let Some(p) = page::make() {
                self.page.store(p, Ordering::Release);
                self.state.store(state::READY, Ordering::Release);
            }
            return;
        }
        let made = match self.reservation.load(Ordering::Relaxed) {
            inherited @ 0.. => Ok(inherited),
            _ => Shape::of(fd).and_then(|shape| self.make_reservation(fd, &shape)).map(process::high_fd),
        };
        match made {
            Ok(reservation) => match page::make() {
                Some(p) => {
                    self.reservation.store(reservation, Ordering::Release);
                    self.page.store(p, Ordering::Release);
                    self.make_handoff();
                    self.state.store(state::READY, Ordering::Release);
                }
                None => {
                    process::close_own(reservation);
                    self.reservation.store(-1, Ordering::Release);
                    self.refused(fd, Reason::ZoneResource);
                }
            },
            Err(e) => self.refused(fd, reason(e)),
        }
    }

    pub(super) fn refused(&self, fd: i32, why: Reason) {
        let _ = reuse_port(fd, false);
        self.state.store(state::OFF, Ordering::Release);
        count(why);
    }

    pub(super) fn make_reservation(&self, fd: i32, shape: &Shape) -> fsocket_sys::Result<i32> {
        let own = || {
            let window = ReuseWindow::new(shape)?;
            reuse_port(fd, true)?;
            let reservation = reservation::reserve(fd, shape)?;
            window.close(shape).and_then(|()| reuse_port(reservation, false)).inspect_err(|_| {
                let _ = sys::close(reservation);
            })?;
            Ok(reservation)
        };
        own().or_else(|e| {
            // The monitor sets SO_REUSEPORT itself.
            match ctl::request(request::Clone { reservation: true }, Some(fd)) {
                Ok((_, Some(reservation))) => Ok(reservation),
                _ => Err(e),
            }
        })
    }
}

/// Maps an error to the reason that is counted.
pub(super) fn reason(e: Errno) -> Reason {
    match e.raw() {
        libc::EPERM | libc::EACCES | libc::EADDRINUSE | libc::EXDEV => Reason::ZoneDenied,
        libc::EOPNOTSUPP | libc::EINVAL | libc::ENOPROTOOPT => Reason::ZoneOption,
        _ => Reason::ZoneResource,
    }
}
