//! Requests of clients: which part of the monitor answers each of them. The content of a message
//! is untrusted.

use super::Monitor;
use crate::answer::{answer_json, any, Answer, Misbehaved};
use crate::arenas::ZoneTotals;
use crate::clients::Outgoing;
use crate::foreign::{self, ForeignFd};
use crate::pace::Doing;
use crate::report::{self, Sources, Wanted};
use crate::shm::ending::Ending;
use crate::shm::in_use::Looked;
use crate::steer::Also;
use crate::turns::TURN;
use crate::{descriptor, limits, ChannelId, ConnId};
use fsocket_proto::report::Report;
use fsocket_proto::{answer, request, Malformed, Message, Msg, Request};
use rustix::io::Errno;
use std::rc::Rc;
use std::time::{Duration, Instant};

/// Messages that are still read from a process after an `exec` has replaced it, at most.
const REQUESTS: usize = 1024;

/// Whether a client may send this request without HELLO: commands and the agent are no processes
/// that use the monitor.
fn needs_no_hello(request: &Request) -> bool {
    use Request as R;
    matches!(request, R::Hello(_) | R::Report(_) | R::Steer(_) | R::Operate(_) | R::Agent(_))
}

impl Monitor {
    /// Handles one message. `from`: if an earlier turn has begun this request, the channel at
    /// which to go on.
    pub fn handle(&mut self, id: ConnId, msg: Msg, fd: Option<ForeignFd>, from: ChannelId) -> Result<(), Misbehaved> {
        let Some(client) = self.ctx.clients.get(id) else { return Ok(()) };
        let (is_process, is_line) = (client.is_process(), self.shm.remote.is_line(id));
        let answer = match Request::decode(&msg) {
            Ok(request) if is_line => self.shm.agent_says(&mut self.ctx, request)?,
            Ok(request) if !is_process && !needs_no_hello(&request) => return Err(Misbehaved("no HELLO")),
            Ok(Request::InUse(asked)) => match self.shm.in_use(asked, fd, from) {
                Looked::Done(answer) => Some(any(answer)),
                Looked::Later(fd, next) => {
                    if let Some(client) = self.ctx.clients.get_mut(id) {
                        client.unfinished = Some((msg, fd, next));
                    }
                    None
                }
            },
            Ok(request) => self.listen_to(id, request, fd)?,
            Err(Malformed::Value) if is_process && !is_line => (msg.seq() != 0).then(|| Err(Errno::INVAL)),
            Err(_) => return Err(Misbehaved("not a request")),
        };
        let Some(answer) = answer else { return Ok(()) };
        self.refresh_steering();
        let may_be_silent = msg.is::<request::Release>() || msg.is::<request::Left>() || msg.is::<request::Unlisten>();
        // If the request has a number, the process waits for the answer.
        if msg.seq() != 0 || !may_be_silent {
            let (out, fd) = match answer {
                Ok((answer, fd)) => (answer.encode().numbered(msg.seq()), fd),
                Err(errno) => (msg.refused(errno.raw_os_error()), None),
            };
            self.ctx.clients.send(id, Outgoing { msg: out, fd, unasked: false });
        }
        Ok(())
    }

    /// Handles requests that have no answer. The others go to [`Self::answer_to`].
    fn listen_to(
        &mut self,
        id: ConnId,
        request: Request,
        fd: Option<ForeignFd>,
    ) -> Result<Option<Answer<Message>>, Misbehaved> {
        use Request as R;
        let (ctx, shm, zones) = (&mut self.ctx, &mut self.shm, &mut self.zones);
        match request {
            R::Adopt(msg) => shm.adopt(ctx, id, msg, fd)?,
            R::Arena(msg) => shm.arena(ctx, id, msg, fd)?,
            R::Arrives(msg) => shm.arrives_in(ctx, id, msg),
            R::Attach(msg) => shm.attach(ctx, id, msg, fd)?,
            R::Broken(msg) => shm.broken(ctx, id, msg),
            R::Counts(msg) => ctx.clients.get_mut(id).into_iter().for_each(|client| client.counted(msg)),
            R::Keep(msg) => shm.keep_for_successor(ctx, id, msg)?,
            R::Nearer(msg) => shm.nearer(ctx, id, msg),
            R::Passed(msg) => shm.note_passed(ctx, id, msg),
            R::PeerClosed(msg) => zones.peer_closed(ctx, id, msg),
            R::Renew(_) => {
                shm.renew(ctx, id, fd)?;
                self.end_process(id);
            }
            R::Rest(msg) => shm.rests(ctx, id, msg),
            R::Ring(msg) => shm.ring(ctx, id, msg),
            R::Share(msg) => _ = zones.share(ctx, id, msg, fd),
            R::Transferred(msg) => shm.taken(ctx, id, msg),
            R::Waker(msg) => shm.waker(ctx, id, msg),
            R::WakerReady(msg) => shm.waker_ready(ctx, id, msg),
            asked => return self.answer_to(id, asked, fd).map(Some),
        }
        Ok(None)
    }

