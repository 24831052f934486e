//! `exec` of a child that runs in its parent's memory ([`crate::lend`]): what its next program inherits.
//!
//! The child keeps in mind which numbers it has duplicated, looks which of them are open at `exec`, and says so. The
//! parent then does what it would do before a `posix_spawn`, and hands over the sockets that have become kernel TCP.
//! Each side checks by SO_COOKIE that the two mean the same socket: other threads of the parent go on meanwhile.

use super::environment::{self, Changes};
use super::{program, Actions, Fate, Next, Plan, Start};
use crate::lent::{borrowed, state, Kept, Loan};
use crate::successor::cookie;
use crate::table::{self, Desc, Kind, DESCS};
use crate::{path, probe, process, rights, zone};
use core::sync::atomic::Ordering;
use fsocket_abi::arena::Reason;
use fsocket_sys as sys;

/// Questions, and the flags of the first one.
mod ask {
    /// The parent is to prepare the next program's inheritance.
    pub const EXEC: u64 = 1;
    /// There is none.
    pub const FAILED: u64 = 2;
    /// A connection is to become the kernel's.
    pub const HAND: u64 = 3;
    pub const KIND: u64 = 7;
    pub const LOADS: u64 = 8;
}

/// An answer: which entry the descriptor that comes along is for.
type Answer = [u64; 2];
/// The last one; then the nonce of the successor whose control socket comes along.
const DONE: u64 = u64::MAX;

type Env = *const *const libc::c_char;

/// The description that the child believes behind `fd`.
fn described(loan: &Loan, fd: i32) -> Option<&'static Desc> {
    match loan.copied(fd) {
        Some(desc) => DESCS.get(desc.checked_sub(1)?),
        None => table::lookup(fd),
    }
}

/// Does a program behave otherwise if it inherits `d`?
fn matters(d: &Desc) -> bool {
    const KINDS: [Kind; 5] = [Kind::Shm, Kind::Listener, Kind::Epoll, Kind::Fresh, Kind::Bound];
    KINDS.contains(&d.kind()) || zone::of(d).is_some()
}

/// The child has duplicated `old`, or no longer has it closed at `exec` (`old` and `new` are one).
pub fn copied(loan: &Loan, old: i32, new: i32) {
    let desc = described(loan, old).filter(|d| matters(d));
    loan.note(new, desc.map_or(0, |d| d.index() + 1));
}

