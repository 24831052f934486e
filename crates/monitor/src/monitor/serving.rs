//! Turns: the loop works for one user for a limited time, then accepts clients that have connected
//! meanwhile.

use super::Monitor;
use crate::answer::Misbehaved;
use crate::foreign::{self, closer};
use crate::pace::Doing;
use crate::turns::TURN;
use crate::wire::{self, Received};
use crate::{logs, ConnId};
use std::time::Instant;

/// Descriptors that the loop may close itself for one message.
const CLOSES: u32 = 4;
/// Sweeping all channels gets turns as if it were a user. (No real user has this number.)
const NO_USER: u32 = u32::MAX;

impl Monitor {
    /// Whether any work waits for a turn now.
    pub(super) fn has_turns(&self) -> bool {
        self.arrivals.come || self.wanting().next().is_some()
    }

    /// Users that want a turn. (A user may be listed more than once.)
    fn wanting(&self) -> impl Iterator<Item = u32> + '_ {
        let sweeps = self.shm.sweeping.is_some().then_some(NO_USER);
        let (ends, unlistens) = (self.shm.endings.users(), self.shm.ended.users());
        self.turns.users().chain(self.arrivals.waiting.users()).chain(ends).chain(unlistens).chain(sweeps)
    }

    /// Gives turns to users until the time of one turn has passed. After that the loop accepts new
    /// clients.
    pub(super) fn take_turns(&mut self) {
        let began = Instant::now();
        while let Some(uid) = self.whose_turn() {
            let from = Instant::now();
            self.take_turn(uid);
            self.fair.had(uid, from.elapsed());
            self.pace.lap();
            if began.elapsed() >= TURN {
                return;
            }
        }
    }

    fn whose_turn(&mut self) -> Option<u32> {
        let mut fair = std::mem::take(&mut self.fair);
        let next = fair.next(self.wanting());
        self.fair = fair;
        next
    }

    /// Works for one user. The user's turns alternate between its requests, the ends of its
    /// processes, and the ends of its listeners.
    fn take_turn(&mut self, uid: u32) {
        if uid == NO_USER {
            self.pace.is(Doing::Sweeping);
            return self.shm.go_on_sweeping(&mut self.ctx, TURN);
        }
        let first = self.fair.turns_of(uid);
        for kind in first..first + 3 {
            match kind % 3 {
                0 if self.turns.waiting(uid) > 0 || self.arrivals.waiting.waiting(uid) > 0 => {
                    return self.serve_some(uid)
                }
                1 if self.shm.endings.waiting(uid) > 0 => return self.end_some(uid),
                2 if self.shm.ended.waiting(uid) > 0 => {
                    self.pace.is(Doing::Unlistening);
                    return self.shm.go_on_ending(&mut self.ctx, uid);
                }
                _ => {}
            }
        }
    }

    /// Admits a user's new clients and handles the messages of its other clients, one by one.
    fn serve_some(&mut self, uid: u32) {
        let began = Instant::now();
        loop {
            self.pace.is(Doing::Accepting);
            let admitted = self.admit(uid);
            let first = self.turns.take(uid);
            if let Some(id) = first {
                if self.serve_one(id) {
                    self.turns.add(uid, id);
                }
                self.settle();
            }
            if !admitted && first.is_none() || began.elapsed() >= TURN {
                return;
            }
        }
    }

    /// Goes on with removing a user's ended processes.
    fn end_some(&mut self, uid: u32) {
        self.pace.is(Doing::Ending);
        let began = Instant::now();
        while let Some(left) = TURN.checked_sub(began.elapsed()) {
            let Some(ending) = self.shm.endings.take(uid) else { return };
            if let Some(rest) = self.go_on(ending, left) {
                self.shm.endings.put_back(uid, rest);
            }
        }
    }

    /// Handles one message of a process. True: there was a message, and there may be more.
    pub(super) fn serve_one(&mut self, id: ConnId) -> bool {
        let Some(client) = self.ctx.clients.get(id) else { return false };
        if !client.wants_input() && !client.hung_up {
            return false;
        }
        let uid = client.uid;
        let unfinished = self.ctx.clients.get_mut(id).and_then(|c| c.unfinished.take());
        let (received, sender, from) = match (unfinished, self.ctx.clients.get(id)) {
            (Some((msg, fd, from)), _) => (Received::Message(msg, Some(fd)), None, from),
            (None, Some(client)) => {
                let (received, sender) = wire::receive_from(client.fd.as_fd(), uid);
                (received, sender, 0)
            }
            (None, None) => return false,
        };
        foreign::may_close(CLOSES);
        logs::for_user(Some(uid));
        self.ctx.policy.sender = sender;
        let shows = matches!(received, Received::Message(_, Some(_)) | Received::Cut(_) | Received::Malformed);
        let handled = match received {
            Received::Message(msg, fd) => {
                tracing::trace!(process = %self.ctx.clients.name(id), kind = msg.kind(), seq = msg.seq(), "request");
                self.pace.is(Doing::Request(msg.kind()));
                self.handle(id, msg, fd, from)
            }
            Received::Cut(msg) => self.refuse_cut(id, &msg),
            Received::Nothing => return false,
            Received::Later => return true,
            Received::End => Err(Misbehaved("it is gone")),
            Received::Malformed => Err(Misbehaved("not a valid message")),
        };
        self.ctx.policy.sender = None;
        foreign::may_close(0);
        logs::for_user(None);
        // (Only a process that has just sent a descriptor is dropped. Another process of the same
        // user is not to blame.)
        let handled =
            if shows && closer().is_full(uid) { Err(Misbehaved("what it sends cannot be closed")) } else { handled };
        if let Err(why) = handled {
            self.ctx.clients.doom(id, why.0);
            return false;
        }
        true
    }
}
