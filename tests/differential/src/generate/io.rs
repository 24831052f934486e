//! Bytes in and out, and the ends of connections.

use super::model::{Fd, Side, What};
use super::Gen;
use crate::call::Call;
use crate::program::VARS;

/// Upper limit of the bytes in flight in one direction. The kernel and the ring both hold more.
const IN_FLIGHT: usize = 24_000;
/// The same for Unix sockets: the kernel counts the memory behind each message, and reports room
/// while a quarter is taken.
const UNIX_IN_FLIGHT: usize = 6_000;
const UNIX_MESSAGE: usize = 1_500;

impl Gen {
    fn size(&mut self) -> usize {
        let n = self.rng.pick(&[0, 1, 1, 3, 8, 10, 64, 100, 100, 500, 1000, 1500, 3000, 9000]);
        if self.switches.has("unix") {
            return n.min(UNIX_MESSAGE);
        }
        if self.switches.has("bulk") && self.rng.chance(20) {
            60_000
        } else {
            n
        }
    }

    /// Sends something, mostly if a process can read it.
    pub(super) fn transfer(&mut self, actor: usize) {
        let Some((fd, side)) = self.end_of(actor) else { return self.connection() };
        if !self.send_over(actor, fd, side) {
            return;
        }
        // Often the other side reads at once, or polls.
        let peer = What::End(Side { conn: side.conn, side: 1 - side.side });
        let readers = self.m.holders_of(peer);
        if let Some((other, var)) = self.rng.pick_opt(&readers) {
            if self.rng.chance(40) {
                self.receive_from(other, Fd { var, what: peer });
            }
        }
    }

    pub(super) fn send_over(&mut self, actor: usize, fd: Fd, side: Side) -> bool {
        let to = 1 - side.side;
        let mut n = self.size();
        let most = if self.switches.has("unix") { UNIX_IN_FLIGHT } else { IN_FLIGHT };
        if self.m.conns[side.conn].bytes[to] + n > most && !self.switches.has("bulk") {
            n = 0;
        }
        let v = fd.var as i64;
        let mut flags = 0;
        for (bit, percent) in [(libc::MSG_NOSIGNAL, 30), (libc::MSG_DONTWAIT, 20), (libc::MSG_DONTROUTE, 3)] {
            if self.rng.chance(percent) {
                flags |= i64::from(bit);
            }
        }
        let k = self.rng.pick(&[1, 2, 3, 5]);
        if self.switches.has("oob") && self.rng.chance(8) {
            flags |= i64::from(libc::MSG_OOB);
            // Not one urgent byte right behind another: docs/limits.md.
            if n == 1 && (k > 1 || std::mem::replace(&mut self.m.conns[side.conn].urgent[to], true)) {
                n = 2;
            }
        }
        let peer = What::End(Side { conn: side.conn, side: to });
        let k = if n > 2000 && self.m.is_slept_on(peer) { 1 } else { k };
        let len = n as i64;
        match self.rng.below(13) {
            0..=3 => self.push(actor, 0, Call::Send, &[v, len, flags]),
            4 => self.push(actor, 0, Call::SendTo, &[v, len, flags]),
            5 | 6 => self.push(actor, 0, Call::Write, &[v, len]),
            7 => self.push(actor, 0, Call::WriteV, &[v, len, k]),
            8 => self.push(actor, 0, Call::SendMsg, &[v, len, k, flags]),
            9 if n <= 3000 && !self.m.is_slept_on(What::End(Side { conn: side.conn, side: to })) => {
                self.push(actor, 0, Call::SendMmsg, &[v, len, k, flags]);
                n *= k as usize;
            }
            10 if self.next_var + 1 < VARS => {
                let f = self.new_fd(actor, Call::File, &[len + 50], What::File);
                let offset = self.rng.pick(&[-1, 0, 20]);
                self.push(actor, 0, Call::SendFile, &[v, f as i64, offset, len]);
            }
            // A sleeping receiver may see the first part alone. That part leaves after 200 ms in
            // any case, and the test does not wait for it.
            11 if n > 0 && !self.m.is_slept_on(What::End(Side { conn: side.conn, side: to })) => {
                self.push(actor, 0, Call::SendMore, &[v, len, 10]);
                n += 10;
            }
            12 if n <= 2000 || !self.m.is_slept_on(peer) => {
                let flags = self.rng.pick(&[0, i64::from(libc::SPLICE_F_NONBLOCK)]);
                self.push(actor, 0, Call::SpliceTo, &[v, len, flags]);
            }
            _ => self.push(actor, 0, Call::PwriteV2, &[v, len, k]),
        }
        self.m.conns[side.conn].bytes[to] += n;
        if n > 0 {
            self.m.wake_all_on(What::End(Side { conn: side.conn, side: to }));
        }
        true
    }

