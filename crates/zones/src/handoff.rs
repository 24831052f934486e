//! Without the monitor's program nothing migrates: what waits in a local listen
//! socket that is closed would be reset. So a worker that leaves in good order
//! first hands its connections to the others of the fork group, over a socket pair made
//! before the fork. (One that is killed cannot; see docs/limits.md.)

use super::listener::Peer;
use super::listener::Zoned;
use crate::{ctl, process};
use core::sync::atomic::Ordering;
use fsocket_reuseport::classic;
use fsocket_sys::{self as sys, Errno, Result};

/// Connections handed over at most; a full socket stops it earlier.
const MOST: usize = 4096;

impl Zoned {
    /// With the reservation, where there is no monitor.
    pub(super) fn make_handoff(&self) {
        if !ctl::dead() {
            return;
        }
        if let Ok(ends) =
            sys::socketpair(libc::AF_UNIX, libc::SOCK_SEQPACKET | libc::SOCK_CLOEXEC | libc::SOCK_NONBLOCK)
        {
            for (at, fd) in self.handoff.iter().zip(ends) {
                at.store(process::high_fd(fd), Ordering::Release);
            }
        }
    }

    /// Where connections of workers that left arrive; -1: nowhere.
    pub fn handoff_fd(&self) -> i32 {
        self.handoff[0].load(Ordering::Relaxed)
    }

    pub(super) fn drop_handoff(&self) {
        for at in &self.handoff {
            let fd = at.swap(-1, Ordering::AcqRel);
            if fd >= 0 {
                process::close_own(fd);
            }
        }
    }

    /// Hands what waits in the local listen socket `local` to other workers. Under
    /// the page's lock, after this worker's entry is gone from it.
    pub(super) fn hand_over(&self, local: i32) {
        let to = self.handoff[1].load(Ordering::Relaxed);
        let Some(page) = self.page().filter(|p| to >= 0 && p.any()) else { return };
        // No more of them: its CPU goes to the global socket from here on.
        let _ = classic::attach(local, process::cpus() as usize, 1, |cpu| page.place_of(cpu));
        for _ in 0..MOST {
            // SAFETY: no address is asked for.
            let Ok(fd) =
                (unsafe { sys::accept4(local, core::ptr::null_mut(), core::ptr::null_mut(), libc::SOCK_CLOEXEC) })
            else {
                return;
            };
            let sent = sys::send_with_fd(to, &[1], Some(fd), libc::MSG_DONTWAIT);
            let _ = sys::close(fd);
            if sent.is_err() {
                return;
            }
        }
    }

    /// A connection that another worker has left behind.
    pub(super) fn take_handed_off(&self, peer: Peer) -> Result<i32> {
        let from = self.handoff_fd();
        if from < 0 {
            return Err(Errno::EAGAIN);
        }
        let (_, got) = sys::recv_with_fd(from, &mut [0u8; 8], libc::MSG_DONTWAIT)?;
        let fd = got.ok_or(Errno::EAGAIN)?;
        if peer.flags & libc::SOCK_CLOEXEC == 0 {
            let _ = sys::fcntl(fd, libc::F_SETFD, 0);
        }
        if peer.flags & libc::SOCK_NONBLOCK != 0 {
            let _ = sys::fcntl(fd, libc::F_SETFL, libc::O_NONBLOCK as usize);
        }
        if !peer.addr.is_null() && !peer.len.is_null() {
            // SAFETY: the application's buffer, as accept4(2) wants it.
            let _ = unsafe {
                sys::raw(libc::SYS_getpeername, [fd as usize, peer.addr as usize, peer.len as usize, 0, 0, 0])
            };
        }
        Ok(fd)
    }
}
