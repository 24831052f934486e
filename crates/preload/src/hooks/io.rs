//! Bytes in and out.

use super::answer::{failed, gone, guarded, interrupted, Answer};
use crate::real;
use fsocket_core::table::{self, kind, Desc};
use fsocket_core::upgrade::{self, Call, Entered};
use fsocket_core::{msg as ops_msg, path, pool, ready, sendfile as ops_sendfile, stream, user, Errno};
use libc::*;

#[inline(always)]
fn conn(fd: c_int) -> Option<&'static Desc> {
    table::lookup(fd).filter(|d| d.is_conn())
}

/// A call on what is no connection of ours. A kernel connection may become one before it, and
/// is then `$again`; until it returns it cannot. In functions of their own, so that what they
/// need costs the fast paths nothing, nor what may become one those that will not.
macro_rules! in_kernel {
    ($name:ident($fd:ident: $fdt:ty $(, $arg:ident: $ty:ty)*), $call:expr) => {{
        #[inline(never)]
        unsafe fn kernel($fd: $fdt, $($arg: $ty),*) -> ssize_t {
            match upgrade::is_candidate($fd) || gone($fd) {
                true => unsafe { undecided($fd, $($arg),*) },
                false => unsafe { real::$name($fd, $($arg),*) },
            }
        }
        #[cold]
        #[inline(never)]
        unsafe fn undecided($fd: $fdt, $($arg: $ty),*) -> ssize_t {
            if gone($fd) {
                return -1;
            }
            match upgrade::enter($fd, $call) {
                Entered::Ours => unsafe { $name($fd, $($arg),*) },
                Entered::Interrupted => {
                    interrupted();
                    -1
                }
                Entered::Kernel(using) => {
                    // A thread that is cancelled in there is unwound through here, and must find
                    // nothing to drop. Its connection then stays the kernel's.
                    let using = core::mem::ManuallyDrop::new(using);
                    let r = unsafe { real::$name($fd, $($arg),*) };
                    drop(core::mem::ManuallyDrop::into_inner(using));
                    r
                }
            }
        }
        unsafe { kernel($fd, $($arg),*) }
    }};
}

/// What a receive of up to `n` bytes is.
#[inline(always)]
fn receives(n: size_t, flags: c_int) -> Call {
    if n == 0 || flags & (MSG_DONTWAIT | MSG_ERRQUEUE | MSG_OOB) != 0 {
        Call::Look
    } else {
        Call::Receive
    }
}

/// The same into several places.
unsafe fn gathers(iov: *const iovec, n: size_t, flags: c_int) -> Call {
    if n > 1024 || !user::readable(iov, n) {
        return Call::Look;
    }
    receives((0..n).map(|i| unsafe { (*iov.add(i)).iov_len }).fold(0, size_t::saturating_add), flags)
}

unsafe fn message(msg: *const msghdr, flags: c_int) -> Call {
    match unsafe { user::get(msg) } {
        Ok(m) => unsafe { gathers(m.msg_iov, m.msg_iovlen, flags) },
        Err(_) => Call::Look,
    }
}

/// A connection of ours, one that may become one, or one that was just closed.
fn candidate(fd: c_int) -> bool {
    pool::holds(fd) || table::lookup(fd).is_some_and(|d| matches!(d.kind(), kind::CONN | kind::KERNEL))
}

/// A send: the fast path bare, the rest guarded and out of its way. What is not done here is
/// left to functions whose result is this one's, so that it is a jump. `$spare`: see
/// [`stream::send_tiny`].
macro_rules! transmit {
    ($fd:expr, $buf:expr, $n:expr, $flags:expr, $spare:literal, else $kernel:expr) => {{
        if let Some(d) = table::lookup($fd) {
            if stream::plain_send($flags) {
                match unsafe { stream::send_tiny::<$spare>(d, $buf as *const u8, $n) } {
                    stream::Tiny::Sent => return $n as ssize_t,
                    stream::Tiny::Tell => return unsafe { tell(d, $n) },
                    stream::Tiny::No => {}
                    stream::Tiny::Fault => return fault(),
                }
            }
            if d.is_conn() {
                return unsafe { transmit_more(d, $buf as *const u8, $n, $flags) };
            }
        }
        $kernel
    }};
}

