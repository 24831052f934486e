//! Keep-alive probes on an idle kernel connection whose bytes go through shared memory.
//!
//! They pass every rule and every link that its bytes would pass. When no answer comes the kernel ends the
//! connection, and the monitor, which hears of that, ends the one in shared memory. The program's own
//! keep-alive options are remembered meanwhile, as all options of a connection in shared memory.

use fsocket_sys as sys;

/// Seconds until the first probe, seconds between two, probes without an answer. The end comes after
/// at most four seconds.
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

/// The bytes are the kernel's again. `fresh`: a socket with this system's defaults; what the program has
/// chosen is set behind this.
pub fn end(fd: i32, fresh: i32) {
    for (level, name, _) in BEAT {
        let mut value = [0u8; 4];
        if sys::getsockopt(fresh, level, name, &mut value).is_ok() {
            let _ = sys::setsockopt(fd, level, name, &value);
        }
    }
}
