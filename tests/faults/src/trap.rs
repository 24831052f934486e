//! Stops a program at every system call of the library, and makes one of them fail.
//!
//! A seccomp filter with SECCOMP_RET_USER_NOTIF is installed between `fork` and `exec`, so the
//! library does not notice it. A thread of this process answers the notifications. The instruction
//! pointer shows whether the call comes from the library, and from which place in it.
//!
//! Long: the trap, the filter in the child, and the warden that answers the filter are one
//! protocol.

use crate::errors::{self, Call};
use anyhow::{bail, Context, Result};
use std::collections::{BTreeMap, HashMap};
use std::fmt;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::os::unix::process::CommandExt;
use std::process::Command;
use std::str::FromStr;
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// A place in the code: a system call, and the offset of its instruction in the file.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Site {
    pub number: i64,
    pub detail: u64,
    pub offset: u64,
}

impl fmt::Display for Site {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{:x}@{:x}", errors::name(self.number), self.detail, self.offset)
    }
}

/// The call that fails: number `nth` at a place (from 1), and with `on` every later one, too.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Fault {
    pub site: Site,
    pub nth: u32,
    pub on: bool,
    pub error: i32,
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Fault { site, nth, on, error } = self;
        write!(f, "{site}#{nth}{}={}", if *on { "+" } else { "" }, errors::error_name(*error))
    }
}

impl FromStr for Fault {
    type Err = anyhow::Error;
    /// The format of `Display`: `socket.0@1a2b#3=EMFILE`. `#3+` means every call from the third on.
    fn from_str(text: &str) -> Result<Fault> {
        let parse = || {
            let (place, error) = text.split_once('=')?;
            let (site, nth) = place.split_once('#')?;
            let (call, offset) = site.split_once('@')?;
            let (call, detail) = call.split_once('.')?;
            let number = errors::CALLS.iter().find(|c| c.1 == call)?.0;
            let site = Site {
                number,
                detail: u64::from_str_radix(detail, 16).ok()?,
                offset: u64::from_str_radix(offset, 16).ok()?,
            };
            let on = nth.ends_with('+');
            let nth = nth.trim_end_matches('+').parse().ok()?;
            Some(Fault { site, nth, on, error: errors::error_number(error)? })
        };
        parse().with_context(|| format!("not a fault: {text}"))
    }
}

/// The calls that fail.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Faults {
    None,
    One(Fault),
    /// The first call at each place fails with EINTR, if a signal may end it.
    Signals,
}

impl From<Option<Fault>> for Faults {
    fn from(one: Option<Fault>) -> Faults {
        one.map_or(Faults::None, Faults::One)
    }
}

/// The code whose calls count.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Whose {
    /// Calls of the library, in any program.
    Library,
    /// Calls of the program itself and of libc.
    Program,
}

/// The calls that the trap has seen.
#[derive(Clone, Debug, Default)]
pub struct Seen {
    /// How often each place made its call, with the errors that the call may return.
    pub sites: BTreeMap<Site, (u32, &'static [i32])>,
    /// Number of calls that the trap made fail.
    pub failed: u32,
    /// An error of the trap itself.
    pub broken: Option<String>,
}

/// Memory that parent and child share.
struct Page {
    pid: AtomicI32,
    listener: AtomicI32,
    taken: AtomicBool,
}

pub struct Trap {
    seen: Arc<Mutex<Seen>>,
    /// If true, calls are counted and may fail.
    armed: Arc<AtomicBool>,
    /// Delay of each call in milliseconds.
    delay: Arc<AtomicU64>,
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Trap {
    /// Makes `command` run under the trap, with everything that it starts. The trap counts and
    /// fails calls from the start if `armed`, else from [`Trap::arm`] on.
    pub fn set(command: &mut Command, whose: Whose, faults: Faults, armed: bool) -> Result<Trap> {
        let page = share()?;
        // SAFETY: `enter` runs between fork and exec of a process with several threads. It only
        // makes system calls and uses memory that exists already, and allocates nothing.
        unsafe { command.pre_exec(move || enter(page, whose)) };
        let seen = Arc::new(Mutex::new(Seen::default()));
        let (stop, armed) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicBool::new(armed)));
        let delay = Arc::new(AtomicU64::new(0));
        let warden = Warden {
            page,
            whose,
            faults,
            seen: seen.clone(),
            armed: armed.clone(),
            delay: delay.clone(),
            stop: stop.clone(),
            texts: HashMap::new(),
        };
        let thread = std::thread::Builder::new().name("warden".into()).spawn(move || warden.run())?;
        Ok(Trap { seen, armed, delay, stop, thread: Some(thread) })
    }

