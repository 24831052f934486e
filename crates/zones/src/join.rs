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

/// How a worker is about to wait for connections. A local listen socket is made
/// only where we see to it that it is waited for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum How {
    /// In a call of ours that sleeps on both sockets (accept, poll, select).
    Sleeping,
    /// In an epoll instance that we are adding it to.
    Epoll,
}

/// A worker that gave up its local listen socket gets one again after this, and
/// twice as long each time: nanoseconds.
const AGAIN: u64 = 1_000_000_000;

impl Local {
    /// It is `who`'s from now on. `fd`: its listen socket, with these `options` of the application's.
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
    /// The calling thread is about to use the listener: its local listen socket,
    /// made now if it is a worker beside others.
    pub fn worker(&self, fd: i32, how: How) -> Option<&Local> {
        if self.state() == state::OFF || self.is_member(fd) {
            return None;
        }
        let own = self.own();
        if how == How::Sleeping {
            // Seen, though it may have no queue of its own yet.
            self.unseen.store(true, Ordering::Relaxed);
            match (self.dwell.returned(), own) {
                (Shown::Away, Some(l)) if l.sleeping.load(Ordering::Relaxed) => {
                    self.step_back(l);
                    return None;
                }
                // Threads may take turns, and then only one of them waits.
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

    /// As [`Zoned::worker`], for the thread that waits in the epoll instance to which the calling
    /// one adds the listener.
    pub(super) fn worker_elsewhere(&self, fd: i32, who: Who) -> Option<&Local> {
        if self.state() == state::OFF || self.is_member(fd) {
            return None;
        }
        let due = || self.is_due_for(fd, who.thread).then(|| self.join(fd, who, How::Epoll)).flatten();
        self.local_of(who.thread).or_else(due)
    }

    /// Is the calling thread the only one that has used the listener here?
    pub(super) fn is_single(&self) -> bool {
        self.is_single_thread(process::thread())
    }

    fn is_single_thread(&self, me: u64) -> bool {
        match self.first.compare_exchange(0, me, Ordering::AcqRel, Ordering::Acquire) {
            Ok(_) => true,
            Err(first) => first == me,
        }
    }

    /// Threads that watched the listener before it had zones sleep and cannot join
    /// by themselves: they get theirs now.
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

    /// Is there reason for one?
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
        // The first thread of the first process joins when others have.
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
            // The program goes on selecting among those it knows, and moves what waits
            // when one dies: a classic one would not. So this worker takes from the
            // global queue, and asks again.
            self.left.fetch_max(1, Ordering::Relaxed);
            self.left_at.store(sys::now_ns(), Ordering::Relaxed);
            count(Reason::NoMonitor);
            return None;
        }
        let _l = self.change.lock().ok()?;
        // Another thread may have done it for this one meanwhile.
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
                // It got no place.
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

    /// The socket, with the door open meanwhile. Under the page's lock.
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
            // Another user by now, or in another network namespace, or a port that needs a
            // privilege.
            reuse_port(reservation, true)?;
            let made = by_monitor(e);
            let _ = reuse_port(reservation, false);
            made
        })
    }

    /// Have connections of its CPU sent there: by the monitor's program, else by
    /// the classic one.
    pub(super) fn select(&self, fd: i32, l: &Local, page: &Page) {
        if self.enter_group(fd, l).is_ok() {
            page.selected.store(1, Ordering::Release);
            return;
        }
        if page.selected.load(Ordering::Acquire) != 0 && !self.is_shared() {
            // The monitor went just now: as above, at the next look.
            return self.leave(l);
        }
        if self.is_shared() {
            // Others are in the group: the kernel's hash among all, as it was. The
            // monitor says when they have gone.
            return count(Reason::ZoneShared);
        }
        count(Reason::ZoneClassic);
        self.attach_classic(l.fd(), page);
    }

    /// Strangers were at the address when these workers joined, and may have gone. The
    /// others of this process sleep.
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

    /// There is another monitor: it has the workers from before as its predecessor's, and is
    /// told here that they live, and may be stolen from.
    pub(super) fn announce_again(&self) {
        let fd = self.fd.load(Ordering::Relaxed);
        let Ok(_l) = self.change.lock() else { return };
        self.group.store(0, Ordering::Relaxed);
        if self.has_member() {
            return self.enter_again(fd);
        }
        for l in self.locals().filter(|l| l.place.load(Ordering::Relaxed) != 0) {
            // Where it has no program of its own the one from before goes on selecting.
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

    /// Close a local listen socket; what waits there moves to the global one.
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
            // As the kernel's group now is.
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

    /// The global listen socket is about to be shut down here: so are those of the workers.
    pub(super) fn shut_others(&self, page: &Page, goes_on: bool) {
        let fd = self.fd.load(Ordering::Relaxed);
        if !page.any() || self.group.load(Ordering::Relaxed) == 0 && self.ask_group(fd, false).is_err() {
            return;
        }
        let _ = ctl::request(request::Shut { group: self.group.load(Ordering::Relaxed), goes_on }, None);
    }

    /// Another process of the fork group has shut down the global listen socket. True: there are no local ones.
    pub(super) fn is_shut(&self) -> bool {
        let shut = !self.is_shared() && self.page().is_some_and(|p| p.shut.load(Ordering::Acquire) != 0);
        if shut {
            self.leave_all();
        }
        shut
    }

    /// The worker stopped waiting for connections, but keeps the listener: others
    /// must get what comes.
    pub(super) fn step_back(&self, l: &Local) {
        self.left.fetch_add(1, Ordering::Relaxed);
        self.left_at.store(sys::now_ns(), Ordering::Relaxed);
        stats::count(Counter::ZoneLeave);
        count(Reason::ZoneTurns);
        self.leave(l);
    }
}
