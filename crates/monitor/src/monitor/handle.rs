//! Requests of clients: which part of the monitor answers which. Everything in a message is untrusted.

use super::Monitor;
use crate::answer::{answer_json, reply, Answer, Misbehaved};
use crate::arenas::ZoneTotals;
use crate::clients::Outgoing;
use crate::descriptor;
use crate::foreign::{self, ForeignFd};
use crate::report::{self, Sources, Wanted};
use crate::shm::ending::Ending;
use crate::shm::in_use::Looked;
use crate::steer::Also;
use crate::turns::TURN;
use crate::{limits, ChannelId, ConnId};
use fsocket_proto::report::Report;
use fsocket_proto::{kind, Msg};
use rustix::io::Errno;
use std::rc::Rc;
use std::time::{Duration, Instant};

/// Rounds of reading what a process that was replaced has sent last.
const REQUESTS: usize = 1024;

impl Monitor {
    /// Handles one request. `from`: the channel at which one goes on that has taken a turn already.
    // Long: one arm for each kind of message: the table of who answers what.
    pub fn handle(&mut self, id: ConnId, msg: Msg, fd: Option<ForeignFd>, from: ChannelId) -> Result<(), Misbehaved> {
        let Some(client) = self.ctx.clients.get(id) else { return Ok(()) };
        const ALONE: [u32; 5] = [kind::HELLO, kind::REPORT, kind::STEER, kind::OPERATE, kind::AGENT];
        if self.shm.remote.is_line(id) {
            return self.shm.agent_says(&mut self.ctx, id, &msg);
        }
        if !client.is_process() && !ALONE.contains(&msg.kind) {
            return Err(Misbehaved("no HELLO"));
        }
        let answer = match msg.kind {
            kind::HELLO => {
                self.has_come();
                self.shm.hello(&mut self.ctx, id, &msg)?
            }
            kind::LISTEN => self.shm.listen(&mut self.ctx, id, &msg, fd),
            kind::WORKER => self.shm.worker(&mut self.ctx, id, &msg),
            kind::CONNECT => self.shm.connect(&mut self.ctx, id, &msg, fd),
            kind::PORTS => self.shm.ports(&mut self.ctx, id, &msg, fd),
            kind::IN_USE => match self.shm.in_use(&msg, fd, from) {
                Looked::Done(answer) => answer,
                Looked::Later(fd, next) => {
                    if let Some(client) = self.ctx.clients.get_mut(id) {
                        client.unfinished = Some((msg, fd, next));
                    }
                    return Ok(());
                }
            },
            kind::UNPUBLISH => self.shm.unpublish(&mut self.ctx, id, &msg, fd),
            kind::OPTIONS => self.shm.mark_options(&mut self.ctx, id, &msg),
            kind::SWITCH => self.shm.switch(&mut self.ctx, id, &msg, fd),
            kind::CLAIM => self.shm.claim(&mut self.ctx, id, &msg),
            kind::UPGRADE => self.shm.upgrade(&mut self.ctx, id, &msg, fd),
            kind::OFFER => self.shm.offer_upgrade(&self.ctx, id, &msg, fd),
            kind::MEET => self.shm.meet(&mut self.ctx, id, &msg, fd),
            kind::AGENT => self.shm.agent_comes(&mut self.ctx, id, &msg),
            kind::TRANSFER => self.shm.take(&mut self.ctx, id, &msg, fd),
            kind::TRANSFERRED => {
                self.shm.taken(&mut self.ctx, id, &msg);
                return Ok(());
            }
            kind::RELEASE => {
                self.shm.release(&mut self.ctx, id, &msg);
                Ok((reply(&msg), None))
            }
            kind::REPORT => self.send_report(id, &msg),
            kind::GROUP => self.zones.group(&mut self.ctx, id, &msg, fd),
            kind::LOCAL => self.zones.local(&mut self.ctx, id, &msg, fd),
            kind::CLONE => self.zones.clone_listener(&mut self.ctx, id, &msg, fd),
            kind::BALANCE => self.zones.balance(&mut self.ctx, id, &msg),
            kind::SHUT => self.zones.shut_group(&mut self.ctx, id, &msg),
            kind::WAITING => self.zones.waiting(&mut self.ctx, id, &msg),
            kind::COUNTED => {
                if let Some(client) = self.ctx.clients.get_mut(id) {
                    client.counted(&msg);
                }
                return Ok(());
            }
            kind::BROKEN => {
                self.shm.broken(&mut self.ctx, id, &msg);
                return Ok(());
            }
            kind::REST => {
                self.shm.rests(&mut self.ctx, id, &msg);
                return Ok(());
            }
            kind::PASSED => {
                self.shm.note_passed(&self.ctx, id, &msg);
                return Ok(());
            }
            kind::ARRIVES => {
                self.shm.arrives_in(&mut self.ctx, id, &msg);
                return Ok(());
            }
            kind::PEER_CLOSED => {
                self.zones.peer_closed(&mut self.ctx, id, &msg);
                return Ok(());
            }
            kind::SHARE => {
                let _ = self.zones.share(&mut self.ctx, id, &msg, fd);
                return Ok(());
            }
            kind::LEFT => {
                self.zones.left(&mut self.ctx, id, &msg);
                Ok((reply(&msg), None))
            }
            kind::STEER => self.steer_request(id, &msg, fd),
            kind::OPERATE => self.operate(id, &msg, fd),
            kind::KEEP => return self.shm.keep_for_successor(&mut self.ctx, id, &msg),
            kind::INHERITED_ARENA => self.shm.inherited_arena(&self.ctx, id, &msg),
            kind::CHANNEL_HANDLE => self.shm.channel_handle(&mut self.ctx, id, &msg),
            kind::SETTLED => {
                self.reclaim_predecessors(id);
                self.shm.settled(&mut self.ctx, id, &msg)
            }
            kind::ADOPT => return self.shm.adopt(&mut self.ctx, id, &msg, fd),
            kind::RENEW => {
                self.shm.renew(&mut self.ctx, id, fd)?;
                self.end_process(id);
                return Ok(());
            }
            kind::ARENA => return self.shm.arena(&mut self.ctx, id, &msg, fd),
            kind::ATTACH => return self.shm.attach(&mut self.ctx, id, &msg, fd),
            kind::UNLISTEN => {
                let shown = fd.and_then(|fd| descriptor::listening(fd.as_fd()).ok());
                let listener = shown.map_or(Some(msg.id), |info| self.shm.listeners.by_cookie(info.cookie));
                if let Some(listener) = listener {
                    self.shm.unlisten(&mut self.ctx, id, listener, msg.arg0 != 0);
                }
                Ok((reply(&msg), None))
            }
            kind::RING => {
                self.shm.ring(&mut self.ctx, id, &msg);
                return Ok(());
            }
            kind::BRIEF => {
                if let Some(client) = self.ctx.clients.get_mut(id).filter(|c| c.holds.contains(&msg.id)) {
                    client.secret = msg.arg1;
                    let (was, wanted) = (self.shm.registry.is_brief(msg.id), msg.arg0 == 1);
                    if was != wanted && (was || client.marks.take(Instant::now())) {
                        self.shm.registry.set_brief(msg.id, wanted);
                    }
                }
                return Ok(());
            }
            kind::JOIN => {
                self.ctx.clients.join_family(id, msg.id);
                return Ok(());
            }
            kind::NEARER => {
                let uid = client.uid;
                if self.shm.listeners.has_port(msg.addr.port) {
                    self.shm.have_ask_again(uid, uid == 0 || self.ctx.config.private);
                }
                return Ok(());
            }
            kind::WAKER => {
                self.shm.waker(&mut self.ctx, id, &msg);
                return Ok(());
            }
            kind::WAKER_READY => {
                self.shm.waker_ready(&mut self.ctx, id, &msg);
                return Ok(());
            }
            _ => return Err(Misbehaved("unknown kind of message")),
        };
        self.refresh_steering();
        // With a number the process waits for the answer.
        if msg.seq == 0 && matches!(msg.kind, kind::RELEASE | kind::LEFT | kind::UNLISTEN) {
            return Ok(());
        }
        let (msg, fd) = answer.unwrap_or_else(|errno| (Msg { result: errno.raw_os_error(), ..reply(&msg) }, None));
        self.ctx.clients.send(id, Outgoing { msg, fd, unasked: false });
        Ok(())
    }