#[cold]
#[inline(never)]
unsafe fn tell(d: &'static Desc, n: size_t) -> ssize_t {
    stream::sent_tiny(d);
    // Were it known that `n` comes back, the caller would keep it over a call, and pay.
    core::hint::black_box(n as ssize_t)
}

#[cold]
#[inline(never)]
fn fault() -> ssize_t {
    // (As in `tell`.)
    core::hint::black_box(failed(Errno::EFAULT))
}

#[inline(never)]
unsafe fn transmit_more(d: &'static Desc, buf: *const u8, n: size_t, flags: c_int) -> ssize_t {
    if stream::plain_send(flags) {
        match unsafe { stream::send_small(d, buf, n) } {
            stream::Tiny::Sent => return n as ssize_t,
            stream::Tiny::Tell => return unsafe { tell(d, n) },
            stream::Tiny::No => {}
            stream::Tiny::Fault => return fault(),
        }
    }
    unsafe { transmit_most(d, buf, n, flags) }
}

#[inline(never)]
unsafe fn transmit_most(d: &'static Desc, buf: *const u8, n: size_t, flags: c_int) -> ssize_t {
    if stream::plain_send(flags) && unsafe { stream::send_fast(d, buf, n) } {
        return n as ssize_t;
    }
    unsafe { transmit_slowly(d, buf, n, flags) }
}

#[inline(never)]
unsafe fn transmit_slowly(d: &'static Desc, buf: *const u8, n: size_t, flags: c_int) -> ssize_t {
    guarded(|| unsafe { stream::send_slow(d, buf, n, flags) }.answer())
}

/// A receive: likewise.
macro_rules! receive {
    ($fd:expr, $buf:expr, $n:expr, $flags:expr, else $other:expr) => {{
        if let Some(d) = table::lookup($fd) {
            match unsafe { stream::recv_on_credit(d, $buf as *mut u8, $n, $flags) } {
                0 if d.is_conn() => return unsafe { receive_more(d, $buf as *mut u8, $n, $flags) },
                0 => {}
                got if got < $n && stream::left_rings(d) => {
                    return unsafe { receive_rest(d, $buf as *mut u8, $n, $flags, got) }
                }
                got => return got as ssize_t,
            }
        }
        $other
    }};
}

#[inline(never)]
unsafe fn receive_more(d: &'static Desc, buf: *mut u8, n: size_t, flags: c_int) -> ssize_t {
    if stream::found_nothing(d) {
        return unsafe { receive_slowly(d, buf, n, flags) };
    }
    match unsafe { stream::recv_fast(d, buf, n, flags) } {
        0 => unsafe { receive_slowly(d, buf, n, flags) },
        got if got < n && stream::left_rings(d) => unsafe { receive_rest(d, buf, n, flags, got) },
        got => got as ssize_t,
    }
}

#[inline(never)]
unsafe fn receive_slowly(d: &'static Desc, buf: *mut u8, n: size_t, flags: c_int) -> ssize_t {
    guarded(|| unsafe { stream::recv_slow(d, buf, n, flags) }.answer())
}

#[cold]
#[inline(never)]
unsafe fn receive_rest(d: &'static Desc, buf: *mut u8, n: size_t, flags: c_int, got: usize) -> ssize_t {
    guarded(|| (got + unsafe { stream::rest(d, buf.wrapping_add(got), n - got, flags) }) as ssize_t)
}

