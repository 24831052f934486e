//! The descriptors that a program is started with.

use crate::{ctl, process};
use core::sync::atomic::{AtomicBool, Ordering};
use fsocket_sys as sys;

/// Do `f` for every open descriptor that is not ours.
pub(super) fn each_descriptor(f: impl FnMut(i32)) {
    static BUSY: AtomicBool = AtomicBool::new(false);
    if BUSY.swap(true, Ordering::Acquire) {
        return;
    }
    // Reading /proc costs more than all else at the start of a program.
    match few_descriptors() {
        Some(numbers) => (0..FEW).filter(|fd| numbers & 1 << fd != 0).for_each(f),
        None => each_listed(f),
    }
    BUSY.store(false, Ordering::Release);
}

fn each_listed(mut f: impl FnMut(i32)) {
    let args = [libc::AT_FDCWD as usize, c"/proc/self/fd".as_ptr() as usize, 0, 0, 0, 0];
    let flags = (libc::O_RDONLY | libc::O_DIRECTORY | libc::O_CLOEXEC) as usize;
    // SAFETY: a C string.
    match unsafe { sys::raw(libc::SYS_openat, [args[0], args[1], flags, 0, 0, 0]) } {
        Ok(dir) => {
            list(dir as i32, |fd| {
                if fd != dir as i32 && !process::owns(fd) {
                    f(fd);
                }
            });
            let _ = sys::close(dir as i32);
        }
        // No /proc: the numbers that programs hand down.
        Err(_) => (0..256).filter(|fd| sys::fcntl(*fd, libc::F_GETFD, 0).is_ok()).for_each(f),
    }
}

/// Is one among them that concerns the library: a socket of the internet, or an epoll instance (those have no place in
/// a file system)? Numbers from [`MANY`] on are not looked at, nor those from [`USUAL`] on if half as many before them
/// are free: a program of ours that has left something says so by other means, and others hand down small ones.
#[link_section = ".text.fsocket_start"]
pub fn any_of_concern() -> bool {
    let is_one = |fd: i32| sys::mode(fd).is_ok_and(|mode| is_of_concern(fd, mode));
    // One call says which are open; a look into /proc makes the kernel build this process's directory.
    match open::<USUAL>(0, is_one) {
        Some((false, last)) if last >= USUAL / 2 => open::<{ MANY - USUAL }>(USUAL, is_one).map(|(any, _)| any),
        usual => usual.map(|(any, _)| any),
    }
    .unwrap_or_else(|| {
        // (A process that may not have so many.)
        let mut any = false;
        each_listed(|fd| any |= is_one(fd));
        any
    })
}

const MANY: usize = 256;
const USUAL: usize = 64;

/// Is one of the `N` numbers from `first` on open and such a one? And the last that is open, or 0. None: the kernel
/// does not say.
#[inline(always)]
fn open<const N: usize>(first: usize, is_one: impl Fn(i32) -> bool) -> Option<(bool, usize)> {
    let mut all: [libc::pollfd; N] =
        core::array::from_fn(|n| libc::pollfd { fd: (first + n) as i32, events: 0, revents: 0 });
    // SAFETY: that many; no mask.
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

/// (Pipes of some programs are sockets: a shell's children have many.)
#[cold]
fn is_internet(fd: i32) -> bool {
    let mut address = [0u8; 28];
    let family = sys::getsockname(fd, &mut address).map(|_| u16::from_ne_bytes([address[0], address[1]]));
    family.is_ok_and(|f| matches!(i32::from(f), libc::AF_INET | libc::AF_INET6))
}

/// Numbers that are looked at one by one.
pub(super) const FEW: i32 = 32;

/// The open descriptors that are not ours, a bit for each, if all are below [`FEW`]. None: there are
/// others, or the kernel does not tell how many there are (before Linux 6.2).
#[link_section = ".text.fsocket_start"]
pub(super) fn few_descriptors() -> Option<u32> {
    let all = sys::size(c"/proc/self/fd").ok().filter(|n| *n > 0)?;
    let open = |fd: &i32| sys::fcntl(*fd, libc::F_GETFD, 0).is_ok();
    let theirs = all - u64::from(ctl::fd() >= 0);
    let seen = (0..FEW).filter(|fd| !process::owns(*fd)).filter(open).take(theirs as usize);
    let numbers = seen.fold(0, |bits, fd| bits | 1 << fd);
    (u64::from(u32::count_ones(numbers)) == theirs).then_some(numbers)
}

/// The numbers that are names in a directory.
fn list(dir: i32, mut f: impl FnMut(i32)) {
    /// Bytes of a directory entry before its name.
    const HEAD: usize = 19;
    #[repr(align(8))]
    struct Buffer([u8; 2048]);
    let mut buf = Buffer([0; 2048]);
    loop {
        let args = [dir as usize, buf.0.as_mut_ptr() as usize, buf.0.len(), 0, 0, 0];
        // SAFETY: the buffer has that many bytes.
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
