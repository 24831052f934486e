//! Connections that leave this program: through `exec` and `posix_spawn`, or into
//! code of libc that makes its own system calls.
//!
//! A program that will load the library inherits connections and listeners as
//! they are ([`crate::inherit`] is its side). For every other one they become the
//! kernel's first.

pub mod actions;
pub mod borrower;
pub mod environment;
mod hidden;
mod program;

use crate::lock::Lock;
use crate::path;
use crate::stage;
use crate::stage::Path;
use crate::table::{self, Desc, Kind, DESCS};
use crate::{ctl, epoll, listen, pool, probe, process, successor, zone};
use core::sync::atomic::{AtomicI32, Ordering};
use fsocket_abi::arena::Reason;
use fsocket_proto::request;
use fsocket_sys as sys;

pub use actions::{as_we_know_them, fd_survives, Actions};
use environment::Changes;
use program::Fate;
pub use program::Start;

/// Call `f` with the environment for the next program, where this process has nothing else to prepare for it.
#[link_section = ".text.fsocket_start"]
pub fn with_environment<R>(env: *const *const libc::c_char, f: impl FnOnce(*const *const libc::c_char) -> R) -> R {
    // (A child of a shell looks at no arguments otherwise.)
    let hidden = environment::hides_us() && probe::are_strings(env);
    environment::extended(env, Changes { hidden, ..Changes::default() }, f)
}

/// What the next program is to find; ended by [`Next::failed`] or
/// [`Next::spawned`].
pub struct Next {
    /// Its control socket, a number of ours that survives `exec`, and its nonce.
    successor: Option<(i32, u64)>,
    /// It runs the same binary as this one and inherits sockets, and somebody has
    /// cleared the environment: the library goes along all the same, as zones and
    /// connections would stay with the kernel's socket. With nothing to inherit the
    /// environment is as the program wants it.
    inject: bool,
    /// Guards of zoned listeners go along.
    reservations: bool,
    /// It could not open the library.
    hidden: bool,
}

/// The successor of a `posix_spawn` under way in another thread: a child forked just
/// then closes it.
static LOOSE: AtomicI32 = AtomicI32::new(-1);
/// One at a time.
#[link_section = ".data.fsocket_start"]
static SPAWNING: Lock<()> = Lock::new(());

/// The program is about to be replaced, or (`spawn`, after these actions) a child of it is.
pub fn prepare(start: &Start, spawn: Option<&Actions>) -> Next {
    let hidden = environment::hides_us();
    if !is_concerned() {
        return Next { successor: None, inject: false, reservations: false, hidden };
    }
    prepare_all(start, spawn, hidden)
}

/// The parts of the library that the next program will have.
struct Plan {
    /// If the loader of glibc starts it: the library and shared memory.
    loads: bool,
    /// See [`Next::inject`].
    inject: bool,
    /// Zones.
    zones: bool,
}

impl Plan {
    /// `inherits`: is anything of the library's inherited? `replaces`: this program (else a child of it is started).
    fn of(start: &Start, hidden: bool, inherits: impl FnOnce() -> bool, replaces: bool) -> Plan {
        let carried = !hidden && environment::carries_us(start.env);
        let inject = !carried
            && !hidden
            && replaces
            && environment::lost_us(start.env)
            && inherits()
            && program::is_this_one(start);
        let zones = !hidden && environment::carries_zones(start.env) || inject;
        Plan { loads: carried || inject, inject, zones }
    }
}

#[inline(never)]
fn prepare_all(start: &Start, spawn: Option<&Actions>, hidden: bool) -> Next {
    crate::upgrade::give_up_all();
    let to = spawn.unwrap_or(&Actions::NONE);
    let inherits = || descs().any(|d| inheritable(d, to)) || zone::successor::any(|fd| fd_survives(fd, &Actions::NONE));
    let plan = Plan::of(start, hidden, inherits, spawn.is_none());
    let mut next = Next { successor: None, inject: plan.inject, reservations: plan.zones, hidden };
    if next.reservations {
        zone::successor::before_exec(|fd| fd_survives(fd, to));
    }
    // Numbers of ours that wait for the next connection are nobody's there.
    pool::drain();
    // What is close-on-exec ends with this program, before the next one runs: that
    // waits for the monitor to have seen it. A child's parent keeps it.
    let ours = |d: &Desc| matches!(d.kind(), Kind::Shm | Kind::Listener);
    let any = descs().any(|d| if spawn.is_some() { inheritable(d, to) } else { ours(d) });
    if !any && !descs().any(|d| hands_over_zones(d, to)) {
        return next;
    }
    let fate = match to.move_away() && start.is_in_fork_group() {
        true => Fate::Unknown,
        false => program::fate(start),
    };
    if fate == Fate::Fails {
        return next;
    }
    let loads = plan.loads && fate == Fate::Loads;
    next.successor = pass_on(to, any, loads, crate::rights::kept_by_exec);
    next
}