#[inline(always)]
pub unsafe fn read(fd: c_int, buf: *mut c_void, n: size_t) -> ssize_t {
    // read() of nothing is 0 at once, unlike recv().
    if n == 0 && conn(fd).is_some() {
        return if user::is_beyond(buf) { failed(Errno::EFAULT) } else { 0 };
    }
    receive!(fd, buf, n, 0, else in_kernel!(read(fd: c_int, buf: *mut c_void, n: size_t), receives(n, 0)))
}

#[inline(always)]
pub unsafe fn write(fd: c_int, buf: *const c_void, n: size_t) -> ssize_t {
    transmit!(fd, buf, n, 0, true, else in_kernel!(write(fd: c_int, buf: *const c_void, n: size_t), Call::Send))
}

pub unsafe fn readv(fd: c_int, iov: *const iovec, n: c_int) -> ssize_t {
    match conn(fd) {
        Some(d) => guarded(|| unsafe { ops_msg::readv(d, iov, n as usize, 0) }.answer()),
        None => {
            in_kernel!(readv(fd: c_int, iov: *const iovec, n: c_int), unsafe { gathers(iov, n.max(0) as size_t, 0) })
        }
    }
}

pub unsafe fn writev(fd: c_int, iov: *const iovec, n: c_int) -> ssize_t {
    match conn(fd) {
        Some(d) => guarded(|| unsafe { ops_msg::writev(d, iov, n as usize, 0) }.answer()),
        None => in_kernel!(writev(fd: c_int, iov: *const iovec, n: c_int), Call::Send),
    }
}

#[inline(always)]
pub unsafe fn recv(fd: c_int, buf: *mut c_void, n: size_t, flags: c_int) -> ssize_t {
    receive!(fd, buf, n, flags, else {
        in_kernel!(recv(fd: c_int, buf: *mut c_void, n: size_t, flags: c_int), receives(n, flags))
    })
}

#[inline(always)]
pub unsafe fn send(fd: c_int, buf: *const c_void, n: size_t, flags: c_int) -> ssize_t {
    transmit!(fd, buf, n, flags, false, else in_kernel!(send(fd: c_int, buf: *const c_void, n: size_t, flags: c_int), Call::Send))
}

pub unsafe fn recvfrom(
    fd: c_int,
    buf: *mut c_void,
    n: size_t,
    flags: c_int,
    addr: *mut sockaddr,
    len: *mut socklen_t,
) -> ssize_t {
    match conn(fd) {
        Some(_) => {
            let r = unsafe { recv(fd, buf, n, flags) };
            if r >= 0 && !addr.is_null() {
                // TCP names no sender. (What was received is gone if that cannot be said, as in the kernel.)
                return unsafe { user::give(&[], addr.cast(), len, 0) }.map_or_else(failed, |()| r);
            }
            r
        }
        None => {
            in_kernel!(recvfrom(fd: c_int, buf: *mut c_void, n: size_t, flags: c_int, addr: *mut sockaddr, len: *mut socklen_t), receives(n, flags))
        }
    }
}

pub unsafe fn sendto(
    fd: c_int,
    buf: *const c_void,
    n: size_t,
    flags: c_int,
    addr: *const sockaddr,
    len: socklen_t,
) -> ssize_t {
    if !addr.is_null() && conn(fd).is_some() {
        // Not used, but looked at.
        if let Err(e) = named(addr.cast(), len) {
            return failed(e);
        }
    }
    transmit!(fd, buf, n, flags, false, else {
        in_kernel!(sendto(fd: c_int, buf: *const c_void, n: size_t, flags: c_int, addr: *const sockaddr, len: socklen_t), Call::Send)
    })
}

/// Would the kernel take this for an address?
#[cold]
#[inline(never)]
fn named(addr: *const u8, len: socklen_t) -> Result<(), Errno> {
    match len as usize {
        n if n > size_of::<sockaddr_storage>() => Err(Errno::EINVAL),
        n if !user::readable(addr, n) => Err(Errno::EFAULT),
        _ => Ok(()),
    }
}

