//! System calls as functions. Descriptors are plain numbers, because most of them belong to the
//! application and not to the library.
//!
//! Long: a list of system calls.

use crate::arch::syscall6;
use crate::errno::{Errno, Result};
use core::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};

macro_rules! sc {
    ($n:ident) => { sc!($n, 0) };
    ($n:ident, $($a:expr),+ $(,)?) => {{
        let mut args = [0usize; 6];
        let mut _i = 0;
        $( args[_i] = $a as usize; _i += 1; )+
        // SAFETY: each function below makes sure of what its call needs, or demands it from those
        // who use it.
        Errno::decode(unsafe { syscall6(libc::$n as usize, args) })
    }};
}

/// Any system call that has no function here.
///
/// # Safety
/// The arguments are as the system call demands.
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
/// Returns RLIMIT_AS of this process, soft and hard. Afterwards it is `new`, if given.
pub fn address_space_limit(new: Option<(u64, u64)>) -> Result<(u64, u64)> {
    prlimit(libc::RLIMIT_AS as _, new)
}
fn prlimit(resource: u32, new: Option<(u64, u64)>) -> Result<(u64, u64)> {
    let new = new.map(|(soft, hard)| [soft, hard]);
    let set = new.as_ref().map_or(core::ptr::null(), |n| n.as_ptr());
    let mut old = [0u64; 2];
    sc!(SYS_prlimit64, 0, resource, set, old.as_mut_ptr())?;
    Ok((old[0], old[1]))
}
/// The soft limit of a resource. No limit if the process may not read it.
pub fn limit(resource: u32) -> u64 {
    prlimit(resource, None).map_or(libc::RLIM64_INFINITY, |(soft, _)| soft)
}
/// Bytes of a page.
pub fn page_size() -> usize {
    crate::vdso::auxiliary(libc::AT_PAGESZ).unwrap_or(4096)
}
/// The beginning of a file, as many bytes as fit into `buf`.
pub fn read_file<'a>(path: &core::ffi::CStr, buf: &'a mut [u8]) -> Result<&'a [u8]> {
    let fd = sc!(SYS_openat, libc::AT_FDCWD, path.as_ptr(), libc::O_RDONLY | libc::O_CLOEXEC)? as i32;
    let n = sc!(SYS_pread64, fd, buf.as_mut_ptr(), buf.len(), 0);
    let _ = close(fd);
    Ok(&buf[..n?])
}
/// Undoes the program's `mlockall` for a range: the kernel need not keep it in memory.
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
    let msg = Message { msg_iov: iov as *mut _, msg_iovlen: n, ..unsafe { core::mem::zeroed() } };
    sc!(SYS_sendmsg, fd, &msg as *const Message, flags)
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
/// SO_RCVTIMEO or SO_SNDTIMEO of a socket, nanoseconds; 0: no limit.
pub fn time_option(fd: i32, name: i32) -> Result<u64> {
    let mut t = [0u8; 16];
    getsockopt(fd, libc::SOL_SOCKET, name, &mut t)?;
    // A `struct timeval`.
    let part = |at: usize| t[at..].first_chunk().map_or(0, |v| i64::from_ne_bytes(*v)).max(0) as u64;
    Ok(part(0).saturating_mul(1_000_000_000).saturating_add(part(8) * 1000))
}
pub fn fcntl(fd: i32, cmd: i32, arg: usize) -> Result<i32> {
    sc!(SYS_fcntl, fd, cmd, arg).map(|v| v as i32)
}
pub fn memfd_create(name: &core::ffi::CStr, flags: u32) -> Result<i32> {
    sc!(SYS_memfd_create, name.as_ptr(), flags).map(|v| v as i32)
}
/// EFBIG above RLIMIT_FSIZE, without the SIGXFSZ that the kernel would send to the program.
pub fn ftruncate(fd: i32, size: usize) -> Result<()> {
    if limit(libc::RLIMIT_FSIZE as _) < size as u64 {
        return Err(Errno::new(libc::EFBIG));
    }
    sc!(SYS_ftruncate, fd, size).map(drop)
}
/// A new mapping at an address that the kernel chooses. It is not written to core files: most
/// mappings are larger than their used part, and the kernel would allocate memory for all of it.
pub fn mmap(len: usize, prot: i32, flags: i32, fd: i32, off: usize) -> Result<*mut u8> {
    mmap_briefly(len, prot, flags, fd, off).inspect(|at| dont_dump(*at, len))
}
/// [`mmap`] for a mapping that lasts no longer than one call.
pub fn mmap_briefly(len: usize, prot: i32, flags: i32, fd: i32, off: usize) -> Result<*mut u8> {
    sc!(SYS_mmap, 0, len, prot, flags & !libc::MAP_FIXED, fd, off).map(|v| v as *mut u8)
}
static ADVISES: AtomicBool = AtomicBool::new(true);
/// From now on mappings may be in core files, because a filter of system calls may forbid
/// `madvise`.
pub fn stop_advising() {
    ADVISES.store(false, Ordering::Relaxed);
}
fn dont_dump(at: *mut u8, len: usize) {
    if !ADVISES.load(Ordering::Relaxed) {
        return;
    }
    // (If this fails, a core file is larger; nothing else happens.)
    let _ = sc!(SYS_madvise, at, len, libc::MADV_DONTDUMP);
}
/// Maps the shared file that is mapped at `at` a second time: `len` bytes from there on, even
/// beyond the end of the first mapping. This needs no descriptor. If the first mapping is in no
/// core file, this one is not, either.
pub fn mmap_again(at: *mut u8, len: usize) -> Result<*mut u8> {
    sc!(SYS_mremap, at, 0, len, libc::MREMAP_MAYMOVE).map(|v| v as *mut u8)
}
/// Replaces the memory at `at` by a new mapping, which (as with [`mmap`]) is in no core file.
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
/// Nothing uses the range any more.
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
/// Sleeps while all words have the expected values. After a signal the kernel restarts this as it
/// restarts [`futex_wait`] without a limit. Errors: EAGAIN, EINTR, ETIMEDOUT; ENOSYS: Linux
/// before 5.16.
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

