//! `exec` of a child that runs in its parent's memory ([`crate::lend`]): what its next program
//! inherits.
//!
//! The child records the descriptors that it has duplicated. At `exec` it checks which of them are
//! open, and reports those to the parent. The parent then prepares as for a `posix_spawn`, and
//! sends the sockets that have moved to kernel TCP. Both sides compare SO_COOKIE to make sure that
//! they mean the same socket, because other threads of the parent keep running.

use super::environment::{self, Changes};
use super::{program, Actions, Fate, Next, Plan, Start};
use crate::lent::{borrowed, state, Kept, Loan};
use crate::successor::cookie;
use crate::table::{self, Desc, Kind, DESCS};
use crate::{path, probe, process, rights, zone};
use core::sync::atomic::Ordering;
use fsocket_abi::arena::Reason;
use fsocket_sys as sys;

/// The child's questions, and flags of the first kind.
mod ask {
    /// Asks the parent to prepare what the next program inherits.
    pub const EXEC: u64 = 1;
    /// Reports that `exec` has failed.
    pub const FAILED: u64 = 2;
    /// Asks the parent to move a connection to the kernel.
    pub const HAND: u64 = 3;
    pub const KIND: u64 = 7;
    pub const LOADS: u64 = 8;
}

/// An answer: the entry of the list to which the sent descriptor belongs.
type Answer = [u64; 2];
/// Marks the last answer. It carries the successor's control socket and its nonce.
const DONE: u64 = u64::MAX;

type Env = *const *const libc::c_char;

/// The description that the child has behind `fd`. (The child may have duplicated another socket
/// to this number.)
fn described(loan: &Loan, fd: i32) -> Option<&'static Desc> {
    match loan.copied(fd) {
        Some(desc) => DESCS.get(desc.checked_sub(1)?),
        None => table::lookup(fd),
    }
}

/// Must a program that inherits `d` be prepared for it?
fn matters(d: &Desc) -> bool {
    const KINDS: [Kind; 5] = [Kind::Shm, Kind::Listener, Kind::Epoll, Kind::Fresh, Kind::Bound];
    KINDS.contains(&d.kind()) || zone::of(d).is_some()
}

/// Records that the child has duplicated `old` to `new`, or has cleared the close-on-exec flag
/// (then `old` and `new` are the same).
pub fn copied(loan: &Loan, old: i32, new: i32) {
    let desc = described(loan, old).filter(|d| matters(d));
    loan.note(new, desc.map_or(0, |d| d.index() + 1));
}

/// Calls `f` for each descriptor number that the child regards as one of a relevant description.
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

/// Makes the list of the numbers that `which` selects. False: there are none, or there is no
/// memory.
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
            // SAFETY: `len` is below `n`, and the mapping has room for `n` entries.
            unsafe { list.add(len).write(kept) };
            len += 1;
        }
    });
    loan.kept.set((list, n, len));
    len > 0
}

/// The list that [`write_down`] has made.
#[allow(clippy::mut_from_ref)] // the memory is a mapping that the loan only points to
fn kept(loan: &Loan) -> &mut [Kept] {
    let (list, _, len) = loan.kept.get();
    match list.is_null() {
        true => &mut [],
        // SAFETY: `write_down` has mapped the list and written that many entries. Parent and child
        // take turns, so only one of them uses the list.
        false => unsafe { core::slice::from_raw_parts_mut(list, len) },
    }
}

/// Frees the memory of the list.
pub fn forget(loan: &Loan) {
    let (list, room, _) = loan.kept.replace((core::ptr::null_mut(), 0, 0));
    if !list.is_null() {
        // SAFETY: `write_down` has mapped the list with room for that many entries, and nothing
        // refers to it any more.
        let _ = unsafe { sys::munmap(list.cast(), room * size_of::<Kept>()) };
    }
}

/// Runs `f`, which executes the child's next program.
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

/// Moves a connection over shared memory to kernel TCP, because the child itself uses `fd`.
pub fn touch(fd: i32) {
    let Some(loan) = borrowed().filter(|l| l.is_served()) else { return };
    let Some(d) = described(loan, fd).filter(|d| d.is_conn()) else { return };
    let _errno = sys::errno::Saved::errno();
    let meant = cookie(fd);
    if meant.is_some() && write_down(loan, |n, other| core::ptr::eq(other, d) && cookie(n) == meant) {
        question(loan, ask::HAND);
    }
}

/// Asks the parent, and puts the sockets that it sends under the child's numbers. Returns the
/// control socket and the nonce of the successor.
fn question(loan: &Loan, what: u64) -> Option<(i32, u64)> {
    if !loan.is_served() {
        return None;
    }
    loan.question.set(what);
    // Release: publishes the question and the list.
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
    // The parent is gone, or the child has closed its end by a raw system call.
    loan.is_never_served();
    None
}

/// Moves the descriptor to a high number for the next program, which may want the low ones.
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

/// Called by the parent: answers the child's question. `next`: what was prepared for the program
/// that the child executes.
pub fn answer(loan: &Loan, next: &mut Option<Next>) {
    let kept = kept(loan);
    for k in kept.iter_mut() {
        let d = DESCS.get(k.desc).filter(|d| d.is_used());
        let same = |fd: &i32| cookie(*fd).unwrap_or(0) == k.cookie;
        k.parents = d.and_then(table::fd_of).filter(same).unwrap_or(-1);
        if let Some(d) = d.filter(|_| k.parents >= 0) {
            // From here on two programs share the kernel's socket.
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

/// Are these valid strings of a program's arguments? For a child that must not install fault
/// handlers.
pub fn are_strings(file: *const libc::c_char, lists: [Env; 2]) -> bool {
    probe::is_string(file) && lists.into_iter().all(probe::are_strings)
}
