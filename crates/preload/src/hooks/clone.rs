//! `clone` with a function and a stack that is a `vfork` otherwise: the child runs in the parent's memory.

use fsocket_lifecycle::lend;
use fsocket_runtime::lent::{self, Loan};
use libc::*;

/// The child borrows the parent's memory, the parent waits, and descriptors are not shared.
pub const BORROWS: u64 = (CLONE_VM | CLONE_VFORK) as u64;
const SHARES: u64 = (CLONE_THREAD | CLONE_FILES) as u64;
/// Does clone(2) with these flags make such a child?
pub fn is_vfork(flags: u64) -> bool {
    flags & BORROWS == BORROWS && flags & SHARES == 0
}

/// The child has a stack of its own, so that the parent waits on this one. None: it is no such child.
///
/// # Safety
/// As clone(2), with a function and a stack.
pub unsafe fn clone(
    [f, stack, arg]: [*mut c_void; 3],
    flags: c_int,
    parent_tid: *mut c_void,
    tls: *mut c_void,
) -> Option<c_int> {
    if !is_vfork(flags as u64) || flags & (CLONE_CHILD_CLEARTID | CLONE_CHILD_SETTID) != 0 || lent::is_borrower() {
        return None;
    }
    let thread = if flags & CLONE_SETTLS != 0 { tls as u64 } else { fsocket_sys::cpu::thread_id() };
    // SAFETY: null, or a new loan.
    let loan = unsafe { lend::begin(flags as u64 & !(CLONE_SETTLS as u64), 0, thread).as_ref() }?;
    struct Start<'a>(extern "C" fn(*mut c_void) -> c_int, *mut c_void, &'a Loan);
    extern "C" fn begin(start: *mut c_void) -> c_int {
        // SAFETY: on the parent's stack, where it stays until this child is done.
        let Start(f, arg, loan) = unsafe { core::ptr::read(start as *const Start) };
        lend::born(loan);
        f(arg)
    }
    // SAFETY: clone's function.
    let f = unsafe { core::mem::transmute::<*mut c_void, extern "C" fn(*mut c_void) -> c_int>(f) };
    let mut start = Start(f, arg, loan);
    let flags = flags & !CLONE_VFORK | CLONE_CHILD_CLEARTID;
    let state = (&raw const loan.head.state).cast_mut().cast();
    // SAFETY: the program's function and stack, as for libc's; `start` and the loan, where the kernel's word lies, outlive
    // the child.
    let r = real!(clone(begin as *mut c_void, stack, flags, (&raw mut start).cast(), parent_tid, tls, state));
    let made = if r < 0 { -i64::from(fsocket_sys::Errno::last().raw()) } else { r.into() };
    let r = lend::serve(loan, made);
    lend::end(loan);
    Some(r as c_int)
}