/// Wakes all sleepers of a futex that was at this address. The memory may be gone.
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
        // The start has checked that this works, but a seccomp filter that was installed later
        // may forbid the call. The ordinary fence is weaker, so callers limit their sleeps.
        core::sync::atomic::fence(core::sync::atomic::Ordering::SeqCst);
    }
}

/// Sends a signal. Signal 0 only checks whether the process exists.
pub fn kill(pid: i32, signal: i32) -> Result<()> {
    sc!(SYS_kill, pid, signal).map(drop)
}
fn stat(path: &core::ffi::CStr) -> Result<libc::stat> {
    let mut st = core::mem::MaybeUninit::<libc::stat>::zeroed();
    sc!(SYS_newfstatat, libc::AT_FDCWD, path.as_ptr(), st.as_mut_ptr(), 0)?;
    // SAFETY: all bytes are initialised (zeroed, then written by the kernel), and `stat` has only integers.
    Ok(unsafe { st.assume_init() })
}
/// Number of links of a file. A directory usually has two, and one for each directory in it.
pub fn links(path: &core::ffi::CStr) -> Result<u64> {
    stat(path).map(|s| s.st_nlink)
}
/// Inode number of a file.
pub fn inode(path: &core::ffi::CStr) -> Result<u64> {
    stat(path).map(|s| s.st_ino)
}
/// The owner of a file, and its type and permissions.
pub fn owner_and_mode(path: &core::ffi::CStr) -> Result<(u32, u32)> {
    stat(path).map(|s| (s.st_uid, s.st_mode))
}
/// Type and permissions of the file behind a descriptor.
pub fn mode(fd: i32) -> Result<u32> {
    ownership(fd).map(|(mode, _, _)| mode)
}
/// Type and permissions, user and group of the file behind a descriptor.
pub fn ownership(fd: i32) -> Result<(u32, u32, u32)> {
    let mut s = core::mem::MaybeUninit::<libc::stat>::uninit();
    sc!(SYS_fstat, fd, s.as_mut_ptr())?;
    // SAFETY: the kernel has filled it; its structure is libc's.
    let s = unsafe { s.assume_init() };
    Ok((s.st_mode, s.st_uid, s.st_gid))
}
/// The size of a file in bytes.
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
        v = now_ns() ^ ((getpid() as u64) << 40) ^ (&raw const v as u64);
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
/// Uses `epoll_pwait` if the kernel lacks `epoll_pwait2`; milliseconds are then rounded up.
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

