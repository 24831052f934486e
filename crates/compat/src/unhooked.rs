//! Programs that make some of their system calls without libc.
//!
//! Rust's `rustix` (and so `polling` and `async-io`) calls libc for `recv`, but not for `epoll_ctl`. So a
//! connection of the library can be in an epoll instance that the library has never seen. There the placeholder
//! does not become ready when the connection does. Such an instance is a descriptor like any other. The library
//! looks for one where connections begin, where they send for the first time, and where a program would have to
//! wait. If there is one, this process and its connections use the kernel.
//!
//! The library also looks for io_uring rings that were made neither through libc nor through liburing
//! ([`crate::rings`]).

use crate::cow::Sparing;
use crate::table;
use crate::upcalls::upcalls;
use crate::{ctl, making, process, rings, stats};
use core::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use fsocket_abi::arena::Reason;
use fsocket_sys as sys;

#[link_section = ".data.fsocket_start"]
static LOOKS: AtomicU32 = AtomicU32::new(0);
/// The first OFTEN calls look every time, later calls once in OFTEN. A look costs about 0.1 us per descriptor
/// number, and programs of this kind make their instance before they wait.
const OFTEN: u32 = 64;
/// Only descriptor numbers below this are looked at, because programs make their instances early.
pub const FDS: i32 = 64;
/// After this many free numbers in a row there are most likely no more descriptors.
const GAP: u32 = 12;
/// Maximum number of instances whose registrations are carried over.
const INSTANCES: usize = 8;

/// Looks, but not at every call, for an instance or a ring that the library has not seen. True: there is one, and
/// the process has been left to the kernel.
pub fn noticed() -> bool {
    let n = LOOKS.fetch_add(1, Ordering::Relaxed);
    if n >= OFTEN && !n.is_multiple_of(OFTEN) || !process::enabled() {
        return false;
    }
    // Rings are looked for less often, because recognizing one costs more.
    look(n < 4 || n.is_power_of_two() || n >= OFTEN)
}

/// As [`noticed`], but looks at every call. Used before something that other processes see.
pub fn noticed_now() -> bool {
    process::enabled() && look(true)
}

/// One bit for each descriptor that this process has looked at and found to be no ring.
#[link_section = ".data.fsocket_start"]
static NO_RING: AtomicU64 = AtomicU64::new(0);
/// One bit for each descriptor that the parent had found to be no ring before the fork, and that has not been
/// closed since. A look into /proc costs 6 us. A child that lives for one connection would need one look for each
/// inherited descriptor.
#[link_section = ".data.fsocket_start"]
static INHERITED_NO_RING: AtomicU64 = AtomicU64::new(0);

/// Called in a forked child, which has inherited the descriptors that the parent has looked at.
pub fn become_child() {
    INHERITED_NO_RING.put(NO_RING.load(Ordering::Relaxed) | INHERITED_NO_RING.load(Ordering::Relaxed));
}

fn look(rings: bool) -> bool {
    let mut found = [-1; INSTANCES];
    let ended = making::ended();
    let Some(n) = find(&mut found, rings) else {
        (upcalls().leave_everything)();
        return true;
    };
    if n == 0 || making::begun() != ended || !found[..n].iter().any(|fd| was_there(*fd) || stays(*fd)) {
        return false;
    }
    stats::fall_back(Reason::Option);
    process::disable();
    (upcalls().leave_to_instances)(&found[..n]);
    true
}

/// One bit for each descriptor that was an epoll instance when the program started. So no thread of this program is
/// making it at the moment.
static THERE: AtomicU64 = AtomicU64::new(0);

/// Called at the start of a program that has inherited the epoll instance `fd`.
pub fn found(fd: i32) {
    THERE.fetch_or(bit(fd), Ordering::Relaxed);
}

fn was_there(fd: i32) -> bool {
    THERE.load(Ordering::Relaxed) & bit(fd) != 0
}

/// Called when a descriptor number is free again, or refers to something else.
pub fn closed(fd: i32) {
    for known in [&THERE, &NO_RING, &INHERITED_NO_RING] {
        if known.load(Ordering::Relaxed) & bit(fd) != 0 {
            known.fetch_and(!bit(fd), Ordering::Relaxed);
        }
    }
}

