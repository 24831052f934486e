//! Connections that leave this program: through `exec` and `posix_spawn`, or into code of libc
//! that makes its own system calls.
//!
//! A program that will load the library inherits connections and listeners as they are
//! ([`crate::inherit`] is the other half). For every other program they move to the kernel first.

pub mod actions;
pub mod borrower;
pub mod environment;
mod hidden;
mod own_file;
mod program;

use crate::lock::Lock;
use crate::path;
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

/// Calls `f` with the environment for the next program, when nothing else needs preparation.
#[link_section = ".text.fsocket_start"]
pub fn with_environment<R>(env: *const *const libc::c_char, f: impl FnOnce(*const *const libc::c_char) -> R) -> R {
    // Without the first condition, every child of a shell would check its arguments.
    let hidden = environment::hides_us() && probe::are_strings(env);
    environment::extended(env, Changes { hidden, ..Changes::default() }, f)
}

/// State that was prepared for the next program. [`Next::failed`] or [`Next::spawned`] ends it.
pub struct Next {
    /// The next program's control socket, which is a descriptor that survives `exec`, and its
    /// nonce.
    successor: Option<(i32, u64)>,
    /// The next program runs the same binary and inherits sockets, but its environment was
    /// cleared. The library is added to the environment all the same, because otherwise zones and
    /// connections would stay with the kernel's socket. (If there is nothing to inherit, the
    /// environment stays as the program wants it.)
    inject: bool,
    /// The next program inherits reservations of zoned listeners.
    reservations: bool,
    /// The next program could not open the library's file.
    hidden: bool,
}

/// The successor's socket while another thread is in `posix_spawn`. A child that is forked
/// meanwhile closes it.
static LOOSE: AtomicI32 = AtomicI32::new(-1);
/// Held during `posix_spawn`.
#[link_section = ".data.fsocket_start"]
static SPAWNING: Lock<()> = Lock::new(());

/// Prepares the next program, which replaces this one or (`spawn`, after these file actions)
/// starts in a child.
pub fn prepare(start: &Start, spawn: Option<&Actions>) -> Next {
    let hidden = environment::hides_us();
    if !is_concerned() {
        return Next { successor: None, inject: false, reservations: false, hidden };
    }
    prepare_all(start, spawn, hidden)
}

/// Which parts of the library the next program will have.
struct Plan {
    /// The library and shared memory, if a dynamic loader starts the program.
    loads: bool,
    /// See [`Next::inject`].
    inject: bool,
    /// Local listen sockets (zones).
    zones: bool,
}

