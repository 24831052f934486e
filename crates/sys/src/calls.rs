//! System calls by name. Descriptors are plain numbers: they belong to the
//! application as often as to us.
//!
//! Long: a list of system calls.

use crate::arch::syscall6;
use crate::errno::{Errno, Result};
use core::sync::atomic::{AtomicBool, AtomicU32, Ordering};

macro_rules! sc {
    ($n:ident) => { sc!($n, 0) };
    ($n:ident, $($a:expr),+ $(,)?) => {{
        let mut args = [0usize; 6];
        let mut _i = 0;
        $( args[_i] = $a as usize; _i += 1; )+
        // SAFETY: each wrapper below states or takes over what its call needs.
        Errno::decode(unsafe { syscall6(libc::$n as usize, args) })
    }};
}

/// Any system call, for what has no wrapper here.
///
/// # Safety
/// As the call demands of its arguments.
#[inline]
pub unsafe fn raw(n: libc::c_long, args: [usize; 6]) -> Result<usize> {
    // SAFETY: the arguments are as this call demands; the assembly follows the kernel's convention.
    Errno::decode(unsafe { syscall6(n as usize, args) })
}

pub fn close(fd: i32) -> Result<()> {
    sc!(SYS_close, fd).map(drop)
}
pub fn close_range(first: u32, last: u32, flags: u32) -> Result<()> {
    sc!(SYS_close_range, first, last, flags).map(drop)
}
pub fn socket(domain: i32, ty: i32, proto: i32) -> Result<i32> {
    sc!(SYS_socket, domain, ty, proto).map(|v| v as i32)
}
pub fn socketpair(domain: i32, ty: i32) -> Result<[i32; 2]> {
    let mut sv = [0i32; 2];
    sc!(SYS_socketpair, domain, ty, 0, sv.as_mut_ptr())?;
    Ok(sv)
}
/// RLIMIT_AS of this process, soft and hard, before it is `new`.
pub fn address_space_limit(new: Option<(u64, u64)>) -> Result<(u64, u64)> {
    prlimit(libc::RLIMIT_AS, new)
}
fn prlimit(resource: u32, new: Option<(u64, u64)>) -> Result<(u64, u64)> {
    let new = new.map(|(soft, hard)| [soft, hard]);
    let set = new.as_ref().map_or(core::ptr::null(), |n| n.as_ptr());
    let mut old = [0u64; 2];
    sc!(SYS_prlimit64, 0, resource, set, old.as_mut_ptr())?;
    Ok((old[0], old[1]))
}
/// The soft limit of a resource; none where it may not be asked.
pub fn limit(resource: u32) -> u64 {
    prlimit(resource, None).map_or(libc::RLIM64_INFINITY, |(soft, _)| soft)
}
/// Bytes of a page.
pub fn page_size() -> usize {
    crate::vdso::auxiliary(libc::AT_PAGESZ).unwrap_or(4096)
}
/// The beginning of a file, as far as `buf` has room.
pub fn read_file<'a>(path: &core::ffi::CStr, buf: &'a mut [u8]) -> Result<&'a [u8]> {
    let fd = sc!(SYS_openat, libc::AT_FDCWD, path.as_ptr(), libc::O_RDONLY | libc::O_CLOEXEC)? as i32;
    let n = sc!(SYS_pread64, fd, buf.as_mut_ptr(), buf.len(), 0);
    let _ = close(fd);
    Ok(&buf[..n?])
}
/// Nothing in the range is kept in memory on the program's behalf (`mlockall`).
pub fn munlock(at: *mut u8, len: usize) {
    let _ = sc!(SYS_munlock, at, len);
}
/// `addr` is a complete socket address.
pub fn bind(fd: i32, addr: &[u8]) -> Result<()> {
    sc!(SYS_bind, fd, addr.as_ptr(), addr.len()).map(drop)
}
pub fn listen(fd: i32, backlog: i32) -> Result<()> {
    sc!(SYS_listen, fd, backlog).map(drop)
}
/// Returns the length of the address, which may be more than was stored.
pub fn getsockname(fd: i32, addr: &mut [u8]) -> Result<usize> {
    let mut len = addr.len() as u32;
    sc!(SYS_getsockname, fd, addr.as_mut_ptr(), &mut len as *mut u32)?;
    Ok(len as usize)
}
pub fn getpeername(fd: i32, addr: &mut [u8]) -> Result<usize> {
    let mut len = addr.len() as u32;
    sc!(SYS_getpeername, fd, addr.as_mut_ptr(), &mut len as *mut u32)?;
    Ok(len as usize)
}
/// `addr` is a complete socket address.
pub fn connect(fd: i32, addr: &[u8]) -> Result<()> {
    sc!(SYS_connect, fd, addr.as_ptr(), addr.len()).map(drop)
}
/// # Safety
/// `addr` and `len` as accept4(2) wants them: both null, or a buffer and its size.
pub unsafe fn accept4(fd: i32, addr: *mut u8, len: *mut u32, flags: i32) -> Result<i32> {
    sc!(SYS_accept4, fd, addr, len, flags).map(|v| v as i32)
}
pub fn shutdown(fd: i32, how: i32) -> Result<()> {
    sc!(SYS_shutdown, fd, how).map(drop)
}
pub fn dup3(old: i32, new: i32, flags: i32) -> Result<()> {
    sc!(SYS_dup3, old, new, flags).map(drop)
}
/// # Safety
/// `buf` is readable for `len` bytes.
pub unsafe fn send(fd: i32, buf: *const u8, len: usize, flags: i32) -> Result<usize> {
    sc!(SYS_sendto, fd, buf, len, flags, 0, 0)
}
/// # Safety
/// `iov` points to `n` vectors of the program's.
pub unsafe fn send_vectors(fd: i32, iov: *const libc::iovec, n: usize, flags: i32) -> Result<usize> {
    // SAFETY: all-zero is a valid msghdr.
    let msg = libc::msghdr { msg_iov: iov as *mut _, msg_iovlen: n, ..unsafe { core::mem::zeroed() } };
    sc!(SYS_sendmsg, fd, &msg as *const libc::msghdr, flags)
}
/// # Safety
/// `buf` is writable for `len` bytes.
pub unsafe fn recv(fd: i32, buf: *mut u8, len: usize, flags: i32) -> Result<usize> {
    sc!(SYS_recvfrom, fd, buf, len, flags, 0, 0)
}
pub fn setsockopt(fd: i32, level: i32, name: i32, val: &[u8]) -> Result<()> {
    sc!(SYS_setsockopt, fd, level, name, val.as_ptr(), val.len()).map(drop)
}
/// Returns how many bytes of `val` were filled.
pub fn getsockopt(fd: i32, level: i32, name: i32, val: &mut [u8]) -> Result<usize> {
    let mut len = val.len() as u32;
    sc!(SYS_getsockopt, fd, level, name, val.as_mut_ptr(), &mut len as *mut u32)?;
    Ok(len as usize)
}
pub fn fcntl(fd: i32, cmd: i32, arg: usize) -> Result<i32> {
    sc!(SYS_fcntl, fd, cmd, arg).map(|v| v as i32)
}
pub fn memfd_create(name: &core::ffi::CStr, flags: u32) -> Result<i32> {
    sc!(SYS_memfd_create, name.as_ptr(), flags).map(|v| v as i32)
}
/// EFBIG above RLIMIT_FSIZE, without the SIGXFSZ that the kernel would send to the program.
pub fn ftruncate(fd: i32, size: usize) -> Result<()> {
    if limit(libc::RLIMIT_FSIZE) < size as u64 {
        return Err(Errno::new(libc::EFBIG));
    }
    sc!(SYS_ftruncate, fd, size).map(drop)
}
/// A new mapping where the kernel likes. It is not written into a core file: most are larger than what is used of them,
/// and the kernel would make memory of all of it.
pub fn mmap(len: usize, prot: i32, flags: i32, fd: i32, off: usize) -> Result<*mut u8> {
    mmap_briefly(len, prot, flags, fd, off).inspect(|at| dont_dump(*at, len))
}
/// [`mmap`] for the length of one call.
pub fn mmap_briefly(len: usize, prot: i32, flags: i32, fd: i32, off: usize) -> Result<*mut u8> {
    sc!(SYS_mmap, 0, len, prot, flags & !libc::MAP_FIXED, fd, off).map(|v| v as *mut u8)
}
static ADVISES: AtomicBool = AtomicBool::new(true);
/// Mappings made from now on may be in a core file: a filter of system calls may forbid to say otherwise.
pub fn stop_advising() {
    ADVISES.store(false, Ordering::Relaxed);
}
fn dont_dump(at: *mut u8, len: usize) {
    if !ADVISES.load(Ordering::Relaxed) {
        return;
    }
    // (A failure costs room in a core file.)
    let _ = sc!(SYS_madvise, at, len, libc::MADV_DONTDUMP);
}
/// Another mapping, of `len` bytes, of the shared file that is mapped at `at`, from there on: also of what comes behind
/// the end of that mapping. It needs no descriptor, and is in no core file if that one is in none.
pub fn mmap_again(at: *mut u8, len: usize) -> Result<*mut u8> {
    sc!(SYS_mremap, at, 0, len, libc::MREMAP_MAYMOVE).map(|v| v as *mut u8)
}
/// Replaces what lies at `at`; as with [`mmap`], no core file has it.
///
/// # Safety
/// The range belongs to the caller and nobody relies on its content.
pub unsafe fn mmap_over(at: *mut u8, len: usize, prot: i32, flags: i32, fd: i32) -> Result<*mut u8> {
    sc!(SYS_mmap, at, len, prot, flags | libc::MAP_FIXED, fd, 0).map(|v| v as *mut u8).inspect(|at| dont_dump(*at, len))
}
/// # Safety
/// The range belongs to the caller, and no reference to it breaks under the protection.
pub unsafe fn mprotect(at: *mut u8, len: usize, prot: i32) -> Result<()> {
    sc!(SYS_mprotect, at, len, prot).map(drop)
}
/// # Safety
/// Nobody uses the range any more.
pub unsafe fn munmap(at: *mut u8, len: usize) -> Result<()> {
    sc!(SYS_munmap, at, len).map(drop)
}
/// # Safety
/// The advice must not destroy what somebody relies on.
pub unsafe fn madvise(at: *mut u8, len: usize, advice: i32) -> Result<()> {
    sc!(SYS_madvise, at, len, advice).map(drop)
}
pub fn eventfd() -> Result<i32> {
    sc!(SYS_eventfd2, 0, libc::EFD_CLOEXEC | libc::EFD_NONBLOCK).map(|v| v as i32)
}
/// Adds one to an eventfd.
pub fn eventfd_ring(fd: i32) -> Result<()> {
    let one = 1u64;
    sc!(SYS_write, fd, &one as *const u64, 8).map(drop)
}
/// # Safety
/// `buf` is writable for `len` bytes.
pub unsafe fn pread(fd: i32, buf: *mut u8, len: usize, off: i64) -> Result<usize> {
    sc!(SYS_pread64, fd, buf, len, off)
}
/// # Safety
/// `buf` is writable for `len` bytes.
pub unsafe fn read(fd: i32, buf: *mut u8, len: usize) -> Result<usize> {
    sc!(SYS_read, fd, buf, len)
}
pub fn write(fd: i32, buf: &[u8]) -> Result<usize> {
    sc!(SYS_write, fd, buf.as_ptr(), buf.len())
}

