//! Polling global and local listen sockets together.

use super::listener::{of, used, Zoned};
use super::{balance, enabled, How};
use crate::table;
use crate::wait::{self, Call, Deadline, Mask, Sleep, Source};
use fsocket_sys::Result;

/// The local listen socket and two more descriptors (or -1) to poll together with the listener
/// `fd`. The calling thread becomes a worker if the conditions hold.
fn beside(fd: i32, events: i16) -> Option<(&'static Zoned, [i32; 3])> {
    if events & (libc::POLLIN | libc::POLLRDNORM) == 0 {
        return None;
    }
    let d = table::lookup(fd)?;
    let z = of(d)?;
    match z.worker(fd, How::Sleeping) {
        Some(l) => Some((z, [l.fd(), z.handoff_fd(), z.peers_fd()])),
        None => z.is_non_worker().then_some((z, [-1; 3])),
    }
}

/// Extra entries for `poll`.
pub const EXTRA: usize = 16;

/// Local listen sockets to poll together with those in `fds`: (index in `fds`, descriptor).
pub struct Beside {
    pub n: usize,
    pub at: [(usize, i32); EXTRA],
    /// The call may sleep.
    sleeps: bool,
    /// Marks the entries that stand for the peers' queues of a listener; see `balance`.
    peers: [Option<&'static Zoned>; EXTRA],
}

/// Has this process local listen sockets, which are polled beside the global ones?
pub fn is_used() -> bool {
    enabled() && used().next().is_some()
}

impl Beside {
    pub fn of(fds: &[libc::pollfd], sleeps: bool) -> Beside {
        let mut b = Beside { n: 0, at: [(0, -1); EXTRA], sleeps, peers: [None; EXTRA] };
        if !is_used() {
            return b;
        }
        for (i, p) in fds.iter().enumerate() {
            if b.n < EXTRA {
                let Some((z, fds)) = beside(p.fd, p.events) else { continue };
                let peers = [None, None, Some(z)];
                for (fd, peers) in fds.into_iter().zip(peers) {
                    if b.n < EXTRA && (fd >= 0 || peers.is_some()) {
                        b.at[b.n] = (i, fd);
                        b.peers[b.n] = peers;
                        b.n += 1;
                    }
                }
            }
        }
        b
    }

    /// Called before a sleep: sets the descriptors that now stand for the peers' queues.
    pub fn arm(&self, extra: &mut [libc::pollfd]) {
        for (z, e) in self.peers[..self.n].iter().zip(extra) {
            if let Some(z) = z {
                e.fd = z.peers_fd();
            }
        }
    }
}

/// `poll` for a process in which the library has only local listen sockets. None: `fds` has none
/// of them, either.
pub fn poll(fds: &mut [libc::pollfd], timeout_ns: Option<u64>, mask: Mask) -> Option<Result<usize>> {
    const WATCHES: usize = 256;
    let b = Beside::of(fds, timeout_ns != Some(0));
    if b.n == 0 || fds.len() + EXTRA + wait::BESIDE > WATCHES {
        return None;
    }
    let n = fds.len();
    let mut all = [libc::pollfd { fd: -1, events: 0, revents: 0 }; WATCHES];
    all[..n].copy_from_slice(fds);
    for (k, &(_, fd)) in b.at[..b.n].iter().enumerate() {
        all[n + k] = libc::pollfd { fd, events: libc::POLLIN, revents: 0 };
    }
    let deadline = Deadline::within(timeout_ns);
    let used = n + b.n + wait::BESIDE;
    let mut asks = b.peers[..b.n].iter().flatten().any(|z| z.is_non_worker());
    loop {
        b.arm(&mut all[n..]);
        balance::before_sleep();
        let left = match core::mem::take(&mut asks) {
            true => Some(0),
            false => deadline.left(),
        };
        let source = Source::Set { fds: &mut all[..used], sleeper: None, mask };
        if let Err(e) = wait::sleep(source, Sleep::of(Call::Zones, left)) {
            return Some(Err(e));
        }
        wait::heed(&all[..used]);
        for (p, a) in fds.iter_mut().zip(&all) {
            p.revents = a.revents;
        }
        fold(fds, &b, &all[n..]);
        let ready = fds.iter().filter(|p| p.revents != 0).count();
        if ready > 0 || deadline.is_over() {
            return Some(Ok(ready));
        }
    }
}

/// Copies readiness of the local sockets to the entries of the global ones. `extra`: the entries
/// of the local sockets, as the kernel has filled them.
pub fn fold(fds: &mut [libc::pollfd], b: &Beside, extra: &[libc::pollfd]) {
    const READ: i16 = libc::POLLIN | libc::POLLRDNORM;
    for ((&(i, _), e), peers) in b.at[..b.n].iter().zip(extra).zip(b.peers) {
        let spoke = e.revents & libc::POLLIN != 0;
        if peers.map_or(spoke, |z| z.peers_spoke(spoke)) {
            fds[i].revents |= fds[i].events & READ;
        }
    }
    for (&(i, _), z) in b.at[..b.n].iter().zip(b.peers).filter_map(|(at, peers)| Some((at, peers?))) {
        if fds[i].revents == 0 {
            let nothing = fds.iter().all(|p| p.revents == 0);
            if z.has_waiting(fds[i].fd, b.sleeps && nothing) {
                fds[i].revents |= fds[i].events & READ;
            }
        }
    }
}