pub unsafe fn recvmsg(fd: c_int, msg: *mut msghdr, flags: c_int) -> ssize_t {
    match conn(fd) {
        // Urgent data come with a flag that is the kernel's to set.
        Some(d) if flags & MSG_OOB != 0 && (!path::still_ours(d) || path::kernel_part(d).is_some()) => unsafe {
            real::recvmsg(path::kernel_part(d).unwrap_or(fd), msg, flags)
        },
        Some(d) => guarded(|| unsafe { receive_message(d, msg, flags) }),
        None => in_kernel!(recvmsg(fd: c_int, msg: *mut msghdr, flags: c_int), unsafe { message(msg, flags) }),
    }
}

unsafe fn receive_message(d: &'static Desc, msg: *mut msghdr, flags: c_int) -> ssize_t {
    let receive = || unsafe {
        let m = user::get(msg)?;
        let n = ops_msg::recvv(d, m.msg_iov, m.msg_iovlen, flags & !MSG_CMSG_CLOEXEC)?;
        if !m.msg_name.is_null() {
            user::put(&raw mut (*msg).msg_namelen, 0)?;
        }
        user::put(&raw mut (*msg).msg_flags, flags & MSG_CMSG_CLOEXEC)?;
        user::put(&raw mut (*msg).msg_controllen, 0)?;
        Ok(n)
    };
    receive().answer()
}

unsafe fn send_message(d: &'static Desc, msg: *const msghdr, flags: c_int) -> ssize_t {
    let send = || unsafe {
        let m = user::get(msg)?;
        if !m.msg_name.is_null() && m.msg_namelen != 0 {
            named(m.msg_name.cast(), (m.msg_namelen as usize).min(size_of::<sockaddr_storage>()) as socklen_t)?;
        }
        if m.msg_iovlen <= UIO_MAXIOV as usize && !user::readable(m.msg_control as *const u8, m.msg_controllen) {
            return Err(Errno::EFAULT);
        }
        if m.msg_controllen >= size_of::<cmsghdr>() as size_t {
            let first = user::get(m.msg_control as *const cmsghdr)?.cmsg_len;
            if !(size_of::<cmsghdr>() as size_t..=m.msg_controllen).contains(&first) {
                return Err(stream::rather(d, flags, Errno::EINVAL));
            }
        }
        ops_msg::sendv(d, m.msg_iov, m.msg_iovlen, flags)
    };
    send().answer()
}

pub unsafe fn sendmsg(fd: c_int, msg: *const msghdr, flags: c_int) -> ssize_t {
    if flags & MSG_ZEROCOPY != 0 {
        // One completion for all vectors: before the first of them.
        if let Some(d) = conn(fd) {
            guarded(|| fsocket_core::opts::extra::zerocopy(d));
        }
    }
    match conn(fd) {
        Some(d) => guarded(|| unsafe { send_message(d, msg, flags) }),
        None => {
            let control =
                |m: &msghdr| m.msg_controllen != 0 && user::readable(m.msg_control as *const u8, m.msg_controllen);
            if unsafe { user::get(msg) }.is_ok_and(|m| control(&m)) {
                guarded(|| unsafe { fsocket_core::close::passing(msg) });
            }
            in_kernel!(sendmsg(fd: c_int, msg: *const msghdr, flags: c_int), Call::Send)
        }
    }
}

/// The messages of a `recvmmsg` or `sendmmsg`.
struct Several {
    vec: *mut mmsghdr,
    n: c_uint,
    flags: c_int,
    done: c_uint,
    over: bool,
}

