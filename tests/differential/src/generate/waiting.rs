//! Waits for many descriptors, and steps that wake the waiting actors.

use super::model::{Fd, Side, What};
use super::Gen;
use crate::call::Call;
use crate::program::{ACTORS, VARS};

const IN: i64 = libc::EPOLLIN as i64;
const OUT: i64 = libc::EPOLLOUT as i64;
const RDHUP: i64 = libc::EPOLLRDHUP as i64;

impl Gen {
    fn mask(&mut self) -> i64 {
        self.rng.pick(&[0, 0, 1, 2, 3])
    }

    fn events(&mut self) -> i64 {
        let base = self.rng.pick(&[IN, IN, IN, OUT, IN | OUT, IN | RDHUP, IN | OUT | RDHUP, 0]);
        if self.rng.chance(10) {
            base | i64::from(libc::EPOLLRDNORM | libc::EPOLLPRI)
        } else {
            base
        }
    }

    /// Random events for a descriptor. For an epoll instance the kernel reports EPOLLIN alone, and
    /// wakes no thread that asks for RDNORM only.
    fn events_of(&mut self, is_epoll: bool) -> i64 {
        let ev = self.events();
        let told = if is_epoll && ev & i64::from(libc::EPOLLRDNORM) != 0 { IN } else { 0 };
        ev | told
    }

    /// The timeout in milliseconds for a wait on these objects. The wait may sleep if the model
    /// allows it.
    fn timeout(&mut self, actor: usize, on: Vec<What>, consumes: bool) -> i64 {
        if self.rng.chance(12) {
            return 15;
        }
        if self.rng.chance(22) && self.m.awake().len() > 1 && self.m.may_sleep_on(&on, consumes) {
            self.m.sleep(actor, on, consumes);
            return self.rng.pick(&[-1, -1, 5000]);
        }
        0
    }

    pub(super) fn poll_some(&mut self, actor: usize) {
        let fds = self.m.fds_of(actor);
        if fds.is_empty() {
            return;
        }
        let n = 1 + self.rng.below(4);
        let mut chosen: Vec<Fd> = (0..n).map(|_| self.rng.pick(&fds)).collect();
        let on = chosen.iter().map(|f| f.what).collect();
        let ms = self.timeout(actor, on, false);
        if !(0..=100).contains(&ms) {
            // Two descriptors of one object need not agree if the object changes while a sleeper
            // looks at them one after the other.
            let mut seen = Vec::new();
            chosen.retain(|f| {
                !seen.contains(&f.what) && {
                    seen.push(f.what);
                    true
                }
            });
            if let Some(ep) = chosen.iter().position(|f| matches!(f.what, What::Epoll(_))) {
                chosen = vec![chosen[ep]];
            }
        }
        let (mask, kind) = (self.mask(), self.rng.below(5));
        let (call, mut args) = match kind {
            0 | 1 => (Call::Poll, vec![ms]),
            2 => (Call::PPoll, vec![ms, mask]),
            3 => (Call::Select, vec![ms]),
            _ => (Call::PSelect, vec![ms, mask]),
        };
        let mut seen = Vec::new();
        for fd in chosen {
            // select() lists each number once.
            if kind > 2 && seen.contains(&fd.var) {
                continue;
            }
            seen.push(fd.var);
            let ev = if kind > 2 {
                self.rng.pick(&[1, 1, 2, 3, 7])
            } else {
                self.events_of(matches!(fd.what, What::Epoll(_)))
            };
            args.extend([fd.var as i64, ev]);
        }
        self.push(actor, 0, call, &args);
    }

    pub(super) fn epoll_of(&mut self, actor: usize) -> Option<usize> {
        let eps: Vec<usize> =
            self.m.fds_of(actor).iter().filter(|f| matches!(f.what, What::Epoll(_))).map(|f| f.var).collect();
        self.rng.pick_opt(&eps)
    }

    fn is_epoll(&self, actor: usize, var: usize) -> bool {
        self.m.fds_of(actor).iter().any(|f| f.var == var && matches!(f.what, What::Epoll(_)))
    }

    /// EPOLLET, unless connections may move: a path switch is an edge (docs/limits.md).
    fn edge(&self) -> i64 {
        if self.moves() {
            0
        } else {
            libc::EPOLLET as u32 as i64
        }
    }

    /// EPOLLONESHOT, unless connections may move: a fired one-shot entry reports an end once more
    /// if the connection moves to the kernel (docs/limits.md).
    fn one_shot(&self) -> i64 {
        if self.moves() {
            0
        } else {
            i64::from(libc::EPOLLONESHOT)
        }
    }

    pub(super) fn watch(&mut self, actor: usize, ep: usize, var: usize) {
        let mut ev = self.events_of(self.is_epoll(actor, var));
        if self.rng.chance(40) {
            ev |= self.edge();
        }
        if self.rng.chance(12) {
            ev |= self.one_shot();
        } else if self.rng.chance(6) {
            ev |= i64::from(libc::EPOLLEXCLUSIVE);
        }
        self.push(actor, 0, Call::EpollAdd, &[ep as i64, var as i64, ev]);
        self.m.watched.insert((ep, var));
    }