/// [`prepare`] for a child in this process's memory, which has found out what the program is.
fn prepare_for_child(to: &Actions, loads: bool) -> Next {
    crate::upgrade::give_up_all();
    let mut next = Next { successor: None, inject: false, reservations: false, hidden: false };
    let any = descs().any(|d| inheritable(d, to));
    if any || descs().any(|d| hands_over_zones(d, to)) {
        next.successor = pass_on(to, any, loads, || true);
    }
    next
}

/// The next program gets what it inherits: from a successor's control socket if it loads the library, else as the
/// kernel's. `any`: connections or listeners. `keeps_rights`: is asked if that matters.
fn pass_on(to: &Actions, any: bool, loads: bool, keeps_rights: impl FnOnce() -> bool) -> Option<(i32, u64)> {
    if !loads {
        descs().filter(|d| hands_over_zones(d, to)).for_each(zone::pass_on);
    }
    let can = any && loads && !ctl::dead() && keeps_rights() && !descs().any(|d| watches(d, to));
    let successor = can.then(|| bequeath(to)).flatten();
    if any && successor.is_none() {
        leave_all(to);
    }
    successor
}

/// All connections of this process become the kernel's.
pub fn hand_over_all() {
    leave_to_kernel(|_| true);
}

/// Everything inheritable becomes the kernel's, because it cannot be known what
/// the next program is.
pub fn before_unknown() {
    if process::nonce() != 0 {
        pool::drain();
        crate::upgrade::give_up_all();
        leave_to_kernel(|d| inheritable(d, &Actions::NONE));
    }
}

/// The next program has the descriptors, and nothing of us.
fn leave_all(to: &Actions) {
    for d in descs().filter(|d| d.kind() == Kind::Listener && inheritable(d, to)) {
        if hands_over(d, to) {
            path::pass_on(d, Reason::Option);
        } else {
            path::leave_to_kernel(d);
        }
    }
    leave_to_kernel(|d| inheritable(d, to));
}

/// Is the next program there to accept on this listener, while other processes of the fork group hold it and leave
/// it alone (dovecot's master and its services)? Or did a server that accepts just not say that
/// its helpers need none?
fn hands_over(d: &Desc, to: &Actions) -> bool {
    d.listening().is_exec_prepared() || !d.listening().accepts() || any_fd(d, |fd| to.take(fd))
}

/// The same of one that may have local listen sockets.
fn hands_over_zones(d: &Desc, to: &Actions) -> bool {
    zone::of(d).is_some() && hands_over(d, to) && survives(d, to)
}

fn descs() -> impl Iterator<Item = &'static Desc> {
    table::all()
}

fn inheritable(d: &Desc, to: &Actions) -> bool {
    if !matches!(d.kind(), Kind::Shm | Kind::Listener) {
        return false;
    }
    survives(d, to)
}

fn survives(d: &Desc, to: &Actions) -> bool {
    if let Actions::Child(_) = to {
        return to.kept(d).next().is_some();
    }
    any_fd(d, |fd| fd_survives(fd, to))
}

fn any_fd(d: &Desc, which: impl Fn(i32) -> bool) -> bool {
    let mut any = false;
    table::each_fd(d, |fd| any |= which(fd));
    any
}

/// An epoll instance that survives: what it watches in our queues and rings is
/// known to this program only.
fn watches(d: &Desc, to: &Actions) -> bool {
    d.kind() == Kind::Epoll && survives(d, to)
}