    pub(super) fn receive(&mut self, actor: usize) {
        if let Some((fd, _)) = self.end_of(actor) {
            self.receive_from(actor, fd);
        }
    }

    /// Receives. The call blocks only if something should be there, or if the actor may sleep.
    pub(super) fn receive_from(&mut self, actor: usize, fd: Fd) {
        let What::End(side) = fd.what else { return };
        let conn = &self.m.conns[side.conn];
        let (have, fin) = (conn.bytes[side.side], conn.fin[1 - side.side]);
        let mut n = self.rng.pick(&[0, 1, 3, 10, 100, 1000, 1000, 20_000]);
        if self.rng.chance(30) {
            n = have;
        }
        if n == 0 && (self.moves() || have == 0 && !self.m.is_nonblock(fd.var)) {
            // A blocking receive of no bytes ends with any wake-up. The kernel wakes for reasons of
            // its own, and a path switch is a wake-up, too.
            n = 10;
        }
        let mut flags = 0;
        for (bit, percent) in [(libc::MSG_PEEK, 18), (libc::MSG_WAITALL, 15), (libc::MSG_TRUNC, 6)] {
            if self.rng.chance(percent) {
                flags |= i64::from(bit);
            }
        }
        if self.switches.has("oob") && self.rng.chance(8) {
            flags |= i64::from(libc::MSG_OOB);
        }
        let all = flags & i64::from(libc::MSG_WAITALL) != 0;
        let sleeps = !fin && (have == 0 || (all && n > have));
        let flagged = self.rng.chance(70);
        if sleeps && !self.m.is_nonblock(fd.var) {
            let others = self.m.awake().len() > 1;
            if others && self.rng.chance(30) && self.m.may_sleep_on(&[fd.what], true) {
                if flags & i64::from(libc::MSG_PEEK) != 0 {
                    // Not a peek for more than is there while another thread receives: README.md.
                    flags &= !i64::from(libc::MSG_WAITALL);
                }
                self.m.sleep(actor, vec![fd.what], true);
            } else {
                flags |= i64::from(libc::MSG_DONTWAIT);
            }
        } else if self.rng.chance(15) {
            flags |= i64::from(libc::MSG_DONTWAIT);
        }
        let (v, len) = (fd.var as i64, n as i64);
        let k = self.rng.pick(&[1, 2, 3, 5]);
        match self.rng.below(10) {
            0..=2 => self.push(actor, 0, Call::Recv, &[v, len, flags]),
            3 => self.push(actor, 0, Call::RecvFrom, &[v, len, flags]),
            4 => self.push(actor, 0, Call::RecvMsg, &[v, len, k, flags]),
            5 if !all => {
                let one =
                    if self.rng.chance(50) { i64::from(libc::MSG_WAITFORONE) } else { i64::from(libc::MSG_DONTWAIT) };
                self.push(actor, 0, Call::RecvMmsg, &[v, len.min(1000), k, flags | one]);
            }
            _ if flagged && flags != 0 => self.push(actor, 0, Call::Recv, &[v, len, flags]),
            _ if flags & i64::from(libc::MSG_DONTWAIT) != 0 => self.push(actor, 0, Call::Recv, &[v, len, flags]),
            6 => self.push(actor, 0, Call::ReadV, &[v, len, k]),
            7 => self.push(actor, 0, Call::PreadV2, &[v, len, k]),
            8 if !self.m.conns[side.conn].low_water[side.side] => {
                let flags = self.rng.pick(&[0, i64::from(libc::SPLICE_F_NONBLOCK)]);
                self.push(actor, 0, Call::SpliceFrom, &[v, len, flags]);
            }
            _ => self.push(actor, 0, Call::Read, &[v, len]),
        }
        if flags & i64::from(libc::MSG_PEEK) == 0 {
            let left = &mut self.m.conns[side.conn].bytes[side.side];
            *left -= n.min(*left);
        }
    }

