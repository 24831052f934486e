//! This process's memory, lent to a child until that starts a program or ends (`vfork`).
//!
//! The child has descriptors and a process number of its own, and the memory, the stack and the thread pointer of the
//! thread that has made it: by these it is known. That thread waits meanwhile, on a stack of its own, and does what
//! the child asks for: the child must not change what the library keeps of this process's descriptors. The two take
//! turns, so that what lies in a [`Loan`] belongs to one of them at a time.

use crate::process;
use core::cell::Cell;
use core::sync::atomic::{AtomicI32, AtomicPtr, AtomicU32, AtomicU64, Ordering};
use fsocket_sys as sys;

/// Loans at a time.
const LOANS: usize = 32;
/// Numbers prepared for the next program that are remembered of one child.
const COPIES: usize = 64;

/// Thread pointers of the children, 0: a free place.
static CHILDREN: [AtomicU64; LOANS] = [const { AtomicU64::new(0) }; LOANS];
/// Their loans, each of which its own thread alone looks at.
static PLACES: [AtomicPtr<Loan>; LOANS] = [const { AtomicPtr::new(core::ptr::null_mut()) }; LOANS];
/// The parent's ends of the socket pairs; -1: none.
static ENDS: [AtomicI32; LOANS] = [const { AtomicI32::new(-1) }; LOANS];

/// Values of [`Head::state`]. The kernel writes the first one, when the child leaves this memory.
pub mod state {
    pub const OVER: u32 = 0;
    pub const RUNS: u32 = 1;
    pub const ASKS: u32 = 2;
}

/// Used by the instructions that make the child, by their offsets (`preload/src/hooks/vfork.rs`).
#[repr(C)]
pub struct Head {
    /// First argument of clone(2).
    pub flags: u64,
    /// Its fourth.
    pub state: AtomicU32,
    reserved: u32,
    /// Its third.
    pub pidfd: u64,
    /// Stack pointer and return address of the caller, and a register's value.
    caller: [Cell<u64>; 3],
}
const _: () = assert!(core::mem::offset_of!(Head, state) == 8 && core::mem::offset_of!(Head, pidfd) == 16);
const _: () = assert!(core::mem::offset_of!(Head, caller) == 24 && core::mem::offset_of!(Loan, head) == 0);

/// A number that the child has made, or has kept open for the next program.
#[derive(Clone, Copy)]
pub struct Copied {
    pub fd: i32,
    /// Index of its description, plus one; 0: it is nothing of the library's any more.
    pub desc: u32,
}

/// A number that the child's next program gets, and that the child takes for a number of `desc`.
#[derive(Clone, Copy)]
pub struct Kept {
    pub fd: i32,
    /// A number of the same in the parent, which finds it; -1: none.
    pub parents: i32,
    /// Index of the description.
    pub desc: u32,
    /// The child has prepared it for the next program.
    pub prepared: bool,
    /// SO_COOKIE of what the child has under its number; 0: no socket.
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
    /// The child's number of its end of a socket pair; -1: the parent has nothing that could be asked for.
    pub end: Cell<i32>,
    /// The pool of placeholders is locked until the child is made.
    pub locked: Cell<bool>,
    /// The child has forked: there is no parent that answers.
    orphan: Cell<bool>,
    /// The child's question, and the numbers that it is about, in memory that the child maps.
    pub question: Cell<u64>,
    /// Room for so many, and how many there are.
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

    /// From now on the child is known. False: there are too many.
    pub fn register(&self) -> bool {
        let free = |c: &&AtomicU64| c.compare_exchange(0, self.thread, Ordering::AcqRel, Ordering::Relaxed).is_ok();
        // (First of all and last: a fork meanwhile forgets what there is.)
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

    /// The child is over.
    pub fn unregister(&self) {
        let at = self.place.get();
        PLACES[at].store(core::ptr::null_mut(), Ordering::Relaxed);
        CHILDREN[at].store(0, Ordering::Release);
        process::lends(false);
    }

    /// Is there a parent that answers?
    pub fn is_served(&self) -> bool {
        !self.orphan.get() && self.end.get() >= 0
    }

    pub fn is_never_served(&self) {
        self.orphan.set(true);
    }

    /// The description (index plus one, or 0) that the child has put behind `fd`, if that was noticed.
    pub fn copied(&self, fd: i32) -> Option<u32> {
        self.copies.iter().map(Cell::get).find(|c| c.fd == fd).map(|c| c.desc)
    }

    /// The child has made `fd` a number of a description (index plus one), or of none.
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

/// The loan that this process lives on, if it is a child in its parent's memory.
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
    // SAFETY: null, or the loan of this thread, which ends it only when no child uses it any more.
    let loan = unsafe { PLACES[at].load(Ordering::Acquire).as_ref() }?;
    // (A handler of the parent's runs before the call, or after it.)
    (loan.lender != sys::getpid()).then_some(loan)
}

/// In a forked child: the loans are its parent's, except one on which the parent lives, too.
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

/// A descriptor of the library's got another number.
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