fn leave_to_kernel(which: impl Fn(&Desc) -> bool) {
    let mut at = 0;
    loop {
        let mut batch = [None; path::BATCH];
        let mut n = 0;
        while at < DESCS.len() && n < path::BATCH {
            if let Some(d) = DESCS.get(at).filter(|d| d.is_conn() && which(d)) {
                batch[n] = Some(d);
                n += 1;
            }
            at += 1;
        }
        if n == 0 {
            return;
        }
        path::materialize(&batch);
    }
}

/// Announce the successor and leave it everything inheritable.
fn bequeath(to: &Actions) -> Option<(i32, u64)> {
    let nonce = sys::getrandom_u64() | 1;
    let fd = ctl::announce(nonce, true)?;
    if to.end(fd) || !successor::mark(fd, nonce) {
        process::close_own(fd);
        return None;
    }
    for d in descs().filter(|d| inheritable(d, to)) {
        if let Some(l) = listen::of(d) {
            ctl::tell(request::Keep { nonce, listener: l.id.load(Ordering::Relaxed) }, None);
        } else if stage::of(d) == Path::Shm {
            leave_conn(d, nonce);
        }
    }
    // What has no place for another holder, or is about to leave the rings anyway.
    leave_to_kernel(|d| inheritable(d, to) && !left_to(d, nonce));
    // (A child that is there already is sent it.)
    if !matches!(to, Actions::Child(_)) {
        LOOSE.store(fd, Ordering::Release);
        let _ = sys::fcntl(fd, libc::F_SETFD, 0);
    }
    Some((fd, nonce))
}

fn left_to(d: &Desc, nonce: u64) -> bool {
    d.sock().is_held_by(nonce)
}

fn leave_conn(d: &'static Desc, nonce: u64) {
    let Some(cookie) = table::fd_of(d).and_then(successor::cookie) else { return };
    let s = d.sock();
    s.set_placeholder(cookie);
    // The placeholder is a kernel socket of two programs from here on.
    d.placeholder().mark_changed();
    let _ = s.add_holder(nonce);
}

impl Next {
    /// Call `f` with the environment for the next program.
    pub fn with_environment<R>(
        &self,
        env: *const *const libc::c_char,
        f: impl FnOnce(*const *const libc::c_char) -> R,
    ) -> R {
        let changes = Changes { successor: self.successor, inject: self.inject, hidden: self.hidden };
        environment::extended(env, changes, f)
    }

    /// There is no next program: `exec` has returned.
    pub fn failed(self) {
        if self.reservations {
            zone::successor::after_exec();
        }
        let Some((fd, nonce)) = self.successor else { return };
        for d in descs().filter(|d| d.is_conn()) {
            d.sock().remove_holder(nonce);
        }
        // The monitor sees its end closed, and takes the listeners back.
        done_with(fd);
    }

    /// It runs, in a child.
    pub fn spawned(self) {
        if self.reservations {
            zone::successor::after_exec();
        }
        if let Some((fd, _)) = self.successor {
            done_with(fd);
        }
    }
}

fn done_with(fd: i32) {
    let _ = LOOSE.compare_exchange(fd, -1, Ordering::AcqRel, Ordering::Relaxed);
    process::close_own(fd);
}

/// In a forked child: a successor that another thread of the parent is starting.
pub fn become_child() {
    SPAWNING.reset_after_fork();
    if LOOSE.load(Ordering::Relaxed) >= 0 {
        process::close_own(LOOSE.swap(-1, Ordering::AcqRel));
    }
}

/// Run a `posix_spawn`: one thread at a time, so that no child gets another's
/// successor.
pub fn one_at_a_time<R>(f: impl FnOnce() -> R) -> R {
    let _lock = SPAWNING.lock();
    f()
}

/// Code that we do not see is about to use `fd`.
pub fn hand_over(fd: i32) {
    crate::upgrade::give_up_fd(fd);
    if let Some(d) = table::lookup(fd).filter(|d| d.is_conn()) {
        path::materialize_one(d, Reason::Option);
    }
}

/// Is there something of ours that the next program could need?
#[inline]
pub fn is_concerned() -> bool {
    process::nonce() != 0 && !nothing_to_keep()
}

/// Is there nothing of ours that a forked child or the next program would have to put in order, as in
/// a shell?
pub fn nothing_to_keep() -> bool {
    table::DESCS.is_empty()
        && epoll::is_unused()
        && zone::is_unused()
        && crate::rings::is_unused()
        && !crate::arena::is_wanted()
}
