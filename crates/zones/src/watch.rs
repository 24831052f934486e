//! Waiting for connections on global and local listen sockets together.
//!
//! The kernel's epoll instance contains the local listen socket beside the global one, with the
//! same events and data. So every thread that waits in the instance sees both, by whatever call
//! it waits. If both are ready at once, the library's `epoll_wait` reports one event.

use super::listener::{count, of, put, state, used, Local, Zoned};
use super::watches::{Watch, Who, IN};
use super::{balance, How};
use crate::table::Desc;
use crate::{ctl, process};
use core::sync::atomic::{AtomicBool, Ordering};
use fsocket_abi::arena::Reason;
use fsocket_sys::{self as sys};

const ONESHOT: u32 = libc::EPOLLONESHOT as u32;
const EXCLUSIVE: u32 = libc::EPOLLEXCLUSIVE as u32;

/// The threads that wait in an epoll instance, as far as the library knows.
#[derive(Clone, Copy)]
pub enum Waits {
    /// No thread has waited so far. The thread that adds the listener need not be the one that waits
    /// ([`belongs`]), and may never wait.
    Nobody,
    /// One thread, and not the calling one.
    Other(Who),
    /// The calling thread, or several.
    Me,
}

/// The kernel has done `epoll_ctl(ep, op, fd, ev)` for the global listen socket; this function
/// does the same for the local one. True: `ep` watches a local socket, or may do so later.
pub fn followed((ep, waits): (i32, Waits), op: i32, fd: i32, d: &Desc, ev: Option<&libc::epoll_event>) -> bool {
    let Some(z) = of(d) else { return false };
    let waiter = if let Waits::Other(who) = waits { Some(who) } else { None };
    let whose = || z.watches.find(ep, fd).map_or_else(process::thread, Watch::thread);
    match (op, ev) {
        _ if z.state() == state::OFF => false,
        // The program's own socket is the local one, so no second socket is watched. The entry is
        // noted to make the instance look again after connections have moved. It is noted before
        // `is_member`, so that another thread that comes now finds this thread.
        (_, Some(ev))
            if op != libc::EPOLL_CTL_DEL && z.is_shared() && z.watches.note(ep, fd, ev, None) && z.is_member(fd) =>
        {
            true
        }
        (libc::EPOLL_CTL_DEL, _) => {
            let exclusive = z.watches.find(ep, fd).is_some_and(|w| w.events.load(Ordering::Relaxed) & EXCLUSIVE != 0);
            let thread = whose();
            z.watches.forget(ep, fd);
            z.unwatched(ep, thread, exclusive);
            false
        }
        (_, Some(ev)) if ev.events & IN == 0 => {
            let thread = whose();
            z.watches.note(ep, fd, ev, waiter);
            z.unwatched(ep, thread, false);
            false
        }
        (_, Some(ev)) if ev.events & ONESHOT != 0 => {
            // With EPOLLONESHOT, two sockets would report two events instead of one.
            z.off(Reason::ZoneTurns);
            if let Some(page) = z.page() {
                page.turns.store(1, Ordering::Release);
            }
            false
        }
        (_, Some(ev)) => {
            let noted = z.watches.note(ep, fd, ev, waiter);
            if noted && !matches!(waits, Waits::Nobody) {
                z.watched(ep, fd, ev, waiter);
            }
            noted
        }
        _ => false,
    }
}

/// The calling thread `who` is the first to wait in `ep`. So it becomes the worker of the
/// listeners in `ep`, whichever thread has added them. (In Apache the main thread adds them
/// before the waiting thread exists. With a single listener Apache waits in `accept` instead, and
/// no thread ever waits in the instance.)
pub fn belongs(ep: i32, who: Who) {
    for z in used() {
        z.belongs(ep, who);
    }
}

/// The calling thread is one of several that wait in `ep`, and is awake. So it handles the
/// worker's messages and looks at the queues; the other threads may be busy for long.
pub fn deputize(ep: i32) {
    let me = process::thread();
    for z in used() {
        for w in z.watches.active().filter(|w| w.ep() == ep) {
            if let Some(l) = z.local_of(w.thread()) {
                l.delegate.store(me, Ordering::Relaxed);
            }
        }
    }
}

impl Zoned {
    fn belongs(&self, ep: i32, who: Who) {
        for w in self.watches.iter().filter(|w| w.ep() == ep) {
            let from = w.thread();
            if from != who.thread {
                w.is_of(who);
                let _ = self.first.compare_exchange(from, who.thread, Ordering::AcqRel, Ordering::Relaxed);
                if let Some(l) = self.local_of(from) {
                    self.belongs_to(l, ep, from, who);
                }
            }
            if w.events.load(Ordering::Relaxed) & IN != 0 {
                self.watched(ep, w.fd.load(Ordering::Relaxed), &w.event(), None);
            }
        }
    }

