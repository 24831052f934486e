//! Processes by their pidfds, and what /proc says of them.

use rustix::event::{poll, PollFd, PollFlags, Timespec};
use rustix::fd::{AsRawFd, BorrowedFd};
use std::io::Read;
use std::path::Path;

/// The process of a pidfd, in our namespace.
pub fn pid_of(fd: BorrowedFd<'_>) -> Option<u32> {
    let text = std::fs::read_to_string(format!("/proc/self/fdinfo/{}", fd.as_raw_fd())).ok()?;
    let pid = text.lines().find_map(|l| l.strip_prefix("Pid:"))?;
    pid.trim().parse().ok().filter(|pid| *pid > 0)
}

/// Whether the process of a pidfd has not ended.
pub fn is_alive(pidfd: BorrowedFd<'_>) -> bool {
    let mut fds = [PollFd::new(&pidfd, PollFlags::IN)];
    poll(&mut fds, Some(&Timespec { tv_sec: 0, tv_nsec: 0 })) == Ok(0)
}

/// A file of the kernel's that is read at once, in few system calls.
pub fn read(path: &Path) -> Option<String> {
    let mut bytes = [0u8; 8192];
    let n = std::fs::File::open(path).and_then(|mut f| f.read(&mut bytes)).ok()?;
    Some(String::from_utf8_lossy(&bytes[..n]).into_owned())
}
