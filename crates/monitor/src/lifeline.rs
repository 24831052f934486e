//! What tells the processes that this monitor has died: not the monitor.
//!
//! A thread that waits for bytes sleeps on a futex, and learns from the monitor that its peer has died.
//! If the monitor dies first, nobody is left to say so. So each arena has a word that this thread
//! holds as a *robust futex* (get_robust_list(2)): at the end of the thread, however it comes, the
//! kernel marks those words and wakes a sleeper of each, who wakes the others.
//!
//! The kernel finds the words by a list in this process's memory, where each node lies at the same
//! distance from its word. The words are shared and anybody's to write; the nodes are not shared. So
//! both lie in a reserved range: a page for each node, and behind all of them a page of an arena for
//! each word.

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

/// The kernel follows so many nodes (ROBUST_LIST_LIMIT).
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
    /// From a node to its word, bytes.
    offset: isize,
    pending: *mut Node,
}

struct List {
    head: Box<Head>,
    /// What the thread had before: glibc's.
    before: (*mut c_void, usize),
    /// `MOST` pages for nodes, then `MOST` for words.
    range: *mut u8,
    used: BTreeSet<usize>,
}

/// Those of this thread. Not to be dropped on another one.
#[derive(Clone)]
pub struct Lifelines(Rc<RefCell<List>>);

/// One arena's.
pub struct Lifeline {
    list: Lifelines,
    at: usize,
}

impl Lifelines {
    /// `None`: the system has none of it.
    pub fn new() -> Option<Lifelines> {
        let (prot, flags) = (ProtFlags::empty(), MapFlags::PRIVATE | MapFlags::NORESERVE);
        // SAFETY: a fresh range at an address of the kernel's choice.
        let range = unsafe { mmap_anonymous(std::ptr::null_mut(), 2 * MOST * PAGE, prot, flags) }.ok()?;
        let range = range.cast::<u8>();
        // (A page of it that was used once is kept: most arenas live for a moment.)
        // SAFETY: the first half of that range.
        unsafe { rustix::mm::mprotect(range.cast(), MOST * PAGE, MprotectFlags::READ | MprotectFlags::WRITE) }.ok()?;
        let offset = (MOST * PAGE + offset_of!(Header, monitor)) as isize;
        let mut head = Box::new(Head { first: Node(std::ptr::null_mut()), offset, pending: std::ptr::null_mut() });
        head.first = Node(&raw mut head.first);
        let mut before = (std::ptr::null_mut(), 0usize);
        // SAFETY: two words for the answer; the head stays where it is until `drop` takes it back.
        let done = unsafe {
            libc::syscall(libc::SYS_get_robust_list, 0, &raw mut before.0, &raw mut before.1) == 0
                && libc::syscall(libc::SYS_set_robust_list, &raw const *head, size_of::<Head>()) == 0
        };
        let list = List { head, before, range, used: BTreeSet::new() };
        if !done {
            // SAFETY: as mapped above.
            let _ = unsafe { rustix::mm::munmap(range.cast(), 2 * MOST * PAGE) };
            std::mem::forget(list);
            return None;
        }
        Some(Lifelines(Rc::new(RefCell::new(list))))
    }

    /// An end in good order is an end.
    pub fn end(self) {
        self.0.borrow_mut().mark();
    }

    /// Holds the word of an arena, whose size and seals have been checked.
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
        // SAFETY: within the range.
        unsafe { self.range.add(at * PAGE).cast() }
    }

    fn word_page(&self, at: usize) -> *mut c_void {
        // SAFETY: within the range.
        unsafe { self.range.add((MOST + at) * PAGE).cast() }
    }

    fn word(&self, at: usize) -> &AtomicU32 {
        // SAFETY: a page of an arena is mapped there while `at` is used.
        unsafe { &*self.word_page(at).cast::<u8>().add(offset_of!(Header, monitor)).cast() }
    }

    /// What points to the node at `at`, or would: that of the one before it, or the head.
    fn pointer_to(&mut self, at: usize) -> *mut Node {
        match self.used.range(..at).next_back() {
            Some(before) => self.node(*before),
            None => &raw mut self.head.first,
        }
    }

    fn add(&mut self, arena: BorrowedFd<'_>) -> Option<usize> {
        let at = (0..MOST).find(|i| !self.used.contains(i))?;
        let (both, fixed) = (ProtFlags::READ | ProtFlags::WRITE, MapFlags::FIXED);
        // SAFETY: a page of our own range, which nobody uses.
        unsafe { mmap(self.word_page(at), PAGE, both, fixed | MapFlags::SHARED, arena.as_fd(), 0) }.ok()?;
        let me = rustix::thread::gettid().as_raw_nonzero().get() as u32;
        self.word(at).store(me | FUTEX_WAITERS, Ordering::Release);
        let before = self.pointer_to(at);
        // SAFETY: a page of ours; and a node, or the head. The kernel may look at any time: the list is
        // whole before and after the second store.
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
        // SAFETY: as in `add`; then a page of our own range that nobody refers to any more.
        unsafe {
            before.write_volatile(*self.node(at));
            let flags = MapFlags::FIXED | MapFlags::PRIVATE | MapFlags::NORESERVE;
            let _ = mmap_anonymous(self.word_page(at), PAGE, ProtFlags::empty(), flags);
        }
    }
}

impl Drop for List {
    fn drop(&mut self) {
        // SAFETY: what this thread had before; then nothing refers to the range.
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
                    // The first, one in the middle, and its place is taken again.
                    drop(held.remove(2));
                    drop(held.remove(0));
                    held.push(lines.hold(arenas[2].as_fd()).unwrap());
                    // A client that writes nonsense harms itself only.
                    map(3).at::<AtomicU32>(offset_of!(Header, monitor)).store(1, Ordering::Release);
                    match orderly {
                        true => lines.end(),
                        // As if killed: nothing is dropped.
                        false => std::mem::forget((lines, held)),
                    }
                });
                // (The scope alone waits for the closure, not for the end of the thread.)
                thread.join().unwrap();
            });
            let marked = |i: usize| word(i).load(Ordering::Acquire) & FUTEX_OWNER_DIED != 0;
            assert_eq!([marked(0), marked(1), marked(2), marked(4)], [false, true, true, true], "{orderly}");
        }
    }
}