impl Several {
    /// One after the other by `each`, as long as `d` is ours; then by `number`, and so what may be the
    /// kernel's for its flags. The connection stays while it is ours, whatever another thread does to the number.
    ///
    /// # Safety
    /// `vec` has `n` entries.
    unsafe fn run(
        &mut self,
        d: &'static Desc,
        mut each: impl FnMut(&mut Several, *mut mmsghdr) -> ssize_t,
        mut number: impl FnMut(&mut Several, *mut mmsghdr) -> ssize_t,
    ) -> c_int {
        guarded::<c_int>(|| {
            stream::throughout(d, |call| {
                let ours = self.flags & (MSG_OOB | MSG_ZEROCOPY) == 0;
                while ours && d.is_conn() && unsafe { self.step(&mut each) } {
                    call.begun();
                }
            });
            0
        });
        while unsafe { self.step(&mut number) } {}
        if self.done == 0 && self.over {
            -1
        } else {
            self.done as c_int
        }
    }

    unsafe fn step(&mut self, f: &mut impl FnMut(&mut Several, *mut mmsghdr) -> ssize_t) -> bool {
        if self.over || self.done == self.n {
            return false;
        }
        let m = self.vec.wrapping_add(self.done as usize);
        match f(self, m) {
            r if r < 0 => self.over = true,
            r => match unsafe { user::put(&raw mut (*m).msg_len, r as c_uint) } {
                Ok(()) => self.done += 1,
                Err(e) => {
                    self.over = true;
                    e.set();
                }
            },
        }
        !self.over
    }
}

pub unsafe fn recvmmsg(fd: c_int, vec: *mut mmsghdr, n: c_uint, flags: c_int, timeout: *mut timespec) -> c_int {
    upgrade::give_up_fd(fd);
    let Some(d) = conn(fd) else {
        return unsafe { real::recvmmsg(fd, vec, n, flags, timeout) };
    };
    let limit = match unsafe { user::get_if(timeout) } {
        Ok(limit) => limit,
        Err(e) => return failed(e),
    };
    if limit.as_ref().is_some_and(|t| t.tv_sec < 0 || !(0..1_000_000_000).contains(&t.tv_nsec)) {
        fsocket_sys::Errno::EINVAL.set();
        return -1;
    }
    let end = limit.as_ref().map(|t| {
        fsocket_sys::now_ns().saturating_add((t.tv_sec as u64).saturating_mul(1_000_000_000) + t.tv_nsec as u64)
    });
    // Unlike recvmsg() it looks for an error before it looks for data.
    if let Some(e) = ready::pending_error(d, flags) {
        e.set();
        return -1;
    }
    let left = || end.map_or(0, |t| t.saturating_sub(fsocket_sys::now_ns()));
    let flags_of = |done| if done > 0 && flags & MSG_WAITFORONE != 0 { flags | MSG_DONTWAIT } else { flags };
    let after = |all: &mut Several, m: *const mmsghdr, r: ssize_t| {
        if r < 0 && all.done > 0 {
            // The next call reports it.
            ready::put_back_error(d, fsocket_sys::Errno::last());
        }
        // The limit is looked at after each message, and ends no wait. Urgent data are the last message.
        all.over |= end.is_some() && left() == 0
            || r >= 0 && unsafe { user::get(&raw const (*m).msg_hdr.msg_flags) }.is_ok_and(|f| f & MSG_OOB != 0);
        r
    };
    let each = |all: &mut Several, m: *mut mmsghdr| {
        let r = unsafe { receive_message(d, &raw mut (*m).msg_hdr, flags_of(all.done) & !MSG_WAITFORONE) };
        after(all, m, r)
    };
    let number = |all: &mut Several, m: *mut mmsghdr| {
        let r = unsafe { recvmsg(fd, &raw mut (*m).msg_hdr, flags_of(all.done) & !MSG_WAITFORONE) };
        after(all, m, r)
    };
    let done = unsafe { Several { vec, n, flags, done: 0, over: false }.run(d, each, number) };
    if limit.is_some() && done > 0 {
        let left = left();
        let left = timespec { tv_sec: (left / 1_000_000_000) as time_t, tv_nsec: (left % 1_000_000_000) as c_long };
        if let Err(e) = unsafe { user::put(timeout, left) } {
            return failed(e);
        }
    }
    done
}