/// Sleep while `*word == expected`. Errors: EAGAIN, EINTR, ETIMEDOUT.
pub fn futex_wait(word: &AtomicU32, expected: u32, timeout_ns: Option<u64>) -> Result<()> {
    let ts = timeout_ns.map(timespec);
    let p = ts.as_ref().map_or(core::ptr::null(), |t| t as *const libc::timespec);
    sc!(SYS_futex, word as *const AtomicU32, libc::FUTEX_WAIT, expected, p, 0, 0).map(drop)
}
/// Sleep while all words are as expected; the kernel restarts it after a signal as it restarts [`futex_wait`]
/// without a limit. Errors: EAGAIN, EINTR, ETIMEDOUT, ENOSYS before Linux 5.16.
pub fn futex_wait_any<const N: usize>(words: [(&AtomicU32, u32); N], timeout_ns: Option<u64>) -> Result<()> {
    #[repr(C)]
    struct Waiter {
        value: u64,
        at: u64,
        flags: u32,
        reserved: u32,
    }
    const SYS_FUTEX_WAITV: usize = 449;
    const SIZE_U32: u32 = 2;
    let at = |w: &AtomicU32| w as *const AtomicU32 as u64;
    let all = words.map(|(w, value)| Waiter { value: value.into(), at: at(w), flags: SIZE_U32, reserved: 0 });
    let until = timeout_ns.map(|ns| timespec(now_ns().saturating_add(ns)));
    let until = until.as_ref().map_or(0, |t| t as *const libc::timespec as usize);
    let clock = libc::CLOCK_MONOTONIC as usize;
    // SAFETY: N waiters and a time, read by the kernel during the call.
    unsafe { raw(SYS_FUTEX_WAITV as _, [all.as_ptr() as usize, N, 0, until, clock, 0]) }.map(drop)
}

