//! Whether the program's libc is musl. The constructor says so, before the first hook does anything.
//!
//! Three things differ for this library. Lengths in `msghdr` and `cmsghdr` have 32 bits, and padding behind them. musl
//! reserves other signals for itself. It does not unwind a cancelled thread, which ends in its call.

use core::sync::atomic::{AtomicBool, Ordering};

#[link_section = ".data.fsocket_start"]
static HERE: AtomicBool = AtomicBool::new(false);

/// The program's libc is musl.
#[link_section = ".text.fsocket_start"]
pub fn note() {
    HERE.store(true, Ordering::Relaxed);
}

/// Is the program's libc musl?
#[inline(always)]
pub fn is_here() -> bool {
    HERE.load(Ordering::Relaxed)
}

/// A length of a message, as the program means it. musl declares 32 bits for what the kernel takes as 64, and clears
/// the padding in a copy; what the program has there is anything.
#[inline(always)]
pub fn length(n: usize) -> usize {
    match is_here() {
        true => n as u32 as usize,
        false => n,
    }
}

/// The header of a message with its lengths as the program means them.
pub fn header(m: libc::msghdr) -> libc::msghdr {
    libc::msghdr { msg_iovlen: length(m.msg_iovlen), msg_controllen: length(m.msg_controllen), ..m }
}
