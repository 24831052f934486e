//! Tells processes that the monitor has died, without code of the monitor.
//!
//! A thread that waits for data sleeps on a futex. If its peer dies, the monitor wakes the thread.
//! But if the monitor dies first, nothing would wake it. So each arena has a word that the
//! monitor's thread holds as a *robust futex* (get_robust_list(2)). When the monitor's thread ends
//! for any reason, the kernel marks those words and wakes one sleeper of each. That sleeper wakes
//! the others.
//!
//! The kernel finds the words by a linked list in this process's memory. Each node of the list
//! must lie at the same distance from its word. The words are in shared memory that clients can
//! write, but the nodes must not be shared. So both lie in one reserved range: first a page for
//! each node, then for each word a page of its arena.

use fsocket_abi::arena::{Header, FUTEX_OWNER_DIED, FUTEX_WAITERS};
use fsocket_sync::atomic::{AtomicU32, Ordering};
use rustix::fd::{AsFd, BorrowedFd};
use rustix::mm::{mmap, mmap_anonymous, MapFlags, MprotectFlags, ProtFlags};
use rustix::thread::futex;
use std::cell::RefCell;
use std::collections::BTreeSet;
use std::ffi::c_void;
use std::mem::offset_of;
use std::rc::Rc;

/// The kernel follows this many nodes at most (ROBUST_LIST_LIMIT).
const MOST: usize = 2048;
const PAGE: usize = 4096;

/// `struct robust_list`.
#[repr(C)]
#[derive(Clone, Copy)]
struct Node(*mut Node);

/// `struct robust_list_head`.
#[repr(C)]
struct Head {
    first: Node,
    /// Bytes from a node to its word.
    offset: isize,
    pending: *mut Node,
}

struct List {
    head: Box<Head>,
    /// The former list of this thread, which belongs to glibc.
    before: (*mut c_void, usize),
    /// `MOST` pages for nodes, then `MOST` for words.
    range: *mut u8,
    used: BTreeSet<usize>,
}

/// The lifelines of one thread. They must be dropped on the same thread.
#[derive(Clone)]
pub struct Lifelines(Rc<RefCell<List>>);

/// The lifeline of one arena.
pub struct Lifeline {
    list: Lifelines,
    at: usize,
}

impl Lifelines {
    /// `None`: the system refuses the memory or the list.
    pub fn new() -> Option<Lifelines> {
        let (prot, flags) = (ProtFlags::empty(), MapFlags::PRIVATE | MapFlags::NORESERVE);
        // SAFETY: this maps a new range at an address that the kernel chooses, so no other memory
        // changes.
        let range = unsafe { mmap_anonymous(std::ptr::null_mut(), 2 * MOST * PAGE, prot, flags) }.ok()?;
        let range = range.cast::<u8>();
        // (Pages of nodes are kept after use: most arenas live only for a moment.)
        // SAFETY: this changes only the first half of that range, which nothing else uses yet.
        unsafe { rustix::mm::mprotect(range.cast(), MOST * PAGE, MprotectFlags::READ | MprotectFlags::WRITE) }.ok()?;
        let offset = (MOST * PAGE + offset_of!(Header, monitor)) as isize;
        let mut head = Box::new(Head { first: Node(std::ptr::null_mut()), offset, pending: std::ptr::null_mut() });
        head.first = Node(&raw mut head.first);
        let mut before = (std::ptr::null_mut(), 0usize);
        // SAFETY: the kernel writes two words that live here. The head is in a box, so it stays in
        // place until `drop` restores the former list.
        let done = unsafe {
            libc::syscall(libc::SYS_get_robust_list, 0, &raw mut before.0, &raw mut before.1) == 0
                && libc::syscall(libc::SYS_set_robust_list, &raw const *head, size_of::<Head>()) == 0
        };
        let list = List { head, before, range, used: BTreeSet::new() };
        if !done {
            // SAFETY: this unmaps the range mapped above. Nothing refers to it: the kernel has not
            // taken the list.
            let _ = unsafe { rustix::mm::munmap(range.cast(), 2 * MOST * PAGE) };
            std::mem::forget(list);
            return None;
        }
        Some(Lifelines(Rc::new(RefCell::new(list))))
    }

    /// Marks all words when the monitor ends in good order, as the kernel does when the thread
    /// dies.
    pub fn end(self) {
        self.0.borrow_mut().mark();
    }

    /// Holds the word of an arena. The caller has checked the arena's size and seals.
    pub fn hold(&self, arena: BorrowedFd<'_>) -> Option<Lifeline> {
        let at = self.0.borrow_mut().add(arena)?;
        Some(Lifeline { list: self.clone(), at })
    }
}

impl Drop for Lifeline {
    fn drop(&mut self) {
        self.list.0.borrow_mut().remove(self.at);
    }
}

impl List {
    fn node(&self, at: usize) -> *mut Node {
        // SAFETY: `at` is below `MOST`, so the result is within the range.
        unsafe { self.range.add(at * PAGE).cast() }
    }