    /// Moves the local listen socket `l` to the thread `who`, which waits in the instance `ep`.
    /// The thread `from` has added the listener there.
    fn belongs_to(&self, l: &Local, ep: i32, from: u64, who: Who) {
        let needed = l.sleeping.load(Ordering::Relaxed) || self.watches.active().any(|w| w.thread() == from);
        let zone = super::cpu::pinned(who.tid).unwrap_or(l.cpu.load(Ordering::Relaxed));
        if needed {
            let _ = sys::epoll_ctl(ep, libc::EPOLL_CTL_DEL, l.fd(), None);
        } else if self.own().is_some() || zone != l.cpu.load(Ordering::Relaxed) {
            self.leave(l);
        } else {
            let _ = l.thread.compare_exchange(from, who.thread, Ordering::AcqRel, Ordering::Relaxed);
        }
    }

    fn watched(&self, ep: i32, fd: i32, ev: &libc::epoll_event, waiter: Option<Who>) -> bool {
        let l = match waiter {
            Some(who) => self.worker_elsewhere(fd, who),
            None => self.worker(fd, How::Epoll),
        };
        let Some(l) = l else { return false };
        l.unwatched.store(false, Ordering::Relaxed);
        if self.put_local(ep, l, ev).is_err() {
            self.leave(l);
            count(Reason::ZoneResource);
            return false;
        }
        l.lazy.store(-1, Ordering::Relaxed);
        self.share(l);
        if self.handoff_fd() >= 0 {
            let _ = put(ep, self.handoff_fd(), ev);
        }
        let others = self.watches.iter().filter(|w| w.events.load(Ordering::Relaxed) & IN != 0).map(|w| {
            let who = Who { thread: w.thread.load(Ordering::Relaxed), tid: w.tid.load(Ordering::Relaxed) };
            (who, w.ep.load(Ordering::Relaxed), w.event())
        });
        self.join_others(fd, others);
        true
    }

    /// Makes the calling thread a worker. It was alone when it began to watch the listener, and
    /// no longer is.
    pub(super) fn late(&self, fd: i32) {
        let me = process::thread();
        let own = |w: &&Watch| w.thread.load(Ordering::Relaxed) == me && w.events.load(Ordering::Relaxed) & IN != 0;
        // If the program has several sockets at one address, a worker uses only one of them.
        if self.is_shared() && (self.watches.iter().find(own).is_none() || self.is_member(fd)) {
            return;
        }
        if self.state() != state::READY || !self.is_due(fd) {
            return;
        }
        if let Some(w) = self.watches.iter().find(own) {
            let ev = w.event();
            self.watched(w.ep.load(Ordering::Relaxed), fd, &ev, None);
        } else if !self.unseen.swap(true, Ordering::Relaxed) {
            count(Reason::ZoneUnseen);
        }
    }

    /// `ep` does not watch the listener any more; `thread` waited there. If no instance of that
    /// thread watches the listener, its local queue must not fill. But the application may only
    /// be changing its place in the kernel's wait list (nginx does so every 16 connections). So
    /// the decision is made when the thread goes to sleep. If another thread made the change,
    /// `thread` may be asleep already.
    fn unwatched(&self, ep: i32, thread: u64, exclusive: bool) {
        let Some(l) = self.local_of(thread) else { return };
        let mine = thread == process::thread();
        if exclusive && mine && self.balance_of(l).is_some() && self.locals().count() == 1 {
            // If removed, the socket's worker would no longer be first in the socket's wait list.
            l.lazy.store(ep, Ordering::Relaxed);
        } else {
            let _ = sys::epoll_ctl(ep, libc::EPOLL_CTL_DEL, l.fd(), None);
            self.take_out_peers(ep);
        }
        if self.handoff_fd() >= 0 {
            let _ = sys::epoll_ctl(ep, libc::EPOLL_CTL_DEL, self.handoff_fd(), None);
        }
        match self.watches.active().any(|w| w.thread() == thread) {
            true => {}
            false if mine => {
                l.unwatched.store(true, Ordering::Relaxed);
                UNWATCHED.store(true, Ordering::Relaxed);
            }
            false => self.step_back(l),
        }
    }
}

/// Set if a thread has a local listen socket that it does not watch, if the library looks for a
/// new monitor, or if it has found one.
static UNWATCHED: AtomicBool = AtomicBool::new(false);
/// A new monitor has come, which has the local listen sockets only from its predecessor's table.
static ANOTHER: AtomicBool = AtomicBool::new(false);

/// Call this when the monitor has died: each thread then checks before its next sleep whether a
/// new monitor has come.
pub fn look_before_sleep() {
    UNWATCHED.store(true, Ordering::Release);
}

/// A new monitor has come.
pub fn another_monitor() {
    ANOTHER.store(true, Ordering::Release);
    UNWATCHED.store(true, Ordering::Release);
}