    /// Handles requests that have an answer: each by the part of the monitor that is concerned.
    fn answer_to(
        &mut self,
        id: ConnId,
        request: Request,
        fd: Option<ForeignFd>,
    ) -> Result<Answer<Message>, Misbehaved> {
        use Request as R;
        let (ctx, shm, zones) = (&mut self.ctx, &mut self.shm, &mut self.zones);
        Ok(match request {
            R::Agent(_) => any(shm.agent_comes(ctx, id)),
            R::Balance(msg) => any(zones.balance(ctx, id, msg)),
            R::ChannelHandle(msg) => any(shm.channel_handle(ctx, id, msg)),
            R::Claim(msg) => any(shm.claim(ctx, id, msg)),
            R::Clone(msg) => any(zones.clone_listener(ctx, id, msg, fd)),
            R::Connect(msg) => any(shm.connect(ctx, id, msg, fd)),
            R::Group(msg) => any(zones.group(ctx, id, msg, fd)),
            R::Hello(msg) => {
                self.has_come();
                any(self.shm.hello(&mut self.ctx, id, msg)?)
            }
            R::InheritedArena(msg) => any(shm.inherited_arena(ctx, id, msg)),
            R::Left(msg) => any(zones.left(ctx, id, msg)),
            R::Listen(msg) => any(shm.listen(ctx, id, msg, fd)),
            R::Local(msg) => any(zones.local(ctx, id, msg, fd)),
            R::Meet(msg) => any(shm.meet(ctx, id, msg, fd)),
            R::Offer(msg) => any(shm.offer_upgrade(ctx, id, msg, fd)),
            R::Operate(msg) => any(self.operate(id, msg, fd)),
            R::Options(msg) => any(shm.mark_options(ctx, id, msg)),
            R::Ports(msg) => any(shm.ports(ctx, id, msg, fd)),
            R::Release(msg) => any(shm.release(ctx, id, msg)),
            R::Report(msg) => any(self.send_report(id, msg)),
            R::Settled(_) => {
                self.reclaim_predecessors(id);
                any(self.shm.settled(&mut self.ctx, id))
            }
            R::Shut(msg) => any(zones.shut_group(ctx, id, msg)),
            R::Steer(msg) => any(self.steer_request(id, msg, fd)),
            R::Switch(msg) => any(shm.switch(ctx, id, msg, fd)),
            R::Transfer(msg) => any(shm.take(ctx, id, msg, fd)),
            R::Unlisten(msg) => any(shm.closes(ctx, id, msg, fd)),
            R::Unpublish(msg) => any(shm.unpublish(ctx, id, msg, fd)),
            R::Upgrade(msg) => any(shm.upgrade(ctx, id, msg, fd)),
            R::Waiting(msg) => any(zones.waiting(ctx, id, msg)),
            R::Worker(msg) => any(shm.worker(ctx, id, msg)),
            _ => return Err(Misbehaved("not a request of a process")),
        })
    }

    /// Refuses a message whose descriptor was lost because the monitor has no free one. The client
    /// does without the request.
    pub(crate) fn refuse_cut(&mut self, id: ConnId, msg: &Msg) -> Result<(), Misbehaved> {
        tracing::warn!(process = %self.ctx.clients.name(id), kind = msg.kind(), "out of descriptors");
        // The process has given up rights and sends a new socket to prove it. It must not keep the
        // old rights here.
        if msg.is::<request::Renew>() {
            return Err(Misbehaved("out of descriptors for its new socket"));
        }
        if msg.seq() != 0 {
            let msg = msg.refused(Errno::MFILE.raw_os_error());
            self.ctx.clients.send(id, Outgoing { msg, fd: None, unasked: false });
        }
        Ok(())
    }

    pub(super) fn report(&self, wanted: Wanted) -> Report {
        let steered =
            if self.steers.is_empty() { Vec::new() } else { self.ctx.broker.steer_also(&Also::Report).groups };
        Sources { ctx: &self.ctx, shm: &self.shm, zones: &self.zones, steered, event_loop: self.pace.report() }
            .report(wanted)
    }

    /// A private monitor leaves a last report in a file.
    pub(super) fn leave_report(&self) {
        if self.ctx.config.private {
            report::leave(&self.report(Wanted { viewer: 0, netns: None, is_brief: true }), &self.ctx.config.socket);
        }
    }

