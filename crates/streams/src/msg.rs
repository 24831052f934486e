//! Vectored sends and receives.

use crate::lengths::Vectors;
use crate::stream::{self, Midway, Part};
use crate::table::Desc;
use crate::user;
use fsocket_sys::{self as sys, Errno, Result};

/// Messages up to this size are gathered and sent as one record, bytes.
const GATHER: usize = 2048;
/// Bytes of a page fragment, of which the kernel fills one with each step of a send.
const PIECE: usize = 32 << 10;
/// Bytes of a peek into several buffers that use the stack, and the most that a peek needs. Neither
/// path keeps more for a receiver (the kernel: net.ipv4.tcp_rmem).
const PEEK: usize = 8 << 10;
const PEEK_MOST: usize = 8 << 20;

/// # Safety
/// `iov` points to `n` valid vectors.
pub unsafe fn sendv(d: &'static Desc, iov: *const libc::iovec, n: usize, flags: i32) -> Result<usize> {
    // SAFETY: the program says that `n` vectors are at `iov`; `Vectors::of` checks that.
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
            // SAFETY: all pieces together are no longer than the buffer, and the guarded copy
            // reports a bad source.
            if let Err(e) = unsafe { user::read(base, p.add(at), len) } {
                return Err(stream::rather(d, flags, e));
            }
            at += len;
        }
        // SAFETY: `at` bytes were written.
        return unsafe { stream::send(d, p, at, flags) };
    }
    // One call, because the peer may answer the first part with a reset before the next one.
    // SAFETY: `Vectors::of` has found the vectors readable; copies and the kernel reach what they point to.
    if let Some(r) = stream::whole(d, flags, |fd| unsafe { sys::send_vectors(fd, v.at(), v.count(), flags) }) {
        return r;
    }
    // Nothing is sent if memory ends within the first piece, which the kernel takes whole or not at all.
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
        // Only the last byte of all vectors is urgent.
        let flags = if done + len >= v.total() { flags } else { flags & !libc::MSG_OOB };
        // SAFETY: `base` and `len` are one of the program's vectors; only copies that return EFAULT, and the kernel,
        // reach it.
        match unsafe { stream::send_part(d, base, len, flags, (block, done)) } {
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

/// `writev`, `pwritev2`: as [`sendv`], but an empty write is no error on any socket. `flags`: those of
/// `pwritev2`.
///
/// # Safety
/// As [`sendv`].
pub unsafe fn writev(d: &'static Desc, iov: *const libc::iovec, n: usize, flags: i32) -> Result<usize> {
    // SAFETY: the program says that `n` vectors are at `iov`; `Vectors::of` checks that.
    let v = unsafe { Vectors::of(iov, n, Errno::EINVAL) }?;
    match v.total() {
        0 => Ok(0),
        // SAFETY: `Vectors::of` has found the vectors readable; copies and the kernel reach what they point to.
        _ => unsafe { send_vectors(d, &v, vector_flags(flags)?) },
    }
}

/// `readv`, `preadv2`: as [`recvv`], but an empty buffer is filled at once. `flags`: those of
/// `preadv2`.
///
/// # Safety
/// As [`recvv`].
pub unsafe fn readv(d: &'static Desc, iov: *const libc::iovec, n: usize, flags: i32) -> Result<usize> {
    // SAFETY: the program says that `n` vectors are at `iov`; `Vectors::of` checks that.
    let v = unsafe { Vectors::of(iov, n, Errno::EINVAL) }?;
    match v.total() {
        0 => Ok(0),
        // SAFETY: `Vectors::of` has found the vectors readable; copies and the kernel reach what they point to.
        _ => unsafe { recv_vectors(d, &v, vector_flags(flags)?, Part::First) },
    }
}

/// Turns flags of `preadv2` and `pwritev2` into those of `recvmsg` and `sendmsg`.
fn vector_flags(flags: i32) -> Result<i32> {
    // Flags up to RWF_NOAPPEND mean nothing to a socket, except one; later ones are not supported
    // (include/uapi/linux/fs.h).
    const KNOWN: i32 = 0x3F;
    match flags {
        f if f & !KNOWN != 0 => Err(Errno::EOPNOTSUPP),
        f if f & libc::RWF_NOWAIT != 0 => Ok(libc::MSG_DONTWAIT),
        _ => Ok(0),
    }
}

/// # Safety
/// `iov` points to `n` valid vectors.
pub unsafe fn recvv(d: &'static Desc, iov: *const libc::iovec, n: usize, flags: i32, part: Part) -> Result<usize> {
    // SAFETY: the program says that `n` vectors are at `iov`; `Vectors::of` checks that.
    let v = unsafe { Vectors::of(iov, n, Errno::new(libc::EMSGSIZE)) }?;
    // SAFETY: `Vectors::of` has found the vectors readable; copies and the kernel reach what they point to.
    unsafe { recv_vectors(d, &v, flags, part) }
}

/// # Safety
/// The vectors are valid.
unsafe fn recv_vectors(d: &'static Desc, v: &Vectors, flags: i32, first: Part) -> Result<usize> {
    if let Some((base, len)) = v.single() {
        // SAFETY: `base` and `len` are one of the program's vectors; only copies that return EFAULT, and the kernel,
        // reach it.
        return unsafe { stream::recv_part(d, base, len, flags, first) };
    }
    if v.total() == 0 {
        // SAFETY: the call receives zero bytes.
        return unsafe { stream::recv_part(d, core::ptr::null_mut(), 0, flags, first) };
    }
    if flags & libc::MSG_PEEK != 0 {
        // SAFETY: `Vectors::of` has found the vectors readable; copies and the kernel reach what they point to.
        return unsafe { peekv(d, v, flags, first) };
    }
    let target = fsocket_shm::conn::low_water(d).min(v.total());
    let sleeps = flags & libc::MSG_WAITALL != 0 || target > 1 || !crate::ready::can_recv(d);
    if sleeps && flags & libc::MSG_DONTWAIT == 0 {
        // SAFETY: `Vectors::of` has found the vectors readable; copies and the kernel reach what they point to.
        return stream::throughout(d, |call| unsafe { recv_each(d, v, flags, (target, first), Some(call)) });
    }
    // SAFETY: `Vectors::of` has found the vectors readable; copies and the kernel reach what they point to.
    unsafe { recv_each(d, v, flags, (target, first), None) }
}

/// Waits for `target` bytes. `first`: what the first vector is.
///
/// # Safety
/// The vectors are valid.
unsafe fn recv_each(
    d: &'static Desc,
    v: &Vectors,
    flags: i32,
    (target, first): (usize, Part),
    call: Option<&Midway>,
) -> Result<usize> {
    let mut done = 0;
    for (base, len) in v.pieces() {
        // Only the first receive may wait, unless more is asked for.
        let enough = done >= target && flags & libc::MSG_WAITALL == 0;
        let f = if done > 0 && enough { flags | libc::MSG_DONTWAIT } else { flags };
        let part = if done > 0 { Part::Later { enough } } else { first };
        // SAFETY: `base` and `len` are one of the program's vectors; only copies that return EFAULT, and the kernel,
        // reach it.
        match unsafe { stream::recv_part(d, base, len, f, part) } {
            Ok(k) => {
                call.inspect(|call| call.begun());
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

/// A peek starts at the same place each time, so it goes through one buffer.
///
/// # Safety
/// The vectors are valid.
#[inline(never)] // (Its buffer is not on the stack of every receiver.)
unsafe fn peekv(d: &'static Desc, v: &Vectors, flags: i32, part: Part) -> Result<usize> {
    let total = v.total();
    let mut small = core::mem::MaybeUninit::<[u8; PEEK]>::uninit();
    if total > PEEK {
        let room = total.min(PEEK_MOST);
        let shape = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE);
        let large = sys::mmap_briefly(room, shape.0, shape.1, -1, 0)?;
        // SAFETY: the mapping has `room` bytes, and `Vectors::of` has found the vectors readable.
        let r = unsafe { peek_by(d, v, (large, room), flags, part) };
        // SAFETY: nothing uses the mapping again.
        let _ = unsafe { sys::munmap(large, room) };
        return r;
    }
    // SAFETY: `total` bytes are there, and `Vectors::of` has found the vectors readable.
    unsafe { peek_by(d, v, (small.as_mut_ptr() as *mut u8, total), flags, part) }
}

/// [`peekv`] through `room` bytes at `buf`.
///
/// # Safety
/// `buf` has `room` bytes, and the vectors are valid.
unsafe fn peek_by(
    d: &'static Desc,
    v: &Vectors,
    (buf, room): (*mut u8, usize),
    flags: i32,
    part: Part,
) -> Result<usize> {
    // SAFETY: `buf` has room for `room` bytes.
    let got = unsafe { stream::recv_part(d, buf, room, flags, part) }?;
    if flags & libc::MSG_TRUNC != 0 && !d.is_unix() {
        // The bytes are only counted: nothing was written to the buffer.
        return Ok(got);
    }
    let mut at = 0;
    for (base, len) in v.pieces() {
        let k = len.min(got - at);
        // SAFETY: `got` bytes are initialized, and the guarded copy reports a bad destination.
        if let Err(e) = unsafe { user::write(buf.add(at), base, k) } {
            return if at > 0 { Ok(at) } else { Err(e) };
        }
        at += k;
    }
    Ok(got)
}