    fn word_page(&self, at: usize) -> *mut c_void {
        // SAFETY: `at` is below `MOST`, so the result is within the range.
        unsafe { self.range.add((MOST + at) * PAGE).cast() }
    }

    fn word(&self, at: usize) -> &AtomicU32 {
        // SAFETY: while `at` is in use, a page of an arena is mapped there.
        unsafe { &*self.word_page(at).cast::<u8>().add(offset_of!(Header, monitor)).cast() }
    }

    /// The pointer in the list that leads to the node at `at`, or that will lead to it. It is in
    /// the preceding node, or in the head.
    fn pointer_to(&mut self, at: usize) -> *mut Node {
        match self.used.range(..at).next_back() {
            Some(before) => self.node(*before),
            None => &raw mut self.head.first,
        }
    }

    fn add(&mut self, arena: BorrowedFd<'_>) -> Option<usize> {
        let at = (0..MOST).find(|i| !self.used.contains(i))?;
        let (both, fixed) = (ProtFlags::READ | ProtFlags::WRITE, MapFlags::FIXED);
        // SAFETY: this replaces a page of the reserved range that is not in use.
        unsafe { mmap(self.word_page(at), PAGE, both, fixed | MapFlags::SHARED, arena.as_fd(), 0) }.ok()?;
        let me = rustix::thread::gettid().as_raw_nonzero().get() as u32;
        self.word(at).store(me | FUTEX_WAITERS, Ordering::Release);
        let before = self.pointer_to(at);
        // SAFETY: both pointers lead to a node in the range or to the head. The kernel may read
        // the list at any time: it is complete before and after the second store.
        unsafe {
            self.node(at).write(*before);
            before.write_volatile(Node(self.node(at)));
        }
        self.used.insert(at);
        Some(at)
    }

    fn mark(&mut self) {
        self.head.first = Node(&raw mut self.head.first);
        for at in std::mem::take(&mut self.used) {
            self.word(at).fetch_or(FUTEX_OWNER_DIED, Ordering::AcqRel);
            let _ = futex::wake(self.word(at), futex::Flags::empty(), i32::MAX as u32);
        }
    }

    fn remove(&mut self, at: usize) {
        if !self.used.remove(&at) {
            return;
        }
        let before = self.pointer_to(at);
        // SAFETY: `before` leads to a node in the range or to the head, and the list is complete
        // before and after the store. After it nothing refers to the word's page, which is then
        // replaced.
        unsafe {
            before.write_volatile(*self.node(at));
            let flags = MapFlags::FIXED | MapFlags::PRIVATE | MapFlags::NORESERVE;
            let _ = mmap_anonymous(self.word_page(at), PAGE, ProtFlags::empty(), flags);
        }
    }
}

impl Drop for List {
    fn drop(&mut self) {
        // SAFETY: this restores the list that the thread had before. After that nothing refers to
        // the range.
        unsafe {
            libc::syscall(libc::SYS_set_robust_list, self.before.0, self.before.1);
            let _ = rustix::mm::munmap(self.range.cast(), 2 * MOST * PAGE);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory::{memfd, Mapping};
    use fsocket_abi::arena::ARENA_SIZE;
    use rustix::fs::SealFlags;

    #[test]
    fn the_end_of_the_thread_marks_all_words_that_it_holds_and_no_other() {
        for orderly in [false, true] {
            let arenas: Vec<_> =
                (0..5).map(|_| memfd("arena", ARENA_SIZE, SealFlags::SHRINK | SealFlags::GROW).unwrap()).collect();
            let maps: Vec<_> = arenas.iter().map(|fd| Mapping::new(fd, PAGE).unwrap()).collect();
            let word = |i: usize| maps[i].at::<AtomicU32>(offset_of!(Header, monitor));
            std::thread::scope(|s| {
                let thread = s.spawn(|| {
                    let lines = Lifelines::new().unwrap();
                    let mut held: Vec<_> = arenas.iter().map(|fd| lines.hold(fd.as_fd()).unwrap()).collect();
                    let map = |i: usize| Mapping::new(&arenas[i], PAGE).unwrap();
                    let held_word = map(4).at::<AtomicU32>(offset_of!(Header, monitor)).load(Ordering::Acquire);
                    assert_ne!(held_word & FUTEX_WAITERS, 0);
                    // Remove one in the middle and the first one, then use a free place again.
                    drop(held.remove(2));
                    drop(held.remove(0));
                    held.push(lines.hold(arenas[2].as_fd()).unwrap());
                    // A client that writes nonsense into its word harms only itself.
                    map(3).at::<AtomicU32>(offset_of!(Header, monitor)).store(1, Ordering::Release);
                    match orderly {
                        true => lines.end(),
                        // As if the process were killed: no destructor runs.
                        false => std::mem::forget((lines, held)),
                    }
                });
                // (The scope waits only for the end of the closure, not for the end of the
                // thread.)
                thread.join().unwrap();
            });
            let marked = |i: usize| word(i).load(Ordering::Acquire) & FUTEX_OWNER_DIED != 0;
            assert_eq!([marked(0), marked(1), marked(2), marked(4)], [false, true, true, true], "{orderly}");
        }
    }
}
