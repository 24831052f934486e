//! Accepts new clients: counts them by user, and turns surplus ones away early.
//!
//! The kernel has one accept queue for clients of all users, in the order of their connections. So
//! the monitor accepts each client at once, and lets it wait for its user's turn here. A client
//! thus waits only behind clients of the same user.

use super::Monitor;
use crate::clients::Client;
use crate::event::ASLEEP;
use crate::foreign::{self, closer, ForeignFd};
use crate::pace::Doing;
use crate::turns::TURN;
use crate::{descriptor, endpoint, logs, shares};
use rustix::event::epoll::{self, EventData, EventFlags};
use rustix::fd::{AsFd, OwnedFd};
use rustix::io::Errno;
use rustix::net::SocketFlags;
use std::time::{Duration, Instant};

/// While this many processes of a user wait for their turn, further ones are turned away.
const WAITING: usize = 256;
/// How long clients are accepted without a pause. All users share the accept queue, so the monitor
/// must empty it faster than a flood fills it.
const TAKING: Duration = TURN.saturating_mul(2);

impl Monitor {
    /// Accepts clients from the kernel's queue, for [`TAKING`] at most.
    pub(super) fn accept_some(&mut self) {
        if !std::mem::take(&mut self.arrivals.come) {
            return;
        }
        let began = Instant::now();
        self.pace.is(Doing::Accepting);
        while self.accept() {
            if began.elapsed() >= TAKING {
                self.arrivals.come = true;
                break;
            }
        }
        self.pace.lap();
    }

    /// Accepts one client. False: none waits.
    pub(super) fn accept(&mut self) -> bool {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        match rustix::net::accept_with(&self.endpoint.fd, flags) {
            Ok(fd) => self.arrives(fd),
            Err(Errno::INTR | Errno::CONNABORTED) => {}
            Err(Errno::MFILE | Errno::NFILE) if self.spare.take().is_some() => {
                // No descriptor is free. One client is turned away: otherwise the endpoint would
                // stay readable, and the loop would spin.
                let turned_away = rustix::net::accept_with(&self.endpoint.fd, flags).map(|fd| ForeignFd::new(fd, 0));
                foreign::may_close(1);
                drop(turned_away.map(ForeignFd::control));
                self.spare = endpoint::spare();
            }
            Err(_) => return false,
        }
        foreign::may_close(0);
        true
    }

    fn arrives(&mut self, fd: OwnedFd) {
        foreign::may_close(1);
        let Ok((pid, uid)) = descriptor::peer(fd.as_fd()) else { return };
        let fd = ForeignFd::new(fd, uid).control();
        logs::for_user(Some(uid));
        let why = if self.ctx.config.private && uid != self.own_uid && uid != 0 {
            Some("not this user's monitor")
        } else if uid != 0 && !self.ctx.config.private && !self.arrivals.may_come(uid, Instant::now()) {
            Some("too many processes a second")
        } else if uid != 0 && self.turns.waiting(uid) + self.arrivals.waiting.waiting(uid) > WAITING {
            Some("too many of its processes wait")
        } else if closer().is_full(uid) {
            Some("too much of it waits to be closed")
        } else if !self.shm.has_share(&self.ctx, uid, shares::CLIENT) {
            Some("too many processes")
        } else {
            None
        };
        match why {
            Some(why) => tracing::warn!(uid, "{why}"),
            None => {
                let client = Client::new(fd, uid, pid, self.ctx.new_family());
                self.arrivals.waiting.add(uid, client);
            }
        }
        logs::for_user(None);
    }

    /// Starts to serve the first waiting client of this user. False: none waits.
    pub(super) fn admit(&mut self, uid: u32) -> bool {
        let Some(client) = self.arrivals.waiting.take(uid) else { return false };
        self.ctx.vouch(uid, client.fd.as_fd());
        self.shm.came_from(&self.ctx, client.fd.as_fd());
        let _ = self.ctx.clients.add(client);
        true
    }

    /// A client has said HELLO: the extra time for the first client is over, even if this client
    /// ends within the same turn.
    pub(super) fn has_come(&mut self) {
        self.deadline = None;
    }

    /// For a private or retired monitor: keeps the deadline up to date, and says whether to exit.
    pub(super) fn is_unneeded(&mut self) -> bool {
        if !self.ctx.config.is_temporary() {
            return false;
        }
        let any = || self.ctx.clients.iter().any(|(_, c)| c.is_process());
        if self.asleep.is_some() || any() || !self.steers.is_empty() {
            self.deadline = None;
            return false;
        }
        let now = Instant::now();
        let deadline = *self.deadline.get_or_insert(now + self.ctx.config.linger);
        if now < deadline {
            return false;
        }
        let Some(file) = self.endpoint.file() else {
            // (Programs with this path in their environment would find another file, so none of
            // them needs this monitor.)
            tracing::info!("the socket is not at its address any more");
            return true;
        };
        // (Only for a private monitor. Programs of a retired one use the library of the new ABI
        // after their next `execve`. A program that has no socket yet can use the kernel.)
        if self.ctx.config.private {
            self.asleep = crate::asleep::any(&self.ctx.config.socket, file);
        }
        let watched = |fd| epoll::add(&*self.ctx.epoll, fd, EventData::new_u64(ASLEEP), EventFlags::IN).is_ok();
        if self.asleep.as_ref().is_some_and(watched) {
            self.deadline = None;
            return false;
        }
        self.asleep = None;
        // A client may be connecting at this moment. After `hide`, no more clients can find the
        // socket. Those that connected before are in the backlog, and are served.
        if self.endpoint.hide().is_err() {
            return true;
        }
        let before = self.ctx.clients.iter().count();
        while self.accept() {}
        for uid in self.arrivals.waiting.users().collect::<Vec<_>>() {
            while self.admit(uid) {}
        }
        if self.ctx.clients.iter().count() == before {
            return true;
        }
        self.deadline = Some(now + self.ctx.config.linger);
        self.endpoint.show().is_err()
    }
}