    pub fn arm(&self) {
        self.armed.store(true, Ordering::SeqCst);
    }

    pub fn disarm(&self) {
        self.armed.store(false, Ordering::SeqCst);
    }

    /// From now on each call waits this long, as on a busy machine.
    pub fn delay(&self, each: Duration) {
        self.delay.store(each.as_millis() as u64, Ordering::SeqCst);
    }

    pub fn seen(&self) -> Seen {
        self.seen.lock().map(|s| s.clone()).unwrap_or_default()
    }
}

impl Drop for Trap {
    /// The processes must have ended: without the thread, their calls fail with ENOSYS.
    fn drop(&mut self) {
        self.stop.store(true, Ordering::SeqCst);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// A page for one trap. It is never unmapped, because a child may still use it.
fn share() -> Result<&'static Page> {
    // SAFETY: `at` is a new mapping that is never undone, and all-zero bytes are a valid Page.
    unsafe {
        let (prot, flags) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_SHARED | libc::MAP_ANONYMOUS);
        let at = libc::mmap(std::ptr::null_mut(), 4096, prot, flags, -1, 0);
        if at == libc::MAP_FAILED {
            bail!("mmap: {}", std::io::Error::last_os_error());
        }
        let page = &*(at as *const Page);
        page.listener.store(-1, Ordering::SeqCst);
        Ok(page)
    }
}

const MAX_CALLS: usize = 64;

/// Runs in the child: installs the filter, and waits until the parent has the listener.
///
/// A signal ends every call that waits for the warden with EINTR, even a call that otherwise never
/// waits. So the monitor's watchdog, which measures how long a call takes, gets no timer here:
/// setting the timer succeeds without effect.
fn enter(page: &Page, whose: Whose) -> std::io::Result<()> {
    const LOAD: u16 = (libc::BPF_LD | libc::BPF_W | libc::BPF_ABS) as u16;
    const EQUAL: u16 = (libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K) as u16;
    const RETURN: u16 = (libc::BPF_RET | libc::BPF_K) as u16;
    let mut code = [libc::sock_filter { code: RETURN, jt: 0, jf: 0, k: libc::SECCOMP_RET_ALLOW }; MAX_CALLS + 6];
    let n = errors::CALLS.len() + 1;
    // `nr` is the first field of seccomp_data. execve is reported because it changes the mappings.
    code[0] = libc::sock_filter { code: LOAD, jt: 0, jf: 0, k: 0 };
    let numbers = errors::CALLS.iter().map(|c| c.0).chain([libc::SYS_execve]);
    for (i, number) in numbers.enumerate() {
        code[1 + i] = libc::sock_filter { code: EQUAL, jt: (n + 1 - i) as u8, jf: 0, k: number as u32 };
    }
    // (Three instructions follow: allow the call; ask the warden; succeed without the call.)
    code[n + 1] = libc::sock_filter { code: EQUAL, jt: 2, jf: 0, k: libc::SYS_timer_settime as u32 };
    code[n + 3].k = libc::SECCOMP_RET_USER_NOTIF;
    if whose == Whose::Program {
        code[n + 4].k = libc::SECCOMP_RET_ERRNO;
    }
    let program = libc::sock_fprog { len: (n + 5) as u16, filter: code.as_mut_ptr() };
    // SAFETY: system calls with numbers, and with a filter that lives until the call returns.
    unsafe {
        if libc::geteuid() != 0 && libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0 {
            return Err(std::io::Error::last_os_error());
        }
        let (operation, flags) = (libc::SECCOMP_SET_MODE_FILTER, libc::SECCOMP_FILTER_FLAG_NEW_LISTENER);
        let fd = libc::syscall(libc::SYS_seccomp, operation, flags, &program as *const libc::sock_fprog);
        if fd < 0 {
            return Err(std::io::Error::last_os_error());
        }
        page.pid.store(libc::getpid(), Ordering::SeqCst);
        page.listener.store(fd as i32, Ordering::SeqCst);
        while !page.taken.load(Ordering::SeqCst) {
            libc::sched_yield();
        }
        libc::close(fd as i32);
    }
    Ok(())
}

