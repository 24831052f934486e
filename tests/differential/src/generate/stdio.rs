//! Connections and listeners with the descriptor numbers 0 to 2, and programs that have one as
//! their standard input and output.

use super::model::{Fd, Side, What};
use super::Gen;
use crate::call::Call;
use crate::program::VARS;

/// The variables with the descriptor numbers 0 to 2.
const FIRST: usize = VARS - 3;
/// A child reads at most this many bytes, so that it writes with one call.
const CHILD: usize = 3000;

impl Gen {
    pub(super) fn stdio(&mut self, actor: usize) {
        if self.rng.chance(40) {
            return self.child(actor);
        }
        let fd = if self.rng.chance(85) { self.socket_of(actor) } else { self.any_of(actor) };
        let Some(fd) = fd else { return };
        let number = self.rng.below(3);
        let var = FIRST + number;
        let held = self.m.fds_of(actor).into_iter().find(|f| f.var == var);
        if held.is_some_and(|over| self.m.is_slept_on(over.what)) || fd.var == var {
            return;
        }
        if !self.may_move(fd) {
            return;
        }
        if let Some(over) = held {
            self.unwatch(actor, over);
        }
        let how = self.rng.pick(&[0, 0, 0, 1, 2, 3]);
        self.push(actor, var, Call::DupOnto, &[fd.var as i64, number as i64, how]);
        self.m.set(actor, var, fd.what);
        let nonblock = self.m.is_nonblock(fd.var);
        self.m.set_nonblock(var, nonblock);
        if let What::End(side) = fd.what {
            let on = Fd { var, what: fd.what };
            match self.rng.below(3) {
                0 => drop(self.send_over(actor, on, side)),
                1 => self.receive_from(actor, on),
                _ => {}
            }
        }
    }

    /// Runs a program with the connection as standard input and output.
    fn child(&mut self, actor: usize) {
        let Some((fd, side)) = self.end_of(actor) else { return };
        // The program inherits the listeners.
        let waits = |f: &Fd| matches!(f.what, What::Listener { port } if self.m.queued_has_moved(port));
        if self.m.fds_of(actor).iter().any(waits) || !self.may_move(fd) {
            return;
        }
        let peer = What::End(Side { conn: side.conn, side: 1 - side.side });
        if self.m.conns[side.conn].bytes[side.side] == 0 {
            if let Some((other, var)) = self.rng.pick_opt(&self.m.holders_of(peer)) {
                self.send_over(other, Fd { var, what: peer }, Side { conn: side.conn, side: 1 - side.side });
            }
        }
        let have = self.m.conns[side.conn].bytes[side.side];
        let fin = self.m.conns[side.conn].fin[1 - side.side];
        if self.m.is_slept_on(fd.what) || (have == 0 && !fin && !self.m.is_nonblock(fd.var)) {
            return;
        }
        let n = self.rng.pick(&[1, 10, have, have]).min(CHILD).min(have.max(1));
        let how = self.rng.pick(&[0, 1, 2, 3]);
        self.push(actor, 0, Call::Child, &[fd.var as i64, n as i64, how]);
        self.m.conns[side.conn].bytes[side.side] = 0;
        self.m.conns[side.conn].bytes[1 - side.side] += n;
        self.m.wake_all_on(peer);
    }

    /// Can connections that began in shared memory move to kernel TCP?
    pub(super) fn moves(&self) -> bool {
        ["stdio", "scm", "recycled", "unix", "trees"].iter().any(|name| self.switches.has(name))
    }

    /// Called before a side moves a connection to kernel TCP, or a listener is passed. Returns
    /// whether it may.
    pub(super) fn may_move(&mut self, fd: Fd) -> bool {
        let side = match fd.what {
            What::End(side) => side,
            // (Not a listener at which a connection waits that its client has moved to kernel TCP:
            // docs/limits.md.)
            What::Listener { port } => return !self.m.queued_has_moved(port),
            _ => return true,
        };
        if self.m.is_slept_on(fd.what) {
            return false;
        }
        self.m.conns[side.conn].moved |= side.side == 0;
        true
    }

    /// Must the descriptor stay open? The numbers 0 to 2 are never free, because the path decides
    /// which descriptor gets a free number (`free::is_number`).
    pub(super) fn keeps_number(&self, call: Call, args: &[i64]) -> bool {
        self.switches.has("stdio") && matches!(call, Call::Close | Call::CloseRange) && args[0] >= FIRST as i64
    }
}
