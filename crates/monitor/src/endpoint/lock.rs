//! The lock of a monitor's socket: a file beside the socket, which names the process that holds
//! the lock.

use crate::pidfd;
use rustix::fd::{AsFd, OwnedFd};
use rustix::fs::{FlockOperation, Mode, OFlags};
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};
use rustix::process::{Pid, PidfdFlags, Signal};
use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

const LOOK: Duration = Duration::from_millis(20);
/// Tries to get a lock whose holder may be about to exit, or about to listen.
const LOOKS: usize = 100;
/// Tries after the holder was asked to end.
const LOOKS_AT_THE_END: usize = 500;
/// Written behind the process number in the lock file of a retired monitor (one that stays for its
/// programs only).
const RETIRED: &str = "retired";

pub fn file(socket: &Path) -> PathBuf {
    let mut name = socket.as_os_str().to_owned();
    name.push(".lock");
    name.into()
}

/// The lock file is never removed: otherwise two monitors could lock two files of the same name.
fn open(socket: &Path) -> io::Result<OwnedFd> {
    let flags = OFlags::CREATE | OFlags::RDWR | OFlags::CLOEXEC | OFlags::NOFOLLOW;
    Ok(rustix::fs::open(file(socket), flags, Mode::RUSR | Mode::WUSR)?)
}

/// Tries to take the lock. False: another process has it.
fn try_lock(fd: &OwnedFd) -> io::Result<bool> {
    match rustix::fs::flock(fd, FlockOperation::NonBlockingLockExclusive) {
        Ok(()) => Ok(true),
        Err(Errno::AGAIN | Errno::INTR) => Ok(false),
        Err(e) => Err(e.into()),
    }
}

/// Takes the lock for a monitor that starts. A retired monitor of the same ABI is asked to end
/// first. `None`: another process keeps the lock.
///
/// # Errors
/// Those of the system calls.
pub fn take(socket: &Path) -> io::Result<Option<OwnedFd>> {
    let fd = open(socket)?;
    let (mut looks, mut has_asked) = (LOOKS, false);
    while looks > 0 {
        if try_lock(&fd)? {
            return Ok(Some(fd));
        }
        if !has_asked && end_retired(&fd)? {
            (looks, has_asked) = (LOOKS_AT_THE_END, true);
        }
        if !has_asked && is_live(socket) {
            break;
        }
        std::thread::sleep(LOOK);
        looks -= 1;
    }
    Ok(None)
}

/// Waits for the lock of a process that has passed its socket to this one and is about to end.
/// (Clients can connect to the socket all the time.) `None`: that process keeps the lock.
///
/// # Errors
/// Those of the system calls.
pub fn inherit(socket: &Path) -> io::Result<Option<OwnedFd>> {
    let fd = open(socket)?;
    for _ in 0..LOOKS_AT_THE_END {
        if try_lock(&fd)? {
            return Ok(Some(fd));
        }
        std::thread::sleep(LOOK);
    }
    Ok(None)
}

/// Writes the holder of the lock into the file. (Only a holder that has done this is asked to end
/// by other monitors.)
pub fn sign(fd: &OwnedFd, retired: bool) {
    let what = if retired { RETIRED } else { "" };
    let text = format!("{} {what}\n", std::process::id());
    let written = rustix::fs::ftruncate(fd, 0).and_then(|()| rustix::io::pwrite(fd, text.as_bytes(), 0));
    if let Err(e) = written {
        tracing::warn!("the lock file cannot be written: {e}");
    }
}

/// Asks the holder of the lock to end if it is a retired monitor. The file can be trusted: only
/// the monitor's user can write it.
///
/// # Errors
/// Those of [`try_lock`].
fn end_retired(fd: &OwnedFd) -> io::Result<bool> {
    let Some(pid) = retired(fd) else { return Ok(false) };
    let Ok(holder) = rustix::process::pidfd_open(pid, PidfdFlags::empty()) else { return Ok(false) };
    // The second look makes sure that `holder` is the right process. It wrote its number and still
    // holds the lock, so it has run all the time, and no other process could get its number.
    if retired(fd) != Some(pid) || try_lock(fd)? {
        return Ok(false);
    }
    Ok(pidfd::is_alive(holder.as_fd()) && rustix::process::pidfd_send_signal(&holder, Signal::TERM).is_ok())
}

fn retired(fd: &OwnedFd) -> Option<Pid> {
    let mut text = [0; 64];
    let n = rustix::io::pread(fd, &mut text, 0).ok()?;
    let (pid, what) = std::str::from_utf8(&text[..n]).ok()?.trim_end().split_once(' ')?;
    (what == RETIRED).then(|| Pid::from_raw(pid.parse().ok()?)).flatten()
}

/// Asks all retired monitors beside a socket to end. Returns how many were asked.
///
/// # Errors
/// The directory cannot be read, or taking a lock fails.
pub fn end_all_retired(socket: &Path) -> io::Result<usize> {
    let mut ended = 0;
    for file in std::fs::read_dir(socket.parent().unwrap_or(Path::new(".")))?
        .flatten()
        .map(|f| f.path())
        .filter(|f| f.extension().is_some_and(|e| e == "lock"))
    {
        let flags = OFlags::RDWR | OFlags::CLOEXEC | OFlags::NOFOLLOW;
        let Ok(fd) = rustix::fs::open(&file, flags, Mode::empty()) else { continue };
        // (A lock that is taken here is released when `fd` is closed.)
        if !try_lock(&fd)? && end_retired(&fd)? {
            ended += 1;
        }
    }
    Ok(ended)
}

fn is_live(path: &Path) -> bool {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let connect = || -> Result<(), Errno> {
        let fd = rustix::net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)?;
        rustix::net::connect(fd.as_fd(), &SocketAddrUnix::new(path)?)
    };
    // EAGAIN: the backlog is full, so the socket has a listener.
    matches!(connect(), Ok(()) | Err(Errno::AGAIN))
}