/// Wakes up to `n` sleepers of a futex that processes share.
pub fn futex_wake(word: &AtomicU32, n: i32) {
    let _ = sc!(SYS_futex, word as *const AtomicU32, libc::FUTEX_WAKE, n, 0, 0, 0);
}

/// Wakes all sleepers of a futex that lay at this address; it may be gone.
pub fn futex_wake_at(at: usize) {
    let _ = sc!(SYS_futex, at, libc::FUTEX_WAKE, i32::MAX, 0, 0, 0);
}

pub const MEMBARRIER_GLOBAL_EXPEDITED: i32 = 1 << 1;
pub const MEMBARRIER_REGISTER_GLOBAL_EXPEDITED: i32 = 1 << 2;
pub fn membarrier(cmd: i32) -> Result<()> {
    sc!(SYS_membarrier, cmd, 0, 0).map(drop)
}

/// The expensive half of the asymmetric fence (`fsocket_sync::light_fence` is
/// the cheap one): when it returns, every thread of every registered process
/// has passed a full barrier.
pub fn heavy_fence() {
    if membarrier(MEMBARRIER_GLOBAL_EXPEDITED).is_err() {
        // Registration was checked at start; a seccomp filter installed later
        // may still forbid the call. The ordinary fence is then all we have,
        // and sleeps are bounded by the caller.
        core::sync::atomic::fence(core::sync::atomic::Ordering::SeqCst);
    }
}

