//! Making a worker's local listen socket, and giving it up.

use super::dwell::Shown;
use super::listener::{count, state, Local, Zoned, LOCALS};
use super::reserve::reason;
use super::watches::Who;
use super::{cpu, page::Page};
use crate::{ctl, process, socks, stats};
use core::sync::atomic::Ordering;
use fsocket_abi::arena::{Counter, Reason};
use fsocket_proto::request;
use fsocket_reuseport::classic;
use fsocket_reuseport::listener::{self, reuse_port, Shape};
use fsocket_reuseport::reservation::ReuseWindow;
use fsocket_sys::{self as sys, Errno, Result};

/// The call in which a worker is about to wait for connections. The library makes a local listen
/// socket only if it can ensure that a thread waits for that socket.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum How {
    /// In a call of the library that sleeps on both sockets (accept, poll, select).
    Sleeping,
    /// In an epoll instance to which the library adds it.
    Epoll,
}

/// Pause after which a worker that gave up its local listen socket gets a new one, in
/// nanoseconds. The pause doubles each time.
const AGAIN: u64 = 1_000_000_000;

impl Local {
    /// Gives this entry to `who`. `fd`: the local listen socket; `options`: the generation of the
    /// application's options that it has.
    fn begin(&self, fd: i32, choice: &cpu::Choice, who: Who, how: How, options: u32) {
        self.fd.store(process::high_fd(fd), Ordering::Relaxed);
        self.cpu.store(choice.cpu, Ordering::Relaxed);
        self.entry.store(choice.entry.map_or(u32::MAX, |e| e), Ordering::Relaxed);
        self.options.store(options, Ordering::Relaxed);
        self.turns.store(0, Ordering::Relaxed);
        self.every.store(0, Ordering::Relaxed);
        self.unwatched.store(false, Ordering::Relaxed);
        self.place.store(0, Ordering::Relaxed);
        self.shared.store(false, Ordering::Relaxed);
        self.fair.store(0, Ordering::Relaxed);
        self.peers_since.store(0, Ordering::Relaxed);
        self.lazy.store(-1, Ordering::Relaxed);
        self.delegate.store(0, Ordering::Relaxed);
        self.sleeping.store(how == How::Sleeping, Ordering::Relaxed);
        self.thread.store(who.thread, Ordering::Release);
    }
}

impl Zoned {
    /// The calling thread is about to use the listener. Returns its local listen socket, which is
    /// made now if the thread is a worker beside others.
    pub fn worker(&self, fd: i32, how: How) -> Option<&Local> {
        if self.state() == state::OFF || self.is_member(fd) {
            return None;
        }
        let own = self.own();
        if how == How::Sleeping {
            // The library sees the wait, although the worker may have no queue of its own yet.
            self.unseen.store(true, Ordering::Relaxed);
            match (self.dwell.returned(), own) {
                (Shown::Away, Some(l)) if l.sleeping.load(Ordering::Relaxed) => {
                    self.step_back(l);
                    return None;
                }
                // No queue yet: the worker was not quick, or there are several threads. (These
                // may take turns, so that only one waits at a time.)
                (shown, None) if shown != Shown::Quick || !self.is_single() => return None,
                _ => {}
            }
        }
        if own.is_some() {
            return own;
        }
        if !self.is_due(fd) {
            return None;
        }
        let l = self.join(fd, Who::me(), how)?;
        if how == How::Sleeping {
            self.share(l);
        }
        Some(l)
    }

    /// As [`Zoned::worker`], for another thread: the calling thread adds the listener to an epoll
    /// instance in which the other thread waits.
    pub(super) fn worker_elsewhere(&self, fd: i32, who: Who) -> Option<&Local> {
        if self.state() == state::OFF || self.is_member(fd) {
            return None;
        }
        let due = || self.is_due_for(fd, who.thread).then(|| self.join(fd, who, How::Epoll)).flatten();
        self.local_of(who.thread).or_else(due)
    }

    /// Is the calling thread the only one in this process that has used the listener?
    pub(super) fn is_single(&self) -> bool {
        self.is_single_thread(process::thread())
    }

    fn is_single_thread(&self, me: u64) -> bool {
        match self.first.compare_exchange(0, me, Ordering::AcqRel, Ordering::Acquire) {
            Ok(_) => true,
            Err(first) => first == me,
        }
    }

    /// Threads that watched the listener before it had zones may be asleep, and cannot join by
    /// themselves. This call makes their local sockets.
    pub(super) fn join_others(&self, fd: i32, watchers: impl Iterator<Item = (Who, i32, libc::epoll_event)>) {
        for (who, ep, ev) in watchers {
            if self.local_of(who.thread).is_none() {
                let Some(l) = self.join(fd, who, How::Epoll) else { return };
                if self.put_local(ep, l, &ev).is_err() {
                    self.leave(l);
                } else {
                    self.share(l);
                }
            }
        }
    }

    /// Should the calling thread get a local socket now?
    pub(super) fn is_due(&self, fd: i32) -> bool {
        self.is_due_for(fd, process::thread())
    }