    fn send_report(&mut self, id: ConnId, request::Report { reset, brief }: request::Report) -> Answer<answer::Report> {
        let client = self.ctx.clients.get(id).ok_or(Errno::BADF)?;
        // (Network namespace: the monitor's end of a control socket belongs to the namespace of
        // the client that has connected.)
        let (viewer, netns) = (client.uid, descriptor::netns_cookie(client.fd.as_fd()).ok());
        let wanted = Wanted { viewer, netns, is_brief: brief };
        if let Some((length, fd)) = self.reports.get(wanted).filter(|_| !reset) {
            return Ok((answer::Report { length }, Some(Rc::new(fd))));
        }
        let began = report::cpu_time();
        self.hear_counts();
        let report = self.report(wanted);
        if reset {
            let private = self.ctx.config.private;
            self.reset_zones(&|uid| viewer == 0 || private || viewer == uid);
        }
        let (length, fd) = answer_json(viewer, &report)?;
        if let Some(fd) = fd.as_ref() {
            self.reports.keep(wanted, length, fd, report::cpu_time().saturating_sub(began));
        }
        Ok((answer::Report { length }, fd))
    }

    /// Sets to zero the counters of accepts and selections that this user may see.
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

    fn steer_request(&mut self, id: ConnId, msg: request::Steer, fd: Option<ForeignFd>) -> Answer<answer::Steer> {
        let text = request_text(msg.length, fd)?;
        let client = self.ctx.clients.get(id).ok_or(Errno::BADF)?;
        let sender = self.ctx.policy.sender.as_ref().ok_or(Errno::PERM)?;
        let done = self.ctx.broker.steer(&text, client.fd.as_fd(), sender)?;
        self.steered(&done);
        answer_json(0, &done.answer).map(|(length, fd)| (answer::Steer { length }, fd))
    }

    fn operate(&mut self, id: ConnId, msg: request::Operate, fd: Option<ForeignFd>) -> Answer<answer::Operate> {
        let request = serde_json::from_slice(&request_text(msg.length, fd)?).map_err(|_| Errno::INVAL)?;
        let uid = self.ctx.clients.get(id).ok_or(Errno::BADF)?.uid;
        let done = self.shm.operate(&mut self.ctx, id, &request)?;
        answer_json(uid, &done).map(|(length, fd)| (answer::Operate { length }, fd))
    }

    /// Removes everything that a process held: it has ended, or is treated as if it had.
    fn end_process(&mut self, id: ConnId) {
        if let Some(ending) = self.begin_end(id) {
            self.go_on(ending, Duration::MAX);
        }
    }

    /// Like [`Self::end_process`], but work that takes longer than a turn is left for later turns.
    pub(super) fn end_in_turns(&mut self, id: ConnId) {
        if let Some(rest) = self.begin_end(id).and_then(|ending| self.go_on(ending, TURN)) {
            self.shm.endings.add(rest.client.uid, rest);
        }
    }

    fn begin_end(&mut self, id: ConnId) -> Option<Ending> {
        self.pace.is(Doing::Ending);
        let mut client = self.ctx.clients.remove(id)?;
        self.ctx.policy.leave(id);
        // (Added at once: a report that is made while the end still takes turns must have all
        // counts.)
        if let Some(told) = client.told.take() {
            self.ctx.ended.add(&told, client.uid);
        }
        if !client.is_process() {
            // This client has never said HELLO, so it has nothing to remove. There may be many
            // such clients.
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

    /// Goes on with the end of a process, for about `budget`. Returns the rest if it is not
    /// finished.
    pub(super) fn go_on(&mut self, mut ending: Ending, budget: Duration) -> Option<Ending> {
        let began = Instant::now();
        while self.go_on_once(&mut ending) {
            if began.elapsed() >= budget {
                return Some(ending);
            }
        }
        self.shm.sweep(&mut self.ctx);
        self.refresh_steering();
        // (This closes the control socket, whose messages have all been read.)
        foreign::may_close(1);
        drop(ending);
        foreign::may_close(0);
        None
    }

    /// Does one piece of the remaining work. False: nothing is left.
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

    /// Ends the predecessors of a process after an `exec`. Connections that only the replaced
    /// program had are closed before the new program goes on, as the kernel does it.
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

/// Reads the text of a request that does not fit into a message.
fn request_text(length: u64, fd: Option<ForeignFd>) -> Result<Vec<u8>, Errno> {
    let fd = fd.ok_or(Errno::BADF)?;
    // A seal against shrinking proves that the file is a memfd, so reading cannot block.
    let seals = rustix::fs::fcntl_get_seals(fd.as_fd())?;
    let length = usize::try_from(length).map_err(|_| Errno::INVAL)?;
    if !seals.contains(rustix::fs::SealFlags::SHRINK) || length > limits::REQUEST {
        return Err(Errno::INVAL);
    }
    let mut text = vec![0; length];
    if rustix::io::retry_on_intr(|| rustix::io::pread(fd.as_fd(), &mut text, 0))? != length {
        return Err(Errno::INVAL);
    }
    Ok(text)
}
