//! Vectored sends and receives.

use crate::lengths::Vectors;
use crate::stream::{self, Midway};
use crate::table::Desc;
use crate::user;
use fsocket_sys::{self as sys, Errno, Result};

/// Messages up to this size are gathered and sent as one record, bytes.
const GATHER: usize = 2048;
/// Bytes of a page fragment, of which the kernel fills one with each step of a send.
const PIECE: usize = 32 << 10;
/// Bytes of a peek into several buffers that go over the stack, and at most: more than
/// either path keeps for a receiver (the kernel: net.ipv4.tcp_rmem).
const PEEK: usize = 8 << 10;
const PEEK_MOST: usize = 8 << 20;

/// # Safety
/// `iov` points to `n` valid vectors.
pub unsafe fn sendv(d: &'static Desc, iov: *const libc::iovec, n: usize, flags: i32) -> Result<usize> {
    // SAFETY: the program says that `n` vectors are at `iov`; `Vectors::of` looks whether they are.
    let v = unsafe { Vectors::of(iov, n, Errno::new(libc::EMSGSIZE)) }?;
    // SAFETY: `Vectors::of` has found the vectors readable; copies and the kernel reach what they point to.
    unsafe { send_vectors(d, &v, flags) }
}

/// # Safety
/// The vectors are valid.
unsafe fn send_vectors(d: &'static Desc, v: &Vectors, flags: i32) -> Result<usize> {
    if let Some((base, len)) = v.single() {
        // SAFETY: `base` and `len` are one of the program's vectors; only copies that return EFAULT, and the kernel,
        // reach it.
        return unsafe { stream::send(d, base, len, flags) };
    }
    if v.total() <= GATHER {
        let mut buf = core::mem::MaybeUninit::<[u8; GATHER]>::uninit();
        let p = buf.as_mut_ptr() as *mut u8;
        let mut at = 0;
        for (base, len) in v.pieces() {
            // SAFETY: all together are no longer than the buffer; sources are the caller's.
            if let Err(e) = unsafe { user::read(base, p.add(at), len) } {
                return Err(stream::rather(d, flags, e));
            }
            at += len;
        }
        // SAFETY: `at` bytes were written.
        return unsafe { stream::send(d, p, at, flags) };
    }
    // In one: what has been sent of it may be answered with a reset before the next part.
    // SAFETY: `Vectors::of` has found the vectors readable; copies and the kernel reach what they point to.
    if let Some(r) = stream::whole(d, flags, |fd| unsafe { sys::send_vectors(fd, v.at(), v.count(), flags) }) {
        return r;
    }
    // Nothing is sent if memory ends within the first of the pieces that the kernel takes whole or not at all.
    let mut first = PIECE;
    let is_there = |(base, len): (*mut u8, usize)| {
        let n = len.min(first);
        first -= n;
        user::readable(base, n)
    };
    if !v.pieces().all(is_there) {
        return Err(stream::rather(d, flags, Errno::EFAULT));
    }
    if let Some(r) = (!stream::left_rings(d)).then(|| stream::refused(d, v.total(), 0, flags)).flatten() {
        return r;
    }
    // SAFETY: `Vectors::of` has found the vectors readable; copies and the kernel reach what they point to.
    stream::throughout(d, |call| unsafe { send_each(d, v, flags, call) })
}

/// # Safety
/// The vectors are valid.
unsafe fn send_each(d: &'static Desc, v: &Vectors, flags: i32, call: &Midway) -> Result<usize> {
    let (mut done, block) = (0, stream::blocks(d, flags));
    for (base, len) in v.pieces() {
        // Of all of them together the last byte is urgent.
        let flags = if done + len >= v.total() { flags } else { flags & !libc::MSG_OOB };
        // SAFETY: `base` and `len` are one of the program's vectors; only copies that return EFAULT, and the kernel,
        // reach it.
        match unsafe { stream::send_part(d, base, len, flags, block) } {
            Ok(k) => {
                call.begun();
                done += k;
                if k < len {
                    break;
                }
            }
            Err(_) if done > 0 => break,
            Err(e) => return Err(e),
        }
    }
    Ok(done)
}

/// `writev`, `pwritev2`: as [`sendv`], but nothing to write is no error on any socket. `flags`: as of `pwritev2`.
///
/// # Safety
/// As [`sendv`].
pub unsafe fn writev(d: &'static Desc, iov: *const libc::iovec, n: usize, flags: i32) -> Result<usize> {
    // SAFETY: the program says that `n` vectors are at `iov`; `Vectors::of` looks whether they are.
    let v = unsafe { Vectors::of(iov, n, Errno::EINVAL) }?;
    match v.total() {
        0 => Ok(0),
        // SAFETY: `Vectors::of` has found the vectors readable; copies and the kernel reach what they point to.
        _ => unsafe { send_vectors(d, &v, vector_flags(flags)?) },
    }
}

