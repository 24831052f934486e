//! The system calls, as plain functions over owned descriptors.

use std::io::{Error, Result};
use std::net::SocketAddr;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};

fn check(result: libc::c_int) -> Result<libc::c_int> {
    if result < 0 {
        Err(Error::last_os_error())
    } else {
        Ok(result)
    }
}

fn count(result: isize) -> Result<usize> {
    usize::try_from(result).map_err(|_| Error::last_os_error())
}

/// A non-blocking, close-on-exec TCP socket of the address's family.
fn socket(address: &SocketAddr) -> Result<OwnedFd> {
    let family = if address.is_ipv4() { libc::AF_INET } else { libc::AF_INET6 };
    // SAFETY: a plain system call; the descriptor is new and nobody else's.
    unsafe {
        let fd = check(libc::socket(family, libc::SOCK_STREAM | libc::SOCK_NONBLOCK | libc::SOCK_CLOEXEC, 0))?;
        Ok(OwnedFd::from_raw_fd(fd))
    }
}

/// The address as the kernel takes it, and its length.
fn raw(address: &SocketAddr) -> (libc::sockaddr_storage, libc::socklen_t) {
    // SAFETY: all zero is a valid sockaddr_storage, which is large and aligned
    // enough for either family's structure.
    unsafe {
        let mut storage: libc::sockaddr_storage = std::mem::zeroed();
        let len = match address {
            SocketAddr::V4(v4) => {
                let to = &mut *(&raw mut storage).cast::<libc::sockaddr_in>();
                to.sin_family = libc::AF_INET as libc::sa_family_t;
                to.sin_port = v4.port().to_be();
                to.sin_addr.s_addr = u32::from_ne_bytes(v4.ip().octets());
                size_of::<libc::sockaddr_in>()
            }
            SocketAddr::V6(v6) => {
                let to = &mut *(&raw mut storage).cast::<libc::sockaddr_in6>();
                to.sin6_family = libc::AF_INET6 as libc::sa_family_t;
                to.sin6_port = v6.port().to_be();
                to.sin6_addr.s6_addr = v6.ip().octets();
                to.sin6_scope_id = v6.scope_id();
                size_of::<libc::sockaddr_in6>()
            }
        };
        (storage, len as libc::socklen_t)
    }
}

fn set_flag(fd: &OwnedFd, option: libc::c_int) -> Result<()> {
    let one: libc::c_int = 1;
    let len = size_of_val(&one) as libc::socklen_t;
    // SAFETY: an integer and its size.
    check(unsafe { libc::setsockopt(fd.as_raw_fd(), libc::SOL_SOCKET, option, (&raw const one).cast(), len) })?;
    Ok(())
}

fn integer_option(fd: &OwnedFd, option: libc::c_int) -> Result<libc::c_int> {
    let mut value: libc::c_int = 0;
    let mut len = size_of_val(&value) as libc::socklen_t;
    let fd = fd.as_raw_fd();
    // SAFETY: an integer and its size.
    check(unsafe { libc::getsockopt(fd, libc::SOL_SOCKET, option, (&raw mut value).cast(), &mut len) })?;
    Ok(value)
}

pub fn listen(address: &SocketAddr, backlog: i32, reuseport: bool) -> Result<OwnedFd> {
    let fd = socket(address)?;
    set_flag(&fd, libc::SO_REUSEADDR)?;
    if reuseport {
        set_flag(&fd, libc::SO_REUSEPORT)?;
    }
    let (storage, len) = raw(address);
    // SAFETY: an address and its length.
    check(unsafe { libc::bind(fd.as_raw_fd(), (&raw const storage).cast(), len) })?;
    // SAFETY: a plain system call.
    check(unsafe { libc::listen(fd.as_raw_fd(), backlog) })?;
    Ok(fd)
}

pub fn accept(listener: &OwnedFd) -> Result<OwnedFd> {
    let flags = libc::SOCK_NONBLOCK | libc::SOCK_CLOEXEC;
    // SAFETY: no address is asked for; the descriptor is new and nobody else's.
    unsafe {
        let fd = libc::accept4(listener.as_raw_fd(), std::ptr::null_mut(), std::ptr::null_mut(), flags);
        Ok(OwnedFd::from_raw_fd(check(fd)?))
    }
}

/// Begins to connect; the end is announced by epoll.
pub fn connect(address: &SocketAddr) -> Result<OwnedFd> {
    let fd = socket(address)?;
    let (storage, len) = raw(address);
    // SAFETY: an address and its length.
    match check(unsafe { libc::connect(fd.as_raw_fd(), (&raw const storage).cast(), len) }) {
        Err(e) if e.raw_os_error() != Some(libc::EINPROGRESS) => Err(e),
        _ => Ok(fd),
    }
}

