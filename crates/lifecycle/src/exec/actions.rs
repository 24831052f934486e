//! Reads the file actions of a `posix_spawn`: changes of descriptors in the child before the next
//! program starts.
//!
//! glibc does not document the structure, but has never changed it: `posix/spawn_int.h` has only
//! got new tags. [`as_we_know_them`] detects a libc with another structure.

use crate::lent::Kept;
use crate::table::{self, Desc};
use core::ffi::c_void;
use fsocket_sys as sys;

const CLOSE: i32 = 0;
const DUP2: i32 = 1;
const OPEN: i32 = 2;
const CHDIR: i32 = 3;
const FCHDIR: i32 = 4;
/// Tags of closefrom and tcsetpgrp, which the libcs number differently. Both are treated as
/// closefrom, which closes more.
const CLOSE_FROM: [i32; 2] = [5, 6];

/// The first members of `posix_spawn_file_actions_t`.
#[repr(C)]
struct Head {
    allocated: i32,
    used: i32,
    list: *const Action,
}

/// `struct __spawn_action`: a tag and a union, whose largest member is the one for `open`.
#[repr(C, align(8))]
pub struct Action {
    tag: i32,
    hole: i32,
    fd: i32,
    /// For DUP2: the new number.
    to: i32,
    rest: [u64; 2],
}

impl Action {
    /// After this action, is `fd` closed or another file?
    fn ends(&self, fd: i32) -> bool {
        match self.tag {
            DUP2 => self.to == fd && self.fd != fd,
            CLOSE | OPEN => self.fd == fd,
            tag => CLOSE_FROM.contains(&tag) && fd >= self.fd,
        }
    }
}

/// The file actions of a child before its `exec`.
pub enum Actions<'a> {
    Known(&'a [Action]),
    /// A child in this process's memory has done the actions itself, and has these descriptors.
    Child(&'a [Kept]),
    /// The library cannot read the actions: they may do anything.
    Unknown,
}

impl Actions<'_> {
    /// For a program that replaces this one: there are no actions.
    pub const NONE: Actions<'static> = Actions::Known(&[]);

    /// # Safety
    /// `actions` is null, or was made by `posix_spawn_file_actions_init` in a libc for which
    /// [`as_we_know_them`] is true.
    pub unsafe fn of<'a>(actions: *const c_void) -> Actions<'a> {
        // SAFETY: `actions` is null, or libc has made it, with the members that `Head` declares
        // (`as_we_know_them`).
        let Some(head) = (unsafe { (actions as *const Head).as_ref() }) else { return Actions::NONE };
        if head.used <= 0 || head.used > head.allocated || head.list.is_null() {
            return Actions::NONE;
        }
        // SAFETY: the list has `used` actions, which libc has added.
        let list = unsafe { core::slice::from_raw_parts(head.list, head.used as usize) };
        match list.iter().all(|a| (CLOSE..=CLOSE_FROM[1]).contains(&a.tag)) {
            true => Actions::Known(list),
            false => Actions::Unknown,
        }
    }

    /// The descriptors of `d` in a child that runs in this process's memory.
    pub fn kept<'b>(&'b self, d: &Desc) -> impl Iterator<Item = &'b Kept> {
        let index = d.index();
        let list = if let Actions::Child(list) = self { list } else { &[][..] };
        list.iter().filter(move |k| k.parents >= 0 && k.desc == index)
    }

    /// Does a `dup2` give the file of `fd` to the next program? Then close-on-exec of `fd` does
    /// not matter.
    pub fn take(&self, fd: i32) -> bool {
        if let Actions::Child(_) = self {
            return table::lookup(fd).is_some_and(|d| self.kept(d).any(|k| k.prepared));
        }
        let Actions::Known(list) = self else { return true };
        let at = list.iter().position(|a| a.tag == DUP2 && a.fd == fd);
        at.is_some_and(|at| !list[..at].iter().any(|a| a.ends(fd)))
    }

    /// Do the actions close or replace `fd`?
    pub fn end(&self, fd: i32) -> bool {
        if let Actions::Child(_) = self {
            return false;
        }
        let Actions::Known(list) = self else { return true };
        list.iter().any(|a| a.ends(fd))
    }

    /// May the actions change the directory from which relative names begin?
    pub fn move_away(&self) -> bool {
        let Actions::Known(list) = self else { return matches!(self, Actions::Unknown) };
        list.iter().any(|a| matches!(a.tag, CHDIR | FCHDIR))
    }
}

