//! Keep-alive probes on the idle kernel connection behind a connection in shared memory (ADR 50).
//!
//! The probes pass every firewall rule and link that the bytes would pass. If they get no answer,
//! the kernel ends its connection. The monitor then ends the connection in shared memory.
//! Meanwhile the library keeps the program's own keep-alive options in its table of options.

use fsocket_sys as sys;

/// Seconds until the first probe, seconds between two probes, and probes without an answer.
/// Together the kernel connection ends after at most four seconds.
const BEAT: [(i32, i32, i32); 4] = [
    (libc::IPPROTO_TCP, libc::TCP_KEEPIDLE, 1),
    (libc::IPPROTO_TCP, libc::TCP_KEEPINTVL, 1),
    (libc::IPPROTO_TCP, libc::TCP_KEEPCNT, 3),
    (libc::SOL_SOCKET, libc::SO_KEEPALIVE, 1),
];

pub fn begin(fd: i32) {
    for (level, name, value) in BEAT {
        let _ = sys::setsockopt(fd, level, name, &value.to_ne_bytes());
    }
}

/// Ends the probes, because the kernel carries the bytes again. `fresh`: a socket with this
/// system's defaults, which are copied to `fd`. The caller sets the program's own options
/// afterwards.
pub fn end(fd: i32, fresh: i32) {
    for (level, name, _) in BEAT {
        let mut value = [0u8; 4];
        if sys::getsockopt(fresh, level, name, &mut value).is_ok() {
            let _ = sys::setsockopt(fd, level, name, &value);
        }
    }
}