    /// Half-close, close, reset.
    pub(super) fn end_some(&mut self, actor: usize) {
        if self.rng.chance(15) {
            let Some(fd) = self.any_of(actor).filter(|f| !self.m.is_slept_on(f.what)) else { return };
            self.unwatch(actor, fd);
            self.push(actor, 0, Call::Close, &[fd.var as i64]);
            return self.m.close(actor, fd.var);
        }
        let Some((fd, side)) = self.end_of(actor) else { return };
        let v = fd.var as i64;
        let peer = What::End(Side { conn: side.conn, side: 1 - side.side });
        let kind = self.rng.below(10);
        if kind > 3 {
            // If a sleeper looks again, the number may belong to another descriptor.
            if self.m.is_slept_on(fd.what) {
                return;
            }
            self.unwatch(actor, fd);
        }
        match kind {
            0..=3 => {
                let how = self.rng.pick(&[1, 1, 1, 0, 2]);
                self.push(actor, 0, Call::Shutdown, &[v, how]);
                if how != 0 {
                    self.m.conns[side.conn].fin[side.side] = true;
                    self.m.wake_all_on(peer);
                }
                if how != 1 {
                    self.m.wake_all_on(fd.what);
                }
            }
            4 | 5 => {
                self.push(actor, 0, Call::SetLinger, &[v, 1, 0]);
                self.push(actor, 0, Call::Close, &[v]);
                self.m.close(actor, fd.var);
                self.m.wake_all_on(peer);
            }
            6 if self.rng.chance(20) => {
                self.push(actor, 0, Call::CloseRange, &[v, v]);
                self.m.close(actor, fd.var);
            }
            _ => {
                self.push(actor, 0, Call::Close, &[v]);
                self.m.close(actor, fd.var);
                if self.m.holders_of(fd.what).is_empty() {
                    self.m.wake_all_on(peer);
                }
            }
        }
    }

    /// Called before `fd` is closed. If another process holds the file, it stays in the kernel's
    /// epoll instances until that process closes it, too. The library's instances forget it at
    /// once. Programs delete an entry before the close, so this deletes `fd`.
    pub(super) fn unwatch(&mut self, actor: usize, fd: Fd) {
        // Every child has inherited an epoll instance, though the model assumes that none uses it.
        let everywhere = matches!(fd.what, What::Epoll(_)) && self.m.processes_alive() > 1;
        if self.m.processes_with(fd.what) < 2 && !everywhere {
            if self.m.fds_of(actor).iter().filter(|f| f.what == fd.what).count() < 2 {
                self.m.watched.retain(|(_, v)| *v != fd.var);
            }
            return;
        }
        let mut eps: Vec<usize> = self.m.watched.iter().filter(|(_, v)| *v == fd.var).map(|(e, _)| *e).collect();
        let mine = self.m.fds_of(actor);
        eps.retain(|ep| mine.iter().any(|f| f.var == *ep));
        eps.sort_unstable();
        for ep in eps {
            self.push(actor, 0, Call::EpollDel, &[ep as i64, fd.var as i64]);
            self.m.watched.remove(&(ep, fd.var));
        }
    }