    /// Nothing is done, for lack of a descriptor: the client does without.
    pub(crate) fn refuse_cut(&mut self, id: ConnId, msg: &Msg) -> Result<(), Misbehaved> {
        tracing::warn!(process = %self.ctx.clients.name(id), kind = msg.kind, "out of descriptors");
        match msg.kind {
            // Rights that it has given up it must not keep here.
            kind::RENEW => return Err(Misbehaved("out of descriptors for its new socket")),
            _ if msg.seq == 0 => {}
            _ => {
                let msg = Msg { result: Errno::MFILE.raw_os_error(), ..reply(msg) };
                self.ctx.clients.send(id, Outgoing { msg, fd: None, unasked: false });
            }
        }
        Ok(())
    }

    pub(super) fn report(&self, wanted: Wanted) -> Report {
        let steered =
            if self.steers.is_empty() { Vec::new() } else { self.ctx.broker.steer_also(&Also::Report).groups };
        Sources { ctx: &self.ctx, shm: &self.shm, zones: &self.zones, steered, event_loop: self.pace.report() }
            .report(wanted)
    }

    /// A private monitor leaves a last report.
    pub(super) fn leave_report(&self) {
        if self.ctx.config.private {
            report::leave(&self.report(Wanted { viewer: 0, is_brief: true }), &self.ctx.config.socket);
        }
    }