    fn is_due_for(&self, fd: i32, thread: u64) -> bool {
        self.fd.store(fd, Ordering::Relaxed);
        let left = self.left.load(Ordering::Relaxed);
        if left > 0 {
            let wait = AGAIN << left.min(6);
            if sys::now_ns().saturating_sub(self.left_at.load(Ordering::Relaxed)) < wait {
                return false;
            }
        }
        if self.page().is_some_and(|p| p.turns.load(Ordering::Acquire) != 0) {
            return false;
        }
        // The first thread of the first process joins only after others have joined.
        self.inherited.load(Ordering::Relaxed) || !self.is_single_thread(thread) || self.page().is_some_and(|p| p.any())
    }

    #[cold]
    fn join(&self, fd: i32, who: Who, how: How) -> Option<&Local> {
        if self.state() == state::PLAIN {
            self.make_ready();
        }
        if self.state() != state::READY {
            return None;
        }
        let page = self.page()?;
        if page.shut.load(Ordering::Acquire) != 0 {
            return None;
        }
        ctl::wanted();
        if ctl::dead() && page.selected.load(Ordering::Acquire) != 0 {
            // The BPF program of a monitor that has died goes on selecting among known sockets,
            // and moves connections when a worker dies. A classic BPF program would not. So this
            // worker takes from the global queue, and tries to join again later.
            self.left.fetch_max(1, Ordering::Relaxed);
            self.left_at.store(sys::now_ns(), Ordering::Relaxed);
            count(Reason::NoMonitor);
            return None;
        }
        let _l = self.change.lock().ok()?;
        // Another thread may have done this meanwhile.
        if let Some(l) = self.local_of(who.thread) {
            return Some(l);
        }
        let is_thread = !self.inherited.load(Ordering::Relaxed) || self.is_active() || who.tid != sys::getpid();
        let made = {
            let _turn = page.lock();
            let Some(choice) = cpu::choose(page, who.tid, is_thread) else {
                drop(_turn);
                drop(_l);
                self.off(Reason::ZoneUnpinned);
                return None;
            };
            let made = self.make_local(fd);
            match (&made, choice.entry) {
                (Ok(_), Some(e)) => page.add_place(e),
                // The worker got no place.
                (Err(_), Some(e)) => page.exit(e),
                _ => {}
            }
            made.map(|local| (local, choice))
        };
        let (local, choice) = match made {
            Ok(m) => m,
            Err(e) => {
                drop(_l);
                self.off(reason(e));
                return None;
            }
        };
        let l = match self.locals.iter().position(|l| l.thread.load(Ordering::Acquire) == 0) {
            Some(i) => {
                self.n.fetch_max(i as u32 + 1, Ordering::AcqRel);
                &self.locals[i]
            }
            None => {
                if let Some(e) = choice.entry {
                    page.exit(e);
                }
                let _ = sys::close(local);
                count(Reason::ZoneResource);
                return None;
            }
        };
        debug_assert!((self.n.load(Ordering::Relaxed) as usize) <= LOCALS);
        l.begin(local, &choice, who, how, page.options.load(Ordering::Acquire));
        self.leave_membership();
        self.select(fd, l, page);
        socks::arena();
        stats::count(Counter::ZoneJoin);
        Some(l)
    }

    /// Makes the socket, for which it opens the reservation. Called under the page's lock.
    fn make_local(&self, fd: i32) -> Result<i32> {
        let shape = Shape::of(fd)?;
        let near = listener::in_namespace_of(fd);
        let by_monitor = |e| match ctl::request(request::Clone { reservation: false }, Some(fd)) {
            Ok((_, Some(local))) => Ok(local),
            _ => Err(e),
        };
        if self.is_shared() {
            return near.and_then(|()| listener::like(fd, &shape)).or_else(by_monitor);
        }
        let reservation = self.reservation.load(Ordering::Acquire);
        let own = || {
            near?;
            let window = ReuseWindow::new(&shape)?;
            reuse_port(reservation, true)?;
            let made = listener::like(fd, &shape);
            let closed = window.close(&shape);
            let shut = reuse_port(reservation, false);
            match (made, closed.and(shut)) {
                (Ok(local), Err(e)) => {
                    let _ = sys::close(local);
                    Err(e)
                }
                (made, _) => made,
            }
        };
        own().or_else(|e| {
            // `reuse_port` opened the reservation, but the socket cannot be made here: the
            // listener is another user's, in another network namespace, or its port needs a
            // privilege.
            reuse_port(reservation, true)?;
            let made = by_monitor(e);
            let _ = reuse_port(reservation, false);
            made
        })
    }