/// `readv`, `preadv2`: as [`recvv`], but room for nothing is filled at once. `flags`: as of `preadv2`.
///
/// # Safety
/// As [`recvv`].
pub unsafe fn readv(d: &'static Desc, iov: *const libc::iovec, n: usize, flags: i32) -> Result<usize> {
    // SAFETY: the program says that `n` vectors are at `iov`; `Vectors::of` looks whether they are.
    let v = unsafe { Vectors::of(iov, n, Errno::EINVAL) }?;
    match v.total() {
        0 => Ok(0),
        // SAFETY: `Vectors::of` has found the vectors readable; copies and the kernel reach what they point to.
        _ => unsafe { recv_vectors(d, &v, vector_flags(flags)?) },
    }
}

/// Flags of `preadv2` and `pwritev2` as those of `recvmsg` and `sendmsg`.
fn vector_flags(flags: i32) -> Result<i32> {
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
    // SAFETY: the program says that `n` vectors are at `iov`; `Vectors::of` looks whether they are.
    let v = unsafe { Vectors::of(iov, n, Errno::new(libc::EMSGSIZE)) }?;
    // SAFETY: `Vectors::of` has found the vectors readable; copies and the kernel reach what they point to.
    unsafe { recv_vectors(d, &v, flags) }
}

/// # Safety
/// The vectors are valid.
unsafe fn recv_vectors(d: &'static Desc, v: &Vectors, flags: i32) -> Result<usize> {
    if let Some((base, len)) = v.single() {
        // SAFETY: `base` and `len` are one of the program's vectors; only copies that return EFAULT, and the kernel,
        // reach it.
        return unsafe { stream::recv(d, base, len, flags) };
    }
    if v.total() == 0 {
        // SAFETY: zero bytes.
        return unsafe { stream::recv(d, core::ptr::null_mut(), 0, flags) };
    }
    if flags & libc::MSG_PEEK != 0 {
        // SAFETY: `Vectors::of` has found the vectors readable; copies and the kernel reach what they point to.
        return unsafe { peekv(d, v, flags) };
    }
    let target = fsocket_shm::conn::low_water(d).min(v.total());
    let sleeps = flags & libc::MSG_WAITALL != 0 || target > 1 || !crate::ready::can_recv(d);
    if sleeps && flags & libc::MSG_DONTWAIT == 0 {
        // SAFETY: `Vectors::of` has found the vectors readable; copies and the kernel reach what they point to.
        return stream::throughout(d, |call| unsafe { recv_each(d, v, flags, target, Some(call)) });
    }
    // SAFETY: `Vectors::of` has found the vectors readable; copies and the kernel reach what they point to.
    unsafe { recv_each(d, v, flags, target, None) }
}

/// Waits for `target` bytes.
///
/// # Safety
/// The vectors are valid.
unsafe fn recv_each(d: &'static Desc, v: &Vectors, flags: i32, target: usize, call: Option<&Midway>) -> Result<usize> {
    let mut done = 0;
    for (base, len) in v.pieces() {
        if done > 0 && (stream::before_urgent(d) || stream::has_failed_below(d)) {
            break;
        }
        // Only the first may wait, unless more is asked for.
        let enough = done >= target && flags & libc::MSG_WAITALL == 0;
        let f = if done > 0 && enough { flags | libc::MSG_DONTWAIT } else { flags };
        // SAFETY: `base` and `len` are one of the program's vectors; only copies that return EFAULT, and the kernel,
        // reach it.
        match unsafe { stream::recv(d, base, len, f) } {
            Ok(k) => {
                call.inspect(|call| call.begun());
                done += k;
                if k < len {
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
#[inline(never)] // (Its buffer is not on the stack of every receiver.)
unsafe fn peekv(d: &'static Desc, v: &Vectors, flags: i32) -> Result<usize> {
    let total = v.total();
    let mut small = core::mem::MaybeUninit::<[u8; PEEK]>::uninit();
    if total > PEEK {
        let room = total.min(PEEK_MOST);
        let shape = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE);
        let large = sys::mmap_briefly(room, shape.0, shape.1, -1, 0)?;
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
unsafe fn peek_by(d: &'static Desc, v: &Vectors, buf: *mut u8, room: usize, flags: i32) -> Result<usize> {
    // SAFETY: `buf` has room for `room` bytes.
    let got = unsafe { stream::recv(d, buf, room, flags) }?;
    if flags & libc::MSG_TRUNC != 0 && !d.is_unix() {
        // Only counted: nothing was written to the buffer.
        return Ok(got);
    }
    let mut at = 0;
    for (base, len) in v.pieces() {
        let k = len.min(got - at);
        // SAFETY: `got` bytes are initialized; the vector is the caller's.
        if let Err(e) = unsafe { user::write(buf.add(at), base, k) } {
            return if at > 0 { Ok(at) } else { Err(e) };
        }
        at += k;
    }
    Ok(got)
}
