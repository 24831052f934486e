//! Examines the descriptors with which a program is started, as cheaply as possible, because most
//! programs have inherited only files.

use crate::{ctl, process};
use core::sync::atomic::{AtomicBool, Ordering};
use fsocket_sys as sys;

/// Calls `f` for every open descriptor of the program.
pub(super) fn each_descriptor(f: impl FnMut(i32)) {
    static BUSY: AtomicBool = AtomicBool::new(false);
    if BUSY.swap(true, Ordering::Acquire) {
        return;
    }
    // Reading /proc costs more than all other steps at the start of a program together.
    match few_descriptors() {
        Some(numbers) => (0..FEW).filter(|fd| numbers & 1 << fd != 0).for_each(f),
        None => each_listed(f),
    }
    BUSY.store(false, Ordering::Release);
}

fn each_listed(mut f: impl FnMut(i32)) {
    let args = [libc::AT_FDCWD as usize, c"/proc/self/fd".as_ptr() as usize, 0, 0, 0, 0];
    let flags = (libc::O_RDONLY | libc::O_DIRECTORY | libc::O_CLOEXEC) as usize;
    // SAFETY: the path is a NUL-terminated string.
    match unsafe { sys::raw(libc::SYS_openat, [args[0], args[1], flags, 0, 0, 0]) } {
        Ok(dir) => {
            list(dir as i32, |fd| {
                if fd != dir as i32 && !process::owns(fd) {
                    f(fd);
                }
            });
            let _ = sys::close(dir as i32);
        }
        // Without /proc: tries the numbers that programs usually hand down.
        Err(_) => (0..256).filter(|fd| sys::fcntl(*fd, libc::F_GETFD, 0).is_ok()).for_each(f),
    }
}

/// Has the program inherited a descriptor that concerns the library: an internet socket, or an
/// epoll instance (neither has a type in the file system)? Numbers from [`MANY`] on are not
/// checked, and those from [`USUAL`] on only if most of the lower numbers are in use. That is
/// enough: programs hand down small numbers, and a program with the library says in another way
/// that it has left state.
#[link_section = ".text.fsocket_start"]
pub fn any_of_concern() -> bool {
    let is_one = |fd: i32| sys::mode(fd).is_ok_and(|mode| is_of_concern(fd, mode));
    // One `ppoll` tells which numbers are open. Reading /proc would make the kernel build the
    // directory of this process.
    match open::<USUAL>(0, is_one) {
        Some((false, last)) if last >= USUAL / 2 => open::<{ MANY - USUAL }>(USUAL, is_one).map(|(any, _)| any),
        usual => usual.map(|(any, _)| any),
    }
    .unwrap_or_else(|| {
        // `ppoll` fails if the process may not have that many descriptors.
        let mut any = false;
        each_listed(|fd| any |= is_one(fd));
        any
    })
}

const MANY: usize = 256;
const USUAL: usize = 64;

/// Is any of the `N` numbers from `first` on open, with `is_one` true? Also returns the highest
/// open number, or 0. None: the kernel does not answer.
#[inline(always)]
fn open<const N: usize>(first: usize, is_one: impl Fn(i32) -> bool) -> Option<(bool, usize)> {
    let mut all: [libc::pollfd; N] =
        core::array::from_fn(|n| libc::pollfd { fd: (first + n) as i32, events: 0, revents: 0 });
    // SAFETY: the array has N entries, and the signal mask is null.
    unsafe { sys::ppoll(all.as_mut_ptr(), N, Some(0), core::ptr::null()) }.ok()?;
    let mut open = all.iter().filter(|p| p.revents & libc::POLLNVAL == 0);
    let last = open.clone().next_back().map_or(0, |p| p.fd as usize);
    Some((open.any(|p| is_one(p.fd)), last))
}

#[inline]
fn is_of_concern(fd: i32, mode: u32) -> bool {
    match mode & libc::S_IFMT {
        libc::S_IFSOCK => is_internet(fd),
        kind => kind == 0,
    }
}

/// Tells internet sockets from others. (Some programs use sockets as pipes, for example the
/// children of a shell.)
#[cold]
fn is_internet(fd: i32) -> bool {
    let mut address = [0u8; 28];
    let family = sys::getsockname(fd, &mut address).map(|_| u16::from_ne_bytes([address[0], address[1]]));
    family.is_ok_and(|f| matches!(i32::from(f), libc::AF_INET | libc::AF_INET6))
}

/// If all numbers are below this one, each is checked by its own system call.
pub(super) const FEW: i32 = 32;

/// The program's open descriptors as a set of bits, if all are below [`FEW`]. None: there are
/// higher ones, or the kernel does not report their count (before Linux 6.2).
#[link_section = ".text.fsocket_start"]
pub(super) fn few_descriptors() -> Option<u32> {
    let all = sys::size(c"/proc/self/fd").ok().filter(|n| *n > 0)?;
    let open = |fd: &i32| sys::fcntl(*fd, libc::F_GETFD, 0).is_ok();
    let theirs = all - u64::from(ctl::fd() >= 0);
    let seen = (0..FEW).filter(|fd| !process::owns(*fd)).filter(open).take(theirs as usize);
    let numbers = seen.fold(0, |bits, fd| bits | 1 << fd);
    (u64::from(u32::count_ones(numbers)) == theirs).then_some(numbers)
}

/// Calls `f` for each number that is a name in the directory.
fn list(dir: i32, mut f: impl FnMut(i32)) {
    /// Bytes of a directory entry before its name.
    const HEAD: usize = 19;
    #[repr(align(8))]
    struct Buffer([u8; 2048]);
    let mut buf = Buffer([0; 2048]);
    loop {
        let args = [dir as usize, buf.0.as_mut_ptr() as usize, buf.0.len(), 0, 0, 0];
        // SAFETY: the buffer has room for that many bytes.
        let n = match unsafe { sys::raw(libc::SYS_getdents64, args) } {
            Ok(n @ 1..) => n.min(buf.0.len()),
            _ => return,
        };
        let mut at = 0;
        while at + HEAD < n {
            let len = u16::from_ne_bytes([buf.0[at + 16], buf.0[at + 17]]) as usize;
            let name = &buf.0[at + HEAD..(at + len.max(HEAD)).min(n)];
            let digits = name.split(|c| *c == 0).next().unwrap_or_default();
            if let Some(fd) = core::str::from_utf8(digits).ok().and_then(|d| d.parse().ok()) {
                f(fd);
            }
            at += len.max(HEAD + 1);
        }
    }
}
