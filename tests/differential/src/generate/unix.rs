//! Unix streams. The kernel connects them. Those that last move to shared memory, and some calls
//! move them back (ADR 78).

use super::model::{Fd, Side, What};
use super::{option, Gen};
use crate::call::Call;
use crate::program::{PORTS, VARS};
use crate::symbols as sym;

/// Messages of a conversation. The library tries to move a connection after 32 calls.
const LONG_ENOUGH: i64 = 24;

impl Gen {
    pub(super) fn unix_listener(&mut self, actor: usize) {
        let port = self.m.ports.len();
        if port >= PORTS || self.next_var + 8 > VARS {
            return;
        }
        let at = self.rng.pick(&[sym::PATH, sym::ABSTRACT]);
        let nonblock = self.rng.chance(20);
        let flags = self.socket_flags(nonblock);
        let family = libc::AF_UNIX;
        let v = self.new_fd(actor, Call::Socket, &[family.into(), flags], What::Fresh { family });
        self.push(actor, 0, Call::Bind, &[v as i64, at, -1]);
        self.push(actor, 0, Call::Listen, &[v as i64, self.rng.clone().pick(&[16, 128, 5]), port as i64]);
        self.m.ports.push(at);
        self.m.set(actor, v, What::Listener { port });
        self.m.set_nonblock(v, nonblock);
    }

    /// A client connects, and a server accepts. Then they mostly exchange messages until the
    /// connection moves.
    pub(super) fn unix_connection(&mut self, client: usize, server: usize, lv: usize, port: usize) {
        let nonblock = self.rng.chance(20);
        let flags = self.socket_flags(nonblock);
        let family = libc::AF_UNIX;
        let cv = self.new_fd(client, Call::Socket, &[family.into(), flags], What::Fresh { family });
        self.m.set_nonblock(cv, nonblock);
        if self.rng.chance(15) {
            self.push(client, 0, Call::Bind, &[cv as i64, self.rng.clone().pick(&[sym::PATH, sym::ABSTRACT]), -1]);
        }
        let early = client != server && self.rng.chance(15) && !self.m.is_nonblock(lv) && self.m.queued(port) == 0;
        let av = early.then(|| self.accept_step(server, lv));
        self.push(client, 0, Call::Connect, &[cv as i64, self.m.ports[port], port as i64]);
        let conn = self.m.new_conn();
        self.m.conns[conn].unix = true;
        self.m.set(client, cv, What::End(Side { conn, side: 0 }));
        match av {
            Some(av) => self.m.install(server, Fd { var: av, what: What::End(Side { conn, side: 1 }) }),
            None => {
                self.m.queue(port, conn, client);
                if self.rng.chance(10) {
                    self.mixable = false;
                    return;
                }
                self.accept_waiting(server, lv, port);
            }
        }
        if self.rng.chance(85) {
            self.converse(conn);
        }
    }

    /// Adds one step that concerns Unix streams.
    pub(super) fn unix(&mut self, actor: usize) {
        let Some((fd, side)) = self.end_of(actor) else { return self.connection() };
        let v = fd.var as i64;
        match self.rng.below(20) {
            0..=6 => self.converse(side.conn),
            7 | 8 if self.m.conns[side.conn].unix => self.push(actor, 0, Call::OutQ, &[v]),
            9 => self.push(actor, 0, Call::FionRead, &[v]),
            10 => {
                let mark = self.rng.pick(&[1, 2, 5, 100]);
                self.m.conns[side.conn].low_water[side.side] = true;
                self.push(actor, 0, Call::SetOpt, &[v, option("RCVLOWAT"), mark]);
            }
            11 | 12 => {
                let call = self.rng.pick(&[Call::GetSockName, Call::GetPeerName, Call::Attributes]);
                self.push(actor, 0, call, &[v]);
            }
            13..=16 => self.pass_over(actor, fd, side),
            17 => self.close_with_unread(actor, fd, side),
            _ => self.connection(),
        }
    }

