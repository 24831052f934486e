//! Processes behind pidfds, and facts about them from /proc.

use rustix::event::{poll, PollFd, PollFlags, Timespec};
use rustix::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use rustix::io::Errno;
use std::path::Path;

/// The number of a pidfd's process in this PID namespace.
pub fn pid_of(fd: BorrowedFd<'_>) -> Option<u32> {
    let text = std::fs::read_to_string(format!("/proc/self/fdinfo/{}", fd.as_raw_fd())).ok()?;
    let pid = text.lines().find_map(|l| l.strip_prefix("Pid:"))?;
    pid.trim().parse().ok().filter(|pid| *pid > 0)
}

/// The number of the process's cgroup (version 2). `None`: the process has ended, or the kernel
/// does not tell (before 6.13).
pub fn cgroup_number(pidfd: BorrowedFd<'_>) -> Option<u64> {
    /// From linux/pidfd.h.
    const PIDFD_INFO_CGROUPID: u64 = 1 << 2;
    const PIDFD_GET_INFO: u64 = 0xc040_ff0b;
    /// The first version of `struct pidfd_info`: a mask, the cgroup, and twelve numbers.
    #[repr(C)]
    struct Info {
        mask: u64,
        cgroup: u64,
        numbers: [u32; 12],
    }
    let mut info = Info { mask: PIDFD_INFO_CGROUPID, cgroup: 0, numbers: [0; 12] };
    // SAFETY: the structure lives during the call, and has the size that the request number
    // encodes.
    let rc = unsafe { libc::ioctl(pidfd.as_raw_fd(), PIDFD_GET_INFO as _, &raw mut info) };
    (rc == 0 && info.mask & PIDFD_INFO_CGROUPID != 0 && info.cgroup != 0).then_some(info.cgroup)
}

/// Whether the process of a pidfd has not ended.
pub fn is_alive(pidfd: BorrowedFd<'_>) -> bool {
    let mut fds = [PollFd::new(&pidfd, PollFlags::IN)];
    // Even a poll that does not wait can end with EINTR (by the watchdog's signal).
    rustix::io::retry_on_intr(|| poll(&mut fds, Some(&Timespec { tv_sec: 0, tv_nsec: 0 }))) == Ok(0)
}

/// The process that has connected a Unix socket (SO_PEERPIDFD, Linux 6.5). Correct even if another
/// process has got its number.
///
/// # Errors
/// NOPROTOOPT: the kernel is too old. Other errors: the process has ended.
pub fn of_peer(control: BorrowedFd<'_>) -> Result<OwnedFd, Errno> {
    const SO_PEERPIDFD: libc::c_int = 77;
    let mut fd: libc::c_int = -1;
    let mut len = size_of::<libc::c_int>() as libc::socklen_t;
    // SAFETY: `fd` and `len` are valid for writes of the size that is passed.
    let rc = unsafe {
        libc::getsockopt(control.as_raw_fd(), libc::SOL_SOCKET, SO_PEERPIDFD, (&raw mut fd).cast(), &raw mut len)
    };
    if rc != 0 || fd < 0 {
        return Err(std::io::Error::last_os_error().raw_os_error().map_or(Errno::SRCH, Errno::from_raw_os_error));
    }
    // SAFETY: the kernel has just made this descriptor, and nothing else owns it.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// Whether the process of a pidfd may administer the network ([`crate::descriptor::may_administer`]).
pub fn may_administer(pidfd: BorrowedFd<'_>) -> bool {
    // The order matters: if the process is alive after the check, the number was its own during
    // the check.
    pid_of(pidfd).is_some_and(crate::descriptor::may_administer) && is_alive(pidfd)
}

/// Reads a file of /proc whole, in few system calls.
pub fn read(path: &Path) -> Option<String> {
    let mut bytes = [0u8; 8192];
    let file = std::fs::File::open(path).ok()?;
    let n = rustix::io::retry_on_intr(|| rustix::io::read(&file, &mut bytes)).ok()?;
    Some(String::from_utf8_lossy(&bytes[..n]).into_owned())
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::fd::AsFd;
    use rustix::process::{getpid, pidfd_open, PidfdFlags};
    use std::sync::atomic::{AtomicBool, Ordering};

    extern "C" fn nothing(_: libc::c_int) {}

    #[test]
    fn a_live_process_is_alive_also_if_a_signal_comes() {
        // SAFETY: the handler does nothing, which is safe in any context. For the other fields
        // zero is valid.
        unsafe {
            let mut action: libc::sigaction = std::mem::zeroed();
            action.sa_sigaction = nothing as extern "C" fn(libc::c_int) as libc::sighandler_t;
            assert_eq!(libc::sigaction(libc::SIGUSR2, &raw const action, std::ptr::null_mut()), 0);
        }
        let pidfd = pidfd_open(getpid(), PidfdFlags::empty()).unwrap();
        let over = AtomicBool::new(false);
        // SAFETY: these calls have no preconditions.
        let (process, thread) = unsafe { (libc::getpid(), libc::gettid()) };
        let wrong = std::thread::scope(|s| {
            s.spawn(|| {
                while !over.load(Ordering::Relaxed) {
                    // SAFETY: the call takes numbers only, and the target thread lives: it waits
                    // for this thread.
                    unsafe { libc::syscall(libc::SYS_tgkill, process, thread, libc::SIGUSR2) };
                }
            });
            let status = Path::new("/proc/self/status");
            let wrong = (0..10_000).filter(|_| !is_alive(pidfd.as_fd()) || read(status).is_none()).count();
            over.store(true, Ordering::Relaxed);
            wrong
        });
        assert_eq!(wrong, 0);
    }
}
