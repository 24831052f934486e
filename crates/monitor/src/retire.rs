//! An upgrade to another ABI: a process of the old program stays for the programs that it serves
//! (ADR 83).
//!
//! A monitor that is told to end or to restart looks at the program file under its own name. If
//! that file has another ABI, the monitor starts its own program once more, and passes its socket.
//! Clients announce themselves to that process as to any next monitor (ADR 48).

use fsocket_monitor::maker;
use rustix::event::PollFlags;
use rustix::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::io::{self, Read};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

/// In LISTEN_FDNAMES: this program itself has made the socket.
pub const OWN: &str = "fastsocketd-own";
/// The first descriptor number of sd_listen_fds(3).
pub const FIRST: i32 = 3;
/// How long another program may take to print its ABI.
const PATIENCE: Duration = Duration::from_secs(2);
/// This program, even if its file has been removed.
pub const SELF: &str = "/proc/self/exe";
/// Variables by which a service manager talks to its main process.
const OF_SERVICE: [&str; 5] = ["NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID", "LISTEN_FDS", "LISTEN_PID"];

/// The ABI of the monitor in this file. `None`: it does not print one.
pub fn abi_of(program: &Path) -> Option<u32> {
    let mut asked = Command::new(program);
    asked.arg("--abi").stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::null());
    OF_SERVICE.iter().for_each(|name| _ = asked.env_remove(name));
    let mut asked = asked.spawn().ok()?;
    let (mut said, mut length) = ([0; 16], 0);
    if let Some(mut out) = asked.stdout.take() {
        if maker::is_ready_within(out.as_fd(), PollFlags::IN, PATIENCE) {
            length = out.read(&mut said).unwrap_or(0);
        }
    }
    let _ = (asked.kill(), asked.wait());
    std::str::from_utf8(&said[..length]).ok()?.trim().parse().ok()
}

/// Whether the new program accepts the current configuration. This process is about to execute it.
pub fn checks(program: &Path) -> bool {
    let args = std::env::args_os().skip(1);
    Command::new(program).args(args).arg("--check").stdin(Stdio::null()).status().is_ok_and(|status| status.success())
}

/// Gives the socket the descriptor number at which the next program in this process expects it.
pub fn pass(socket: i32) -> io::Result<()> {
    let done = match socket == FIRST {
        // SAFETY: the call takes numbers only, and clears the close-on-exec flag of the socket.
        true => unsafe { libc::fcntl(FIRST, libc::F_SETFD, 0) },
        // SAFETY: the call takes numbers only. A file that has the number is no longer used.
        false => unsafe { libc::dup3(socket, FIRST, 0) },
    };
    if done < 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(())
}

/// Starts a retired monitor on this socket. It becomes a child of init, and waits until this
/// process has released the lock.
///
/// # Errors
/// Those of the system calls.
pub fn stay(socket: BorrowedFd<'_>) -> io::Result<()> {
    let mut args = std::env::args_os();
    let mut again = Command::new(SELF);
    again.arg0(args.next().unwrap_or_default()).args(args).arg("--retired").env("LISTEN_FDNAMES", OWN);
    OF_SERVICE.iter().for_each(|name| _ = again.env_remove(name));
    let socket = socket.as_raw_fd();
    let prepare = move || {
        pass(socket)?;
        // SAFETY: no memory is involved. The child has one thread and goes on to `exec`; its
        // parent ends at once.
        match unsafe { libc::fork() } {
            0 => {
                // SAFETY: no memory is involved. A new session lets the child outlive the process
                // group and the terminal of this process.
                unsafe { libc::setsid() };
                Ok(())
            }
            -1 => Err(io::Error::last_os_error()),
            // SAFETY: this ends the process at once, without running any code of this program.
            _ => unsafe { libc::_exit(0) },
        }
    };
    // SAFETY: `prepare` makes only system calls, which are safe between `fork` and `exec`.
    unsafe { again.pre_exec(prepare) };
    again.spawn()?.wait().map(drop)
}

/// The socket with which a retired monitor was started. `None`: this process was not started as
/// one.
pub fn inherited() -> Option<OwnedFd> {
    let is_passed = std::env::var_os("LISTEN_FDNAMES").is_some_and(|names| names == OWN);
    // (This process has only one thread, so no other code reads the environment meanwhile.)
    std::env::remove_var("LISTEN_FDNAMES");
    if !is_passed {
        return None;
    }
    // SAFETY: [`stay`] has passed the socket with this number, and nothing else in this process
    // owns the number.
    let fd = unsafe { OwnedFd::from_raw_fd(FIRST) };
    rustix::io::fcntl_setfd(fd.as_fd(), rustix::io::FdFlags::CLOEXEC).ok()?;
    Some(fd)
}

/// Sets the name of this process. Being executed as [`SELF`], it would be called "exe".
pub fn take_name() {
    // SAFETY: the argument is a C string, which the kernel copies.
    unsafe { libc::prctl(libc::PR_SET_NAME, c"fastsocketd".as_ptr()) };
}