/// Signal 0: does the process exist?
pub fn kill(pid: i32, signal: i32) -> Result<()> {
    sc!(SYS_kill, pid, signal).map(drop)
}
fn stat(path: &core::ffi::CStr) -> Result<libc::stat> {
    let mut st = core::mem::MaybeUninit::<libc::stat>::zeroed();
    sc!(SYS_newfstatat, libc::AT_FDCWD, path.as_ptr(), st.as_mut_ptr(), 0)?;
    // SAFETY: zeroed, and filled in by the kernel.
    Ok(unsafe { st.assume_init() })
}
/// Names of a file; of a directory, mostly two and one for each directory in it.
#[allow(clippy::unnecessary_cast)] // 32 bits on arm64
pub fn links(path: &core::ffi::CStr) -> Result<u64> {
    // (32 bits wide on aarch64.)
    #[allow(clippy::unnecessary_cast)]
    stat(path).map(|s| s.st_nlink as u64)
}
/// Inode number of a file.
pub fn inode(path: &core::ffi::CStr) -> Result<u64> {
    stat(path).map(|s| s.st_ino)
}
/// The owner of a file, and its type and permissions.
pub fn owner_and_mode(path: &core::ffi::CStr) -> Result<(u32, u32)> {
    stat(path).map(|s| (s.st_uid, s.st_mode))
}
/// Type and permissions of what a descriptor refers to.
pub fn mode(fd: i32) -> Result<u32> {
    ownership(fd).map(|(mode, _, _)| mode)
}
/// Type and permissions of what a descriptor refers to, its user and its group.
pub fn ownership(fd: i32) -> Result<(u32, u32, u32)> {
    let mut s = core::mem::MaybeUninit::<libc::stat>::uninit();
    sc!(SYS_fstat, fd, s.as_mut_ptr())?;
    // SAFETY: the kernel has filled it; its structure is libc's.
    let s = unsafe { s.assume_init() };
    Ok((s.st_mode, s.st_uid, s.st_gid))
}
/// What a file says of its size, bytes.
pub fn size(path: &core::ffi::CStr) -> Result<u64> {
    stat(path).map(|s| s.st_size as u64)
}
pub fn getpid() -> i32 {
    sc!(SYS_getpid).map_or(0, |v| v as i32)
}
pub fn gettid() -> i32 {
    sc!(SYS_gettid).map_or(0, |v| v as i32)
}
pub fn getuid() -> u32 {
    sc!(SYS_getuid).map_or(0, |v| v as u32)
}
pub fn getegid() -> u32 {
    sc!(SYS_getegid).map_or(0, |v| v as u32)
}
pub fn geteuid() -> u32 {
    sc!(SYS_geteuid).map_or(0, |v| v as u32)
}
pub fn tgkill(pid: i32, tid: i32, sig: i32) -> Result<()> {
    sc!(SYS_tgkill, pid, tid, sig).map(drop)
}
pub fn sched_yield() {
    let _ = sc!(SYS_sched_yield);
}
pub fn nanosleep(ns: u64) {
    let ts = timespec(ns);
    let _ = sc!(SYS_nanosleep, &ts as *const libc::timespec, 0);
}
#[inline]
pub fn getrandom_u64() -> u64 {
    let mut v = 0u64;
    if sc!(SYS_getrandom, &mut v as *mut u64, 8, libc::GRND_NONBLOCK) != Ok(8) {
        v = now_ns() ^ ((getpid() as u64) << 40) ^ crate::arch::ticks();
    }
    v
}

