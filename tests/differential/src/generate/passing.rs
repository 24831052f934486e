//! Descriptors that are duplicated, or passed to another process.

use super::model::{Fd, What};
use super::Gen;
use crate::call::Call;
use crate::program::VARS;

impl Gen {
    pub(super) fn duplicate(&mut self, actor: usize) {
        let Some(fd) = self.any_of(actor) else { return };
        if self.next_var + 4 > VARS {
            return;
        }
        match self.rng.below(6) {
            0 | 1 => drop(self.new_fd(actor, Call::Dup, &[fd.var as i64], fd.what)),
            2 => drop(self.new_fd(actor, Call::DupFd, &[fd.var as i64, 10], fd.what)),
            3 => drop(self.new_fd(actor, Call::DupFdCloexec, &[fd.var as i64, 0], fd.what)),
            _ => {
                let Some(over) = self.any_of(actor) else { return };
                if self.m.is_slept_on(over.what) {
                    return;
                }
                // (Duplicating a descriptor onto itself closes nothing.)
                if over.var != fd.var {
                    self.unwatch(actor, over);
                }
                let args = [fd.var as i64, over.var as i64, 0];
                if self.rng.chance(50) {
                    self.push(actor, 0, Call::Dup2, &args[..2]);
                } else {
                    self.push(actor, 0, Call::Dup3, &args);
                }
                self.m.set(actor, over.var, fd.what);
            }
        }
        let nonblock = self.m.is_nonblock(fd.var);
        self.m.set_nonblock(self.next_var - 1, nonblock);
    }

    pub(super) fn pass(&mut self, actor: usize) {
        let unix: Vec<_> = self.m.fds_of(actor).into_iter().filter(|f| matches!(f.what, What::Unix(_))).collect();
        let (Some(over), Some(fd)) = (self.rng.pick_opt(&unix), self.any_of(actor)) else {
            if self.next_var + 4 <= VARS {
                let v = self.vars(2);
                self.push(actor, v, Call::SocketPair, &[0]);
                let pair = self.m.new_unix();
                self.m.install(actor, Fd { var: v, what: What::Unix((pair, 0)) });
                self.m.install(actor, Fd { var: v + 1, what: What::Unix((pair, 1)) });
            }
            return;
        };
        let tcp = matches!(fd.what, What::End(_) | What::Listener { .. } | What::Fresh { .. });
        let epoll = matches!(fd.what, What::Epoll(_)); // known to the library only where it was made
        if epoll || (tcp && !self.switches.has("scm")) || self.next_var + 1 > VARS {
            return;
        }
        let What::Unix((pair, side)) = over.what else { return };
        if tcp && !self.may_move(fd) {
            return;
        }
        self.push(actor, 0, Call::SendFd, &[over.var as i64, fd.var as i64]);
        if let What::Listener { port } = fd.what {
            // From now on new connections are the kernel's.
            self.m.share(port);
        }
        let receivers = self.m.holders_of(What::Unix((pair, 1 - side)));
        if let Some((other, var)) = self.rng.pick_opt(&receivers) {
            self.new_fd(other, Call::RecvFd, &[var as i64], fd.what);
        }
    }
}