/// Do `f` for each number that the child takes for one of something that matters.
fn each_number(loan: &Loan, mut f: impl FnMut(i32, &'static Desc, bool)) {
    table::each(|fd, d| {
        if matters(d) && loan.copied(fd).is_none() {
            f(fd, d, false);
        }
    });
    for c in loan.all_copied() {
        if let Some(d) = DESCS.get(c.desc - 1).filter(|d| matters(d)) {
            f(c.fd, d, true);
        }
    }
}

/// Writes down the numbers that `which` takes. False: there are none, or there is no memory.
fn write_down(loan: &Loan, which: impl Fn(i32, &Desc) -> bool) -> bool {
    forget(loan);
    let mut n = 0;
    each_number(loan, |fd, d, _| n += usize::from(which(fd, d)));
    let (prot, flags) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
    if n == 0 {
        return false;
    }
    let Ok(memory) = sys::mmap(n * size_of::<Kept>(), prot, flags, -1, 0) else { return false };
    let list = memory.cast::<Kept>();
    let mut len = 0;
    each_number(loan, |fd, d, prepared| {
        if len < n && which(fd, d) {
            let kept = Kept { fd, parents: -1, desc: d.index(), prepared, cookie: cookie(fd).unwrap_or(0) };
            // SAFETY: below `n`, for which there is room.
            unsafe { list.add(len).write(kept) };
            len += 1;
        }
    });
    loan.kept.set((list, n, len));
    len > 0
}

/// The numbers that were written down.
#[allow(clippy::mut_from_ref)] // the memory is a mapping of the loan's, not the loan
fn kept(loan: &Loan) -> &mut [Kept] {
    let (list, _, len) = loan.kept.get();
    match list.is_null() {
        true => &mut [],
        // SAFETY: mapped by `write_down`, with that many entries; parent and child look at it by turns.
        false => unsafe { core::slice::from_raw_parts_mut(list, len) },
    }
}

/// Gives the memory of the list back.
pub fn forget(loan: &Loan) {
    let (list, room, _) = loan.kept.replace((core::ptr::null_mut(), 0, 0));
    if !list.is_null() {
        // SAFETY: mapped by `write_down`.
        let _ = unsafe { sys::munmap(list.cast(), room * size_of::<Kept>()) };
    }
}

/// `f` replaces the child.
pub fn execute(loan: &Loan, start: &Start, env: Env, f: impl FnOnce(Env) -> i32) -> i32 {
    let hidden = environment::hides_us();
    let unchanged = Changes { hidden, ..Changes::default() };
    let survives = |fd: i32, _: &Desc| sys::fcntl(fd, libc::F_GETFD, 0).is_ok_and(|f| f & libc::FD_CLOEXEC == 0);
    if !loan.is_served() || !write_down(loan, survives) {
        return environment::extended(env, unchanged, f);
    }
    let plan = Plan::of(start, hidden, || true, true);
    let fate = program::fate(start);
    if fate == Fate::Fails {
        return environment::extended(env, unchanged, f);
    }
    if plan.zones {
        let is_kept = |d: &Desc| kept(loan).iter().any(|k| k.desc == d.index());
        zone::successor::before_exec(|fd| table::lookup(fd).is_some_and(is_kept));
    }
    let loads = plan.loads && fate == Fate::Loads && rights::kept_by_exec();
    loan.class.set(rights::class());
    let successor = question(loan, ask::EXEC | if loads { ask::LOADS } else { 0 });
    let r = environment::extended(env, Changes { successor, inject: plan.inject, hidden }, f);
    let _errno = sys::errno::Saved::errno();
    if plan.zones {
        zone::successor::after_exec();
    }
    if let Some((fd, _)) = successor {
        let _ = sys::close(fd);
    }
    question(loan, ask::FAILED);
    r
}

/// The child uses `fd` itself: a connection over shared memory becomes kernel TCP.
pub fn touch(fd: i32) {
    let Some(loan) = borrowed().filter(|l| l.is_served()) else { return };
    let Some(d) = described(loan, fd).filter(|d| d.is_conn()) else { return };
    let _errno = sys::errno::Saved::errno();
    let meant = cookie(fd);
    if meant.is_some() && write_down(loan, |n, other| core::ptr::eq(other, d) && cookie(n) == meant) {
        question(loan, ask::HAND);
    }
}

/// Asks the parent, and puts what it hands over under the child's numbers. Returns control socket and nonce of the
/// successor.
fn question(loan: &Loan, what: u64) -> Option<(i32, u64)> {
    if !loan.is_served() {
        return None;
    }
    loan.question.set(what);
    // Release: the question, and what was written down.
    loan.head.state.store(state::ASKS, Ordering::Release);
    sys::futex_wake(&loan.head.state, 1);
    loop {
        let mut bytes = [0u8; size_of::<Answer>()];
        let fd = match sys::recv_with_fd(loan.end.get(), &mut bytes, 0) {
            Ok((n, fd)) if n == bytes.len() => fd,
            Err(sys::Errno::EINTR) => continue,
            _ => break,
        };
        let [low, high] = [0, 8].map(|at| u64::from_ne_bytes(core::array::from_fn(|i| bytes[at + i])));
        if low == DONE {
            return Some((for_next(fd?), high));
        }
        if let (Some(fd), Some(k)) = (fd, kept(loan).get(low as usize)) {
            let flags = sys::fcntl(k.fd, libc::F_GETFD, 0).unwrap_or(0);
            let _ = sys::dup3(fd, k.fd, if flags & libc::FD_CLOEXEC != 0 { libc::O_CLOEXEC } else { 0 });
            let _ = sys::close(fd);
        }
    }
    // The parent is gone, or the child has closed its end past the library.
    loan.is_never_served();
    None
}

/// A number for the next program, out of the way of the small ones.
fn for_next(fd: i32) -> i32 {
    match sys::fcntl(fd, libc::F_DUPFD, process::high() as usize) {
        Ok(high) => {
            let _ = sys::close(fd);
            high
        }
        Err(_) => {
            let _ = sys::fcntl(fd, libc::F_SETFD, 0);
            fd
        }
    }
}

/// The parent: does what the child asks for. `next`: what was prepared for the program that it executes.
pub fn answer(loan: &Loan, next: &mut Option<Next>) {
    let kept = kept(loan);
    for k in kept.iter_mut() {
        let d = DESCS.get(k.desc).filter(|d| d.is_used());
        let same = |fd: &i32| cookie(*fd).unwrap_or(0) == k.cookie;
        k.parents = d.and_then(table::fd_of).filter(same).unwrap_or(-1);
        if let Some(d) = d.filter(|_| k.parents >= 0) {
            // The kernel's socket is one of two programs from here on.
            d.placeholder().mark_changed();
        }
    }
    let what = loan.question.get();
    match what & ask::KIND {
        ask::EXEC => {
            let loads = what & ask::LOADS != 0 && loan.class.get() == rights::class();
            *next = Some(super::prepare_for_child(&Actions::Child(kept), loads));
        }
        ask::HAND => kept.iter().filter(|k| k.parents >= 0).for_each(|k| hand_over(k.parents)),
        _ => {
            if let Some(next) = next.take() {
                next.failed();
            }
        }
    }
    let end = loan.parents_end().load(Ordering::Relaxed);
    let send = |a: Answer, fd: Option<i32>| {
        let mut bytes = [0u8; size_of::<Answer>()];
        bytes.chunks_exact_mut(8).zip(a).for_each(|(to, v)| to.copy_from_slice(&v.to_ne_bytes()));
        let _ = sys::send_with_fd(end, &bytes, fd, 0);
    };
    for (i, k) in kept.iter().enumerate().filter(|(_, k)| k.parents >= 0 && k.cookie != 0) {
        if cookie(k.parents) != Some(k.cookie) {
            send([i as u64, 0], Some(k.parents));
        }
    }
    let successor = next.as_ref().and_then(|n| n.successor);
    send([DONE, successor.map_or(0, |(_, nonce)| nonce)], successor.map(|(fd, _)| fd));
}

fn hand_over(fd: i32) {
    crate::upgrade::give_up_fd(fd);
    if let Some(d) = table::lookup(fd).filter(|d| d.is_conn()) {
        path::materialize_one(d, Reason::Option);
    }
}

/// Strings of a program's arguments, of a child that must leave the handlers of faults alone.
pub fn are_strings(file: *const libc::c_char, lists: [Env; 2]) -> bool {
    probe::is_string(file) && lists.into_iter().all(probe::are_strings)
}