    /// Makes the kernel send connections of the worker's CPU to the local socket: by the
    /// monitor's BPF program, else by the classic one.
    pub(super) fn select(&self, fd: i32, l: &Local, page: &Page) {
        if self.enter_group(fd, l).is_ok() {
            page.selected.store(1, Ordering::Release);
            return;
        }
        if page.selected.load(Ordering::Acquire) != 0 && !self.is_shared() {
            // The monitor has just died. The worker tries to join again at its next look.
            return self.leave(l);
        }
        if self.is_shared() {
            // Foreign sockets are in the group, so the kernel's hash selects among all sockets,
            // as without the library. The monitor sends a message when the foreign sockets have
            // gone.
            return count(Reason::ZoneShared);
        }
        count(Reason::ZoneClassic);
        self.attach_classic(l.fd(), page);
    }

    /// Called when foreign sockets have left the address. They were there when these workers
    /// joined, so no program selects yet. The other workers of this process may sleep, so the
    /// caller does this for all.
    pub(super) fn select_late(&self, fd: i32) {
        let Some(page) = self.page() else { return };
        let Ok(_l) = self.change.lock() else { return };
        for l in self.locals().filter(|l| l.place.load(Ordering::Relaxed) == 0) {
            self.select(fd, l, page);
        }
    }

    fn enter_group(&self, fd: i32, l: &Local) -> Result<()> {
        if self.group.load(Ordering::Relaxed) == 0 {
            let (_, selects) = self.ask_group(fd, self.is_shared())?;
            if !selects {
                return Err(Errno::EAGAIN);
            }
        }
        let enter = request::Local {
            group: self.group.load(Ordering::Relaxed),
            cpu: Some(l.cpu.load(Ordering::Relaxed)),
            on_trial: l.sleeping.load(Ordering::Relaxed),
        };
        let (answer, _) = ctl::request(enter, Some(l.fd()))?;
        l.place.store(answer.place, Ordering::Relaxed);
        self.map_balance();
        Ok(())
    }

    /// A new monitor has started. It has taken over its predecessor's table of workers, and
    /// learns from this call that these workers live and may be stolen from.
    pub(super) fn announce_again(&self) {
        let fd = self.fd.load(Ordering::Relaxed);
        let Ok(_l) = self.change.lock() else { return };
        self.group.store(0, Ordering::Relaxed);
        if self.has_member() {
            return self.enter_again(fd);
        }
        for l in self.locals().filter(|l| l.place.load(Ordering::Relaxed) != 0) {
            // If the new monitor has no BPF program, the old one goes on selecting.
            if self.enter_group(fd, l).is_ok() {
                self.map_balance_again();
                self.share(l);
            }
        }
    }

    fn attach_classic(&self, member: i32, page: &Page) {
        let _turn = page.lock();
        let n = page.places.load(Ordering::Relaxed);
        let _ = classic::attach(member, process::cpus() as usize, n + 1, |cpu| page.place_of(cpu));
    }

    /// Closes a local listen socket; its connections move to the global one.
    pub(super) fn leave(&self, l: &Local) {
        if l.thread.swap(0, Ordering::AcqRel) == 0 {
            return;
        }
        let fd = l.fd.swap(-1, Ordering::AcqRel);
        let classic = l.place.load(Ordering::Relaxed) == 0;
        let shared = l.shared.load(Ordering::Relaxed);
        self.unshare(l, fd);
        if let Some(page) = self.page() {
            let _turn = page.lock();
            let entry = l.entry.load(Ordering::Relaxed);
            page.exit(entry);
            if classic && !self.is_shared() && page.selected.load(Ordering::Relaxed) == 0 {
                self.hand_over(fd);
            }
            process::close_own(fd);
            // The page must mirror the order of sockets in the kernel's group.
            page.remove_place(entry);
        } else {
            process::close_own(fd);
        }
        if !classic {
            self.tell_left(l.place.load(Ordering::Relaxed), shared);
        } else if let Some(page) = self.page().filter(|p| !self.is_shared() && p.selected.load(Ordering::Relaxed) == 0)
        {
            self.attach_classic(self.fd.load(Ordering::Relaxed), page);
        }
    }

    /// Called before the global listen socket is shut down: the workers' local sockets are shut
    /// down as well.
    pub(super) fn shut_others(&self, page: &Page, goes_on: bool) {
        let fd = self.fd.load(Ordering::Relaxed);
        if !page.any() || self.group.load(Ordering::Relaxed) == 0 && self.ask_group(fd, false).is_err() {
            return;
        }
        let _ = ctl::request(request::Shut { group: self.group.load(Ordering::Relaxed), goes_on }, None);
    }

    /// Has another process of the fork group shut down the global listen socket? If so, this
    /// process closes its local sockets.
    pub(super) fn is_shut(&self) -> bool {
        let shut = !self.is_shared() && self.page().is_some_and(|p| p.shut.load(Ordering::Acquire) != 0);
        if shut {
            self.leave_all();
        }
        shut
    }

    /// The worker has stopped waiting for connections, but keeps the listener open. So its local
    /// socket is closed, and other workers get its connections.
    pub(super) fn step_back(&self, l: &Local) {
        self.left.fetch_add(1, Ordering::Relaxed);
        self.left_at.store(sys::now_ns(), Ordering::Relaxed);
        stats::count(Counter::ZoneLeave);
        count(Reason::ZoneTurns);
        self.leave(l);
    }
}
