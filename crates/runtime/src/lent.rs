//! Handles `vfork`: this process lends its memory to a child until the child executes a program or
//! ends.
//!
//! The child has its own descriptors and process number. It shares memory, stack and thread
//! pointer with the thread that made it; the thread pointer identifies it. That thread waits
//! meanwhile on a separate stack, and acts for the child, because the child must not change the
//! library's records of the parent's descriptors. Parent and child take turns, so only one of them
//! uses a [`Loan`] at a time.

use crate::process;
use core::cell::Cell;
use core::sync::atomic::{AtomicI32, AtomicPtr, AtomicU32, AtomicU64, Ordering};
use fsocket_sys as sys;

/// The most loans at a time.
const LOANS: usize = 32;
/// The most descriptor numbers that a loan remembers for one child that prepares its next program.
const COPIES: usize = 64;

/// Thread pointers of the children; 0: free.
static CHILDREN: [AtomicU64; LOANS] = [const { AtomicU64::new(0) }; LOANS];
/// The loans. Used only by the thread that made the loan, and by its child.
static PLACES: [AtomicPtr<Loan>; LOANS] = [const { AtomicPtr::new(core::ptr::null_mut()) }; LOANS];
/// The parent's ends of the socket pairs; -1: none.
static ENDS: [AtomicI32; LOANS] = [const { AtomicI32::new(-1) }; LOANS];

/// Values of [`Head::state`]. The kernel writes [`state::OVER`] when the child leaves this memory.
pub mod state {
    pub const OVER: u32 = 0;
    pub const RUNS: u32 = 1;
    pub const ASKS: u32 = 2;
}

/// Used at fixed offsets by the assembly code that makes the child (`preload/src/hooks/vfork.rs`).
#[repr(C)]
pub struct Head {
    /// First argument of clone(2).
    pub flags: u64,
    /// Fourth argument of clone(2).
    pub state: AtomicU32,
    reserved: u32,
    /// Third argument of clone(2).
    pub pidfd: u64,
    /// Stack pointer and return address of the caller, and the value of one register.
    caller: [Cell<u64>; 3],
}
const _: () = assert!(core::mem::offset_of!(Head, state) == 8 && core::mem::offset_of!(Head, pidfd) == 16);
const _: () = assert!(core::mem::offset_of!(Head, caller) == 24 && core::mem::offset_of!(Loan, head) == 0);

/// A descriptor that the child has made, or has kept open for the next program.
#[derive(Clone, Copy)]
pub struct Copied {
    pub fd: i32,
    /// Index + 1 of its description. 0: the descriptor is no longer one of the library.
    pub desc: u32,
}

/// A descriptor that the child's next program gets, and that the child regards as one of `desc`.
#[derive(Clone, Copy)]
pub struct Kept {
    pub fd: i32,
    /// A descriptor of the same description in the parent; -1: there is none.
    pub parents: i32,
    /// Index of the description.
    pub desc: u32,
    /// The child has prepared it for the next program.
    pub prepared: bool,
    /// SO_COOKIE of the child's socket under this number; 0: no socket.
    pub cookie: u64,
}

#[repr(C, align(64))]
pub struct Loan {
    pub head: Head,
    lender: i32,
    thread: u64,
    /// Signals that the caller blocks.
    pub mask: u64,
    place: Cell<usize>,
    /// The child's number of its end of a socket pair. -1: the child needs no answers, because the
    /// parent has no connection.
    pub end: Cell<i32>,
    /// The pool of placeholders stays locked until the child is made.
    pub locked: Cell<bool>,
    /// The child has forked, so no parent answers the grandchild.
    orphan: Cell<bool>,
    /// Memory that the child maps, for its question to the parent and the descriptors in the
    /// question.
    pub question: Cell<u64>,
    /// The descriptors for the next program: address, capacity and number of entries.
    pub kept: Cell<(*mut Kept, usize, usize)>,
    /// The child's rights ([`crate::rights::class`]).
    pub class: Cell<u64>,
    copies: [Cell<Copied>; COPIES],
}

impl Loan {
    /// `thread`: the thread pointer of the child.
    pub fn new(flags: u64, pidfd: u64, thread: u64, mask: u64) -> Loan {
        Loan {
            head: Head {
                flags,
                state: AtomicU32::new(state::RUNS),
                reserved: 0,
                pidfd,
                caller: [const { Cell::new(0) }; 3],
            },
            lender: sys::getpid(),
            thread,
            mask,
            place: Cell::new(0),
            end: Cell::new(-1),
            locked: Cell::new(false),
            orphan: Cell::new(false),
            question: Cell::new(0),
            kept: Cell::new((core::ptr::null_mut(), 0, 0)),
            class: Cell::new(0),
            copies: [const { Cell::new(Copied { fd: -1, desc: 0 }) }; COPIES],
        }
    }