pub(crate) fn timespec(ns: u64) -> libc::timespec {
    libc::timespec {
        tv_sec: (ns / 1_000_000_000).min(i64::MAX as u64 / 2) as i64,
        tv_nsec: (ns % 1_000_000_000) as i64,
    }
}

/// The kernel's tick in nanoseconds, which is the unit of its coarse clocks. It is read once. 0:
/// unknown.
pub fn clock_tick_ns() -> u64 {
    static TICK: AtomicU64 = AtomicU64::new(0);
    let known = TICK.load(Ordering::Relaxed);
    if known != 0 {
        return known;
    }
    let mut ts = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    let asked = sc!(SYS_clock_getres, libc::CLOCK_MONOTONIC_COARSE, &mut ts as *mut libc::timespec);
    let tick = asked.map_or(0, |_| ts.tv_nsec as u64);
    TICK.store(tick, Ordering::Relaxed);
    tick
}

/// CLOCK_MONOTONIC, nanoseconds.
#[inline]
pub fn now_ns() -> u64 {
    crate::vdso::clock_ns(libc::CLOCK_MONOTONIC)
}

/// The kernel's `struct msghdr`. (musl's has other types.)
#[repr(C)]
struct Message {
    msg_name: *mut u8,
    msg_namelen: u32,
    msg_iov: *mut libc::iovec,
    msg_iovlen: usize,
    msg_control: *mut u8,
    msg_controllen: usize,
    msg_flags: i32,
}

/// The kernel's `struct cmsghdr`.
#[repr(C)]
struct MessageControl {
    cmsg_len: usize,
    cmsg_level: i32,
    cmsg_type: i32,
}

/// Sends one packet, with at most one descriptor.
pub fn send_with_fd(sock: i32, data: &[u8], fd: Option<i32>, flags: i32) -> Result<usize> {
    let mut iov = libc::iovec { iov_base: data.as_ptr() as *mut _, iov_len: data.len() };
    let mut control = Control::default();
    // SAFETY: all-zero is a valid msghdr.
    let mut msg: Message = unsafe { core::mem::zeroed() };
    msg.msg_iov = &mut iov;
    msg.msg_iovlen = 1;
    if let Some(fd) = fd {
        control.hdr = MessageControl { cmsg_len: CMSG_LEN, cmsg_level: libc::SOL_SOCKET, cmsg_type: libc::SCM_RIGHTS };
        control.fd[0] = fd;
        msg.msg_control = &mut control as *mut Control as *mut _;
        msg.msg_controllen = core::mem::size_of::<Control>();
    }
    sc!(SYS_sendmsg, sock, &msg as *const Message, flags | libc::MSG_NOSIGNAL)
}

/// Receives one packet; a descriptor that came along is close-on-exec.
/// A packet of length zero is the end of the socket.
pub fn recv_with_fd(sock: i32, data: &mut [u8], flags: i32) -> Result<(usize, Option<i32>)> {
    let mut iov = libc::iovec { iov_base: data.as_mut_ptr() as *mut _, iov_len: data.len() };
    let mut control = Control::default();
    // SAFETY: all-zero is a valid msghdr.
    let mut msg: Message = unsafe { core::mem::zeroed() };
    msg.msg_iov = &mut iov;
    msg.msg_iovlen = 1;
    msg.msg_control = &mut control as *mut Control as *mut _;
    msg.msg_controllen = core::mem::size_of::<Control>();
    let n = sc!(SYS_recvmsg, sock, &mut msg as *mut Message, flags | libc::MSG_CMSG_CLOEXEC)?;
    let got = msg.msg_controllen >= CMSG_LEN
        && control.hdr.cmsg_level == libc::SOL_SOCKET
        && control.hdr.cmsg_type == libc::SCM_RIGHTS
        && control.hdr.cmsg_len >= CMSG_LEN;
    Ok((n, got.then_some(control.fd[0])))
}

const CMSG_LEN: usize = core::mem::size_of::<MessageControl>() + 4;

#[repr(C)]
struct Control {
    hdr: MessageControl,
    fd: [i32; 2],
}
impl Default for Control {
    fn default() -> Self {
        Control { hdr: MessageControl { cmsg_len: 0, cmsg_level: 0, cmsg_type: 0 }, fd: [-1; 2] }
    }
}