pub unsafe fn sendmmsg(fd: c_int, vec: *mut mmsghdr, n: c_uint, flags: c_int) -> c_int {
    upgrade::give_up_fd(fd);
    let Some(d) = conn(fd) else {
        return unsafe { real::sendmmsg(fd, vec, n, flags) };
    };
    // As the kernel: the rest is for the next call.
    let n = n.min(UIO_MAXIOV as c_uint);
    let each = |_: &mut Several, m: *mut mmsghdr| unsafe { send_message(d, &raw const (*m).msg_hdr, flags) };
    let number = |_: &mut Several, m: *mut mmsghdr| unsafe { sendmsg(fd, &raw const (*m).msg_hdr, flags) };
    unsafe { Several { vec, n, flags, done: 0, over: false }.run(d, each, number) }
}

// The FORTIFY twins check the size of the destination, then do the same. When
// the check fails libc's own function ends the program, as it should.

pub unsafe fn __read_chk(fd: c_int, buf: *mut c_void, n: size_t, cap: size_t) -> ssize_t {
    match candidate(fd) {
        true if n <= cap => unsafe { read(fd, buf, n) },
        _ => unsafe { real::__read_chk(fd, buf, n, cap) },
    }
}

pub unsafe fn __recv_chk(fd: c_int, buf: *mut c_void, n: size_t, cap: size_t, flags: c_int) -> ssize_t {
    match candidate(fd) {
        true if n <= cap => unsafe { recv(fd, buf, n, flags) },
        _ => unsafe { real::__recv_chk(fd, buf, n, cap, flags) },
    }
}

pub unsafe fn __recvfrom_chk(
    fd: c_int,
    buf: *mut c_void,
    n: size_t,
    cap: size_t,
    flags: c_int,
    addr: *mut sockaddr,
    len: *mut socklen_t,
) -> ssize_t {
    match candidate(fd) {
        true if n <= cap => unsafe { recvfrom(fd, buf, n, flags, addr, len) },
        _ => unsafe { real::__recvfrom_chk(fd, buf, n, cap, flags, addr, len) },
    }
}

pub unsafe fn preadv2(fd: c_int, iov: *const iovec, n: c_int, off: off_t, flags: c_int) -> ssize_t {
    upgrade::give_up_fd(fd);
    match conn(fd) {
        Some(d) if off == -1 => guarded(|| {
            ops_msg::vector_flags(flags).and_then(|f| unsafe { ops_msg::readv(d, iov, n as usize, f) }).answer()
        }),
        // The placeholder has the right error.
        None if gone(fd) => -1,
        _ => unsafe { real::preadv2(fd, iov, n, off, flags) },
    }
}

pub unsafe fn pwritev2(fd: c_int, iov: *const iovec, n: c_int, off: off_t, flags: c_int) -> ssize_t {
    upgrade::give_up_fd(fd);
    match conn(fd) {
        Some(d) if off == -1 => guarded(|| {
            ops_msg::vector_flags(flags).and_then(|f| unsafe { ops_msg::writev(d, iov, n as usize, f) }).answer()
        }),
        None if gone(fd) => -1,
        _ => unsafe { real::pwritev2(fd, iov, n, off, flags) },
    }
}

pub unsafe fn preadv64v2(fd: c_int, iov: *const iovec, n: c_int, off: off_t, flags: c_int) -> ssize_t {
    upgrade::give_up_fd(fd);
    match conn(fd) {
        Some(d) if off == -1 => guarded(|| {
            ops_msg::vector_flags(flags).and_then(|f| unsafe { ops_msg::readv(d, iov, n as usize, f) }).answer()
        }),
        None if gone(fd) => -1,
        _ => unsafe { real::preadv64v2(fd, iov, n, off, flags) },
    }
}