impl Plan {
    /// `inherits`: does the program inherit anything from the library? `replaces`: does the
    /// program replace this one? (Otherwise it starts in a child.)
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
    // The next program does not know the spare placeholders.
    pool::drain();
    // Close-on-exec sockets end with this program, and the monitor must see that before the next
    // program runs. (Before a spawn they stay in the parent.)
    let ours = |d: &Desc| matches!(d.kind(), Kind::Shm | Kind::Listener);
    let any = descs().any(|d| if spawn.is_some() { inheritable(d, to) } else { ours(d) });
    if !any && !descs().any(|d| hands_over_zones(d, to)) {
        return next;
    }
    let fate = match to.move_away() && start.is_relative() {
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

/// Like [`prepare`], for a child in this process's memory. That child has already examined the
/// program.
fn prepare_for_child(to: &Actions, loads: bool) -> Next {
    crate::upgrade::give_up_all();
    let mut next = Next { successor: None, inject: false, reservations: false, hidden: false };
    let any = descs().any(|d| inheritable(d, to));
    if any || descs().any(|d| hands_over_zones(d, to)) {
        next.successor = pass_on(to, any, loads, || true);
    }
    next
}

/// Prepares what the next program inherits: with a successor's control socket if it loads the
/// library, otherwise by moving everything to the kernel. `any`: there are connections or
/// listeners to inherit. `keeps_rights` is called only if the answer matters.
fn pass_on(to: &Actions, any: bool, loads: bool, keeps_rights: impl FnOnce() -> bool) -> Option<(i32, u64)> {
    let loads = loads && own_file::is_current();
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

/// Moves all connections of this process to the kernel.
pub fn hand_over_all() {
    leave_to_kernel(|_| true);
}

/// Moves everything inheritable to the kernel, because the next program is unknown.
pub fn before_unknown() {
    if process::nonce() != 0 {
        pool::drain();
        crate::upgrade::give_up_all();
        leave_to_kernel(|d| inheritable(d, &Actions::NONE));
    }
}

/// Moves what the next program inherits to the kernel, because it has the descriptors but not the
/// library.
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

/// Will the next program accept on this listener, while other processes of the fork group only
/// hold it? (An example is dovecot's master with its services.) False: a server accepts here
/// itself, and has only forgotten to mark the listener close-on-exec.
fn hands_over(d: &Desc, to: &Actions) -> bool {
    d.listening().is_exec_prepared() || !d.listening().accepts() || any_fd(d, |fd| to.take(fd))
}

/// Like [`hands_over`], for a listener that may have local listen sockets.
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

/// Does an epoll instance survive? Its entries for queues and rings are known only to this
/// program.
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

/// Announces the successor to the monitor, and leaves it everything inheritable.
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
        } else if d.is_in_rings() {
            leave_conn(d, nonce);
        }
    }
    // Moves the connections that could not be left to the successor: those that have no room for
    // another holder, or are about to leave the rings anyway.
    leave_to_kernel(|d| inheritable(d, to) && !left_to(d, nonce));
    // A child that exists already gets the socket in a message.
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
    // From here on two programs share the placeholder.
    d.placeholder().mark_changed();
    let _ = s.add_holder(nonce);
}

impl Next {
    /// Calls `f` with the environment for the next program.
    pub fn with_environment<R>(
        &self,
        env: *const *const libc::c_char,
        f: impl FnOnce(*const *const libc::c_char) -> R,
    ) -> R {
        let changes = Changes { successor: self.successor, inject: self.inject, hidden: self.hidden };
        environment::extended(env, changes, f)
    }

    /// Takes everything back, because `exec` has failed.
    pub fn failed(self) {
        if self.reservations {
            zone::successor::after_exec();
        }
        let Some((fd, nonce)) = self.successor else { return };
        for d in descs().filter(|d| d.is_conn()) {
            d.sock().remove_holder(nonce);
        }
        // The monitor sees that the successor's socket is closed, and takes the listeners back.
        done_with(fd);
    }

    /// Cleans up in the parent, because the next program runs in a child.
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

/// In a forked child: closes the socket of a successor that another thread of the parent is
/// starting.
pub fn become_child() {
    SPAWNING.reset_after_fork();
    if LOOSE.load(Ordering::Relaxed) >= 0 {
        process::close_own(LOOSE.swap(-1, Ordering::AcqRel));
    }
}

/// Runs `posix_spawn`s one at a time, so that no child inherits the successor's socket of another.
pub fn one_at_a_time<R>(f: impl FnOnce() -> R) -> R {
    let _lock = SPAWNING.lock();
    f()
}

/// Moves the connection `fd` to the kernel, because code below the hooks is about to use it.
pub fn hand_over(fd: i32) {
    crate::upgrade::give_up_fd(fd);
    if let Some(d) = table::lookup(fd).filter(|d| d.is_conn()) {
        path::materialize_one(d, Reason::Option);
    }
}

/// Does the library have state that the next program could need?
#[inline]
pub fn is_concerned() -> bool {
    process::nonce() != 0 && !nothing_to_keep()
}

/// True if the library has no state that a forked child or the next program would have to handle,
/// as in a shell.
pub fn nothing_to_keep() -> bool {
    table::DESCS.is_empty()
        && epoll::is_unused()
        && zone::is_unused()
        && crate::rings::is_unused()
        && !crate::arena::is_wanted()
}
