//! Sends and receives: buffers, vectors, messages, files, descriptors.

use super::errno;
use crate::shared::{Slot, GUARD, TRANSFER};
use fsocket_sys as sys;
use libc::{c_int, c_void, iovec, msghdr, sockaddr_storage, socklen_t};
use std::mem::{size_of, zeroed};
use std::ptr::null_mut;
use std::sync::atomic::Ordering::Relaxed;

/// The byte that fills a receive buffer: a call that writes more than it returns is reported.
const CANARY: u8 = 0xEE;

const PIECES: usize = 8;

/// Byte `i` of the data that step `step` sends.
pub(super) fn pattern(step: u32, i: usize) -> u8 {
    (step.wrapping_mul(151) as usize + i * 7 + (i >> 8) * 13) as u8
}

/// Fills the slot's buffer with the data that this step sends.
pub(super) unsafe fn source(s: &Slot, n: usize) -> *const c_void {
    // SAFETY: the calling step has exclusive use of the slot.
    let data = unsafe { s.data() };
    let step = s.step.load(Relaxed);
    for (i, b) in data[..n.min(TRANSFER)].iter_mut().enumerate() {
        *b = pattern(step, i);
    }
    data.as_ptr() as *const c_void
}

/// Receives into the slot's buffer. Reports -99 if bytes behind the received ones have changed.
pub(super) unsafe fn take(s: &Slot, n: usize, call: impl FnOnce(*mut c_void) -> isize) -> i64 {
    // SAFETY: the calling step has exclusive use of the slot.
    unsafe {
        s.data()[..n + GUARD].fill(CANARY);
        let r = call(s.data().as_mut_ptr() as *mut c_void);
        let saved = errno();
        let got = (r.max(0) as usize).min(n);
        s.len.store(got as u32, Relaxed);
        if s.data()[got..n + GUARD].iter().any(|b| *b != CANARY) {
            s.put_aux(-99);
        }
        *libc::__errno_location() = saved;
        r as i64
    }
}

pub(super) unsafe fn pieces(p: *const c_void, n: usize, k: i64) -> ([iovec; PIECES], c_int) {
    let k = (k.max(0) as usize).min(PIECES);
    let each = n / k.max(1);
    let mut v = [iovec { iov_base: null_mut(), iov_len: 0 }; PIECES];
    for (i, part) in v[..k].iter_mut().enumerate() {
        part.iov_len = if i + 1 == k { n - each * i } else { each };
        // SAFETY: the piece is within the n bytes.
        part.iov_base = unsafe { (p as *mut u8).add(each * i) } as *mut c_void;
    }
    (v, k as c_int)
}

pub(super) unsafe fn message(v: &mut [iovec; PIECES], k: c_int) -> msghdr {
    // SAFETY: an all-zero `msghdr` is an empty message.
    let mut m: msghdr = unsafe { zeroed() };
    m.msg_iov = v.as_mut_ptr();
    m.msg_iovlen = k as _;
    m
}

pub(super) unsafe fn receive_message(s: &Slot, p: *mut c_void, fd: c_int, n: usize, k: i64, flags: c_int) -> isize {
    // SAFETY: `p` has `n` bytes; name and control are local variables.
    unsafe {
        let (mut v, k) = pieces(p, n, k);
        let mut m = message(&mut v, k);
        let mut name: sockaddr_storage = zeroed();
        let mut control = [0u64; 16];
        m.msg_name = &mut name as *mut _ as *mut c_void;
        m.msg_namelen = size_of::<sockaddr_storage>() as socklen_t;
        m.msg_control = control.as_mut_ptr() as *mut c_void;
        m.msg_controllen = size_of::<[u64; 16]>() as _;
        let r = libc::recvmsg(fd, &mut m, flags);
        if r >= 0 {
            for v in [m.msg_flags as i64, m.msg_namelen as i64, m.msg_controllen as i64] {
                s.put_aux(v);
            }
        }
        r
    }
}

pub(super) unsafe fn send_many(s: &Slot, fd: c_int, n: usize, k: i64, flags: c_int) -> i64 {
    // SAFETY: the vectors point into the slot's buffer.
    unsafe {
        let k = (k.max(0) as usize).min(PIECES);
        let p = source(s, n * k);
        let mut v = [iovec { iov_base: null_mut(), iov_len: 0 }; PIECES];
        let mut many: [libc::mmsghdr; PIECES] = zeroed();
        for i in 0..k {
            v[i] = iovec { iov_base: (p as *mut u8).add(n * i) as *mut c_void, iov_len: n };
            many[i].msg_hdr.msg_iov = &mut v[i];
            many[i].msg_hdr.msg_iovlen = 1;
        }
        let r = libc::sendmmsg(fd, many.as_mut_ptr(), k as u32, flags as _);
        for m in &many[..(r.max(0) as usize).min(PIECES)] {
            s.put_aux(m.msg_len.into());
        }
        r.into()
    }
}

