//! `read`, `write`, `send`, `recv` and the like. These hooks are the entry of the data path: a connection over shared
//! memory takes a jump to `fsocket_streams` that saves no register, every other descriptor libc's function.

use super::answer::{ended, failed, gone, guarded, Answer};
use fsocket_fdtable::table::{self, Desc};
use fsocket_migrate::upgrade::{self, Call, Entered};
use fsocket_ops::{names, opts};
use fsocket_runtime::{lengths, user};
use fsocket_streams::{msg as ops_msg, sendfile as ops_sendfile, stream};
use fsocket_sys::Errno;
use libc::*;

mod behind;
mod beside;
mod pipes;
mod to_kernel;
mod twins;

pub use messages::{recvmmsg, recvmsg, sendmmsg, sendmsg};
pub use pipes::splice;
pub use to_kernel::{aio_to_kernel, to_kernel};
pub use twins::{__read_chk, __recv_chk, __recvfrom_chk, preadv2, preadv64v2, pwritev2, pwritev64v2};

#[inline(always)]
fn conn(fd: c_int) -> Option<&'static Desc> {
    table::lookup(fd).filter(|d| d.is_conn())
}

/// A call on a descriptor that is no connection over shared memory. A kernel connection may move to shared memory
/// before the call, and then `$again` runs; it cannot move during the call. The code is in functions of its own, so it
/// costs the fast paths no register.
macro_rules! in_kernel {
    ($name:ident($fd:ident: $fdt:ty $(, $arg:ident: $ty:ty)*), $call:expr) => {{
        #[inline(never)]
        unsafe fn kernel($fd: $fdt, $($arg: $ty),*) -> ssize_t {
            match upgrade::is_candidate($fd) || gone($fd) {
                // SAFETY: the program's arguments, for a function that makes this call.
                true => unsafe { undecided($fd, $($arg),*) },
                false => real!($name($fd, $($arg),*)),
            }
        }
        #[cold]
        #[inline(never)]
        unsafe fn undecided($fd: $fdt, $($arg: $ty),*) -> ssize_t {
            if gone($fd) {
                return -1;
            }
            match upgrade::enter($fd, $call) {
                // SAFETY: the program's arguments, for the hook of this call.
                Entered::Ours => unsafe { $name($fd, $($arg),*) },
                Entered::Ended(e) => {
                    ended(e);
                    -1
                }
                Entered::Kernel(using) => {
                    // A cancelled thread is unwound through here, and must find nothing to drop. Its connection then
                    // stays on the kernel.
                    let using = core::mem::ManuallyDrop::new(using);
                    let r = real!($name($fd, $($arg),*));
                    drop(core::mem::ManuallyDrop::into_inner(using));
                    r
                }
            }
        }
        // SAFETY: the arguments are the program's, for a function that makes this call.
        unsafe { kernel($fd, $($arg),*) }
    }};
}

// Behind the macro, which it uses.
mod messages;

/// Classifies a receive of up to `n` bytes.
#[inline(always)]
fn receives(n: size_t, flags: c_int) -> Call {
    if n == 0 || flags & (MSG_DONTWAIT | MSG_ERRQUEUE | MSG_OOB) != 0 {
        Call::Look
    } else {
        Call::Receive
    }
}

/// The same for several buffers.
unsafe fn gathers(iov: *const iovec, n: size_t, flags: c_int) -> Call {
    if n > 1024 || !user::readable(iov, n) {
        return Call::Look;
    }
    // SAFETY: all `n` vectors are readable.
    receives((0..n).map(|i| unsafe { (*iov.add(i)).iov_len }).fold(0, size_t::saturating_add), flags)
}

/// A send: the fast path without a guard, the slow paths guarded. Slow paths are functions with the same result type,
/// so the call is a jump. `$spare`: see [`stream::send_tiny`].
macro_rules! transmit {
    ($fd:expr, $buf:expr, $n:expr, $flags:expr, $spare:literal, $more:ident, else $kernel:expr) => {{
        if let Some(d) = table::lookup($fd) {
            if stream::plain_send($flags) {
                // SAFETY: the program says that `$n` bytes are at `$buf`; the copy returns EFAULT where they are not.
                match unsafe { stream::send_tiny::<$spare>(d, $buf as *const u8, $n) } {
                    stream::Tiny::Sent => return $n as ssize_t,
                    stream::Tiny::Tell => return tell(d, $n),
                    stream::Tiny::No => {}
                    stream::Tiny::Fault => return fault(),
                }
            }
            if d.is_conn() {
                // SAFETY: the program says that `$n` bytes are at `$buf`; the copy returns EFAULT where they are not.
                return unsafe { $more(d, $buf as *const u8, $n, $flags) };
            }
        }
        $kernel
    }};
}