/// # Safety
/// `fds` points to `n` pollfds; `mask` is null or a signal mask.
pub unsafe fn ppoll(
    fds: *mut libc::pollfd,
    n: usize,
    timeout_ns: Option<u64>,
    mask: *const libc::sigset_t,
) -> Result<usize> {
    let mut ts = timeout_ns.map(timespec);
    let p = ts.as_mut().map_or(core::ptr::null_mut(), |t| t as *mut libc::timespec);
    sc!(SYS_ppoll, fds, n, p, mask, 8)
}
pub fn epoll_create1(flags: i32) -> Result<i32> {
    sc!(SYS_epoll_create1, flags).map(|v| v as i32)
}
pub fn epoll_ctl(ep: i32, op: i32, fd: i32, ev: Option<&libc::epoll_event>) -> Result<()> {
    let p = ev.map_or(core::ptr::null(), |e| e as *const libc::epoll_event);
    sc!(SYS_epoll_ctl, ep, op, fd, p).map(drop)
}
/// Falls back to `epoll_pwait` with milliseconds rounded up where
/// `epoll_pwait2` is missing.
///
/// # Safety
/// `evs` has room for `max` events; `mask` is null or a signal mask.
pub unsafe fn epoll_wait(
    ep: i32,
    evs: *mut libc::epoll_event,
    max: i32,
    timeout_ns: Option<u64>,
    mask: *const libc::sigset_t,
) -> Result<usize> {
    match timeout_ns {
        Some(ns) if ns % 1_000_000 != 0 => {
            let ts = timespec(ns);
            match sc!(SYS_epoll_pwait2, ep, evs, max, &ts as *const libc::timespec, mask, 8) {
                Err(Errno::ENOSYS) => sc!(SYS_epoll_pwait, ep, evs, max, ns / 1_000_000 + 1, mask, 8),
                r => r,
            }
        }
        Some(ns) => sc!(SYS_epoll_pwait, ep, evs, max, (ns / 1_000_000).min(i32::MAX as u64) as i32, mask, 8),
        None => sc!(SYS_epoll_pwait, ep, evs, max, -1isize, mask, 8),
    }
}