    fn send_report(&mut self, id: ConnId, msg: &Msg) -> Answer {
        let viewer = self.ctx.clients.get(id).ok_or(Errno::BADF)?.uid;
        let reset = msg.arg1 == 1;
        let wanted = Wanted { viewer, is_brief: msg.arg2 == 1 };
        if let Some((length, fd)) = self.reports.get(wanted).filter(|_| !reset) {
            return Ok((Msg { arg0: length, ..reply(msg) }, Some(Rc::new(fd))));
        }
        let began = report::cpu_time();
        let report = self.report(wanted);
        if reset {
            let private = self.ctx.config.private;
            self.reset_zones(&|uid| viewer == 0 || private || viewer == uid);
        }
        let (answer, fd) = answer_json(msg, viewer, &report)?;
        if let Some(fd) = fd.as_ref() {
            self.reports.keep(wanted, answer.arg0, fd, report::cpu_time().saturating_sub(began));
        }
        Ok((answer, fd))
    }

    /// Sets the counters of what a user sees to zero: accepts and selections.
    fn reset_zones(&mut self, sees: &dyn Fn(u32) -> bool) {
        for arena in self.ctx.arenas.iter().filter(|a| sees(a.uid)) {
            arena.mem.fold_zones(&mut ZoneTotals::new());
        }
        self.ctx.ended.zones.retain(|uid, _| !sees(*uid));
        if sees(0) {
            self.pace.reset();
        }
        self.zones.reset(sees);
    }

    fn steer_request(&mut self, id: ConnId, msg: &Msg, fd: Option<ForeignFd>) -> Answer {
        let text = request_text(msg, fd)?;
        let client = self.ctx.clients.get(id).ok_or(Errno::BADF)?;
        let sender = self.ctx.policy.sender.as_ref().ok_or(Errno::PERM)?;
        let done = self.ctx.broker.steer(&text, client.fd.as_fd(), sender)?;
        self.steered(&done);
        answer_json(msg, 0, &done.answer)
    }

    fn operate(&mut self, id: ConnId, msg: &Msg, fd: Option<ForeignFd>) -> Answer {
        let request = serde_json::from_slice(&request_text(msg, fd)?).map_err(|_| Errno::INVAL)?;
        let uid = self.ctx.clients.get(id).ok_or(Errno::BADF)?.uid;
        answer_json(msg, uid, &self.shm.operate(&mut self.ctx, id, &request)?)
    }

    /// A process is gone (or is treated as if): everything it held goes.
    fn end_process(&mut self, id: ConnId) {
        if let Some(ending) = self.begin_end(id) {
            self.go_on(ending, Duration::MAX);
        }
    }

    /// The same, but what takes longer than a turn is left for those to come.
    pub(super) fn end_in_turns(&mut self, id: ConnId) {
        if let Some(rest) = self.begin_end(id).and_then(|ending| self.go_on(ending, TURN)) {
            self.shm.endings.add(rest);
        }
    }