struct Warden {
    page: &'static Page,
    whose: Whose,
    faults: Faults,
    seen: Arc<Mutex<Seen>>,
    armed: Arc<AtomicBool>,
    delay: Arc<AtomicU64>,
    stop: Arc<AtomicBool>,
    /// For each thread, the range of the library's code: first and last address, and offset in the
    /// file.
    texts: HashMap<u32, [u64; 3]>,
}

impl Warden {
    fn run(mut self) {
        let result = self.listener().and_then(|listener| match listener {
            Some(fd) => self.serve(&fd),
            None => Ok(()),
        });
        if let (Err(e), Ok(mut seen)) = (result, self.seen.lock()) {
            seen.broken = Some(format!("{e:#}"));
        }
    }

    /// The listener of the child's filter, or `None` if there will be no child.
    fn listener(&self) -> Result<Option<OwnedFd>> {
        while self.page.listener.load(Ordering::SeqCst) < 0 {
            if self.stop.load(Ordering::SeqCst) {
                return Ok(None);
            }
            std::thread::sleep(Duration::from_micros(200));
        }
        let (pid, fd) = (self.page.pid.load(Ordering::SeqCst), self.page.listener.load(Ordering::SeqCst));
        // SAFETY: the calls take numbers only, and nothing else owns the returned descriptors.
        let listener = unsafe {
            let pidfd = libc::syscall(libc::SYS_pidfd_open, pid, 0);
            if pidfd < 0 {
                bail!("pidfd_open: {}", std::io::Error::last_os_error());
            }
            let pidfd = OwnedFd::from_raw_fd(pidfd as i32);
            let fd = libc::syscall(libc::SYS_pidfd_getfd, pidfd.as_raw_fd(), fd, 0);
            if fd < 0 {
                bail!("pidfd_getfd: {}", std::io::Error::last_os_error());
            }
            OwnedFd::from_raw_fd(fd as i32)
        };
        self.page.taken.store(true, Ordering::SeqCst);
        Ok(Some(listener))
    }

    /// Answers until all processes under the filter have ended.
    fn serve(&mut self, listener: &OwnedFd) -> Result<()> {
        while !self.stop.load(Ordering::SeqCst) {
            let mut p = libc::pollfd { fd: listener.as_raw_fd(), events: libc::POLLIN, revents: 0 };
            // SAFETY: the call uses one local pollfd.
            match unsafe { libc::poll(&mut p, 1, 20) } {
                0 => continue,
                n if n < 0 => continue,
                _ => {}
            }
            if p.revents & libc::POLLIN == 0 {
                return Ok(()); // POLLHUP: no process is left.
            }
            // SAFETY: all-zero bytes are a valid notification, which the call demands; the kernel
            // fills it in.
            let mut got: libc::seccomp_notif = unsafe { std::mem::zeroed() };
            // SAFETY: the call writes to a local notification, which is zero.
            if unsafe { libc::ioctl(listener.as_raw_fd(), NOTIF_RECV, &mut got) } != 0 {
                continue; // ENOENT: a signal has ended the thread's call.
            }
            let error = self.decide(&got);
            match self.delay.load(Ordering::SeqCst) {
                0 => {}
                ms => std::thread::sleep(Duration::from_millis(ms)),
            }
            let answer = libc::seccomp_notif_resp {
                id: got.id,
                val: 0,
                error: -error.unwrap_or(0),
                flags: if error.is_some() { 0 } else { libc::SECCOMP_USER_NOTIF_FLAG_CONTINUE as u32 },
            };
            // SAFETY: the call reads a local answer. (ENOENT: the thread has gone.)
            unsafe { libc::ioctl(listener.as_raw_fd(), NOTIF_SEND, &answer) };
        }
        Ok(())
    }

