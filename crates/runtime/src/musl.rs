//! Whether the program's libc is musl. The constructor of the library sets this before the first
//! hook acts.
//!
//! Three differences matter. Lengths in `msghdr` and `cmsghdr` have 32 bits, followed by padding.
//! musl reserves other signals for itself. musl does not unwind a cancelled thread, which ends
//! inside its call.

use core::sync::atomic::{AtomicBool, Ordering};

#[link_section = ".data.fsocket_start"]
static HERE: AtomicBool = AtomicBool::new(false);

/// Records that the program's libc is musl.
#[link_section = ".text.fsocket_start"]
pub fn note() {
    HERE.store(true, Ordering::Relaxed);
}

/// Does the program use musl?
#[inline(always)]
pub fn is_here() -> bool {
    HERE.load(Ordering::Relaxed)
}

/// A length in a message header, as the program means it. musl declares 32 bits where the kernel
/// takes 64, and clears the padding in its own copy. In the program's memory the padding may have
/// any value.
#[inline(always)]
pub fn length(n: usize) -> usize {
    match is_here() {
        true => n as u32 as usize,
        false => n,
    }
}

/// A copy of the message header with its lengths as the program means them.
pub fn header(m: libc::msghdr) -> libc::msghdr {
    libc::msghdr { msg_iovlen: length(m.msg_iovlen), msg_controllen: length(m.msg_controllen), ..m }
}