pub unsafe fn pwritev64v2(fd: c_int, iov: *const iovec, n: c_int, off: off_t, flags: c_int) -> ssize_t {
    upgrade::give_up_fd(fd);
    match conn(fd) {
        Some(d) if off == -1 => guarded(|| {
            ops_msg::vector_flags(flags).and_then(|f| unsafe { ops_msg::writev(d, iov, n as usize, f) }).answer()
        }),
        None if gone(fd) => -1,
        _ => unsafe { real::pwritev64v2(fd, iov, n, off, flags) },
    }
}

/// The kernel does it: a connection of ours becomes a kernel connection first.
fn to_kernel(fd: c_int) {
    pool::let_go(fd);
    guarded(|| fsocket_core::exec::hand_over(fd));
}

pub unsafe fn splice(
    input: c_int,
    in_off: *mut loff_t,
    out: c_int,
    out_off: *mut loff_t,
    n: size_t,
    flags: c_uint,
) -> ssize_t {
    to_kernel(input);
    to_kernel(out);
    unsafe { real::splice(input, in_off, out, out_off, n, flags) }
}

pub unsafe fn tee(input: c_int, out: c_int, n: size_t, flags: c_uint) -> ssize_t {
    to_kernel(input);
    to_kernel(out);
    unsafe { real::tee(input, out, n, flags) }
}

pub unsafe fn sendfile(out: c_int, input: c_int, off: *mut off_t, n: size_t) -> ssize_t {
    match conn(out) {
        Some(d) => guarded(|| unsafe { ops_sendfile::sendfile(d, input, off, n) }.answer()),
        None => in_kernel!(sendfile(out: c_int, input: c_int, off: *mut off_t, n: size_t), Call::Send),
    }
}

pub unsafe fn sendfile64(out: c_int, input: c_int, off: *mut off_t, n: size_t) -> ssize_t {
    match conn(out) {
        Some(d) => guarded(|| unsafe { ops_sendfile::sendfile(d, input, off, n) }.answer()),
        None => in_kernel!(sendfile64(out: c_int, input: c_int, off: *mut off_t, n: size_t), Call::Send),
    }
}

pub unsafe fn vdprintf(fd: c_int, format: *const c_char, args: *mut c_void) -> c_int {
    to_kernel(fd);
    unsafe { real::vdprintf(fd, format, args) }
}

pub unsafe fn __vdprintf_chk(fd: c_int, flag: c_int, format: *const c_char, args: *mut c_void) -> c_int {
    to_kernel(fd);
    unsafe { real::__vdprintf_chk(fd, flag, format, args) }
}

/// The descriptor is the first member of an `aiocb`.
unsafe fn aio_to_kernel(cb: *mut c_void) {
    if let Some(fd) = unsafe { (cb as *const c_int).as_ref() } {
        to_kernel(*fd);
    }
}

pub unsafe fn aio_read(cb: *mut c_void) -> c_int {
    unsafe {
        aio_to_kernel(cb);
        real::aio_read(cb)
    }
}

pub unsafe fn aio_write(cb: *mut c_void) -> c_int {
    unsafe {
        aio_to_kernel(cb);
        real::aio_write(cb)
    }
}

pub unsafe fn aio_read64(cb: *mut c_void) -> c_int {
    unsafe {
        aio_to_kernel(cb);
        real::aio_read64(cb)
    }
}

pub unsafe fn aio_write64(cb: *mut c_void) -> c_int {
    unsafe {
        aio_to_kernel(cb);
        real::aio_write64(cb)
    }
}

pub unsafe fn lio_listio(mode: c_int, list: *const *mut c_void, n: c_int, event: *mut c_void) -> c_int {
    unsafe {
        for i in 0..n.max(0) as usize {
            aio_to_kernel(*list.add(i));
        }
        real::lio_listio(mode, list, n, event)
    }
}

pub unsafe fn lio_listio64(mode: c_int, list: *const *mut c_void, n: c_int, event: *mut c_void) -> c_int {
    unsafe {
        for i in 0..n.max(0) as usize {
            aio_to_kernel(*list.add(i));
        }
        real::lio_listio64(mode, list, n, event)
    }
}
