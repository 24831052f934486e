//! Accepting by a thread that has no local listen socket, while other workers have one. (Such a
//! thread is a worker on probation, or a master that accepts now and then.) Before it reports
//! that no connection waits, and before a sleep, it asks the monitor for the listen socket of a
//! worker with a waiting connection.

use super::listener::Peer;
use super::listener::{state, Asked, Zoned};
use crate::{ctl, process};
use core::sync::atomic::Ordering;
use fsocket_abi::arena::zone_accept;
use fsocket_proto::request;
use fsocket_sys::{self as sys, Errno, Result};

/// After this many questions without success, the thread asks only once in [`SELDOM`]
/// nanoseconds.
const OFTEN: u32 = 32;
const SELDOM: u64 = 10_000_000;
/// Number of sockets to try, because another process may take the connection first.
const TRIES: usize = 4;

impl Asked {
    fn may(&self, sleeps: bool) -> bool {
        sleeps && !self.refused.load(Ordering::Relaxed)
            || self.in_vain.load(Ordering::Relaxed) < OFTEN
            || sys::now_ns().saturating_sub(self.at.load(Ordering::Relaxed)) >= SELDOM
    }
    fn answered(&self, found: bool, refused: bool) {
        self.refused.store(refused, Ordering::Relaxed);
        if found {
            return self.in_vain.store(0, Ordering::Relaxed);
        }
        if refused || self.in_vain.fetch_add(1, Ordering::Relaxed) >= OFTEN {
            self.in_vain.store(OFTEN, Ordering::Relaxed);
            self.at.store(sys::now_ns(), Ordering::Relaxed);
        }
    }
}

impl Zoned {
    /// Has the calling thread no local listen socket, while other workers have one? (Some
    /// processes lack the rights to get one.)
    pub fn is_non_worker(&self) -> bool {
        matches!(self.state(), state::READY | state::OFF)
            && process::balances()
            && !self.is_shared()
            && self.own().is_none()
            && self.page().is_some_and(|p| p.selected.load(Ordering::Relaxed) != 0 && p.any())
            && !ctl::dead()
    }

    /// Is the program's listener the only socket to accept from?
    pub fn is_idle(&self) -> bool {
        !self.is_active() && !self.is_shared() && !self.is_non_worker() && self.handoff_fd() < 0
    }

    /// Returns a worker's socket with a waiting connection, and the worker's place. `sleeps`: if
    /// there is none, the caller sleeps, and the monitor notifies it when a connection comes.
    fn waiting(&self, fd: i32, sleeps: bool) -> Option<(i32, u32)> {
        if !self.is_non_worker() || !self.asked.may(sleeps) {
            return None;
        }
        let answer = match self.group.load(Ordering::Relaxed) != 0 || self.ask_group(fd, false).is_ok_and(|g| g.1) {
            true => ctl::request(request::Waiting { group: self.group.load(Ordering::Relaxed) }, None),
            false => Err(Errno::ENOENT),
        };
        self.asked.answered(answer.is_ok(), !matches!(answer, Ok(_) | Err(Errno::EAGAIN)));
        let (answer, socket) = answer.ok()?;
        Some((process::high_fd(socket?), answer.place))
    }

    /// Takes a connection that waits for a worker. None: there is none, or the caller is a worker.
    pub fn take_waiting(&self, fd: i32, sleeps: bool, peer: Peer) -> Option<Result<i32>> {
        for _ in 0..TRIES {
            let (socket, place) = self.waiting(fd, sleeps)?;
            let r = peer.accept(socket);
            process::close_own(socket);
            match r {
                Ok(n) => {
                    self.took_from(place);
                    return Some(self.accepted(n, sys::cpu::current().saturating_sub(1), zone_accept::STOLEN));
                }
                Err(Errno::EAGAIN) => {}
                Err(e) => return Some(Err(e)),
            }
        }
        None
    }

    /// Would [`Zoned::take_waiting`] find a connection?
    pub fn has_waiting(&self, fd: i32, sleeps: bool) -> bool {
        self.waiting(fd, sleeps).map(|(socket, _)| process::close_own(socket)).is_some()
    }
}
