//! Without the monitor's BPF program the kernel does not migrate connections: when a local listen
//! socket is closed, it resets those that wait there. So a worker that exits in good order first
//! sends its connections to the other workers of the fork group, over a socket pair made before
//! the fork. (A killed worker cannot do this; see docs/limits.md.)

use super::listener::Peer;
use super::listener::Zoned;
use crate::{ctl, process};
use core::sync::atomic::Ordering;
use fsocket_reuseport::classic;
use fsocket_sys::{self as sys, Errno, Result};

/// A worker hands over at most this many connections; it stops earlier if the socket pair is
/// full.
const MOST: usize = 4096;

impl Zoned {
    /// Makes the socket pair together with the reservation, if there is no monitor.
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

    /// The socket on which connections of exiting workers arrive; -1: none.
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

    /// Hands the connections in the local listen socket `local` to other workers. Called under the
    /// page's lock, after this worker's entry has left the page.
    pub(super) fn hand_over(&self, local: i32) {
        let to = self.handoff[1].load(Ordering::Relaxed);
        let Some(page) = self.page().filter(|p| to >= 0 && p.any()) else { return };
        // No new connections may come to this socket: its CPU's connections go to the global
        // socket from now on.
        let _ = classic::attach(local, process::cpus() as usize, 1, |cpu| page.place_of(cpu));
        for _ in 0..MOST {
            // SAFETY: both pointers are null, so the kernel returns no address.
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

    /// Takes a connection that another worker has left behind.
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
            // SAFETY: `peer.addr` and `peer.len` are the application's, as accept4(2) wants them;
            // the kernel checks both.
            let _ = unsafe {
                sys::raw(libc::SYS_getpeername, [fd as usize, peer.addr as usize, peer.len as usize, 0, 0, 0])
            };
        }
        Ok(fd)
    }
}