/// How a connect ended.
pub fn connect_result(fd: &OwnedFd) -> Result<()> {
    match integer_option(fd, libc::SO_ERROR)? {
        0 => Ok(()),
        errno => Err(Error::from_raw_os_error(errno)),
    }
}

/// Is the CPU that handled the socket's latest packet the one we run on?
pub fn is_local(fd: &OwnedFd) -> bool {
    // SAFETY: a plain call.
    let here = unsafe { libc::sched_getcpu() };
    integer_option(fd, libc::SO_INCOMING_CPU).is_ok_and(|cpu| cpu == here)
}

/// `None`: nothing there now. `Some(0)`: the end.
pub fn read(fd: &OwnedFd, to: &mut [u8]) -> Result<Option<usize>> {
    // SAFETY: a buffer and its length.
    would_block(count(unsafe { libc::recv(fd.as_raw_fd(), to.as_mut_ptr().cast(), to.len(), 0) }))
}

/// `None`: no room now.
pub fn write(fd: &OwnedFd, from: &[u8]) -> Result<Option<usize>> {
    // SAFETY: a buffer and its length.
    would_block(count(unsafe { libc::send(fd.as_raw_fd(), from.as_ptr().cast(), from.len(), libc::MSG_NOSIGNAL) }))
}

fn would_block(result: Result<usize>) -> Result<Option<usize>> {
    match result {
        Ok(n) => Ok(Some(n)),
        Err(e) if matches!(e.raw_os_error(), Some(libc::EAGAIN | libc::EINTR)) => Ok(None),
        Err(e) => Err(e),
    }
}

/// An epoll instance.
pub struct Epoll(OwnedFd);

impl Epoll {
    pub fn new() -> Result<Epoll> {
        // SAFETY: a plain system call; the descriptor is new and nobody else's.
        unsafe { Ok(Epoll(OwnedFd::from_raw_fd(check(libc::epoll_create1(libc::EPOLL_CLOEXEC))?))) }
    }

    fn control(&self, operation: libc::c_int, fd: &OwnedFd, events: libc::c_int, token: u64) -> Result<()> {
        let mut event = libc::epoll_event { events: events as u32, u64: token };
        // SAFETY: one event that lives here.
        check(unsafe { libc::epoll_ctl(self.0.as_raw_fd(), operation, fd.as_raw_fd(), &mut event) })?;
        Ok(())
    }

    pub fn add(&self, fd: &OwnedFd, events: libc::c_int, token: u64) -> Result<()> {
        self.control(libc::EPOLL_CTL_ADD, fd, events, token)
    }

    pub fn modify(&self, fd: &OwnedFd, events: libc::c_int, token: u64) -> Result<()> {
        self.control(libc::EPOLL_CTL_MOD, fd, events, token)
    }

    pub fn remove(&self, fd: &OwnedFd) -> Result<()> {
        self.control(libc::EPOLL_CTL_DEL, fd, 0, 0)
    }

    /// Number of events that were put into `events`; 0 also after a signal.
    pub fn wait(&self, events: &mut [libc::epoll_event], milliseconds: i32) -> Result<usize> {
        let (pointer, len) = (events.as_mut_ptr(), events.len() as libc::c_int);
        // SAFETY: an array and its length.
        match check(unsafe { libc::epoll_wait(self.0.as_raw_fd(), pointer, len, milliseconds) }) {
            Ok(n) => Ok(n as usize),
            Err(e) if e.kind() == std::io::ErrorKind::Interrupted => Ok(0),
            Err(e) => Err(e),
        }
    }
}

/// CPUs that this process may use.
pub fn allowed_cpus() -> Vec<usize> {
    // SAFETY: all zero is an empty set.
    let mut set: libc::cpu_set_t = unsafe { std::mem::zeroed() };
    // SAFETY: the set and its size.
    if unsafe { libc::sched_getaffinity(0, size_of_val(&set), &mut set) } != 0 {
        return vec![0];
    }
    // SAFETY: within the set.
    (0..libc::CPU_SETSIZE as usize).filter(|cpu| unsafe { libc::CPU_ISSET(*cpu, &set) }).collect()
}