fn bit(fd: i32) -> u64 {
    1u64.checked_shl(fd as u32).unwrap_or(0)
}
const _: () = assert!(FDS as u32 <= u64::BITS);

/// Is the instance still unknown after a moment? While another thread duplicates or closes an instance, the
/// instance is missing from the library's tables.
fn stays(fd: i32) -> bool {
    (0..MOMENTS).all(|_| {
        sys::nanosleep(1_000_000);
        is_unseen(fd)
    })
}

/// Number of milliseconds for which an instance must stay unknown.
const MOMENTS: u32 = 5;

/// Is the descriptor neither in the library's tables nor one of the library's own?
fn is_unknown(fd: i32) -> bool {
    fd != ctl::fd() && table::lookup(fd).is_none() && !process::owns(fd)
}

/// Tells an epoll instance from other descriptors by removing a pollable descriptor that is in no instance. ENOENT:
/// `fd` is an instance. EINVAL: it is something else.
fn probe(fd: i32) -> Result<(), sys::Errno> {
    sys::epoll_ctl(fd, libc::EPOLL_CTL_DEL, ctl::fd(), None)
}

fn is_unseen(fd: i32) -> bool {
    is_unknown(fd) && probe(fd) == Err(sys::Errno::ENOENT)
}

/// Finds unknown epoll instances, and returns their number. None: there is a ring.
fn find(found: &mut [i32; INSTANCES], rings: bool) -> Option<usize> {
    if ctl::dead() {
        return Some(0);
    }
    let (mut n, mut gap) = (0, 0);
    for fd in 3..FDS {
        if !is_unknown(fd) {
            gap = 0;
            continue;
        }
        let answer = probe(fd);
        gap = if answer == Err(sys::Errno::EBADF) { gap + 1 } else { 0 };
        match answer {
            _ if gap == GAP => break,
            Err(sys::Errno::ENOENT) if n < INSTANCES => {
                found[n] = fd;
                n += 1;
            }
            Err(sys::Errno::EINVAL) if rings && may_be_ring(fd) => {
                if is_ring(fd) {
                    return None;
                }
                NO_RING.fetch_or(bit(fd), Ordering::Relaxed);
            }
            _ => {}
        }
    }
    Some(n)
}

fn may_be_ring(fd: i32) -> bool {
    !rings::known(fd) && INHERITED_NO_RING.load(Ordering::Relaxed) & bit(fd) == 0
}

/// Is `fd` an io_uring ring? The answer is in /proc, because a system-call filter may end a program that makes a
/// call of io_uring. A look into /proc makes the kernel build a directory for the process, which takes about 6 us.
/// So the look is limited to descriptors without a file type. A ring has none, like all files that only the kernel
/// makes.
fn is_ring(fd: i32) -> bool {
    if sys::mode(fd).is_ok_and(|mode| mode & libc::S_IFMT != 0) {
        return false;
    }
    let mut path = [0u8; 40];
    let prefix = b"/proc/self/fd/";
    path[..prefix.len()].copy_from_slice(prefix);
    decimal(fd, &mut path[prefix.len()..]);
    let mut name = [0u8; 32];
    let args = [libc::AT_FDCWD as usize, path.as_ptr() as usize, name.as_mut_ptr() as usize, name.len(), 0, 0];
    // SAFETY: `path` is NUL-terminated, and `name` is writable for its length.
    let n = unsafe { sys::raw(libc::SYS_readlinkat, args) }.unwrap_or(0);
    &name[..n] == b"anon_inode:[io_uring]"
}

/// The events for which `fd` is registered in `ep`.
pub fn registration(ep: i32, fd: i32) -> Option<libc::epoll_event> {
    account(ep, |line| parse(line, fd))
}

/// The process of a pidfd, as its number in this process's PID namespace. Not positive: the process has ended, or
/// has no number here.
pub fn pid_of(pidfd: i32) -> Option<i32> {
    account(pidfd, |line| core::str::from_utf8(line).ok()?.strip_prefix("Pid:")?.trim().parse().ok())
}

