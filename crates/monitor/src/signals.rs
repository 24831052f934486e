//! Signals: the end, and SIGHUP, which has the monitor begin again with what the configuration says now.

use rustix::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::io::Write;
use std::os::unix::process::CommandExt;
use std::path::PathBuf;

/// In LISTEN_FDNAMES: the socket is this program's own.
pub const OWN: &str = "fastsocketd-own";

pub struct Signals {
    config: Option<PathBuf>,
    begin_again: bool,
    /// The monitor's socket, and whether its name belongs to this process.
    passed: Option<(OwnedFd, bool)>,
}

/// SIGTERM, SIGINT, and SIGHUP.
fn all() -> libc::sigset_t {
    // SAFETY: zero is a valid sigset_t; sigemptyset initialises it anyway, and it is valid for all calls.
    unsafe {
        let mut set: libc::sigset_t = std::mem::zeroed();
        libc::sigemptyset(&raw mut set);
        for signal in [libc::SIGTERM, libc::SIGINT, libc::SIGHUP] {
            libc::sigaddset(&raw mut set, signal);
        }
        set
    }
}

impl Signals {
    /// They wait from here on. `config`: the file that was named.
    pub fn block(config: Option<PathBuf>) -> std::io::Result<Signals> {
        let set = all();
        // SAFETY: the set is valid for the call.
        if unsafe { libc::sigprocmask(libc::SIG_BLOCK, &raw const set, std::ptr::null_mut()) } != 0 {
            return Err(std::io::Error::last_os_error());
        }
        Ok(Signals { config, begin_again: false, passed: None })
    }

    /// This program is passed that socket once more when it begins again.
    pub fn pass_on(&mut self, socket: OwnedFd, own: bool) {
        self.passed = Some((socket, own));
    }

    /// A descriptor that becomes readable on those, of this process.
    pub fn watch(&self) -> std::io::Result<OwnedFd> {
        let set = all();
        // SAFETY: the set is valid for the call; the descriptor that it returns is ours alone.
        unsafe {
            let fd = libc::signalfd(-1, &raw const set, libc::SFD_CLOEXEC | libc::SFD_NONBLOCK);
            if fd < 0 {
                return Err(std::io::Error::last_os_error());
            }
            Ok(OwnedFd::from_raw_fd(fd))
        }
    }

    /// One has come: is it the end? Not SIGHUP with a configuration that is wrong: the old one goes on. `at_once`:
    /// nothing else has to end before this program begins again.
    pub fn end(&mut self, watched: BorrowedFd<'_>, at_once: bool) -> bool {
        let mut info = [0u8; 128];
        let signal = match rustix::io::read(watched, &mut info) {
            Ok(128) => u32::from_ne_bytes([info[0], info[1], info[2], info[3]]) as i32,
            _ => return false,
        };
        if signal != libc::SIGHUP {
            return true;
        }
        let read = fsocket_monitor::settings::read(self.config.as_deref());
        if let Err(e) = read.and_then(|settings| settings.balance.knobs()) {
            say(format_args!("not reloaded: {e}"));
            return false;
        }
        if let Err(e) = program().and_then(std::fs::metadata) {
            say(format_args!("not reloaded: its program is gone: {e}"));
            return false;
        }
        self.begin_again = true;
        if at_once {
            self.begin_again_if_asked();
        }
        true
    }

    /// This program once more, in this process, after SIGHUP: with what the file says now, and as the binary is
    /// now. Programs that run find it as they find any monitor that comes after another one.
    pub fn begin_again_if_asked(&self) {
        if self.begin_again {
            if let Err(e) = self.begin_again() {
                say(format_args!("not begun again: {e}"));
            }
        }
    }

    fn begin_again(&self) -> std::io::Result<()> {
        let mut args = std::env::args_os();
        let name = args.next().unwrap_or_default();
        let mut again = std::process::Command::new(program()?);
        again.arg0(name).args(args);
        if let Some((socket, own)) = &self.passed {
            // As sd_listen_fds(3) has it.
            const FIRST: i32 = 3;
            // SAFETY: numbers only; whatever has this number is not used any more.
            if unsafe { libc::dup3(socket.as_raw_fd(), FIRST, 0) } < 0 {
                return Err(std::io::Error::last_os_error());
            }
            again.env("LISTEN_FDS", "1").env("LISTEN_PID", std::process::id().to_string());
            again.env("LISTEN_FDNAMES", if *own { OWN } else { "" });
        }
        Err(again.exec())
    }
}

/// This program's file as it is now: after an upgrade the kernel names the one that was removed.
fn program() -> std::io::Result<PathBuf> {
    Ok(std::env::current_exe()?.to_string_lossy().trim_end_matches(" (deleted)").into())
}

/// (Nobody may read it.)
fn say(what: std::fmt::Arguments<'_>) {
    let _ = writeln!(std::io::stderr(), "fastsocketd: {what}");
}