    /// Has this side sent bytes that its peer has not read? If the connection moves to the kernel
    /// then, a receive ends where the path changes.
    pub(super) fn has_sent(&self, fd: Fd) -> bool {
        fd.what.side().is_some_and(|side| self.m.conns[side.conn].bytes[1 - side.side] > 0)
    }

    /// Both ends exchange messages, if neither has anything else to read.
    fn converse(&mut self, conn: usize) {
        let c = &self.m.conns[conn];
        if c.fin != [false; 2] || c.bytes != [0; 2] {
            return;
        }
        let ends = [0, 1].map(|side| What::End(Side { conn, side }));
        let [here, there] = ends.map(|end| self.m.holders_of(end));
        let (Some((a, av)), Some((b, bv))) = (self.rng.pick_opt(&here), self.rng.pick_opt(&there)) else { return };
        if a == b || ends.iter().any(|end| !self.m.may_sleep_on(&[*end], true)) {
            return;
        }
        if !self.m.conns[conn].unix {
            // (The kernel holds back what comes next until the last answer is acknowledged, which takes time.)
            for (actor, var) in [(a, av), (b, bv)] {
                self.push(actor, 0, Call::SetOpt, &[var as i64, option("NODELAY"), 1]);
            }
        }
        self.push(b, 0, Call::Echo, &[bv as i64, LONG_ENOUGH]);
        self.push(a, 0, Call::Ping, &[av as i64, LONG_ENOUGH]);
    }

    /// Passes a descriptor over the connection, which moves the connection from shared memory to
    /// the kernel.
    fn pass_over(&mut self, actor: usize, fd: Fd, side: Side) {
        let peer = Side { conn: side.conn, side: 1 - side.side };
        // (Not behind other bytes: before a descriptor, a receive without room for descriptors ends
        // on shared memory, but not in the kernel.)
        let taken = self.m.is_slept_on(What::End(peer)) || self.m.is_slept_on(fd.what);
        if self.next_var + 2 > VARS || taken || self.m.conns[side.conn].bytes[peer.side] > 0 {
            return;
        }
        let receivers = self.m.holders_of(What::End(peer));
        let Some((other, var)) = self.rng.pick_opt(&receivers) else { return };
        let fds = self.m.fds_of(actor);
        let Some(passed) = self.rng.pick_opt(&fds).filter(|f| !matches!(f.what, What::Epoll(_))) else { return };
        // (Not a listener: the order of its waiting connections would be undefined.)
        if matches!(passed.what, What::Listener { .. }) || !self.may_move(passed) || self.has_sent(passed) {
            return;
        }
        self.push(actor, 0, Call::SendFd, &[fd.var as i64, passed.var as i64]);
        self.new_fd(other, Call::RecvFd, &[var as i64], passed.what);
    }

    /// An end with unread bytes closes. The other end gets the error once.
    fn close_with_unread(&mut self, actor: usize, fd: Fd, side: Side) {
        let peer = Side { conn: side.conn, side: 1 - side.side };
        let holders = self.m.holders_of(What::End(peer));
        let Some((other, var)) = self.rng.pick_opt(&holders) else { return };
        if self.m.is_slept_on(fd.what) {
            return;
        }
        self.push(other, 0, Call::Send, &[var as i64, 5, libc::MSG_NOSIGNAL.into()]);
        self.m.conns[side.conn].bytes[side.side] += 5;
        self.unwatch(actor, fd);
        self.push(actor, 0, Call::Close, &[fd.var as i64]);
        self.m.close(actor, fd.var);
        if self.m.holders_of(fd.what).is_empty() {
            self.m.wake_all_on(What::End(peer));
        }
        let all = libc::POLLIN | libc::POLLOUT | libc::POLLRDHUP;
        for _ in 0..2 {
            match self.rng.below(4) {
                0 => self.push(other, 0, Call::Poll, &[0, var as i64, all.into()]),
                1 => self.push(other, 0, Call::GetOpt, &[var as i64, option("ERROR")]),
                2 => self.push(other, 0, Call::Send, &[var as i64, 3, libc::MSG_NOSIGNAL.into()]),
                _ => self.push(other, 0, Call::Recv, &[var as i64, 10, libc::MSG_DONTWAIT.into()]),
            }
        }
    }
}