#[cold]
#[inline(never)]
fn tell(d: &'static Desc, n: size_t) -> ssize_t {
    stream::sent_tiny(d);
    // If the compiler knew that `n` comes back, the caller would keep `n` over a call.
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
        // SAFETY: the program says that `n` bytes are at `buf`; the copy returns EFAULT where they are not.
        match unsafe { stream::send_small(d, buf, n) } {
            stream::Tiny::Sent => return n as ssize_t,
            stream::Tiny::Tell => return tell(d, n),
            stream::Tiny::No => {}
            stream::Tiny::Fault => return fault(),
        }
    }
    // SAFETY: the program says that `n` bytes are at `buf`; the copy returns EFAULT where they are not.
    unsafe { transmit_most(d, buf, n, flags) }
}

/// [`transmit_more`] of `write`, which checks a length before it cuts it.
#[inline(never)]
unsafe fn write_more(d: &'static Desc, buf: *const u8, n: size_t, flags: c_int) -> ssize_t {
    match n > lengths::MOST {
        true if lengths::whole(buf, n).is_err() => fault(),
        // SAFETY: the program says that `n` bytes are at `buf`; the copy returns EFAULT where they are not.
        _ => unsafe { transmit_more(d, buf, n, flags) },
    }
}

#[inline(never)]
unsafe fn transmit_most(d: &'static Desc, buf: *const u8, n: size_t, flags: c_int) -> ssize_t {
    // SAFETY: the program says that `n` bytes are at `buf`; the copy returns EFAULT where they are not.
    if stream::plain_send(flags) && unsafe { stream::send_fast(d, buf, n) } {
        return n as ssize_t;
    }
    // SAFETY: the program says that `n` bytes are at `buf`; the copy returns EFAULT where they are not.
    unsafe { transmit_slowly(d, buf, n, flags) }
}

#[inline(never)]
unsafe fn transmit_slowly(d: &'static Desc, buf: *const u8, n: size_t, flags: c_int) -> ssize_t {
    // SAFETY: the program says that `n` bytes are at `buf`; the copy returns EFAULT where they are not.
    guarded(|| unsafe { stream::send_slow(d, buf, n, flags) }.answer())
}