/// Does the library read these actions correctly: `dup2` of 1 to 2, and `close` of 3?
///
/// # Safety
/// `sample` was made by `posix_spawn_file_actions_init`, with these two actions.
pub unsafe fn as_we_know_them(sample: *const c_void) -> bool {
    // SAFETY: the structure that spawn.h declares is larger than `Head`.
    let head = unsafe { &*(sample as *const Head) };
    if head.used != 2 || head.allocated < 2 || head.list.is_null() {
        return false;
    }
    // SAFETY: libc has made room for at least two actions. The first is inside, whatever their
    // size is; the second is read only if the first is as expected.
    let at = |i: usize| unsafe { &*head.list.add(i) };
    (at(0).tag, at(0).fd, at(0).to) == (DUP2, 1, 2) && (at(1).tag, at(1).fd) == (CLOSE, 3)
}

/// Does the next program have the file of `fd`, under any number?
pub fn fd_survives(fd: i32, to: &Actions) -> bool {
    to.take(fd) || sys::fcntl(fd, libc::F_GETFD, 0).is_ok_and(|f| f & libc::FD_CLOEXEC == 0)
}

#[cfg(test)]
mod tests {
    extern crate std;
    use super::*;
    use libc::*;

    enum Add {
        Close(i32),
        Dup2(i32, i32),
        Open(i32),
    }
    use Add::{Close, Dup2, Open};

    /// Makes libc's structure with these actions, and calls `look` with the actions as the library
    /// reads them, and with the result of `as_we_know_them`.
    fn made_of(added: &[Add], look: impl FnOnce(Actions, bool)) {
        // SAFETY: libc initializes the structure before its other functions use it, and destroys
        // it at the end.
        unsafe {
            let mut a: posix_spawn_file_actions_t = core::mem::zeroed();
            assert_eq!(posix_spawn_file_actions_init(&raw mut a), 0);
            for one in added {
                let r = match *one {
                    Close(fd) => posix_spawn_file_actions_addclose(&raw mut a, fd),
                    Dup2(from, to) => posix_spawn_file_actions_adddup2(&raw mut a, from, to),
                    Open(fd) => posix_spawn_file_actions_addopen(&raw mut a, fd, c"/".as_ptr(), O_RDONLY, 0),
                };
                assert_eq!(r, 0);
            }
            let seen = (&raw const a).cast();
            look(Actions::of(seen), as_we_know_them(seen));
            posix_spawn_file_actions_destroy(&raw mut a);
        }
    }

    #[test]
    fn what_libc_writes_is_read() {
        made_of(&[Dup2(1, 2), Close(3)], |_, known| assert!(known));
        made_of(&[Dup2(1, 2), Close(4)], |_, known| assert!(!known));
        made_of(&[], |a, known| assert!(!known && !a.take(0)));
    }

    #[test]
    fn the_next_program_gets_what_is_duplicated() {
        made_of(&[Open(8), Dup2(5, 0), Dup2(0, 6), Dup2(7, 7), Dup2(8, 9), Close(5)], |a, _| {
            assert!(a.take(5) && a.take(7), "a duplicate, and the same number");
            assert!(!a.take(0) && !a.take(8) && !a.take(6), "replaced before, or only a target");
            assert!(a.end(5) && a.end(0) && a.end(8) && !a.end(7) && !a.end(10));
            assert!(!a.move_away());
        });
    }

    #[test]
    fn what_is_not_known_is_anything() {
        assert!(Actions::Unknown.take(3) && Actions::Unknown.end(3) && Actions::Unknown.move_away());
        assert!(!Actions::NONE.take(3) && !Actions::NONE.end(3) && !Actions::NONE.move_away());
        let one = |tag| [Action { tag, hole: 0, fd: 3, to: 0, rest: [0; 2] }];
        let of = |list: &[Action]| {
            let head = Head { allocated: 8, used: list.len() as i32, list: list.as_ptr() };
            // SAFETY: `head` describes the list, which is as long as it says.
            matches!(unsafe { Actions::of((&raw const head).cast()) }, Actions::Known(_))
        };
        assert!(of(&one(CLOSE_FROM[1])) && !of(&one(CLOSE_FROM[1] + 1)) && !of(&one(-1)));
        let list = one(CLOSE_FROM[0]);
        let from = Actions::Known(&list);
        assert!(from.end(3) && from.end(900) && !from.end(2));
        let list = one(FCHDIR);
        assert!(Actions::Known(&list).move_away());
    }
}
