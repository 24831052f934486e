//! Programs that make some of their system calls themselves.
//!
//! Rust's `rustix` (so `polling`, `async-io`) calls libc for `recv` but not for
//! `epoll_ctl`: a connection of ours can sit in an epoll instance that we never
//! saw, where its placeholder is never ready the way the connection is. Such an
//! instance is a descriptor like any other, so we look for one where
//! connections begin, where they send for the first time and where a program would
//! have to wait. Once one is found this process is left to the kernel, with everything that it has.
//!
//! The same goes for io_uring: a ring that was made neither through libc nor through
//! liburing ([`crate::rings`]).

use crate::cow::Sparing;
use crate::table;
use crate::upcalls::upcalls;
use crate::{ctl, making, process, rings, stats};
use core::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use fsocket_abi::arena::Reason;
use fsocket_sys as sys;

#[link_section = ".data.fsocket_start"]
static LOOKS: AtomicU32 = AtomicU32::new(0);
/// So often we look every time, then every that many times: a look costs some
/// 0.1 us a number, and such programs make their instance before they wait.
const OFTEN: u32 = 64;
/// Numbers looked at: instances are made early.
pub const FDS: i32 = 64;
/// So many free numbers in a row are the end of what the program has, most likely.
const GAP: u32 = 12;
/// Instances whose registrations are carried over.
const INSTANCES: usize = 8;

/// Now and then, look for an instance that is not ours to see. True: there is
/// one, and everything has gone over to the kernel.
pub fn noticed() -> bool {
    let n = LOOKS.fetch_add(1, Ordering::Relaxed);
    if n >= OFTEN && !n.is_multiple_of(OFTEN) || !process::enabled() {
        return false;
    }
    // Recognizing a ring costs more.
    look(n < 4 || n.is_power_of_two() || n >= OFTEN)
}

/// As [`noticed`], and not only now and then: before something that others see.
pub fn noticed_now() -> bool {
    process::enabled() && look(true)
}

/// Descriptors, a bit each, that looks of this process have found to be no ring.
#[link_section = ".data.fsocket_start"]
static NO_RING: AtomicU64 = AtomicU64::new(0);
/// Those that the parent had found before the fork and that nobody has closed since. To ask /proc costs
/// 6 us each, which a child that lives for one connection would pay for every descriptor that it inherits.
#[link_section = ".data.fsocket_start"]
static INHERITED_NO_RING: AtomicU64 = AtomicU64::new(0);

/// In a forked child: what the parent has looked at is what the child has inherited.
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

/// Instances that this program has found itself with, a bit for each number: no thread of its
/// own is just making those.
static THERE: AtomicU64 = AtomicU64::new(0);

/// At start: `fd` is an instance.
pub fn found(fd: i32) {
    THERE.fetch_or(bit(fd), Ordering::Relaxed);
}

fn was_there(fd: i32) -> bool {
    THERE.load(Ordering::Relaxed) & bit(fd) != 0
}

/// A number is free again, or something else.
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

/// Is it still unknown after a moment? An instance that another thread duplicates or closes
/// is not in our tables for as long as that takes.
fn stays(fd: i32) -> bool {
    (0..MOMENTS).all(|_| {
        sys::nanosleep(1_000_000);
        is_unseen(fd)
    })
}

/// Milliseconds.
const MOMENTS: u32 = 5;

/// Is it neither the program's, as far as we know, nor our own?
fn is_unknown(fd: i32) -> bool {
    fd != ctl::fd() && table::lookup(fd).is_none() && !process::owns(fd)
}

/// Tells an instance from other descriptors: removing a descriptor from it that can be polled and lies in no
/// instance gives ENOENT for an instance, EINVAL for anything else.
fn probe(fd: i32) -> Result<(), sys::Errno> {
    sys::epoll_ctl(fd, libc::EPOLL_CTL_DEL, ctl::fd(), None)
}

fn is_unseen(fd: i32) -> bool {
    is_unknown(fd) && probe(fd) == Err(sys::Errno::ENOENT)
}

/// How many instances there are. None: there is a ring.
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

/// Asked of /proc: a system-call filter may end a program that makes a call of io_uring. That makes the kernel build a
/// directory for the process, some 10 us, so only of what has no type, as all that only the kernel makes.
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
    // SAFETY: a NUL-terminated path and a buffer of that size.
    let n = unsafe { sys::raw(libc::SYS_readlinkat, args) }.unwrap_or(0);
    &name[..n] == b"anon_inode:[io_uring]"
}

/// What `fd` is registered for in `ep`.
pub fn registration(ep: i32, fd: i32) -> Option<libc::epoll_event> {
    account(ep, |line| parse(line, fd))
}

/// The process that a pidfd is of, as this one numbers it; not positive: it has ended, or
/// has no number here.
pub fn pid_of(pidfd: i32) -> Option<i32> {
    account(pidfd, |line| core::str::from_utf8(line).ok()?.strip_prefix("Pid:")?.trim().parse().ok())
}

/// The first line that `read` makes something of in the kernel's own account of a descriptor.
fn account<T>(of: i32, read: impl Fn(&[u8]) -> Option<T>) -> Option<T> {
    let mut path = [0u8; 40];
    let prefix = b"/proc/self/fdinfo/";
    path[..prefix.len()].copy_from_slice(prefix);
    decimal(of, &mut path[prefix.len()..]);
    let args = [libc::AT_FDCWD as usize, path.as_ptr() as usize, (libc::O_RDONLY | libc::O_CLOEXEC) as usize, 0, 0, 0];
    // SAFETY: a NUL-terminated path.
    let info = unsafe { sys::raw(libc::SYS_openat, args) }.ok()? as i32;
    let mut buf = [0u8; 4096];
    let (mut have, mut found) = (0, None);
    // 4 MiB: more than any table of descriptors fills.
    for _ in 0..4096 {
        // SAFETY: within `buf`.
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

/// A line of "tfd: 7 events: 19 data: 2a  pos:…", numbers behind `tfd` in hexadecimal.
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
        // SAFETY: plain system calls.
        let ep = unsafe { libc::epoll_create1(libc::EPOLL_CLOEXEC) };
        let waker = sys::eventfd().unwrap();
        assert!(registration(ep, waker).is_none());
        let ev = libc::epoll_event { events: (libc::EPOLLIN | libc::EPOLLET) as u32, u64: 0xABCD_EF01_2345_6789 };
        sys::epoll_ctl(ep, libc::EPOLL_CTL_ADD, waker, Some(&ev)).unwrap();
        let got = registration(ep, waker).unwrap();
        // The kernel adds HUP and ERR, which it reports always.
        assert_eq!({ got.events } & { ev.events }, { ev.events });
        assert_eq!({ got.u64 }, { ev.u64 });
        for fd in [ep, waker] {
            let _ = sys::close(fd);
        }
    }
}
