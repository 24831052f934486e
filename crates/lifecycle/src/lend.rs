//! `vfork`, in the parent. The thread that makes the child waits on a separate stack until the
//! child has executed a program or has ended. Meanwhile it answers the child's requests.
//!
//! The kernel's own wait (`CLONE_VFORK`) could not answer. As in that wait, the thread handles no
//! signals meanwhile.

use crate::lent::{state, Loan};
use crate::{exec, pool, process};
use core::sync::atomic::Ordering;
use fsocket_sys as sys;

/// Bytes of the waiting thread's stack. The loan is at its upper end, and an inaccessible page at
/// its lower end.
const SIZE: usize = 256 << 10;
const PAGE: usize = 4096;

/// The lowest address of a loan's memory.
fn base(loan: *const Loan) -> *mut u8 {
    (loan as usize + size_of::<Loan>() - SIZE) as *mut u8
}

fn set_mask(new: u64) -> u64 {
    let mut old = 0u64;
    let how = libc::SIG_SETMASK as usize;
    // SAFETY: the kernel's signal sets have 8 bytes, as `new` and `old` do.
    let _ =
        unsafe { sys::raw(libc::SYS_rt_sigprocmask, [how, &raw const new as usize, &raw mut old as usize, 8, 0, 0]) };
    old
}

/// Does the program handle SIGCHLD?
fn handles_childs_end() -> bool {
    // The kernel's `struct sigaction` begins with the handler.
    let mut action = [0u64; 4];
    let args = [libc::SIGCHLD as usize, 0, &raw mut action as usize, 8, 0, 0];
    // SAFETY: the call sets no action. It writes at most these 32 bytes, 8 of which are the signal
    // set.
    let asked = unsafe { sys::raw(libc::SYS_rt_sigaction, args) };
    asked.is_err() || ![libc::SIG_DFL, libc::SIG_IGN].contains(&(action[0] as usize))
}

/// Called before clone(2) with these flags, which make a child in this process's memory. `thread`:
/// the thread pointer of the child. Null: there is no memory, or the library could not distinguish
/// the child from this process.
pub fn begin(flags: u64, pidfd: u64, thread: u64) -> *const Loan {
    if crate::sealed::sealed() || sys::getpid() == 1 && process::has_left_namespaces() {
        return core::ptr::null();
    }
    let (prot, how) =
        (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE);
    let Ok(memory) = sys::mmap(SIZE, prot, how, -1, 0) else { return core::ptr::null() };
    // SAFETY: this is the lowest page of the new mapping, which nothing uses.
    let _ = unsafe { sys::mprotect(memory, PAGE, libc::PROT_NONE) };
    // Blocks all signals, including libc's own. Their handlers would run on the separate stack, or
    // in the child as if it were this thread. SIGCHLD stays unblocked if it has no handler: the
    // kernel drops an ignored signal only while it is not blocked. A blocked one would go to
    // another thread, and interrupt a call there.
    let mask = set_mask(if handles_childs_end() { u64::MAX } else { !(1 << (libc::SIGCHLD - 1)) });
    let flags = flags & !(libc::CLONE_VFORK as u64) | libc::CLONE_CHILD_CLEARTID as u64;
    // SAFETY: the loan ends at the upper end of the mapping. The end is page-aligned, so the loan
    // is aligned, too.
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

/// Makes a socket pair for questions, and empties the pool of placeholders: the program believes
/// that their numbers are closed.
fn prepare(loan: &Loan) {
    if let Ok([child, parent]) = sys::socketpair(libc::AF_UNIX, libc::SOCK_SEQPACKET | libc::SOCK_CLOEXEC) {
        loan.parents_end().store(process::high_fd(parent), Ordering::Release);
        loan.end.set(process::high_fd(child));
    }
    loan.locked.set(pool::drain_for_loan());
}

/// The first call of the child.
pub fn born(loan: &Loan) {
    let parents = loan.parents_end().load(Ordering::Relaxed);
    if parents >= 0 {
        // Closes the child's copy, so that the child notices when the parent ends. (Only the
        // number in the child is closed. The shared record of own descriptors must not change.)
        let _ = sys::close(parents);
    }
    set_mask(loan.mask);
}

/// Runs in the parent on the loan's stack, until the child does not use the memory any more.
/// `made`: the result of clone(2).
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
            // Takes the question, unless the child has died since.
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

/// Runs in the parent, on its own stack again.
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
    // SAFETY: `begin` has mapped the memory with this size, and nothing refers to it any more.
    let _ = unsafe { sys::munmap(base(loan), SIZE) };
    set_mask(mask);
}
