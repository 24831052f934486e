//! Vectored sends and receives.

use crate::stream::{self, Midway};
use crate::table::Desc;
use crate::user;
use fsocket_sys::{self as sys, Errno, Result};

/// Messages up to this size are gathered and sent as one record, bytes.
const GATHER: usize = 2048;
/// Bytes of a peek into several buffers that go over the stack, and at most: more than
/// either path keeps for a receiver (the kernel: net.ipv4.tcp_rmem).
const PEEK: usize = 16 << 10;
const PEEK_MOST: usize = 8 << 20;
/// IOV_MAX
const MAX_IOV: usize = 1024;

/// `too_many`: what the call says of more than [`MAX_IOV`] vectors.
///
/// # Safety
/// `iov` points to `n` vectors of the program's, or to nothing.
unsafe fn checked<'a>(iov: *const libc::iovec, n: usize, too_many: Errno) -> Result<(&'a [libc::iovec], usize)> {
    if n > MAX_IOV {
        return Err(too_many);
    }
    if n == 0 {
        return Ok((&[], 0));
    }
    if !user::readable(iov, n) {
        return Err(Errno::EFAULT);
    }
    // SAFETY: they are there.
    let v = unsafe { core::slice::from_raw_parts(iov, n) };
    let mut total = 0usize;
    for x in v {
        if x.iov_len > isize::MAX as usize {
            return Err(Errno::EINVAL);
        }
        if user::is_beyond(x.iov_base) {
            return Err(Errno::EFAULT);
        }
        total = total.saturating_add(x.iov_len);
    }
    Ok((v, total))
}

/// # Safety
/// `iov` points to `n` valid vectors.
pub unsafe fn sendv(d: &'static Desc, iov: *const libc::iovec, n: usize, flags: i32) -> Result<usize> {
    // SAFETY: the caller's.
    let (v, total) = unsafe { checked(iov, n, Errno::new(libc::EMSGSIZE)) }?;
    if let [one] = v {
        // SAFETY: the caller's.
        return unsafe { stream::send(d, one.iov_base as *const u8, one.iov_len, flags) };
    }
    if total <= GATHER {
        let mut buf = core::mem::MaybeUninit::<[u8; GATHER]>::uninit();
        let p = buf.as_mut_ptr() as *mut u8;
        let mut at = 0;
        for x in v {
            // SAFETY: the sum of all lengths fits; sources are the caller's.
            if let Err(e) = unsafe { user::read(x.iov_base as *const u8, p.add(at), x.iov_len) } {
                return Err(stream::rather(d, flags, e));
            }
            at += x.iov_len;
        }
        // SAFETY: `total` bytes were written.
        return unsafe { stream::send(d, p, total, flags) };
    }
    // In one: what has been sent of it may be answered with a reset before the next part.
    // SAFETY: the caller's vectors.
    if let Some(r) = stream::whole(d, flags, |fd| unsafe { sys::send_vectors(fd, iov, n, flags) }) {
        return r;
    }
    if let Some(r) = (!stream::left_rings(d)).then(|| stream::refused(d, total, 0, flags)).flatten() {
        return r;
    }
    // SAFETY: the caller's.
    stream::throughout(d, |call| unsafe { send_each(d, v, flags, call) })
}

/// # Safety
/// The vectors are valid.
unsafe fn send_each(d: &'static Desc, v: &[libc::iovec], flags: i32, call: &Midway) -> Result<usize> {
    let (mut done, block) = (0, stream::blocks(d, flags));
    let last = v.iter().rposition(|x| x.iov_len != 0);
    for (i, x) in v.iter().enumerate() {
        if x.iov_len == 0 {
            continue;
        }
        // Of all of them together the last byte is urgent.
        let flags = if Some(i) == last { flags } else { flags & !libc::MSG_OOB };
        // SAFETY: the caller's.
        match unsafe { stream::send_part(d, x.iov_base as *const u8, x.iov_len, flags, block) } {
            Ok(k) => {
                call.begun();
                done += k;
                if k < x.iov_len {
                    break;
                }
            }
            Err(_) if done > 0 => break,
            Err(e) => return Err(e),
        }
    }
    Ok(done)
}

/// `writev`: as [`sendv`], but nothing to write is no error on any socket.
///
/// # Safety
/// As [`sendv`].
pub unsafe fn writev(d: &'static Desc, iov: *const libc::iovec, n: usize, flags: i32) -> Result<usize> {
    // SAFETY: the caller's.
    match unsafe { checked(iov, n, Errno::EINVAL) }?.1 {
        0 => Ok(0),
        // SAFETY: the caller's.
        _ => unsafe { sendv(d, iov, n, flags) },
    }
}

/// `readv`: as [`recvv`], but room for nothing is filled at once.
///
/// # Safety
/// As [`recvv`].
pub unsafe fn readv(d: &'static Desc, iov: *const libc::iovec, n: usize, flags: i32) -> Result<usize> {
    // SAFETY: the caller's.
    match unsafe { checked(iov, n, Errno::EINVAL) }?.1 {
        0 => Ok(0),
        // SAFETY: the caller's.
        _ => unsafe { recvv(d, iov, n, flags) },
    }
}

