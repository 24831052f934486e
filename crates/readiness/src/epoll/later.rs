//! The epoll instance of a child that serves one connection.
//!
//! Most such children end with their connection, which is the kernel's (ADR 53). An instance that watches nothing
//! else needs nothing of ours: what is registered there is noted, in a few words, and the kernel does the rest.
//! It becomes known like any other before a connection can go over to shared memory, and before the
//! program does anything with it that must be seen.

use super::create;
use super::instance::of;
use super::item;
use crate::process;
use crate::table::{self, Desc, Kind, DESCS};
use crate::{ctl, listen, making};
use core::sync::atomic::{AtomicI32, AtomicU32, AtomicU64, Ordering};
use fsocket_runtime::brief;

/// A connection that the instance watches.
struct Noted {
    /// The number under which; -1: this place is free.
    fd: AtomicI32,
    desc: AtomicU32,
    generation: AtomicU32,
    events: AtomicU32,
    data: AtomicU64,
}

#[link_section = ".data.fsocket_start"]
static NOTED: [Noted; 4] = [const {
    Noted {
        fd: AtomicI32::new(-1),
        desc: AtomicU32::new(0),
        generation: AtomicU32::new(0),
        events: AtomicU32::new(0),
        data: AtomicU64::new(0),
    }
}; 4];

impl Noted {
    /// The connection, while it is still that one.
    fn desc(&self) -> Option<&'static Desc> {
        let is_it = |d: &&Desc| {
            self.fd.load(Ordering::Relaxed) >= 0
                && d.kind() == Kind::Kernel
                && d.is_used()
                && d.generation() == self.generation.load(Ordering::Relaxed)
        };
        DESCS.get(self.desc.load(Ordering::Relaxed)).filter(is_it)
    }
    fn event(&self) -> libc::epoll_event {
        libc::epoll_event { events: self.events.load(Ordering::Relaxed), u64: self.data.load(Ordering::Relaxed) }
    }
}

/// Does this process serve one connection of the kernel's, with one thread, and has the monitor not heard of it?
/// No connection can go over then, and nobody sleeps in the instance while it becomes known.
fn can_stay() -> bool {
    listen::is_deferred() && brief::is_for_connection() && process::is_single_threaded() && ctl::fd() < 0
}

/// The kernel has created an instance. False: as [`create::track`].
pub fn created(fd: i32) -> bool {
    begin(fd) || create::track(fd)
}

/// The program has made the instance `fd`. True: there is no need to know it yet.
fn begin(fd: i32) -> bool {
    if making::later().is_some() {
        become_known();
    }
    let can = fd < making::LATER_MOST && can_stay();
    if can {
        NOTED.iter().for_each(|n| n.fd.store(-1, Ordering::Relaxed));
        making::set_later(fd);
    }
    can
}

/// Before a wait in the instance. False: it is known now.
pub fn waits() -> bool {
    let can = can_stay();
    match can {
        true => drop(brief::turn()),
        false => become_known(),
    }
    can
}

/// Before a change of what the instance watches. False: it is known now.
///
/// # Safety
/// `ev` is readable, or `op` needs none.
pub unsafe fn changes(op: i32, fd: i32, ev: *const libc::epoll_event) -> bool {
    // A one-shot registration must be seen when it fires.
    const SEEN: u32 = (libc::EPOLLONESHOT | libc::EPOLLEXCLUSIVE) as u32;
    // SAFETY: `ev` is readable where `op` looks at it: the hook has checked that.
    let plain = op == libc::EPOLL_CTL_DEL || unsafe { ev.read_unaligned() }.events & SEEN == 0;
    let ours = table::lookup(fd).is_some_and(|d| d.kind() != Kind::Kernel || place(fd).is_none());
    let can = can_stay() && plain && !ours && !process::owns(fd) && !making::is_later(fd);
    if !can {
        become_known();
    }
    can
}

/// A place for the number, or the one that it has.
fn place(fd: i32) -> Option<&'static Noted> {
    let has = |n: &&Noted| n.fd.load(Ordering::Relaxed) == fd;
    NOTED.iter().find(has).or_else(|| NOTED.iter().find(|n| n.desc().is_none()))
}

/// The kernel has made the change.
///
/// # Safety
/// As [`changes`].
pub unsafe fn changed(op: i32, fd: i32, ev: *const libc::epoll_event) {
    let (Some(d), Some(n)) = (table::lookup(fd), place(fd)) else { return };
    if op == libc::EPOLL_CTL_DEL {
        return n.fd.store(-1, Ordering::Relaxed);
    }
    // SAFETY: `ev` is readable where `op` looks at it: the hook has checked that.
    let ev = unsafe { ev.read_unaligned() };
    n.desc.store(d.index(), Ordering::Relaxed);
    n.generation.store(d.generation(), Ordering::Relaxed);
    n.events.store(ev.events, Ordering::Relaxed);
    n.data.store(ev.u64, Ordering::Relaxed);
    n.fd.store(fd, Ordering::Relaxed);
    d.placeholder().set_watched(true);
}

/// `fd` is to be used in another way: if it is the instance, it becomes known.
#[inline]
pub fn used(fd: i32) {
    if making::is_later(fd) {
        become_known();
    }
}

/// The process is to do something that a child for one connection does not.
#[inline]
pub fn settle() {
    if making::later().is_some() {
        become_known();
    }
}

#[cold]
fn become_known() {
    let Some(fd) = making::later() else { return };
    making::forget_later(fd);
    let known = create::track(fd);
    if !known {
        // No memory for it: nothing of ours may come into it.
        process::disable();
    }
    let ep = table::lookup(fd).and_then(of).filter(|_| known);
    for n in &NOTED {
        let Some(d) = n.desc() else { continue };
        let is_there = ep.is_some_and(|ep| {
            let added = ep
                .lock
                .lock()
                .is_ok_and(|mut g| item::add(ep, &mut g, d, n.fd.load(Ordering::Relaxed), &n.event(), true).is_ok());
            added && ep.watch_ctl()
        });
        if !is_there {
            // The instance would not hear that it has gone over.
            crate::upgrade::give_up(d);
        }
        n.fd.store(-1, Ordering::Relaxed);
    }
    if let Some(ep) = ep {
        ep.kernel.store(true, Ordering::Relaxed);
    }
}
