//! Calls with lengths at the edges. The memory has 3 GiB, so that each length means the same on
//! both sides.

use super::bytes::pattern;
use super::errno;
use crate::shared::Slot;
use crate::symbols::Names;
use libc::{c_int, c_void, iovec, msghdr};
use std::mem::zeroed;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::OnceLock;

/// The calls, by number. Odd numbers receive.
pub const NAMES: Names = &[
    ("write", 0),
    ("read", 1),
    ("send", 2),
    ("recv", 3),
    ("writev", 4),
    ("readv", 5),
    ("writev_2", 6),
    ("readv_2", 7),
    ("sendmsg", 8),
    ("recvmsg", 9),
    ("sendto", 10),
    ("peek", 11),
    ("pwritev2", 12),
    ("preadv2", 13),
];

/// Upper limit of the received bytes that are compared.
const COMPARED: usize = 4096;

/// The memory lies far below the end of a program's half of the addresses, so that only the length
/// decides whether a range is valid.
fn memory() -> *mut u8 {
    static AT: OnceLock<usize> = OnceLock::new();
    let shape = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE | libc::MAP_FIXED_NOREPLACE;
    let make = || {
        let prot = libc::PROT_READ | libc::PROT_WRITE;
        // SAFETY: a new mapping; the call fails if another mapping is there.
        unsafe { libc::mmap((1usize << 45) as *mut c_void, 3 << 30, prot, shape, -1, 0) as usize }
    };
    *AT.get_or_init(make) as *mut u8
}

/// Makes the call. Arguments: descriptor, call, a power of two (its exponent), and what to add to
/// the power.
pub(super) unsafe fn long(s: &Slot) -> i64 {
    let (fd, call) = (s.arg(0) as c_int, s.arg(1));
    let n = (1u128 << s.arg(2)) as u64 as usize;
    let n = n.wrapping_add(s.arg(3) as usize);
    let at = memory();
    let buf = at.cast::<c_void>();
    let nowait = libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL;
    // SAFETY: 3 GiB are mapped. The test passes longer lengths on purpose, and expects the call to
    // refuse or cut them.
    unsafe {
        (0..n.min(COMPARED)).for_each(|i| *at.add(i) = pattern(s.step.load(Relaxed), i));
        let mut v = [iovec { iov_base: buf, iov_len: 1 }, iovec { iov_base: buf.byte_add(1), iov_len: n }];
        let one = iovec { iov_base: buf, iov_len: n };
        let mut m: msghdr = zeroed();
        (m.msg_iov, m.msg_iovlen) = (&raw const one as *mut iovec, 1);
        let r = match call {
            0 => libc::write(fd, buf, n),
            1 => libc::read(fd, buf, n),
            2 => libc::send(fd, buf, n, nowait),
            3 => libc::recv(fd, buf, n, nowait),
            4 => libc::writev(fd, &one, 1),
            5 => libc::readv(fd, &one, 1),
            6 => libc::writev(fd, v.as_mut_ptr(), 2),
            7 => libc::readv(fd, v.as_mut_ptr(), 2),
            8 => libc::sendmsg(fd, &m, nowait),
            9 => libc::recvmsg(fd, &mut m, nowait),
            10 => libc::sendto(fd, buf, n, nowait, std::ptr::null(), 0),
            11 => libc::recv(fd, buf, n, nowait | libc::MSG_PEEK),
            12 => libc::pwritev2(fd, &one, 1, -1, 0),
            _ => libc::preadv2(fd, &one, 1, -1, 0),
        };
        let saved = errno();
        if call % 2 == 1 && r > 0 {
            let got = std::slice::from_raw_parts(at, (r as usize).min(COMPARED));
            s.put_aux(got.iter().fold(7i64, |h, b| h * 31 % 65521 + i64::from(*b)));
        }
        *libc::__errno_location() = saved;
        r as i64
    }
}