    /// The error with which this call fails, if it fails.
    fn decide(&mut self, got: &libc::seccomp_notif) -> Option<i32> {
        if i64::from(got.data.nr) == libc::SYS_execve {
            self.texts.clear();
            return None;
        }
        if !self.armed.load(Ordering::Relaxed) {
            return None;
        }
        let offset = self.offset(got.pid, got.data.instruction_pointer)?;
        let call = Call { number: i64::from(got.data.nr), args: got.data.args };
        let errors = match self.faults {
            Faults::Signals => errors::by_signal(&call),
            _ => errors::errors(&call),
        };
        if errors.is_empty() {
            return None;
        }
        let site = Site { number: call.number, detail: errors::detail(&call), offset };
        let mut seen = self.seen.lock().ok()?;
        let count = &mut seen.sites.entry(site).or_insert((0, errors)).0;
        *count += 1;
        let nth = *count;
        // A call with other arguments at the same place may not have this error.
        let due = |f: &Fault| f.site == site && errors.contains(&f.error) && (nth == f.nth || f.on && nth > f.nth);
        let error = match self.faults {
            Faults::None => return None,
            Faults::One(fault) => Some(fault).filter(due)?.error,
            Faults::Signals => Some(libc::EINTR).filter(|_| nth == 1)?,
        };
        seen.failed += 1;
        Some(error)
    }

    /// The file offset of the instruction, if it belongs to code whose calls count.
    fn offset(&mut self, thread: u32, at: u64) -> Option<u64> {
        let inside = |t: &[u64; 3]| (t[0]..=t[1]).contains(&at).then(|| at - t[0] + t[2]);
        if let Some(offset) = self.texts.get(&thread).and_then(inside) {
            return Some(offset);
        }
        if self.whose == Whose::Library && self.texts.contains_key(&thread) {
            return None;
        }
        let maps = std::fs::read_to_string(format!("/proc/{thread}/maps")).ok()?;
        for line in maps.lines() {
            let Some(text) = text(line) else { continue };
            let ours = match self.whose {
                Whose::Library => line.ends_with("/libfsocket.so"),
                Whose::Program => inside(&text).is_some(),
            };
            if ours {
                self.texts.insert(thread, text);
                return inside(&text);
            }
        }
        None
    }
}

/// First and last address and file offset from a line of /proc/PID/maps, if the line is code of a
/// file.
fn text(line: &str) -> Option<[u64; 3]> {
    let mut words = line.split_whitespace();
    let (from, to) = words.next()?.split_once('-')?;
    let code = words.next()?.contains('x');
    let offset = u64::from_str_radix(words.next()?, 16).ok()?;
    let (from, to) = (u64::from_str_radix(from, 16).ok()?, u64::from_str_radix(to, 16).ok()?);
    (code && line.contains('/')).then_some([from, to, offset])
}

// linux/seccomp.h: _IOWR('!', 0, struct seccomp_notif) and _IOWR('!', 1, struct seccomp_notif_resp).
const NOTIF_RECV: libc::c_ulong = ioctl(0, size_of::<libc::seccomp_notif>());
const NOTIF_SEND: libc::c_ulong = ioctl(1, size_of::<libc::seccomp_notif_resp>());
const fn ioctl(number: libc::c_ulong, size: usize) -> libc::c_ulong {
    3 << 30 | (size as libc::c_ulong) << 16 | (b'!' as libc::c_ulong) << 8 | number
}

/// Waits until `done` returns true, at most for `limit`.
pub fn within(limit: Duration, mut done: impl FnMut() -> bool) -> bool {
    let end = Instant::now() + limit;
    loop {
        if done() {
            return true;
        }
        if Instant::now() > end {
            return false;
        }
        std::thread::sleep(Duration::from_millis(3));
    }
}
