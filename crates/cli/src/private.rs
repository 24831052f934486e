//! Starts a private monitor (one for this user only). It runs detached in a session of its own. It
//! keeps no descriptor of the program that `fastsocket run` starts.

use fsocket_client::control;
use rustix::event::{poll, PollFd, PollFlags, Timespec};
use rustix::fd::OwnedFd;
use rustix::process::{pidfd_open, Pid, PidfdFlags};
use std::ffi::{CString, OsStr};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::path::Path;
use std::time::{Duration, Instant};

/// A new monitor must answer within this time; otherwise the program runs without it.
const START_LIMIT: Duration = Duration::from_secs(2);
/// If the new monitor ends at once, another monitor that was started at the same moment may have
/// won the race for the socket. The other monitor must answer within this time.
const RACE_LIMIT: Duration = Duration::from_millis(300);

/// Makes sure that the private monitor's directory exists. A directory is refused if it belongs to
/// another user or if other users can enter it.
pub fn directory(socket: &Path) -> Result<(), String> {
    let dir = socket.parent().unwrap_or(Path::new("/"));
    match std::fs::DirBuilder::new().mode(0o700).create(dir) {
        Ok(()) => return Ok(()),
        Err(e) if e.kind() == std::io::ErrorKind::AlreadyExists => {}
        Err(e) => return Err(format!("{}: {e}", dir.display())),
    }
    let meta = std::fs::symlink_metadata(dir).map_err(|e| format!("{}: {e}", dir.display()))?;
    if !meta.is_dir() || meta.uid() != rustix::process::geteuid().as_raw() || meta.mode() & 0o077 != 0 {
        return Err(format!("{}: not a directory of mode 0700 that belongs to this user", dir.display()));
    }
    Ok(())
}

/// Starts `monitor` and returns once it answers at `socket`. The socket must lie in a
/// [`directory`] of this user.
pub fn start(monitor: &Path, socket: &Path) -> Result<(), String> {
    let image = Image::new(monitor, socket)?;
    let pidfd = image.spawn().map_err(|e| format!("{}: {e}", monitor.display()))?;
    let started = Instant::now();
    let mut ended = None;
    loop {
        match control::probe_at(&control::named(socket)) {
            Ok(_) => {
                // Wait until the monitor answers the whole protocol. A program that greets it
                // earlier may time out, and would then use kernel sockets for a second.
                control::await_answer(socket, START_LIMIT.saturating_sub(started.elapsed()));
                return Ok(());
            }
            Err(e) if control::is_absent(e) => {}
            Err(e) => return Err(format!("{}: {e}", socket.display())),
        }
        if ended.is_none() && pidfd.as_ref().is_some_and(|fd| wait_ms(fd, 1)) {
            ended = Some(Instant::now());
        } else if ended.is_some() || pidfd.is_none() {
            std::thread::sleep(Duration::from_millis(1));
        }
        if ended.is_some_and(|at| at.elapsed() > RACE_LIMIT) {
            return Err(format!("{} ended at start", monitor.display()));
        }
        if started.elapsed() > START_LIMIT {
            return Err(format!("{} did not answer within {} s", monitor.display(), START_LIMIT.as_secs()));
        }
    }
}

/// Waits up to `ms` milliseconds for the process to end.
fn wait_ms(pidfd: &OwnedFd, ms: i64) -> bool {
    let mut fds = [PollFd::new(pidfd, PollFlags::IN)];
    let limit = Timespec { tv_sec: 0, tv_nsec: ms * 1_000_000 };
    poll(&mut fds, Some(&limit)).is_ok_and(|n| n > 0)
}

/// Everything that the child needs, allocated before the fork because the child must not allocate.
struct Image {
    path: CString,
    args: Vec<CString>,
    env: Vec<CString>,
}

impl Image {
    fn new(monitor: &Path, socket: &Path) -> Result<Self, String> {
        let c = |s: &OsStr| CString::new(s.as_bytes()).map_err(|_| "path with a zero byte".to_owned());
        let path = c(monitor.as_os_str())?;
        let args = vec![path.clone(), c(OsStr::new("--private"))?, c(OsStr::new("--socket"))?, c(socket.as_os_str())?];
        // The monitor itself must not load the library.
        let env = std::env::vars_os().filter(|(k, _)| k != "LD_PRELOAD" && k != fsocket_proto::paths::ENV_SOCKET);
        let env = env.filter_map(|(k, v)| CString::new([k.as_bytes(), b"=", v.as_bytes()].concat()).ok()).collect();
        Ok(Image { path, args, env })
    }