/// The calling thread is about to wait in an epoll instance.
#[inline(always)]
pub fn before_sleep() {
    look_if_asked();
    if UNWATCHED.load(Ordering::Relaxed) {
        give_up_unwatched();
    }
    balance::before_sleep();
}

#[cold]
fn give_up_unwatched() {
    UNWATCHED.store(false, Ordering::Relaxed);
    if ctl::may_come() {
        ctl::wanted();
        UNWATCHED.fetch_or(ctl::may_come(), Ordering::Relaxed);
    }
    announce_again();
    for z in used() {
        if let Some(l) = z.own().filter(|l| l.unwatched.load(Ordering::Relaxed)) {
            z.step_back(l);
        }
        if z.locals().any(|l| l.unwatched.load(Ordering::Relaxed)) {
            UNWATCHED.store(true, Ordering::Relaxed);
        }
    }
}

fn announce_again() {
    if ANOTHER.swap(false, Ordering::AcqRel) {
        used().for_each(Zoned::announce_again);
    }
}

/// Does this event data belong to a listener that can be ready in two sockets?
pub fn is_double(data: u64) -> bool {
    used().any(|z| z.is_active() && z.watches.iter().any(|w| w.data.load(Ordering::Relaxed) == data))
}

/// The monitor has sent a message that asks for a look at the listeners. Any call may have read
/// the message, and no thread has looked yet.
static LOOK_ASKED: AtomicBool = AtomicBool::new(false);

/// Calls [`late`], if the monitor has asked for a look.
#[inline(always)]
pub fn look_if_asked() {
    if LOOK_ASKED.load(Ordering::Relaxed) {
        catch_up(false);
    }
}

/// Other workers have joined or left while the calling thread slept in an epoll instance. If the
/// thread watches a listener, it becomes a worker now.
pub fn late() {
    catch_up(true);
}

/// `slept`: the thread waits in an instance that has listeners in it.
#[cold]
fn catch_up(slept: bool) {
    LOOK_ASKED.store(false, Ordering::Relaxed);
    for z in used() {
        let fd = z.fd.load(Ordering::Relaxed);
        if z.own().is_none() && (slept || z.watches.iter().any(|w| w.thread() == process::thread())) {
            z.late(fd);
        }
        if z.is_shared() {
            z.ask_for_program();
            z.select_late(fd);
        }
    }
}

/// Connections have moved between listen sockets, for which the kernel wakes no thread. So every
/// epoll instance with such a listener must check again.
pub fn look(group: u64) {
    for z in used().filter(|z| {
        let g = z.group.load(Ordering::Relaxed);
        g == group || g == 0
    }) {
        z.ask_again();
        z.is_shut();
        LOOK_ASKED.store(true, Ordering::Relaxed);
        for w in z.watches.iter() {
            let (ep, fd) = (w.ep.load(Ordering::Relaxed), w.fd.load(Ordering::Relaxed));
            let ev = w.event();
            again(ep, fd, &ev);
            // (A socket that other workers share is left alone: nothing moves to it, and its
            // worker would lose its first place in the wait list.)
            for l in z.locals().filter(|l| !l.shared.load(Ordering::Relaxed)) {
                if sys::epoll_ctl(ep, libc::EPOLL_CTL_DEL, l.fd(), None).is_ok() {
                    let _ = put(ep, l.fd(), &ev);
                }
            }
        }
    }
}

/// The monitor has died, so no message comes when a worker dies. The library checks for dead
/// workers itself, and looks for a new monitor.
pub fn alone() {
    if used().any(|z| z.page().is_some() || z.is_shared()) {
        ctl::wanted();
    }
    announce_again();
    for z in used() {
        if z.own().is_none() {
            if !ctl::dead() {
                z.ask_again();
                z.left.store(0, Ordering::Relaxed);
            }
            z.late(z.fd.load(Ordering::Relaxed));
        }
        let Some(page) = z.page() else { continue };
        let deaths = page.deaths();
        if z.deaths.swap(deaths, Ordering::Relaxed) != deaths {
            look(z.group.load(Ordering::Relaxed));
        }
    }
}

fn again(ep: i32, fd: i32, ev: &libc::epoll_event) {
    if ev.events & EXCLUSIVE != 0 {
        // The kernel cannot modify this entry, so it is removed and added. No event is lost in
        // between, because adding the entry checks for readiness.
        if sys::epoll_ctl(ep, libc::EPOLL_CTL_DEL, fd, None).is_ok() {
            let _ = sys::epoll_ctl(ep, libc::EPOLL_CTL_ADD, fd, Some(ev));
        }
    } else {
        let _ = sys::epoll_ctl(ep, libc::EPOLL_CTL_MOD, fd, Some(ev));
    }
}