/// Are there handlers that say SA_RESTART, and handlers that do not?
pub fn signals_disagree() -> bool {
    let mut said = [false; 2];
    for signal in 1..=64 {
        let mut old = [0u64; 4];
        let r = sc!(SYS_rt_sigaction, signal, 0, old.as_mut_ptr(), 8);
        if r.is_ok() && old[0] > libc::SIG_IGN as u64 {
            said[(old[1] & libc::SA_RESTART as u64 != 0) as usize] = true;
        }
    }
    said == [true; 2]
}

pub(crate) fn timespec(ns: u64) -> libc::timespec {
    libc::timespec {
        tv_sec: (ns / 1_000_000_000).min(i64::MAX as u64 / 2) as i64,
        tv_nsec: (ns % 1_000_000_000) as i64,
    }
}

/// The kernel's tick, nanoseconds: what its coarse clocks count in. 0: unknown.
pub fn clock_tick_ns() -> u64 {
    let mut ts = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    match sc!(SYS_clock_getres, libc::CLOCK_MONOTONIC_COARSE, &mut ts as *mut libc::timespec) {
        Ok(_) => ts.tv_nsec as u64,
        Err(_) => 0,
    }
}
/// CLOCK_MONOTONIC, nanoseconds.
#[inline]
pub fn now_ns() -> u64 {
    crate::vdso::clock_ns(libc::CLOCK_MONOTONIC)
}

/// Sends one packet, with at most one descriptor.
pub fn send_with_fd(sock: i32, data: &[u8], fd: Option<i32>, flags: i32) -> Result<usize> {
    let mut iov = libc::iovec { iov_base: data.as_ptr() as *mut _, iov_len: data.len() };
    let mut control = Control::default();
    // SAFETY: all-zero is a valid msghdr.
    let mut msg: libc::msghdr = unsafe { core::mem::zeroed() };
    msg.msg_iov = &mut iov;
    msg.msg_iovlen = 1;
    if let Some(fd) = fd {
        control.hdr = libc::cmsghdr { cmsg_len: CMSG_LEN, cmsg_level: libc::SOL_SOCKET, cmsg_type: libc::SCM_RIGHTS };
        control.fd[0] = fd;
        msg.msg_control = &mut control as *mut Control as *mut _;
        msg.msg_controllen = core::mem::size_of::<Control>();
    }
    sc!(SYS_sendmsg, sock, &msg as *const libc::msghdr, flags | libc::MSG_NOSIGNAL)
}

/// Receives one packet; a descriptor that came along is close-on-exec.
/// A packet of length zero is the end of the socket.
pub fn recv_with_fd(sock: i32, data: &mut [u8], flags: i32) -> Result<(usize, Option<i32>)> {
    let mut iov = libc::iovec { iov_base: data.as_mut_ptr() as *mut _, iov_len: data.len() };
    let mut control = Control::default();
    // SAFETY: all-zero is a valid msghdr.
    let mut msg: libc::msghdr = unsafe { core::mem::zeroed() };
    msg.msg_iov = &mut iov;
    msg.msg_iovlen = 1;
    msg.msg_control = &mut control as *mut Control as *mut _;
    msg.msg_controllen = core::mem::size_of::<Control>();
    let n = sc!(SYS_recvmsg, sock, &mut msg as *mut libc::msghdr, flags | libc::MSG_CMSG_CLOEXEC)?;
    let got = msg.msg_controllen >= CMSG_LEN
        && control.hdr.cmsg_level == libc::SOL_SOCKET
        && control.hdr.cmsg_type == libc::SCM_RIGHTS
        && control.hdr.cmsg_len >= CMSG_LEN;
    Ok((n, got.then_some(control.fd[0])))
}

const CMSG_LEN: usize = core::mem::size_of::<libc::cmsghdr>() + 4;

#[repr(C)]
struct Control {
    hdr: libc::cmsghdr,
    fd: [i32; 2],
}
impl Default for Control {
    fn default() -> Self {
        Control { hdr: libc::cmsghdr { cmsg_len: 0, cmsg_level: 0, cmsg_type: 0 }, fd: [-1; 2] }
    }
}