    /// Starts the monitor as a grandchild, so that the program (which this process becomes) does
    /// not have the monitor among its children. Returns the monitor's pidfd.
    fn spawn(&self) -> std::io::Result<Option<OwnedFd>> {
        let pointers = |v: &[CString]| -> Vec<*const libc::c_char> {
            v.iter().map(|s| s.as_ptr()).chain([std::ptr::null()]).collect()
        };
        let (args, env) = (pointers(&self.args), pointers(&self.env));
        // Both ends close on exec. If the parent reads the pid and then the end of the pipe
        // without an errno, exec succeeded.
        let (rx, tx) = rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC)?;
        let adopts = adopts_orphans();
        // SAFETY: this process has one thread, so no lock is held in the copy. The children only
        // call async-signal-safe functions, on memory that was prepared above.
        let first = unsafe {
            if adopts {
                hidden_child()
            } else {
                libc::fork()
            }
        };
        if first < 0 {
            return Err(std::io::Error::last_os_error());
        }
        if first == 0 {
            // SAFETY: this process has one thread, and the child leaves only by `_exit` or
            // `execve`, so it never returns to Rust code of the parent.
            unsafe {
                libc::setsid();
                if adopts {
                    libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL);
                }
                let second = libc::fork();
                if adopts && second > 0 {
                    keep(second);
                }
                if adopts && second == 0 {
                    libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL);
                }
                if second != 0 {
                    libc::_exit(if second < 0 { 1 } else { 0 });
                }
                exec_detached(&self.path, &args, &env, std::os::fd::AsRawFd::as_raw_fd(&tx));
            }
        }
        drop(tx);
        let mut status = 0;
        while !adopts
            // SAFETY: `status` is a live local variable, and `first` is a child of this process.
            && unsafe { libc::waitpid(first, &mut status, 0) } < 0
            && std::io::Error::last_os_error().kind() == std::io::ErrorKind::Interrupted
        {}
        if status != 0 {
            return Err(std::io::Error::other("cannot fork"));
        }
        let mut word = [0; 8];
        let mut got = Vec::new();
        while let Ok(n @ 1..) = rustix::io::read(&rx, &mut word) {
            got.extend_from_slice(&word[..n]);
        }
        let int = |i: usize| got.get(i..i + 4).map(|b| i32::from_ne_bytes([b[0], b[1], b[2], b[3]]));
        if let Some(errno) = int(4) {
            return Err(std::io::Error::from_raw_os_error(errno));
        }
        let pid = int(0).and_then(Pid::from_raw).ok_or_else(|| std::io::Error::other("cannot start"))?;
        Ok(pidfd_open(pid, PidfdFlags::empty()).ok())
    }
}

/// Whether this process becomes the parent of orphans among its descendants: as pid 1 or as a
/// subreaper. Its program keeps this role after `exec`.
fn adopts_orphans() -> bool {
    let mut subreaper: libc::c_int = 0;
    // SAFETY: the kernel writes one `int`, and `subreaper` is one.
    let asked = unsafe { libc::prctl(libc::PR_GET_CHILD_SUBREAPER, &raw mut subreaper) };
    std::process::id() == 1 || asked == 0 && subreaper != 0
}

/// Forks a child without an exit signal. Its parent gets no SIGCHLD when it ends, and `wait` does
/// not report it (except with `__WALL` or `__WCLONE`). The kernel restores the signal if the child
/// calls `exec` or gets another parent.
///
/// # Safety
/// As for `fork`.
unsafe fn hidden_child() -> libc::pid_t {
    // SAFETY: a null stack pointer makes the child continue on a copy of this stack. No flag makes
    // the kernel write to memory.
    unsafe { libc::syscall(libc::SYS_clone, 0, 0, 0, 0, 0) as libc::pid_t }
}

/// Body of the hidden child. It stays the parent of the monitor as long as the program lives, so
/// that the program does not adopt the monitor as an orphan. It keeps no descriptor open.
///
/// # Safety
/// Call it only in a process of its own, because it closes all descriptors. It calls only
/// async-signal-safe functions.
unsafe fn keep(monitor: libc::pid_t) -> ! {
    // SAFETY: all pointers are null or a C string literal.
    unsafe {
        libc::chdir(c"/".as_ptr());
        libc::syscall(libc::SYS_close_range, 0u32, u32::MAX, 0u32);
        for signal in [libc::SIGHUP, libc::SIGINT, libc::SIGTERM, libc::SIGQUIT] {
            libc::signal(signal, libc::SIG_IGN);
        }
        while libc::waitpid(monitor, std::ptr::null_mut(), 0) < 0 && *libc::__errno_location() == libc::EINTR {}
        // Stay after the end of the monitor, because the program could see the end of this
        // process.
        loop {
            libc::pause();
        }
    }
}

/// Makes the second child the monitor. It writes its pid to `pipe`, and then the errno if `execve`
/// fails.
///
/// # Safety
/// `args` and `env` end with a null pointer and outlive the call.
unsafe fn exec_detached(
    path: &CString,
    args: &[*const libc::c_char],
    env: &[*const libc::c_char],
    pipe: libc::c_int,
) -> ! {
    // SAFETY: all calls are async-signal-safe. Pointers point to live locals, or to the arrays,
    // which end with null and outlive the call by the condition of this function.
    unsafe {
        let pid = libc::getpid();
        libc::write(pipe, (&raw const pid).cast(), 4);
        libc::chdir(c"/".as_ptr());
        // The pipe becomes descriptor 3. It first moves to a higher number, because 0 to 2 are
        // replaced below.
        let high = libc::fcntl(pipe, libc::F_DUPFD_CLOEXEC, 4);
        libc::dup3(high, 3, libc::O_CLOEXEC);
        let null = libc::open(c"/dev/null".as_ptr(), libc::O_RDWR | libc::O_CLOEXEC);
        for fd in 0..3 {
            if null == fd {
                libc::fcntl(fd, libc::F_SETFD, 0);
            } else {
                libc::dup2(null, fd);
            }
        }
        libc::syscall(libc::SYS_close_range, 4u32, u32::MAX, 0u32);
        let mut none: libc::sigset_t = std::mem::zeroed();
        libc::sigemptyset(&mut none);
        libc::sigprocmask(libc::SIG_SETMASK, &none, std::ptr::null_mut());
        for signal in 1..=64 {
            libc::signal(signal, libc::SIG_DFL);
        }
        libc::execve(path.as_ptr(), args.as_ptr(), env.as_ptr());
        let errno = *libc::__errno_location();
        libc::write(3, (&raw const errno).cast(), 4);
        libc::_exit(1)
    }
}