/// Reads the kernel's description of a descriptor (fdinfo), and returns the first result of `read` for one of its
/// lines.
fn account<T>(of: i32, read: impl Fn(&[u8]) -> Option<T>) -> Option<T> {
    let mut path = [0u8; 40];
    let prefix = b"/proc/self/fdinfo/";
    path[..prefix.len()].copy_from_slice(prefix);
    decimal(of, &mut path[prefix.len()..]);
    let args = [libc::AT_FDCWD as usize, path.as_ptr() as usize, (libc::O_RDONLY | libc::O_CLOEXEC) as usize, 0, 0, 0];
    // SAFETY: `path` is NUL-terminated.
    let info = unsafe { sys::raw(libc::SYS_openat, args) }.ok()? as i32;
    let mut buf = [0u8; 4096];
    let (mut have, mut found) = (0, None);
    // At most 4096 reads of at most 4 KiB, which is more than any table of descriptors fills.
    for _ in 0..4096 {
        // SAFETY: the range is within `buf`.
        let n = unsafe { sys::read(info, buf.as_mut_ptr().add(have), buf.len() - have) }.unwrap_or(0);
        have += n;
        let text = &buf[..have];
        found = found.or_else(|| text.split(|b| *b == b'\n').find_map(&read));
        if n == 0 || found.is_some() {
            break;
        }
        let rest = text.iter().rposition(|b| *b == b'\n').map_or(have, |i| i + 1);
        buf.copy_within(rest..have, 0);
        have -= rest;
    }
    let _ = sys::close(info);
    found
}

/// Parses a line of "tfd: 7 events: 19 data: 2a  pos:…". The numbers after `tfd` are hexadecimal.
fn parse(line: &[u8], fd: i32) -> Option<libc::epoll_event> {
    let mut words = core::str::from_utf8(line).ok()?.split_ascii_whitespace();
    let mut field = |name| (words.next() == Some(name)).then(|| words.next()).flatten();
    if field("tfd:")?.parse() != Ok(fd) {
        return None;
    }
    let events = u32::from_str_radix(field("events:")?, 16).ok()?;
    let u64 = u64::from_str_radix(field("data:")?, 16).ok()?;
    Some(libc::epoll_event { events, u64 })
}

fn decimal(v: i32, to: &mut [u8]) {
    let mut digits = 1;
    while v / 10i32.pow(digits) > 0 {
        digits += 1;
    }
    for i in 0..digits {
        to[i as usize] = b'0' + (v / 10i32.pow(digits - 1 - i) % 10) as u8;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_registration_is_read_from_the_kernels_account() {
        let line = b"tfd:        7 events: 4000001d data:         fffffffffffffff0  pos:0 ino:1b sdev:9";
        let ev = parse(line, 7).unwrap();
        assert_eq!(({ ev.events }, { ev.u64 }), (0x4000_001d, 0xffff_ffff_ffff_fff0));
        assert!(parse(line, 8).is_none());
        assert!(parse(b"pos:\t0", 7).is_none());
        assert!(parse(b"tfd: 7 events: 19 da", 7).is_none());
    }

    #[test]
    fn numbers_in_paths() {
        for v in [0, 9, 10, 63, 12345] {
            let mut b = [0u8; 8];
            decimal(v, &mut b);
            let end = b.iter().position(|c| *c == 0).unwrap();
            assert_eq!(core::str::from_utf8(&b[..end]).unwrap().parse(), Ok(v));
        }
    }

    #[test]
    pub fn registrations_of_a_real_instance_are_found() {
        // SAFETY: the call takes no pointers.
        let ep = unsafe { libc::epoll_create1(libc::EPOLL_CLOEXEC) };
        let waker = sys::eventfd().unwrap();
        assert!(registration(ep, waker).is_none());
        let ev = libc::epoll_event { events: (libc::EPOLLIN | libc::EPOLLET) as u32, u64: 0xABCD_EF01_2345_6789 };
        sys::epoll_ctl(ep, libc::EPOLL_CTL_ADD, waker, Some(&ev)).unwrap();
        let got = registration(ep, waker).unwrap();
        // The kernel adds HUP and ERR, which it always reports.
        assert_eq!({ got.events } & { ev.events }, { ev.events });
        assert_eq!({ got.u64 }, { ev.u64 });
        for fd in [ep, waker] {
            let _ = sys::close(fd);
        }
    }
}
