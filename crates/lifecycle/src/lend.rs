//! `vfork`, in the parent. The thread that makes the child waits on a stack of its own, until the child has executed a
//! program or is over. Meanwhile it does what the child asks for.
//!
//! The kernel's own wait (`CLONE_VFORK`) would do nothing for the child. As there, no signal is handled meanwhile.

use crate::lent::{state, Loan};
use crate::{exec, pool, process};
use core::sync::atomic::Ordering;
use fsocket_sys as sys;

/// The waiting thread's stack, with the loan at its upper end, and a page below it that is not there.
const SIZE: usize = 256 << 10;
const PAGE: usize = 4096;

/// The memory of a loan begins there.
fn base(loan: *const Loan) -> *mut u8 {
    (loan as usize + size_of::<Loan>() - SIZE) as *mut u8
}

fn set_mask(new: u64) -> u64 {
    let mut old = 0u64;
    let how = libc::SIG_SETMASK as usize;
    // SAFETY: the kernel's signal sets are 8 bytes long.
    let _ =
        unsafe { sys::raw(libc::SYS_rt_sigprocmask, [how, &raw const new as usize, &raw mut old as usize, 8, 0, 0]) };
    old
}

/// Has the program a handler of SIGCHLD?
fn handles_childs_end() -> bool {
    // The kernel's `struct sigaction` begins with the handler.
    let mut action = [0u64; 4];
    let args = [libc::SIGCHLD as usize, 0, &raw mut action as usize, 8, 0, 0];
    // SAFETY: no action is set; the old one has at most these 32 bytes, and its signal set 8 of them.
    let asked = unsafe { sys::raw(libc::SYS_rt_sigaction, args) };
    asked.is_err() || ![libc::SIG_DFL, libc::SIG_IGN].contains(&(action[0] as usize))
}

/// Before clone(2) with these flags, which make a child in this process's memory. `thread`: its thread pointer.
/// Null: it cannot be had, or the child would not be told from this process.
pub fn begin(flags: u64, pidfd: u64, thread: u64) -> *const Loan {
    if crate::sealed::sealed() || sys::getpid() == 1 && process::has_left_namespaces() {
        return core::ptr::null();
    }
    let (prot, how) =
        (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE);
    let Ok(memory) = sys::mmap(SIZE, prot, how, -1, 0) else { return core::ptr::null() };
    // SAFETY: the lowest page of what was just mapped.
    let _ = unsafe { sys::mprotect(memory, PAGE, libc::PROT_NONE) };
    // All signals, libc's own, too: their handlers would run on the borrowed stack, or in the child for this thread. But not
    // the child's end if nobody handles it: the kernel drops an ignored signal only where it is not blocked, and would
    // interrupt a call of another thread.
    let mask = set_mask(if handles_childs_end() { u64::MAX } else { !(1 << (libc::SIGCHLD - 1)) });
    let flags = flags & !(libc::CLONE_VFORK as u64) | libc::CLONE_CHILD_CLEARTID as u64;
    // SAFETY: the upper end of the mapping is aligned to a page, and so the loan as its size is.
    let loan = unsafe {
        let loan = memory.add(SIZE - size_of::<Loan>()).cast::<Loan>();
        loan.write(Loan::new(flags, pidfd, thread, mask));
        &*loan
    };
    if !loan.register() {
        release(loan, mask);
        return core::ptr::null();
    }
    if !exec::nothing_to_keep() {
        prepare(loan);
    }
    loan
}

/// A way to ask, and no number of the program's that it believes closed.
fn prepare(loan: &Loan) {
    if let Ok([child, parent]) = sys::socketpair(libc::AF_UNIX, libc::SOCK_SEQPACKET | libc::SOCK_CLOEXEC) {
        loan.parents_end().store(process::high_fd(parent), Ordering::Release);
        loan.end.set(process::high_fd(child));
    }
    loan.locked.set(pool::drain_for_loan());
}

/// The child, first of all.
pub fn born(loan: &Loan) {
    let parents = loan.parents_end().load(Ordering::Relaxed);
    if parents >= 0 {
        // So that the end of the parent is seen. (The number is this process's: no state of the library's changes.)
        let _ = sys::close(parents);
    }
    set_mask(loan.mask);
}

/// The parent, on the loan's stack, until the child is done with the memory. `made`: clone(2) has returned that.
pub fn serve(loan: &Loan, made: i64) -> i64 {
    if loan.locked.replace(false) {
        pool::unlock_after_fork();
    }
    if loan.end.get() >= 0 {
        process::close_own(loan.end.get());
    }
    if made < 0 {
        sys::Errno::new(-made as i32).set();
        return -1;
    }
    let mut next = None;
    loop {
        match loan.head.state.load(Ordering::Acquire) {
            state::OVER => break,
            state::RUNS => {
                let _ = sys::futex_wait(&loan.head.state, state::RUNS, None);
            }
            // (Not if the child has died since.)
            asks => {
                let state = &loan.head.state;
                if state.compare_exchange(asks, state::RUNS, Ordering::AcqRel, Ordering::Relaxed).is_ok() {
                    let _errno = sys::errno::Saved::errno();
                    exec::borrower::answer(loan, &mut next);
                }
            }
        }
    }
    let _errno = sys::errno::Saved::errno();
    if let Some(next) = next {
        next.spawned();
    }
    made
}

/// The parent, on its own stack again.
pub fn end(loan: &Loan) {
    let parents = loan.parents_end().swap(-1, Ordering::AcqRel);
    if parents >= 0 {
        process::close_own(parents);
    }
    exec::borrower::forget(loan);
    loan.unregister();
    release(loan, loan.mask);
}

fn release(loan: &Loan, mask: u64) {
    // SAFETY: mapped by `begin`, and nobody refers to it any more.
    let _ = unsafe { sys::munmap(base(loan), SIZE) };
    set_mask(mask);
}
