//! Trees of processes: children that borrow memory, processes that share descriptors and stop
//! sharing, subreapers that wait for all their children, and resource limits from the start.

use super::model::{Fd, What};
use super::Gen;
use crate::call::Call;
use crate::program::ACTORS;
use crate::symbols::{LIMIT, VFORK};

const MIB: i64 = 1 << 20;
/// An address-space limit in bytes with which the library leaves the process alone.
const NARROW: i64 = 60 * MIB;

impl Gen {
    /// Sets the limits under which each process begins, if any. (All programs here fit into them
    /// without the library. No call may fail because of what the library uses.)
    pub(super) fn limits(&mut self) {
        for actor in 0..self.m.actors.len() {
            while self.rng.chance(45) {
                let (which, name) = self.rng.pick(&[
                    (0, "NOFILE"),
                    (1, "AS"),
                    (2, "DATA"),
                    (3, "MEMLOCK"),
                    (4, "CORE"),
                    (5, "FSIZE"),
                    (6, "STACK"),
                    (7, "SIGPENDING"),
                ]);
                let value = match name {
                    "NOFILE" => self.rng.pick(&[64, 100, 256, 1024]),
                    "AS" => self.rng.pick(&[NARROW, 1000 * MIB, 5000 * MIB]),
                    "DATA" => self.rng.pick(&[16 * MIB, 40 * MIB, 100 * MIB, 1000 * MIB]),
                    "MEMLOCK" | "CORE" => self.rng.pick(&[0, 64 << 10, MIB]),
                    "FSIZE" => self.rng.pick(&[256 << 10, 16 * MIB]),
                    "STACK" => self.rng.pick(&[MIB, 8 * MIB]),
                    _ => self.rng.pick(&[0, 100]),
                };
                self.push(actor, 0, Call::Limit, &[LIMIT[which].1, value]);
            }
            if self.rng.chance(25) {
                self.push(actor, 0, Call::Subreaper, &[1]);
            }
        }
    }

    pub(super) fn trees(&mut self, actor: usize) {
        let new = self.m.actors.len();
        match self.rng.below(20) {
            0..=7 => self.borrower(actor),
            8..=10 if new < ACTORS - 1 && !self.m.watches_closed(actor) => {
                self.push(actor, 0, Call::Fork, &[new as i64]);
                self.m.fork(actor, false);
                if self.rng.chance(40) && new + 1 < ACTORS - 1 {
                    // Its child will be an orphan.
                    self.push(new, 0, Call::Fork, &[new as i64 + 1]);
                    self.m.fork(new, false);
                    self.push(new, 0, Call::Exit, &[]);
                    self.m.process_ends(new);
                }
            }
            11..=13 => self.push(actor, 0, Call::Reap, &[]),
            14 => self.push(actor, 0, Call::Subreaper, &[self.rng.clone().below(2) as i64]),
            15 | 16 => self.own_descriptors(actor),
            17 if new < ACTORS - 1 && self.may_leave(actor) => {
                self.take_to_kernel(actor);
                self.push(actor, 0, Call::CloneFiles, &[new as i64]);
                self.m.thread(actor);
            }
            _ if self.m.awake().len() > 2 && self.m.processes_alive() > 1 => {
                self.push(actor, 0, Call::Exit, &[]);
                self.m.process_ends(actor);
            }
            _ => {}
        }
    }

    /// The child of a `vfork` closes, duplicates, or executes another program. Its parent's
    /// descriptors stay.
    fn borrower(&mut self, actor: usize) {
        let Some(fd) = self.any_of(actor) else { return };
        if self.m.is_slept_on(fd.what) || !self.may_move(fd) {
            return;
        }
        // (The next program inherits the listeners.)
        let waits = |f: &Fd| matches!(f.what, What::Listener { port } if self.m.queued_has_moved(port));
        if self.m.fds_of(actor).iter().any(waits) {
            return;
        }
        self.take_to_kernel(actor);
        let what = self.rng.below(VFORK.len()) as i64;
        let how = self.rng.below(2) as i64;
        self.push(actor, 0, Call::VFork, &[fd.var as i64, what, how]);
        let Some(side) = fd.what.side() else { return };
        if self.rng.chance(60) {
            self.send_over(actor, fd, side);
        }
    }

    /// A thread gets a descriptor table of its own: the other threads keep the descriptors that it
    /// closes.
    fn own_descriptors(&mut self, actor: usize) {
        let new = self.m.actors.len();
        if self.m.threads_of(actor) < 2 {
            if new < ACTORS - 1 {
                self.push(actor, 0, Call::Thread, &[new as i64]);
                self.m.thread(actor);
            }
            return;
        }
        if !self.may_leave(actor) {
            return;
        }
        self.take_to_kernel(actor);
        self.push(actor, 0, Call::Unshare, &[self.rng.clone().below(2) as i64]);
        self.m.unshare(actor);
    }

    /// Moves the connections that the process has opened to kernel TCP.
    fn take_to_kernel(&mut self, actor: usize) {
        for side in self.m.fds_of(actor).into_iter().filter_map(|f| f.what.side()) {
            self.m.conns[side.conn].moved |= side.side == 0;
        }
    }

    /// May the process use only the kernel from now on? Not while an actor sleeps on an object
    /// whose path would change. Nor with a listener that another process holds, too, because that
    /// process gets the connections that come over shared memory.
    fn may_leave(&self, actor: usize) -> bool {
        let fine = |f: &Fd| match f.what {
            What::Listener { port } => self.m.queued(port) == 0 && self.m.processes_with(f.what) < 2,
            _ => true,
        };
        let fds = self.m.fds_of(actor);
        !self.m.has_epoll(actor) && fds.iter().all(|f| fine(f) && !self.m.is_slept_on(f.what))
    }
}