/// Binds the calling thread to one CPU.
pub fn pin(cpu: usize) -> Result<()> {
    // SAFETY: all zero is an empty set; `cpu` comes from [`allowed_cpus`].
    unsafe {
        let mut set: libc::cpu_set_t = std::mem::zeroed();
        libc::CPU_SET(cpu, &mut set);
        check(libc::sched_setaffinity(0, size_of_val(&set), &set))?;
    }
    Ok(())
}

/// Raises the limit of descriptors to the highest allowed number.
pub fn raise_descriptor_limit() {
    // SAFETY: a structure that lives here.
    unsafe {
        let mut limit: libc::rlimit = std::mem::zeroed();
        if libc::getrlimit(libc::RLIMIT_NOFILE, &mut limit) == 0 {
            limit.rlim_cur = limit.rlim_max;
            libc::setrlimit(libc::RLIMIT_NOFILE, &limit);
        }
    }
}

/// `Some(pid)` in the parent, `None` in the child, which dies with its parent.
pub fn fork() -> Result<Option<libc::pid_t>> {
    // SAFETY: one thread has begun when this is called, so the child may go on as it is.
    let pid = check(unsafe { libc::fork() })?;
    if pid == 0 {
        // SAFETY: a plain system call.
        unsafe { libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGTERM) };
        return Ok(None);
    }
    Ok(Some(pid))
}

pub fn kill(pid: libc::pid_t, signal: libc::c_int) {
    // SAFETY: a plain system call.
    unsafe { libc::kill(pid, signal) };
}

/// A child that ended, if any did: its process number and wait status.
pub fn reap() -> Option<(libc::pid_t, i32)> {
    let mut status = 0;
    // SAFETY: an integer that lives here.
    let pid = unsafe { libc::waitpid(-1, &mut status, libc::WNOHANG) };
    (pid > 0).then_some((pid, status))
}

fn signal_set(signals: &[libc::c_int]) -> libc::sigset_t {
    // SAFETY: `sigemptyset` initialises the set that the others change.
    unsafe {
        let mut set = std::mem::zeroed();
        libc::sigemptyset(&mut set);
        signals.iter().for_each(|signal| {
            libc::sigaddset(&mut set, *signal);
        });
        set
    }
}

/// Signals for the calling thread to [`wait_signal`] for, or as they were.
pub fn block_signals(signals: &[libc::c_int], block: bool) {
    let how = if block { libc::SIG_BLOCK } else { libc::SIG_UNBLOCK };
    // SAFETY: an initialised set.
    unsafe { libc::pthread_sigmask(how, &signal_set(signals), std::ptr::null_mut()) };
}

/// Waits at most that long for one of `signals`, which are blocked.
pub fn wait_signal(signals: &[libc::c_int], limit: std::time::Duration) -> Option<libc::c_int> {
    let limit = libc::timespec { tv_sec: limit.as_secs() as libc::time_t, tv_nsec: limit.subsec_nanos().into() };
    // SAFETY: an initialised set and a time that live here.
    let signal = unsafe { libc::sigtimedwait(&signal_set(signals), std::ptr::null_mut(), &limit) };
    (signal > 0).then_some(signal)
}

/// Installs a handler, which must be async-signal-safe.
pub fn on_signal(signal: libc::c_int, handler: extern "C" fn(libc::c_int)) {
    // SAFETY: the handler only stores to an atomic (see its definition).
    unsafe { libc::signal(signal, handler as *const () as libc::sighandler_t) };
}

/// To the background, in the parent's directory, with its outputs.
pub fn daemonize() -> Result<()> {
    // SAFETY: one thread has begun when this is called.
    check(unsafe { libc::daemon(1, 1) })?;
    Ok(())
}

/// `len` zeroed bytes that forked children share with their parent, for ever.
pub fn shared_memory(len: usize) -> Result<*mut u8> {
    let protection = libc::PROT_READ | libc::PROT_WRITE;
    let flags = libc::MAP_SHARED | libc::MAP_ANONYMOUS;
    // SAFETY: a new mapping where the kernel likes it.
    let at = unsafe { libc::mmap(std::ptr::null_mut(), len, protection, flags, -1, 0) };
    if at == libc::MAP_FAILED {
        return Err(Error::last_os_error());
    }
    Ok(at.cast())
}

/// `CLOCK_MONOTONIC_COARSE`, whole seconds: cheap enough for every event.
pub fn seconds() -> u32 {
    // SAFETY: a structure that lives here.
    unsafe {
        let mut now: libc::timespec = std::mem::zeroed();
        libc::clock_gettime(libc::CLOCK_MONOTONIC_COARSE, &mut now);
        now.tv_sec as u32
    }
}
