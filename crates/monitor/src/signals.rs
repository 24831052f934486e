//! Handles signals: those that end the monitor, and SIGHUP, after which it starts again with the
//! current configuration.

use crate::options::Options;
use crate::retire;
use anyhow::Context;
use fsocket_monitor::endpoint::Leave;
use rustix::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::io::Write;
use std::os::unix::process::CommandExt;
use std::path::PathBuf;

/// In /proc, this follows the name of a file that was removed or replaced.
const DELETED: &str = " (deleted)";

/// The monitor's socket. If the socket's name belongs to this process, also the means to leave the
/// name to another process.
type Passed = (OwnedFd, Option<Leave>);

pub struct Signals {
    config: Option<PathBuf>,
    /// The monitor serves all users and is not retired: programs must keep it when another ABI is
    /// installed.
    is_kept: bool,
    retired: bool,
    /// Once the monitor has ended: start again (`begin_again`), or leave a retired monitor
    /// (`stay`).
    begin_again: bool,
    stay: bool,
    passed: Option<Passed>,
}

/// SIGTERM, SIGINT, and SIGHUP.
fn all() -> libc::sigset_t {
    // SAFETY: zero is a valid sigset_t, `sigemptyset` initialises it, and it is valid for all
    // calls.
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
    /// Blocks the signals. From here on they wait until they are read.
    pub fn block(options: &Options) -> std::io::Result<Signals> {
        let set = all();
        // SAFETY: the set is valid for the call, and no old set is requested.
        if unsafe { libc::sigprocmask(libc::SIG_BLOCK, &raw const set, std::ptr::null_mut()) } != 0 {
            return Err(std::io::Error::last_os_error());
        }
        let (config, retired) = (options.config.clone(), options.retired);
        let is_kept = !options.private && !retired;
        Ok(Signals { config, is_kept, retired, begin_again: false, stay: false, passed: None })
    }

    /// The socket that is passed to the next program.
    pub fn pass_on(&mut self, socket: OwnedFd, own: Option<Leave>) {
        self.passed = Some((socket, own));
    }

    /// Marks this process as the front, which only serves: the broker starts programs.
    pub fn is_of_front(&mut self) {
        (self.is_kept, self.passed) = (false, None);
    }

    /// A descriptor that becomes readable when this process gets one of the signals.
    pub fn watch(&self) -> std::io::Result<OwnedFd> {
        let set = all();
        // SAFETY: the set is valid for the call, and nothing else owns the new descriptor.
        unsafe {
            let fd = libc::signalfd(-1, &raw const set, libc::SFD_CLOEXEC | libc::SFD_NONBLOCK);
            if fd < 0 {
                return Err(std::io::Error::last_os_error());
            }
            Ok(OwnedFd::from_raw_fd(fd))
        }
    }

    /// Handles a signal. Returns whether the monitor ends. It goes on after SIGHUP if the new
    /// configuration is wrong. `at_once`: no other process must end before the next program
    /// starts.
    pub fn end(&mut self, watched: BorrowedFd<'_>, at_once: bool) -> bool {
        let mut info = [0u8; 128];
        let signal = match rustix::io::read(watched, &mut info) {
            Ok(128) => u32::from_ne_bytes([info[0], info[1], info[2], info[3]]) as i32,
            _ => return false,
        };
        self.stay = self.is_kept && self.is_replaced();
        if signal == libc::SIGHUP {
            if let Err(e) = self.may_begin_again() {
                say(format_args!("not reloaded: {e}"));
                return false;
            }
            self.begin_again = true;
        }
        if at_once {
            self.go_on_if_asked();
        }
        true
    }

    /// Whether the program's file now has another ABI, while this process owns the socket's name.
    fn is_replaced(&self) -> bool {
        let owns = matches!(&self.passed, Some((_, Some(_))));
        let is_gone = || std::env::current_exe().is_ok_and(|own| own.to_string_lossy().ends_with(DELETED));
        owns && is_gone() && retire::abi_of(&self.program()).is_some_and(|abi| abi != fsocket_abi::VERSION)
    }

    fn may_begin_again(&self) -> anyhow::Result<()> {
        let program = self.program();
        std::fs::metadata(&program).context("its program is gone")?;
        // (If the new program has another ABI, only that program can check its configuration.)
        if self.stay {
            anyhow::ensure!(retire::checks(&program), "wrong for {}", program.display());
            return Ok(());
        }
        fsocket_monitor::settings::read(self.config.as_deref())?.balance.knobs()?;
        Ok(())
    }

    /// Starts what follows this monitor. If the next monitor has another ABI, a retired monitor
    /// goes on for the programs that this one has served. After SIGHUP, this process executes the
    /// current program file with the current configuration. Running programs find each of them as
    /// they find any next monitor.
    pub fn go_on_if_asked(&mut self) {
        if self.stay {
            match self.passed.as_ref().map(|(socket, own)| (retire::stay(socket.as_fd()), own)) {
                Some((Ok(()), Some(own))) => own.to_another(),
                Some((Err(e), _)) => say(format_args!("programs that run lose their monitor: {e}")),
                _ => {}
            }
        }
        if self.begin_again {
            if let Err(e) = self.begin_again() {
                say(format_args!("not begun again: {e}"));
            }
        }
    }

    /// The path of the program's current file. (After an upgrade, /proc names the removed file.)
    fn program(&self) -> PathBuf {
        if self.retired {
            return retire::SELF.into();
        }
        let own = std::env::current_exe().unwrap_or_default();
        own.to_string_lossy().trim_end_matches(DELETED).into()
    }

    fn begin_again(&self) -> std::io::Result<()> {
        let mut args = std::env::args_os();
        let name = args.next().unwrap_or_default();
        let mut again = std::process::Command::new(self.program());
        again.arg0(name).args(args);
        ["LISTEN_FDS", "LISTEN_PID", "LISTEN_FDNAMES"].iter().for_each(|name| _ = again.env_remove(name));
        // (A program of another ABI makes a socket of its own.)
        if let Some((socket, own)) = self.passed.as_ref().filter(|_| !self.stay) {
            retire::pass(socket.as_raw_fd())?;
            again.env("LISTEN_FDS", "1").env("LISTEN_PID", std::process::id().to_string());
            again.env("LISTEN_FDNAMES", if own.is_some() { retire::OWN } else { "" });
        }
        Err(again.exec())
    }
}

/// (Errors are ignored: nobody may be reading standard error.)
fn say(what: std::fmt::Arguments<'_>) {
    let _ = writeln!(std::io::stderr(), "fastsocketd: {what}");
}
