//! `clone` with a function and a stack, when the child runs in the parent's memory as after
//! `vfork`. Such a child must not change the library's state.

use fsocket_lifecycle::lend;
use fsocket_runtime::lent::{self, Loan};
use libc::*;

/// Flags of a child that borrows memory: the child runs in the parent's memory, and the parent
/// waits.
pub const BORROWS: u64 = (CLONE_VM | CLONE_VFORK) as u64;
const SHARES: u64 = (CLONE_THREAD | CLONE_FILES) as u64;
/// Does clone(2) with these flags make a child that borrows memory? (The child must have its own
/// descriptors.)
pub fn is_vfork(flags: u64) -> bool {
    flags & BORROWS == BORROWS && flags & SHARES == 0
}

/// Makes the child. The child has its own stack, so the parent can wait on the present one. None:
/// this is no such child.
///
/// # Safety
/// As for clone(2), with a function and a stack.
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
    // SAFETY: null, or a new loan that stays valid until `lend::end`.
    let loan = unsafe { lend::begin(flags as u64 & !(CLONE_SETTLS as u64), 0, thread).as_ref() }?;
    struct Start<'a>(extern "C" fn(*mut c_void) -> c_int, *mut c_void, &'a Loan);
    extern "C" fn begin(start: *mut c_void) -> c_int {
        // SAFETY: `start` is on the parent's stack, and the parent waits there until this child is
        // done.
        let Start(f, arg, loan) = unsafe { core::ptr::read(start as *const Start) };
        lend::born(loan);
        f(arg)
    }
    // SAFETY: clone(2) takes a function of this type.
    let f = unsafe { core::mem::transmute::<*mut c_void, extern "C" fn(*mut c_void) -> c_int>(f) };
    let mut start = Start(f, arg, loan);
    let flags = flags & !CLONE_VFORK | CLONE_CHILD_CLEARTID;
    let state = (&raw const loan.head.state).cast_mut().cast();
    // SAFETY: function and stack are those with which the program has called clone(2). `start`,
    // and the loan with the kernel's word, outlive the child's use of this memory.
    let r = real!(clone(begin as *mut c_void, stack, flags, (&raw mut start).cast(), parent_tid, tls, state));
    let made = if r < 0 { -i64::from(fsocket_sys::Errno::last().raw()) } else { r.into() };
    let r = lend::serve(loan, made);
    lend::end(loan);
    Some(r as c_int)
}
