//! Is a placeholder still as `socket` returns a new one?
//!
//! The library sees what libc's functions do to a socket, and remembers the options that were set, the duplicates, the
//! processes and epoll instances that have it (`dirty`, `watched`). It does not see raw system calls, nor calls by the name
//! in /proc. So the kernel is asked for everything that can be asked and that would do harm in the next connection:
//! whether the socket is bound or connected, the flags of the open file, its owner and its mode. A socket that differs in
//! one of them is closed; so is one about which the kernel does not answer.

use crate::table::Desc;
use core::sync::atomic::{AtomicU64, Ordering};
use fsocket_sys as sys;

/// User and group of this process's new sockets, packed; [`UNKNOWN`] until it is asked for.
#[link_section = ".data.fsocket_start"]
static CREATOR: AtomicU64 = AtomicU64::new(UNKNOWN);
const UNKNOWN: u64 = u64::MAX;

/// The process may have other credentials now, and new sockets another owner.
pub fn other_credentials() {
    CREATOR.store(UNKNOWN, Ordering::Relaxed);
}

/// User and group of a socket that this process makes now.
fn creator() -> u64 {
    match CREATOR.load(Ordering::Relaxed) {
        UNKNOWN => {
            let now = pack(sys::geteuid(), sys::getegid());
            CREATOR.store(now, Ordering::Relaxed);
            now
        }
        known => known,
    }
}

fn pack(uid: u32, gid: u32) -> u64 {
    u64::from(uid) << 32 | u64::from(gid)
}

/// Whether the socket behind `fd`, the placeholder of `d`, is as new. Some: and whether it is close-on-exec.
pub(crate) fn close_on_exec_if_clean(fd: i32, d: &Desc) -> Option<bool> {
    let known = [&d.dirty, &d.watched, &d.kernel_only].iter().all(|flag| !flag.load(Ordering::Relaxed));
    let clean = known && is_unbound(fd) && has_flags(fd, d.placeholder_nonblock()) && is_as_created(fd);
    let flags = if clean { sys::fcntl(fd, libc::F_GETFD, 0).ok()? } else { return None };
    Some(flags & libc::FD_CLOEXEC != 0)
}

/// It has no address and no port, so that it neither is connected nor was.
fn is_unbound(fd: i32) -> bool {
    let mut name = [0u8; size_of::<libc::sockaddr_in6>()];
    // Behind the family everything is zero.
    sys::getsockname(fd, &mut name).is_ok_and(|len| len <= name.len()) && name[2..].iter().all(|byte| *byte == 0)
}

/// No O_ASYNC, O_APPEND, O_DIRECT, …; O_NONBLOCK as the library believes.
fn has_flags(fd: i32, nonblock: bool) -> bool {
    let expected = libc::O_RDWR | if nonblock { libc::O_NONBLOCK } else { 0 };
    sys::fcntl(fd, libc::F_GETFL, 0) == Ok(expected)
}

fn is_as_created(fd: i32) -> bool {
    sys::ownership(fd).is_ok_and(|(mode, uid, gid)| mode == libc::S_IFSOCK | 0o777 && pack(uid, gid) == creator())
}
