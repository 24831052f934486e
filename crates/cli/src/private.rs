//! Starts a private monitor: detached, belonging to nobody's session, holding
//! nothing of the program that happened to need it first.

use fsocket_client::control;
use rustix::event::{poll, PollFd, PollFlags, Timespec};
use rustix::fd::OwnedFd;
use rustix::process::{pidfd_open, Pid, PidfdFlags};
use std::ffi::{CString, OsStr};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::path::Path;
use std::time::{Duration, Instant};

/// How long a starting monitor may take before the program runs without it.
const START_LIMIT: Duration = Duration::from_secs(2);
/// A monitor that ended at once may have lost a race against another one that
/// was started at the same moment; how long that one may take.
const RACE_LIMIT: Duration = Duration::from_millis(300);

/// The private monitor's directory, made if need be. A directory that is not ours, or open to
/// others, is not used.
pub fn directory(socket: &Path) -> Result<(), String> {
    let dir = socket.parent().unwrap_or(Path::new("/"));
    match std::fs::DirBuilder::new().mode(0o700).create(dir) {
        Ok(()) => return Ok(()),
        Err(e) if e.kind() == std::io::ErrorKind::AlreadyExists => {}
        Err(e) => return Err(format!("{}: {e}", dir.display())),
    }
    let meta = std::fs::symlink_metadata(dir).map_err(|e| format!("{}: {e}", dir.display()))?;
    if !meta.is_dir() || meta.uid() != rustix::process::geteuid().as_raw() || meta.mode() & 0o077 != 0 {
        return Err(format!("{}: not a directory of mode 0700 that belongs to us", dir.display()));
    }
    Ok(())
}

/// Starts `monitor` and returns once it answers at `socket`, in a [`directory`] of this user's.
pub fn start(monitor: &Path, socket: &Path) -> Result<(), String> {
    let image = Image::new(monitor, socket)?;
    let pidfd = image.spawn().map_err(|e| format!("{}: {e}", monitor.display()))?;
    let started = Instant::now();
    let mut ended = None;
    loop {
        match control::probe(socket) {
            Ok(_) => {
                // (A program that greets it earlier may give up before, and use kernel sockets for a second.)
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

/// Everything the child needs, allocated before the fork.
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

    /// Forks twice, so that the monitor never is a child that the program sees
    /// which this process becomes. Gives back the monitor's pidfd.
    fn spawn(&self) -> std::io::Result<Option<OwnedFd>> {
        let pointers = |v: &[CString]| -> Vec<*const libc::c_char> {
            v.iter().map(|s| s.as_ptr()).chain([std::ptr::null()]).collect()
        };
        let (args, env) = (pointers(&self.args), pointers(&self.env));
        // Both ends close on exec: its end without a byte is the success of exec.
        let (rx, tx) = rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC)?;
        let adopts = adopts_orphans();
        // SAFETY: a process with one thread, of which this is a copy; the children below only
        // call async-signal-safe functions on memory prepared above.
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
            // SAFETY: this process has one thread; `_exit` and `execve` are the only ways out.
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
            // SAFETY: `status` is ours; `first` is our child.
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

/// Is this process, and so the program that it becomes, the parent of all orphans below it?
fn adopts_orphans() -> bool {
    let mut subreaper: libc::c_int = 0;
    // SAFETY: the call writes one `int`.
    let asked = unsafe { libc::prctl(libc::PR_GET_CHILD_SUBREAPER, &raw mut subreaper) };
    std::process::id() == 1 || asked == 0 && subreaper != 0
}

/// As `fork`, but the child says nothing at its end, and a parent that waits for children does not see it (unless by
/// `__WALL` or `__WCLONE`): it has no exit signal. It would lose that by `exec`, or with another parent.
///
/// # Safety
/// As `fork`.
unsafe fn hidden_child() -> libc::pid_t {
    // SAFETY: no stack, so a copy of this one; no memory that the kernel would write to.
    unsafe { libc::syscall(libc::SYS_clone, 0, 0, 0, 0, 0) as libc::pid_t }
}

/// The hidden child: the monitor's parent, as long as the program lives. It holds nothing.
///
/// # Safety
/// In a process of its own; async-signal-safe.
unsafe fn keep(monitor: libc::pid_t) -> ! {
    // SAFETY: numbers and null only.
    unsafe {
        libc::chdir(c"/".as_ptr());
        libc::syscall(libc::SYS_close_range, 0u32, u32::MAX, 0u32);
        for signal in [libc::SIGHUP, libc::SIGINT, libc::SIGTERM, libc::SIGQUIT] {
            libc::signal(signal, libc::SIG_IGN);
        }
        while libc::waitpid(monitor, std::ptr::null_mut(), 0) < 0 && *libc::__errno_location() == libc::EINTR {}
        // (An end of this one would be announced to the program.)
        loop {
            libc::pause();
        }
    }
}

/// In the second child: becomes the monitor. Writes its pid to `pipe`, and the
/// errno after it if `execve` fails.
///
/// # Safety
/// `args` and `env` end with a null pointer and outlive the call.
unsafe fn exec_detached(
    path: &CString,
    args: &[*const libc::c_char],
    env: &[*const libc::c_char],
    pipe: libc::c_int,
) -> ! {
    // SAFETY: async-signal-safe calls with pointers to locals and to the
    // caller's arrays.
    unsafe {
        let pid = libc::getpid();
        libc::write(pipe, (&raw const pid).cast(), 4);
        libc::chdir(c"/".as_ptr());
        // Descriptor 3 becomes the pipe (first moved out of the way of 0 to 2).
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