/// A receive, built like the send.
macro_rules! receive {
    ($fd:expr, $buf:expr, $n:expr, $flags:expr, else $other:expr) => {{
        if let Some(d) = table::lookup($fd) {
            // SAFETY: the program says that `$n` bytes fit at `$buf`; the copy returns EFAULT where they are not.
            match unsafe { stream::recv_on_credit(d, $buf as *mut u8, $n, $flags) } {
                // SAFETY: the program says that `$n` bytes fit at `$buf`; the copy returns EFAULT where they are not.
                0 if d.is_conn() => return unsafe { receive_more(d, $buf as *mut u8, $n, $flags) },
                0 => {}
                got if got < $n && stream::left_rings(d) => {
                    // SAFETY: the program says that `$n` bytes fit at `$buf`; fewer, `got`, are filled.
                    return unsafe { receive_rest(d, $buf as *mut u8, $n, $flags, got) };
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
        // SAFETY: the program says that `n` bytes fit at `buf`; the copy returns EFAULT where they are not.
        return unsafe { receive_slowly(d, buf, n, flags) };
    }
    // SAFETY: the program says that `n` bytes fit at `buf`; the copy returns EFAULT where they are not.
    match unsafe { stream::recv_fast(d, buf, n, flags) } {
        // SAFETY: the program says that `n` bytes fit at `buf`; the copy returns EFAULT where they are not.
        0 => unsafe { receive_slowly(d, buf, n, flags) },
        // SAFETY: `got` of the `n` bytes at `buf` are filled.
        got if got < n && stream::left_rings(d) => unsafe { receive_rest(d, buf, n, flags, got) },
        got => got as ssize_t,
    }
}

#[inline(never)]
unsafe fn receive_slowly(d: &'static Desc, buf: *mut u8, n: size_t, flags: c_int) -> ssize_t {
    // SAFETY: the program says that `n` bytes fit at `buf`; the copy returns EFAULT where they are not.
    guarded(|| unsafe { stream::recv_slow(d, buf, n, flags) }.answer())
}

#[cold]
#[inline(never)]
unsafe fn receive_rest(d: &'static Desc, buf: *mut u8, n: size_t, flags: c_int, got: usize) -> ssize_t {
    // SAFETY: the `n - got` bytes behind those that are filled belong to the same buffer.
    guarded(|| (got + unsafe { stream::rest(d, buf.wrapping_add(got), n - got, flags) }) as ssize_t)
}

#[inline(always)]
pub unsafe fn read(fd: c_int, buf: *mut c_void, n: size_t) -> ssize_t {
    // read() of 0 bytes returns 0 at once, unlike recv(). A length above the limit of one call is checked before it is
    // cut.
    if n.wrapping_sub(1) >= lengths::MOST && conn(fd).is_some() {
        // SAFETY: the program says that `n` bytes fit at `buf`; the copy returns EFAULT where they are not.
        return unsafe { read_oddly(fd, buf, n) };
    }
    receive!(fd, buf, n, 0, else in_kernel!(read(fd: c_int, buf: *mut c_void, n: size_t), receives(n, 0)))
}

#[cold]
#[inline(never)]
unsafe fn read_oddly(fd: c_int, buf: *mut c_void, n: size_t) -> ssize_t {
    match lengths::whole(buf, n) {
        Ok(0) => 0,
        // SAFETY: the program says that `n` bytes fit at `buf`; the copy returns EFAULT where they are not.
        Ok(n) => unsafe { recv(fd, buf, n, 0) },
        Err(e) => failed(e),
    }
}

#[inline(always)]
pub unsafe fn write(fd: c_int, buf: *const c_void, n: size_t) -> ssize_t {
    transmit!(fd, buf, n, 0, true, write_more, else in_kernel!(write(fd: c_int, buf: *const c_void, n: size_t), Call::Send))
}

pub unsafe fn readv(fd: c_int, iov: *const iovec, n: c_int) -> ssize_t {
    match conn(fd) {
        // SAFETY: the program says that `n` vectors are at `iov`; they are checked before they are read.
        Some(d) => guarded(|| unsafe { ops_msg::readv(d, iov, n as usize, 0) }.answer()),
        None => {
            in_kernel!(readv(fd: c_int, iov: *const iovec, n: c_int), {
                // SAFETY: the program says that `n` vectors are at `iov`, and `gathers` checks them.
                unsafe { gathers(iov, n.max(0) as size_t, 0) }
            })
        }
    }
}

pub unsafe fn writev(fd: c_int, iov: *const iovec, n: c_int) -> ssize_t {
    match conn(fd) {
        // SAFETY: the program says that `n` vectors are at `iov`; they are checked before they are read.
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
    // SAFETY: the program says that `n` bytes are at `buf`; the copy returns EFAULT where they are not.
    transmit!(fd, buf, n, flags, false, transmit_more, else unsafe { send_in_kernel(fd, buf, n, flags) })
}

/// [`send`] on a descriptor that is no connection over shared memory, in a frame of its own, because [`send`] saves no
/// register.
///
/// # Safety
/// As [`send`].
#[inline(never)]
unsafe fn send_in_kernel(fd: c_int, buf: *const c_void, n: size_t, flags: c_int) -> ssize_t {
    opts::sends(fd, flags);
    in_kernel!(send(fd: c_int, buf: *const c_void, n: size_t, flags: c_int), Call::Send)
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
        Some(d) => {
            let is_unix = d.is_unix();
            // SAFETY: `buf` and `n` are those of `recv`.
            let r = unsafe { recv(fd, buf, n, flags) };
            if is_unix && names_sender(d, r) && !addr.is_null() {
                // SAFETY: `addr` and `len` come from the program; the copy reports bad ones.
                return unsafe { names::sender(fd, addr, len) }.map_or_else(failed, |()| r);
            }
            if r >= 0 && !addr.is_null() {
                // TCP names no sender. If the length cannot be written, the received bytes are lost, as in the kernel.
                // SAFETY: `addr` and `len` come from the program; the copy reports bad ones.
                return unsafe { user::give(&[], addr.cast(), len, 0) }.map_or_else(failed, |()| r);
            }
            r
        }
        None => {
            in_kernel!(recvfrom(fd: c_int, buf: *mut c_void, n: size_t, flags: c_int, addr: *mut sockaddr, len: *mut socklen_t), receives(n, flags))
        }
    }
}

/// Must a receive from a Unix socket that returned `r` write an address? The kernel names the peer where there are
/// bytes.
#[inline]
fn names_sender(d: &Desc, r: ssize_t) -> bool {
    r > 0 || r == 0 && d.is_conn() && fsocket_shm::conn::ring_has(d)
}

pub unsafe fn sendto(
    fd: c_int,
    buf: *const c_void,
    n: size_t,
    flags: c_int,
    addr: *const sockaddr,
    len: socklen_t,
) -> ssize_t {
    if let Some(d) = conn(fd).filter(|_| !addr.is_null()) {
        if d.is_unix() && len != 0 {
            return failed(Errno::EISCONN);
        }
        // The address is checked, but not used.
        if let Err(e) = lengths::buffer(buf, n).and_then(|_| named(addr.cast(), len, flags)) {
            return failed(e);
        }
    }
    // SAFETY: the program says that `n` bytes are at `buf`; the copy returns EFAULT where they are not.
    transmit!(fd, buf, n, flags, false, transmit_more, else unsafe { sendto_in_kernel(fd, buf, n, flags, addr, len) })
}

/// As [`send_in_kernel`].
///
/// # Safety
/// As [`sendto`].
#[inline(never)]
unsafe fn sendto_in_kernel(
    fd: c_int,
    buf: *const c_void,
    n: size_t,
    flags: c_int,
    addr: *const sockaddr,
    len: socklen_t,
) -> ssize_t {
    opts::sends(fd, flags);
    in_kernel!(sendto(fd: c_int, buf: *const c_void, n: size_t, flags: c_int, addr: *const sockaddr, len: socklen_t), Call::Send)
}

/// Would the kernel accept this address? With MSG_FASTOPEN it checks the family before it answers EISCONN.
#[cold]
#[inline(never)]
fn named(addr: *const u8, len: socklen_t, flags: c_int) -> Result<(), Errno> {
    let connects = flags & MSG_FASTOPEN != 0;
    // SAFETY: any bytes are a number; the copy returns EFAULT where nothing is.
    let family = || unsafe { user::get(addr as *const sa_family_t) };
    match len as usize {
        n if n > size_of::<sockaddr_storage>() => Err(Errno::EINVAL),
        n if !user::readable(addr, n) => Err(Errno::EFAULT),
        n if connects && n < size_of::<sa_family_t>() => Err(Errno::EINVAL),
        _ if connects && family() == Ok(AF_UNSPEC as sa_family_t) => Err(Errno::new(EOPNOTSUPP)),
        _ => Ok(()),
    }
}

pub unsafe fn sendfile(out: c_int, input: c_int, off: *mut off_t, n: size_t) -> ssize_t {
    match conn(out) {
        // SAFETY: `off` is null or the program's; the copy returns EFAULT where nothing is.
        Some(d) => guarded(|| unsafe { ops_sendfile::sendfile(d, input, off, n) }.answer()),
        None => in_kernel!(sendfile(out: c_int, input: c_int, off: *mut off_t, n: size_t), Call::Send),
    }
}

pub unsafe fn sendfile64(out: c_int, input: c_int, off: *mut off_t, n: size_t) -> ssize_t {
    match conn(out) {
        // SAFETY: `off` is null or the program's; the copy returns EFAULT where nothing is.
        Some(d) => guarded(|| unsafe { ops_sendfile::sendfile(d, input, off, n) }.answer()),
        None => in_kernel!(sendfile64(out: c_int, input: c_int, off: *mut off_t, n: size_t), Call::Send),
    }
}