    pub(super) fn epoll_some(&mut self, actor: usize) {
        let Some(ep) = self.epoll_of(actor) else {
            if self.next_var + 1 < VARS {
                let what = What::Epoll(self.m.number());
                let flags = if self.rng.chance(50) { libc::EPOLL_CLOEXEC } else { 0 };
                let ep = self.new_fd(actor, Call::EpollCreate, &[flags.into()], what);
                for _ in 0..1 + self.rng.below(3) {
                    if let Some(fd) = self.any_of(actor).filter(|f| f.var != ep) {
                        self.watch(actor, ep, fd.var);
                    }
                }
            }
            return;
        };
        let watched: Vec<usize> = self.m.watched.iter().filter(|(e, _)| *e == ep).map(|(_, v)| *v).collect();
        let mut watched = watched;
        watched.sort_unstable();
        match self.rng.below(20) {
            0..=4 => {
                if let Some(fd) = self.any_of(actor) {
                    self.watch(actor, ep, fd.var);
                }
            }
            5..=7 if !watched.is_empty() => {
                let var = self.rng.pick(&watched);
                let mut ev = self.events_of(self.is_epoll(actor, var));
                if self.rng.chance(40) {
                    ev |= self.edge();
                }
                if self.rng.chance(20) {
                    ev |= self.one_shot();
                }
                self.push(actor, 0, Call::EpollMod, &[ep as i64, var as i64, ev]);
            }
            // (README.md: a child that has inherited the instance may move the connection.)
            8 if !(watched.is_empty() || self.moves() && self.m.is_epoll_inherited()) => {
                let var = self.rng.pick(&watched);
                self.push(actor, 0, Call::EpollDel, &[ep as i64, var as i64]);
                self.m.watched.remove(&(ep, var));
            }
            9 if self.next_var + 1 < VARS => {
                // An epoll instance inside another one.
                let what = What::Epoll(self.m.number());
                let outer = self.new_fd(actor, Call::EpollCreate, &[0], what);
                self.watch(actor, outer, ep);
            }
            _ => {
                let fds = self.m.fds_of(actor);
                let mut on: Vec<What> = fds.iter().filter(|f| watched.contains(&f.var)).map(|f| f.what).collect();
                on.extend(fds.iter().filter(|f| f.var == ep).map(|f| f.what));
                let ms = self.timeout(actor, on, true);
                let (mask, e) = (self.mask(), ep as i64);
                match self.rng.below(4) {
                    0 => self.push(actor, 0, Call::EpollPwait, &[e, 32, ms, mask]),
                    1 => self.push(actor, 0, Call::EpollPwait2, &[e, 32, ms, mask]),
                    _ => self.push(actor, 0, Call::EpollWait, &[e, 32, ms]),
                }
            }
        }
    }

    /// Makes a step that wakes a sleeper.
    pub(super) fn release(&mut self) {
        let asleep = self.m.asleep();
        let Some(sleeper) = self.rng.pick_opt(&asleep) else { return };
        if self.rng.chance(15) {
            let signal = self.rng.pick(&[libc::SIGUSR1, libc::SIGUSR2]);
            self.push(0, 0, Call::Signal, &[sleeper as i64, signal.into()]);
            self.m.wake(sleeper);
            return;
        }
        let on = self.m.actors[sleeper].sleeps_on.clone();
        let Some(what) = self.rng.pick_opt(&on) else { return };
        match what {
            What::End(side) => {
                let peer = Side { conn: side.conn, side: 1 - side.side };
                let holders = self.m.holders_of(What::End(peer));
                if let Some((actor, var)) = self.rng.pick_opt(&holders) {
                    let fd = Fd { var, what: What::End(peer) };
                    if self.rng.chance(75) {
                        self.send_over(actor, fd, peer);
                    } else {
                        let call = self.rng.pick(&[Call::Shutdown, Call::Close]);
                        if call == Call::Close {
                            self.unwatch(actor, fd);
                        }
                        let how: &[i64] = if call == Call::Close { &[var as i64] } else { &[var as i64, 1] };
                        self.push(actor, 0, call, how);
                        if call == Call::Close {
                            self.m.close(actor, var);
                        }
                        self.m.conns[side.conn].fin[peer.side] = true;
                        self.m.wake(sleeper);
                    }
                    return;
                }
            }
            What::Listener { port } => {
                let awake = self.m.awake();
                let client =
                    self.rng.pick_opt(&awake).filter(|c| self.next_var + 4 < VARS && self.m.in_order(port, *c));
                if let Some(client) = client {
                    let (addr, family, leads) = self.way_to(port);
                    let v = self.new_fd(client, Call::Socket, &[family.into(), 0], What::Fresh { family });
                    self.push(client, 0, Call::Connect, &[v as i64, addr, port as i64]);
                    if !leads {
                        return;
                    }
                    let conn = self.m.new_conn();
                    self.m.queue(port, conn, client);
                    self.mixable = false;
                    self.m.set(client, v, What::End(Side { conn, side: 0 }));
                    self.m.wake(sleeper);
                    return;
                }
            }
            What::PipeRead(p) => {
                let holders = self.m.holders_of(What::PipeWrite(p));
                if let Some((actor, var)) = self.rng.pick_opt(&holders) {
                    self.push(actor, 0, Call::Write, &[var as i64, 8]);
                    self.m.wake(sleeper);
                    return;
                }
            }
            What::Event(_) => {
                let holders = self.m.holders_of(what);
                if let Some((actor, var)) = self.rng.pick_opt(&holders) {
                    self.push(actor, 0, Call::Write, &[var as i64, 8]);
                    self.m.wake(sleeper);
                    return;
                }
            }
            _ => {}
        }
        // No actor can wake the sleeper, so it gets a signal or is killed.
        if self.m.awake().is_empty() && self.m.actors.len() + 1 >= ACTORS {
            self.push(0, 0, Call::Kill, &[sleeper as i64]);
            return self.m.process_ends(sleeper);
        }
        self.push(0, 0, Call::Signal, &[sleeper as i64, libc::SIGUSR1.into()]);
        self.m.wake(sleeper);
    }
}
