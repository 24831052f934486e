//! Clients that come: counted by user, and turned away early.
//!
//! All come through one queue of the kernel's, in the order in which they come. So each is taken out of it at once, and
//! waits for its user's turn here: a user's clients wait behind those of the same user only.

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

/// While so many processes of a user wait for their turn no further ones are taken.
const WAITING: usize = 256;
/// So long clients are taken out of the kernel's queue at once. It is everybody's, and has to be emptied faster than a
/// flood fills it.
const TAKING: Duration = TURN.saturating_mul(2);

impl Monitor {
    /// Takes clients out of the kernel's queue, for [`TAKING`] at most.
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

    /// Takes one client that has come. False: nobody has.
    pub(super) fn accept(&mut self) -> bool {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        match rustix::net::accept_with(&self.endpoint.fd, flags) {
            Ok(fd) => self.arrives(fd),
            Err(Errno::INTR | Errno::CONNABORTED) => {}
            Err(Errno::MFILE | Errno::NFILE) if self.spare.take().is_some() => {
                // Turn one away, or the loop would spin on it.
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
        } else if uid != 0 && self.turns.waiting(uid) + self.arrivals.waiting(uid) > WAITING {
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
                self.arrivals.add(uid, client);
            }
        }
        logs::for_user(None);
    }

    /// The first client of this user that has come is one of those that are served. False: none has.
    pub(super) fn admit(&mut self, uid: u32) -> bool {
        let Some(client) = self.arrivals.take(uid) else { return false };
        self.ctx.vouch(uid, client.fd.as_fd());
        self.shm.came_from(&self.ctx, client.fd.as_fd());
        let _ = self.ctx.clients.add(client);
        true
    }

    /// A client is here: the grace of the start is over, also if it ends in this very turn.
    pub(super) fn has_come(&mut self) {
        self.deadline = None;
    }

    /// Private: keeps the deadline, and says when to go.
    pub(super) fn is_unneeded(&mut self) -> bool {
        if !self.ctx.config.private {
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
            // (Programs with that name in their environment look for another file.)
            tracing::info!("the socket is not at its address any more");
            return true;
        };
        self.asleep = crate::asleep::any(&self.ctx.config.socket, file);
        let watched = |fd| epoll::add(&*self.ctx.epoll, fd, EventData::new_u64(ASLEEP), EventFlags::IN).is_ok();
        if self.asleep.as_ref().is_some_and(watched) {
            self.deadline = None;
            return false;
        }
        self.asleep = None;
        // Somebody may be connecting just now. After `hide` nobody can find us;
        // whoever did before is in the backlog, and is served.
        if self.endpoint.hide().is_err() {
            return true;
        }
        let before = self.ctx.clients.iter().count();
        while self.accept() {}
        for uid in self.arrivals.users().collect::<Vec<_>>() {
            while self.admit(uid) {}
        }
        if self.ctx.clients.iter().count() == before {
            return true;
        }
        self.deadline = Some(now + self.ctx.config.linger);
        self.endpoint.show().is_err()
    }
}