    /// Adds pipes, eventfds, timers and Unix sockets, which programs wait for together with
    /// sockets.
    pub(super) fn kernel_things(&mut self, actor: usize) {
        let fds = self.m.fds_of(actor);
        let have: Vec<Fd> = fds
            .into_iter()
            .filter(|f| {
                matches!(f.what, What::PipeRead(_) | What::PipeWrite(_) | What::Event(_) | What::Timer | What::Unix(_))
            })
            .collect();
        if have.is_empty() || self.rng.chance(30) {
            if self.next_var + 4 > VARS {
                return;
            }
            let nonblock = self.rng.chance(60);
            let flags = i64::from(if nonblock { libc::SOCK_NONBLOCK } else { 0 });
            match self.rng.below(4) {
                0 | 1 => {
                    let v = self.vars(2);
                    let pipe = self.m.number();
                    self.push(actor, v, Call::Pipe, &[flags]);
                    self.m.install(actor, Fd { var: v, what: What::PipeRead(pipe) });
                    self.m.install(actor, Fd { var: v + 1, what: What::PipeWrite(pipe) });
                    self.m.set_nonblock(v, nonblock);
                }
                2 => {
                    let value = self.rng.below(2) as i64;
                    let event = What::Event(self.m.number());
                    let v = self.new_fd(actor, Call::EventFd, &[value, flags], event);
                    self.m.kernel_bytes.insert(event, value as usize);
                    self.m.set_nonblock(v, nonblock);
                }
                _ => {
                    let fired = self.rng.below(2) as i64;
                    self.new_fd(actor, Call::TimerFd, &[fired], What::Timer);
                }
            }
            return;
        }
        let fd = self.rng.pick(&have);
        let v = fd.var as i64;
        match fd.what {
            What::PipeWrite(p) => {
                self.push(actor, 0, Call::Write, &[v, 8]);
                *self.m.kernel_bytes.entry(What::PipeRead(p)).or_default() += 8;
                self.m.wake_all_on(What::PipeRead(p));
            }
            What::Event(_) if self.rng.chance(50) => {
                // An eventfd accepts any 8 bytes except all ones as a count.
                self.push(actor, 0, Call::Write, &[v, 8]);
                *self.m.kernel_bytes.entry(fd.what).or_default() += 1;
                self.m.wake_all_on(fd.what);
            }
            What::PipeRead(_) | What::Event(_) => {
                let have = self.m.kernel_bytes.remove(&fd.what).unwrap_or(0);
                if have > 0 || self.m.is_nonblock(fd.var) {
                    self.push(actor, 0, Call::Read, &[v, 8]);
                }
            }
            What::Unix((p, side)) => {
                self.push(actor, 0, Call::Send, &[v, 5, libc::MSG_NOSIGNAL.into()]);
                self.m.wake_all_on(What::Unix((p, 1 - side)));
            }
            _ => self.push(actor, 0, Call::Read, &[v, 8]),
        }
    }

    /// A receive that ends by SO_RCVTIMEO.
    pub(super) fn blocking_timeout(&mut self, actor: usize) {
        let Some((fd, side)) = self.end_of(actor) else { return };
        let v = fd.var as i64;
        if self.m.is_nonblock(fd.var) || !self.m.may_sleep_on(&[fd.what], true) {
            return;
        }
        self.push(actor, 0, Call::SetRcvTimeo, &[v, 20]);
        let all = if self.rng.chance(30) { i64::from(libc::MSG_WAITALL) } else { 0 };
        self.push(actor, 0, Call::Recv, &[v, 500, all]);
        self.m.conns[side.conn].bytes[side.side] = 0;
        if self.rng.chance(50) {
            self.push(actor, 0, Call::SetRcvTimeo, &[v, 0]);
        }
    }
}
