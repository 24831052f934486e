//! The socket options that the library records, and their defaults.

const S: i32 = libc::SOL_SOCKET;
const T: i32 = libc::IPPROTO_TCP;

/// The number of options that a socket has room for.
pub const COUNT: usize = 24;

pub struct Opt {
    pub level: i32,
    pub name: i32,
    pub default: i32,
    pub min: i32,
    pub max: i32,
}

const fn o(level: i32, name: i32, default: i32, min: i32, max: i32) -> Opt {
    Opt { level, name, default, min, max }
}

const ANY: i32 = i32::MAX;

/// A time limit in nanoseconds that is over at once. The kernel turns a negative limit into such a
/// limit, and reports it as 0.
pub const AT_ONCE: u64 = 1;

/// The recorded options. Values outside `min..=max` are refused as the kernel does. A maximum of 1
/// without a minimum means that any non-zero value is stored as 1.
pub static TABLE: [Opt; 18] = [
    o(S, libc::SO_REUSEADDR, 0, i32::MIN, 1),
    o(S, libc::SO_KEEPALIVE, 0, i32::MIN, 1),
    o(S, libc::SO_SNDBUF, 2_626_560, 0, ANY),
    o(S, libc::SO_RCVBUF, 131_072, 0, ANY),
    o(S, libc::SO_OOBINLINE, 0, i32::MIN, 1),
    o(S, libc::SO_RCVLOWAT, 1, 0, ANY),
    o(T, libc::TCP_NODELAY, 0, i32::MIN, 1),
    o(T, libc::TCP_CORK, 0, i32::MIN, 1),
    o(T, libc::TCP_KEEPIDLE, 7200, 1, 32767),
    o(T, libc::TCP_KEEPINTVL, 75, 1, 32767),
    o(T, libc::TCP_KEEPCNT, 9, 1, 127),
    o(T, libc::TCP_QUICKACK, 1, i32::MIN, 1),
    o(T, libc::TCP_USER_TIMEOUT, 0, 0, ANY),
    o(T, libc::TCP_DEFER_ACCEPT, 0, i32::MIN, ANY),
    o(libc::IPPROTO_IPV6, libc::IPV6_V6ONLY, 0, i32::MIN, 1),
    o(T, libc::TCP_NOTSENT_LOWAT, 0, i32::MIN, ANY),
    o(T, libc::TCP_WINDOW_CLAMP, 0, 1, ANY),
    o(T, TCP_INQ, 0, 0, 1),
];

pub const REUSEADDR: usize = 0;

pub const SNDBUF: usize = 2;

pub const RCVBUF: usize = 3;

pub const RCVLOWAT: usize = 5;

pub const USER_TIMEOUT: usize = 12;

pub const DEFER_ACCEPT: usize = 13;

pub const V6ONLY: usize = 14;

pub const NOTSENT_LOWAT: usize = 15;

pub const WINDOW_CLAMP: usize = 16;

pub const INQ: usize = 17;

/// From include/uapi/linux/tcp.h. `recvmsg` returns the number of unread bytes in a control message of this type.
pub const TCP_INQ: i32 = 36;

pub const DEFAULTS: [i32; COUNT] = {
    let mut d = [0; COUNT];
    let mut i = 0;
    while i < TABLE.len() {
        d[i] = TABLE[i].default;
        i += 1;
    }
    d
};

/// The number of options that a socket records by name. With more of them, every option that can
/// be copied counts.
pub const KEPT: usize = 6;

// include/uapi/linux/in6.h
pub const IPV6_ADDRFORM: i32 = 1;