/// Flags of `preadv2` and `pwritev2` as those of `recvmsg` and `sendmsg`.
pub fn vector_flags(flags: i32) -> Result<i32> {
    // Up to RWF_NOAPPEND they mean nothing to a socket, but for one; later ones it
    // does not support (include/uapi/linux/fs.h).
    const KNOWN: i32 = 0x3F;
    match flags {
        f if f & !KNOWN != 0 => Err(Errno::EOPNOTSUPP),
        f if f & libc::RWF_NOWAIT != 0 => Ok(libc::MSG_DONTWAIT),
        _ => Ok(0),
    }
}

/// # Safety
/// `iov` points to `n` valid vectors.
pub unsafe fn recvv(d: &'static Desc, iov: *const libc::iovec, n: usize, flags: i32) -> Result<usize> {
    // SAFETY: the caller's.
    let (v, total) = unsafe { checked(iov, n, Errno::new(libc::EMSGSIZE)) }?;
    if let [one] = v {
        // SAFETY: the caller's.
        return unsafe { stream::recv(d, one.iov_base as *mut u8, one.iov_len, flags) };
    }
    if total == 0 {
        // SAFETY: zero bytes.
        return unsafe { stream::recv(d, core::ptr::null_mut(), 0, flags) };
    }
    if flags & libc::MSG_PEEK != 0 {
        // SAFETY: the caller's.
        return unsafe { peekv(d, v, flags) };
    }
    let target = stream::low_water(d).min(total);
    let sleeps = flags & libc::MSG_WAITALL != 0 || target > 1 || !crate::ready::can_recv(d);
    if sleeps && flags & libc::MSG_DONTWAIT == 0 {
        // SAFETY: the caller's.
        return stream::throughout(d, |call| unsafe { recv_each(d, v, flags, target, Some(call)) });
    }
    // SAFETY: the caller's.
    unsafe { recv_each(d, v, flags, target, None) }
}

/// Waits for `target` bytes.
///
/// # Safety
/// The vectors are valid.
unsafe fn recv_each(
    d: &'static Desc,
    v: &[libc::iovec],
    flags: i32,
    target: usize,
    call: Option<&Midway>,
) -> Result<usize> {
    let mut done = 0;
    for x in v {
        if x.iov_len == 0 {
            continue;
        }
        if done > 0 && (stream::before_urgent(d) || stream::has_failed_below(d)) {
            break;
        }
        // Only the first may wait, unless more is asked for.
        let enough = done >= target && flags & libc::MSG_WAITALL == 0;
        let f = if done > 0 && enough { flags | libc::MSG_DONTWAIT } else { flags };
        // SAFETY: the caller's.
        match unsafe { stream::recv(d, x.iov_base as *mut u8, x.iov_len, f) } {
            Ok(k) => {
                call.inspect(|call| call.begun());
                done += k;
                if k < x.iov_len {
                    break;
                }
            }
            Err(e) if done > 0 => {
                if matches!(e, Errno::ECONNRESET | Errno::EPIPE) {
                    crate::ready::put_back_error(d, e); // the next call's
                }
                break;
            }
            Err(e) => return Err(e),
        }
    }
    Ok(done)
}

/// A peek starts at the same place each time, so it goes through one buffer.
///
/// # Safety
/// The vectors are valid.
unsafe fn peekv(d: &'static Desc, v: &[libc::iovec], flags: i32) -> Result<usize> {
    let total = v.iter().fold(0usize, |n, x| n.saturating_add(x.iov_len));
    let mut small = core::mem::MaybeUninit::<[u8; PEEK]>::uninit();
    if total > PEEK {
        let room = total.min(PEEK_MOST);
        let shape = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE);
        let large = sys::mmap(room, shape.0, shape.1, -1, 0)?;
        // SAFETY: a mapping of `room` bytes; the caller's vectors.
        let r = unsafe { peek_by(d, v, large, room, flags) };
        // SAFETY: not used again.
        let _ = unsafe { sys::munmap(large, room) };
        return r;
    }
    // SAFETY: `total` bytes are there; the caller's vectors.
    unsafe { peek_by(d, v, small.as_mut_ptr() as *mut u8, total, flags) }
}

/// [`peekv`] by way of `room` bytes at `buf`.
///
/// # Safety
/// They are there, and the vectors are valid.
unsafe fn peek_by(d: &'static Desc, v: &[libc::iovec], buf: *mut u8, room: usize, flags: i32) -> Result<usize> {
    // SAFETY: the caller's.
    let got = unsafe { stream::recv(d, buf, room, flags) }?;
    if flags & libc::MSG_TRUNC != 0 {
        // Only counted: nothing was written to the buffer.
        return Ok(got);
    }
    let mut at = 0;
    for x in v {
        let k = x.iov_len.min(got - at);
        // SAFETY: `got` bytes are initialized; the vector is the caller's.
        if let Err(e) = unsafe { user::write(buf.add(at), x.iov_base as *mut u8, k) } {
            return if at > 0 { Ok(at) } else { Err(e) };
        }
        at += k;
    }
    Ok(got)
}