pub(super) unsafe fn receive_many(s: &Slot, fd: c_int, n: usize, k: i64, flags: c_int) -> i64 {
    // SAFETY: the vectors point into the slot's buffer.
    unsafe {
        let k = (k.max(0) as usize).min(PIECES);
        let n = n.min(TRANSFER / PIECES);
        s.data()[..n * k].fill(CANARY);
        let p = s.data().as_mut_ptr();
        let mut v = [iovec { iov_base: null_mut(), iov_len: 0 }; PIECES];
        let mut many: [libc::mmsghdr; PIECES] = zeroed();
        for i in 0..k {
            v[i] = iovec { iov_base: p.add(n * i) as *mut c_void, iov_len: n };
            many[i].msg_hdr.msg_iov = &mut v[i];
            many[i].msg_hdr.msg_iovlen = 1;
        }
        let r = libc::recvmmsg(fd, many.as_mut_ptr(), k as u32, flags as _, null_mut());
        for m in &many[..(r.max(0) as usize).min(PIECES)] {
            s.put_aux(m.msg_len.into());
        }
        if r > 0 {
            s.len.store((n * r as usize) as u32, Relaxed);
        }
        r.into()
    }
}

pub(super) unsafe fn send_file(s: &Slot, out: c_int, input: c_int, offset: i64, n: usize) -> i64 {
    // SAFETY: the offset is a local variable.
    unsafe {
        let mut at = offset;
        let r = libc::sendfile(out, input, if offset < 0 { null_mut() } else { &mut at }, n);
        let saved = errno();
        s.put_aux(at);
        s.put_aux(libc::lseek(input, 0, libc::SEEK_CUR));
        *libc::__errno_location() = saved;
        r as i64
    }
}

pub(super) unsafe fn file(s: &Slot, n: usize) -> i64 {
    // SAFETY: the name is a C string.
    let fd = unsafe { libc::memfd_create(c"file".as_ptr(), 0) };
    // SAFETY: the calling step has exclusive use of the slot.
    let content = unsafe { std::slice::from_raw_parts(source(s, n) as *const u8, n) };
    if fd < 0 || sys::write(fd, content) != Ok(n) {
        return -1;
    }
    // SAFETY: the call takes numbers only.
    unsafe { libc::lseek(fd, 0, libc::SEEK_SET) };
    fd.into()
}

pub(super) unsafe fn send_fd(over: c_int, fd: c_int) -> i64 {
    // SAFETY: the message points to a local byte, vector and control buffer.
    unsafe {
        let mut byte = [b'F'];
        let mut v = [iovec { iov_base: null_mut(), iov_len: 0 }; PIECES];
        v[0] = iovec { iov_base: byte.as_mut_ptr() as *mut c_void, iov_len: 1 };
        let mut m = message(&mut v, 1);
        let mut control = [0u64; 4];
        m.msg_control = control.as_mut_ptr() as *mut c_void;
        m.msg_controllen = libc::CMSG_SPACE(4) as _;
        let c = libc::CMSG_FIRSTHDR(&m);
        (*c).cmsg_level = libc::SOL_SOCKET;
        (*c).cmsg_type = libc::SCM_RIGHTS;
        (*c).cmsg_len = libc::CMSG_LEN(4) as _;
        (libc::CMSG_DATA(c) as *mut c_int).write_unaligned(fd);
        libc::sendmsg(over, &m, libc::MSG_NOSIGNAL) as i64
    }
}

pub(super) unsafe fn receive_fd(over: c_int) -> i64 {
    // SAFETY: the message points to a local byte, vector and control buffer.
    unsafe {
        let mut byte = [0u8];
        let mut v = [iovec { iov_base: null_mut(), iov_len: 0 }; PIECES];
        v[0] = iovec { iov_base: byte.as_mut_ptr() as *mut c_void, iov_len: 1 };
        let mut m = message(&mut v, 1);
        let mut control = [0u64; 4];
        m.msg_control = control.as_mut_ptr() as *mut c_void;
        m.msg_controllen = size_of::<[u64; 4]>() as _;
        if libc::recvmsg(over, &mut m, 0) < 0 {
            return -1;
        }
        let c = libc::CMSG_FIRSTHDR(&m);
        if c.is_null() || (*c).cmsg_type != libc::SCM_RIGHTS {
            *libc::__errno_location() = libc::ENOMSG;
            return -1;
        }
        i64::from((libc::CMSG_DATA(c) as *const c_int).read_unaligned())
    }
}