    /// Enters the loan in the tables. False: there are too many loans.
    pub fn register(&self) -> bool {
        let free = |c: &&AtomicU64| c.compare_exchange(0, self.thread, Ordering::AcqRel, Ordering::Relaxed).is_ok();
        // Counted first and released last, because a fork in between forgets all counted loans.
        process::lends(true);
        let Some(at) = CHILDREN.iter().position(|c| free(&c)) else {
            process::lends(false);
            return false;
        };
        self.place.set(at);
        PLACES[at].store(core::ptr::from_ref(self).cast_mut(), Ordering::Release);
        true
    }

    /// The parent's end of the socket pair; -1: none.
    pub fn parents_end(&self) -> &AtomicI32 {
        &ENDS[self.place.get()]
    }

    /// Removes the loan, because the child has ended or executed a program.
    pub fn unregister(&self) {
        let at = self.place.get();
        PLACES[at].store(core::ptr::null_mut(), Ordering::Relaxed);
        CHILDREN[at].store(0, Ordering::Release);
        process::lends(false);
    }

    /// Does the parent answer this child?
    pub fn is_served(&self) -> bool {
        !self.orphan.get() && self.end.get() >= 0
    }

    pub fn is_never_served(&self) {
        self.orphan.set(true);
    }

    /// The description (index + 1, or 0) that the child has put behind `fd`, if a hook has seen
    /// that.
    pub fn copied(&self, fd: i32) -> Option<u32> {
        self.copies.iter().map(Cell::get).find(|c| c.fd == fd).map(|c| c.desc)
    }

    /// Records that `fd` of the child now belongs to a description (index + 1), or to none (0).
    pub fn note(&self, fd: i32, desc: u32) {
        let at = |fd: i32| self.copies.iter().find(|c| c.get().fd == fd);
        if let Some(place) = at(fd).or_else(|| if desc == 0 { None } else { at(-1) }) {
            place.set(Copied { fd, desc });
        }
    }

    pub fn all_copied(&self) -> impl Iterator<Item = Copied> + '_ {
        self.copies.iter().map(Cell::get).filter(|c| c.fd >= 0 && c.desc > 0)
    }
}

/// The loan whose memory this process uses, if it is such a child.
#[inline]
pub fn borrowed() -> Option<&'static Loan> {
    match process::is_lent() {
        true => find(),
        false => None,
    }
}

#[inline]
pub fn is_borrower() -> bool {
    borrowed().is_some()
}

#[cold]
fn find() -> Option<&'static Loan> {
    let me = sys::cpu::thread_id();
    let at = CHILDREN.iter().position(|c| c.load(Ordering::Acquire) == me)?;
    // SAFETY: null, or the loan of this thread, which removes the loan only when the child does
    // not use it any more.
    let loan = unsafe { PLACES[at].load(Ordering::Acquire).as_ref() }?;
    // The parent has the same thread pointer: its handlers run before or after the call.
    (loan.lender != sys::getpid()).then_some(loan)
}

/// In a forked child: the loans belong to its parent, except the loan whose memory the parent
/// itself uses.
pub fn become_child() {
    if !process::is_lent() {
        return;
    }
    if let Some(loan) = borrowed() {
        return loan.is_never_served();
    }
    for ((child, place), end) in CHILDREN.iter().zip(&PLACES).zip(&ENDS) {
        if child.swap(0, Ordering::Relaxed) == 0 {
            continue;
        }
        place.store(core::ptr::null_mut(), Ordering::Relaxed);
        let end = end.swap(-1, Ordering::Relaxed);
        if end >= 0 {
            process::close_own(end);
        }
    }
    process::lends_nothing();
}

/// The library has moved a descriptor from `old` to `new`. True: it belongs to this module.
pub fn renumbered(old: i32, new: i32) -> bool {
    ENDS.iter().any(|end| end.compare_exchange(old, new, Ordering::AcqRel, Ordering::Relaxed).is_ok())
}

#[cfg(test)]
mod tests {
    extern crate std;
    use super::*;

    #[test]
    fn the_lender_is_not_the_borrower() {
        let loan = Loan::new(0, 0, sys::cpu::thread_id(), 0);
        assert!(!is_borrower() && loan.register() && process::is_lent());
        assert!(!is_borrower(), "this is the lender");
        loan.unregister();
        assert!(!process::is_lent());
    }

    #[test]
    fn the_last_word_about_a_number_counts() {
        let loan = Loan::new(0, 0, 0, 0);
        loan.note(5, 0);
        assert_eq!(loan.copied(5), None);
        loan.note(5, 7);
        loan.note(6, 8);
        loan.note(5, 0);
        assert_eq!((loan.copied(5), loan.copied(6)), (Some(0), Some(8)));
        assert_eq!(loan.all_copied().count(), 1);
        (10..200).for_each(|fd| loan.note(fd, 1));
        assert_eq!(loan.copied(6), Some(8), "not more than there is room for");
    }
}