    /// A turn for each user who waits.
    pub(super) fn take_turns(&mut self) {
        for uid in self.turns.users() {
            let begin = Instant::now();
            while let Some(id) = self.turns.take(uid) {
                if self.serve_one(id) {
                    self.turns.add(uid, id);
                }
                self.settle();
                if begin.elapsed() >= TURN {
                    break;
                }
            }
            self.pace.lap();
            // A flood of clients that come and go must not fill the queue while users have their turns.
            self.accept_some();
        }
    }

    /// A turn for each user whose processes have ended.
    pub(super) fn end_some(&mut self) {
        for uid in self.shm.endings.users() {
            let began = Instant::now();
            while let Some(left) = TURN.checked_sub(began.elapsed()) {
                let Some(ending) = self.shm.endings.take(uid) else { break };
                if let Some(rest) = self.go_on(ending, left) {
                    self.shm.endings.put_back(rest);
                }
            }
            self.pace.lap();
        }
    }

    fn begin_end(&mut self, id: ConnId) -> Option<Ending> {
        let mut client = self.ctx.clients.remove(id)?;
        self.ctx.policy.leave(id);
        // (At once: a report that is asked for before it has ended has all that was counted.)
        if let Some(told) = client.told.take() {
            self.ctx.ended.add(&told, client.uid);
        }
        if !client.is_process() {
            // It has said nothing, and has nothing: there may be many of those.
            self.shm.remote.leave(id);
            foreign::may_close(1);
            drop(client);
            foreign::may_close(0);
            return None;
        }
        self.shm.transfers.leave(id);
        tracing::debug!(pid = client.pid, name = client.name, "end");
        Some(Ending::new(id, client, self.ctx.arenas.used_by(id)))
    }

    /// For `budget` at most; returns what is left.
    fn go_on(&mut self, mut ending: Ending, budget: Duration) -> Option<Ending> {
        let began = Instant::now();
        while self.go_on_once(&mut ending) {
            if began.elapsed() >= budget {
                return Some(ending);
            }
        }
        self.shm.sweep(&mut self.ctx);
        self.refresh_steering();
        // (Its control socket, which is read to the end.)
        foreign::may_close(1);
        drop(ending);
        foreign::may_close(0);
        None
    }

    /// One piece of what is left to do. False: there is nothing more.
    fn go_on_once(&mut self, ending: &mut Ending) -> bool {
        if self.shm.leave_some_sockets(&mut self.ctx, ending) || self.shm.leave_some_channels(&mut self.ctx, ending) {
            return true;
        }
        if std::mem::replace(&mut ending.has_stopped, true) {
            return self.shm.leave_a_listener(&mut self.ctx, ending);
        }
        let (id, client) = (ending.id, &mut ending.client);
        self.shm.leave_offers(&mut self.ctx, id, client);
        self.zones.leave_zones(&mut self.ctx, id);
        self.shm.leave_listeners(&mut self.ctx, id, client);
        true
    }

    /// Connections that only the replaced program had are closed before the new one goes on,
    /// as in the kernel.
    fn reclaim_predecessors(&mut self, id: ConnId) {
        for conn in self.shm.predecessors(&self.ctx, id) {
            for _ in 0..REQUESTS {
                if !self.serve_one(conn) {
                    break;
                }
            }
            if self.ctx.clients.doomed.contains(&conn) {
                self.ctx.clients.doomed.retain(|d| *d != conn);
                self.end_process(conn);
            }
        }
    }
}

/// A request that is too long for a message.
fn request_text(msg: &Msg, fd: Option<ForeignFd>) -> Result<Vec<u8>, Errno> {
    let fd = fd.ok_or(Errno::BADF)?;
    // Sealed, so that reading it cannot block.
    let seals = rustix::fs::fcntl_get_seals(fd.as_fd())?;
    let length = msg.arg0 as usize;
    if !seals.contains(rustix::fs::SealFlags::SHRINK) || length > limits::REQUEST {
        return Err(Errno::INVAL);
    }
    let mut text = vec![0; length];
    if rustix::io::pread(fd.as_fd(), &mut text, 0)? != length {
        return Err(Errno::INVAL);
    }
    Ok(text)
}
