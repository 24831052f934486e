//! Names of flags, options and addresses, as programs spell them.

/// A named set of bits, or of alternatives.
pub type Names = &'static [(&'static str, i64)];

pub const FAMILY: Names =
    &[("inet", libc::AF_INET as i64), ("inet6", libc::AF_INET6 as i64), ("unix", libc::AF_UNIX as i64)];
pub const SOCK_TYPE: Names = &[("NONBLOCK", libc::SOCK_NONBLOCK as i64), ("CLOEXEC", libc::SOCK_CLOEXEC as i64)];
pub const MSG: Names = &[
    ("PEEK", libc::MSG_PEEK as i64),
    ("WAITALL", libc::MSG_WAITALL as i64),
    ("DONTWAIT", libc::MSG_DONTWAIT as i64),
    ("TRUNC", libc::MSG_TRUNC as i64),
    ("NOSIGNAL", libc::MSG_NOSIGNAL as i64),
    ("OOB", libc::MSG_OOB as i64),
    ("ERRQUEUE", libc::MSG_ERRQUEUE as i64),
    ("CMSG_CLOEXEC", libc::MSG_CMSG_CLOEXEC as i64),
    ("WAITFORONE", libc::MSG_WAITFORONE as i64),
    ("CTRUNC", libc::MSG_CTRUNC as i64),
    ("EOR", libc::MSG_EOR as i64),
    ("MORE", libc::MSG_MORE as i64),
    ("DONTROUTE", libc::MSG_DONTROUTE as i64),
    ("CONFIRM", libc::MSG_CONFIRM as i64),
];
pub const POLL: Names = &[
    ("IN", libc::POLLIN as i64),
    ("PRI", libc::POLLPRI as i64),
    ("OUT", libc::POLLOUT as i64),
    ("ERR", libc::POLLERR as i64),
    ("HUP", libc::POLLHUP as i64),
    ("NVAL", libc::POLLNVAL as i64),
    ("RDNORM", libc::POLLRDNORM as i64),
    ("RDBAND", libc::POLLRDBAND as i64),
    ("WRNORM", libc::POLLWRNORM as i64),
    ("WRBAND", libc::POLLWRBAND as i64),
    ("RDHUP", libc::POLLRDHUP as i64),
    ("EXCLUSIVE", libc::EPOLLEXCLUSIVE as u32 as i64),
    ("ONESHOT", libc::EPOLLONESHOT as u32 as i64),
    ("ET", libc::EPOLLET as u32 as i64),
];
/// Sets of `select`.
pub const SELECT: Names = &[("R", 1), ("W", 2), ("X", 4)];
pub const HOW: Names = &[("RD", 0), ("WR", 1), ("RDWR", 2), ("BAD", 7)];
pub const FILE_FLAGS: Names = &[("NONBLOCK", libc::O_NONBLOCK as i64), ("APPEND", libc::O_APPEND as i64)];
pub const CLOEXEC: Names = &[("CLOEXEC", libc::O_CLOEXEC as i64)];
pub const FD_FLAGS: Names = &[("CLOEXEC", libc::FD_CLOEXEC as i64)];
pub const MASK: Names = &[("USR1", 1), ("USR2", 2)];
pub const SIGNAL: Names = &[("USR1", libc::SIGUSR1 as i64), ("USR2", libc::SIGUSR2 as i64)];
/// Changes of a socket's attributes.
pub const TOUCH: Names = &[
    ("async", 0),
    ("owner", 1),
    ("signal", 2),
    ("mode", 3),
    ("port", 4),
    ("shutdown", 5),
    ("fastopen", 6),
    ("append", 7),
    ("mark", 8),
    ("owner_by_ioctl", 9),
];
/// Actions of a `vfork` child on a descriptor, before the child becomes another program or ends.
pub const VFORK: Names = &[
    ("end", 0),
    ("close", 1),
    ("dup", 2),
    ("close_all", 3),
    ("exec", 4),
    ("exec_closed", 5),
    ("exec_all_closed", 6),
    ("exec_fails", 7),
];
/// Resource limits.
pub const LIMIT: Names = &[
    ("NOFILE", libc::RLIMIT_NOFILE as i64),
    ("AS", libc::RLIMIT_AS as i64),
    ("DATA", libc::RLIMIT_DATA as i64),
    ("MEMLOCK", libc::RLIMIT_MEMLOCK as i64),
    ("CORE", libc::RLIMIT_CORE as i64),
    ("FSIZE", libc::RLIMIT_FSIZE as i64),
    ("STACK", libc::RLIMIT_STACK as i64),
    ("SIGPENDING", libc::RLIMIT_SIGPENDING as i64),
];
/// How a thread gets descriptors of its own.
pub const UNSHARE: Names = &[("unshare", 0), ("close_range", 1)];
/// The pointers of a call's bad argument. `edge` has a few bytes before the end of its page,
/// `constant` can only be read, `exact` is valid but ends with its page.
pub const NOWHERE: Names = &[
    ("fine", 0),
    ("null", 1),
    ("one", 2),
    ("none", 3),
    ("edge", 4),
    ("constant", 5),
    ("high", 6),
    ("kernel", 7),
    ("exact", 8),
];
/// Addresses. `lo4b` is another address of the loopback network. `off` is an address of a
/// documentation network that no host has. The last two are for Unix sockets; their "port" is a
/// part of the name.
pub const ADDR: Names = &[
    ("lo4", 0),
    ("any4", 1),
    ("lo6", 2),
    ("any6", 3),
    ("lo4b", 4),
    ("mapped", 5),
    ("path", PATH),
    ("abstract", ABSTRACT),
];
pub const PATH: i64 = 6;
pub const ABSTRACT: i64 = 7;

/// Integer options: name, level, number.
pub const OPTIONS: &[(&str, i32, i32)] = &[
    ("REUSEADDR", libc::SOL_SOCKET, libc::SO_REUSEADDR),
    ("REUSEPORT", libc::SOL_SOCKET, libc::SO_REUSEPORT),
    ("KEEPALIVE", libc::SOL_SOCKET, libc::SO_KEEPALIVE),
    ("OOBINLINE", libc::SOL_SOCKET, libc::SO_OOBINLINE),
    ("RCVLOWAT", libc::SOL_SOCKET, libc::SO_RCVLOWAT),
    ("SNDBUF", libc::SOL_SOCKET, libc::SO_SNDBUF),
    ("RCVBUF", libc::SOL_SOCKET, libc::SO_RCVBUF),
    ("PRIORITY", libc::SOL_SOCKET, libc::SO_PRIORITY),
    ("MARK", libc::SOL_SOCKET, libc::SO_MARK),
    ("BROADCAST", libc::SOL_SOCKET, libc::SO_BROADCAST),
    ("DONTROUTE", libc::SOL_SOCKET, libc::SO_DONTROUTE),
    ("BUSY_POLL", libc::SOL_SOCKET, libc::SO_BUSY_POLL),
    ("ERROR", libc::SOL_SOCKET, libc::SO_ERROR),
    ("TYPE", libc::SOL_SOCKET, libc::SO_TYPE),
    ("DOMAIN", libc::SOL_SOCKET, libc::SO_DOMAIN),
    ("PROTOCOL", libc::SOL_SOCKET, libc::SO_PROTOCOL),
    ("ACCEPTCONN", libc::SOL_SOCKET, libc::SO_ACCEPTCONN),
    ("NODELAY", libc::IPPROTO_TCP, libc::TCP_NODELAY),
    ("CORK", libc::IPPROTO_TCP, libc::TCP_CORK),
    ("KEEPIDLE", libc::IPPROTO_TCP, libc::TCP_KEEPIDLE),
    ("KEEPINTVL", libc::IPPROTO_TCP, libc::TCP_KEEPINTVL),
    ("KEEPCNT", libc::IPPROTO_TCP, libc::TCP_KEEPCNT),
    ("QUICKACK", libc::IPPROTO_TCP, libc::TCP_QUICKACK),
    ("USER_TIMEOUT", libc::IPPROTO_TCP, libc::TCP_USER_TIMEOUT),
    ("DEFER_ACCEPT", libc::IPPROTO_TCP, libc::TCP_DEFER_ACCEPT),
    ("SYNCNT", libc::IPPROTO_TCP, libc::TCP_SYNCNT),
    ("LINGER2", libc::IPPROTO_TCP, libc::TCP_LINGER2),
    ("MAXSEG", libc::IPPROTO_TCP, libc::TCP_MAXSEG),
    ("WINDOW_CLAMP", libc::IPPROTO_TCP, libc::TCP_WINDOW_CLAMP),
    ("FASTOPEN", libc::IPPROTO_TCP, libc::TCP_FASTOPEN),
    ("NOTSENT_LOWAT", libc::IPPROTO_TCP, libc::TCP_NOTSENT_LOWAT),
    ("TOS", libc::IPPROTO_IP, libc::IP_TOS),
    ("TTL", libc::IPPROTO_IP, libc::IP_TTL),
    ("FREEBIND", libc::IPPROTO_IP, libc::IP_FREEBIND),
    ("V6ONLY", libc::IPPROTO_IPV6, libc::IPV6_V6ONLY),
    ("BOGUS", libc::IPPROTO_TCP, 9999),
    ("TIMESTAMP", libc::SOL_SOCKET, libc::SO_TIMESTAMP),
    ("BINDTOIFINDEX", libc::SOL_SOCKET, libc::SO_BINDTOIFINDEX),
];

/// Index of an option by its name.
pub fn option(name: &str) -> Option<i64> {
    OPTIONS.iter().position(|(n, _, _)| *n == name).map(|i| i as i64)
}

/// `A|B`, or `0`; bits without a name in hexadecimal.
pub fn bits(names: Names, value: i64) -> String {
    let mut left = value;
    let mut text = Vec::new();
    for (name, bit) in names {
        if *bit != 0 && left & bit == *bit {
            text.push((*name).to_owned());
            left &= !bit;
        }
    }
    if left != 0 {
        text.push(format!("{left:#x}"));
    }
    if text.is_empty() {
        "0".into()
    } else {
        text.join("|")
    }
}

/// The reverse of [`bits`].
pub fn parse_bits(names: Names, text: &str) -> Option<i64> {
    let mut value = 0;
    for word in text.split('|') {
        value |= match names.iter().find(|(n, _)| *n == word) {
            Some((_, bit)) => *bit,
            None => match word.strip_prefix("0x") {
                Some(hex) => i64::from_str_radix(hex, 16).ok()?,
                None => word.parse().ok()?,
            },
        };
    }
    Some(value)
}

/// The name of one of several alternatives.
pub fn one(names: Names, value: i64) -> String {
    names.iter().find(|(_, v)| *v == value).map_or_else(|| value.to_string(), |(n, _)| (*n).to_owned())
}

pub fn parse_one(names: Names, text: &str) -> Option<i64> {
    names.iter().find(|(n, _)| *n == text).map(|(_, v)| *v).or_else(|| text.parse().ok())
}

/// The name of an errno.
pub fn errno(e: i32) -> String {
    const NAMES: &[(i32, &str)] = &[
        (libc::EPERM, "EPERM"),
        (libc::ENOENT, "ENOENT"),
        (libc::EINTR, "EINTR"),
        (libc::EIO, "EIO"),
        (libc::ECHILD, "ECHILD"),
        (libc::EBADF, "EBADF"),
        (libc::EAGAIN, "EAGAIN"),
        (libc::ENOMEM, "ENOMEM"),
        (libc::EACCES, "EACCES"),
        (libc::EFAULT, "EFAULT"),
        (libc::EEXIST, "EEXIST"),
        (libc::EINVAL, "EINVAL"),
        (libc::EMFILE, "EMFILE"),
        (libc::ENOTTY, "ENOTTY"),
        (libc::ESPIPE, "ESPIPE"),
        (libc::EPIPE, "EPIPE"),
        (libc::EDOM, "EDOM"),
        (libc::ELOOP, "ELOOP"),
        (libc::ENOTSOCK, "ENOTSOCK"),
        (libc::EDESTADDRREQ, "EDESTADDRREQ"),
        (libc::ENOPROTOOPT, "ENOPROTOOPT"),
        (libc::EOPNOTSUPP, "EOPNOTSUPP"),
        (libc::EAFNOSUPPORT, "EAFNOSUPPORT"),
        (libc::EADDRINUSE, "EADDRINUSE"),
        (libc::EADDRNOTAVAIL, "EADDRNOTAVAIL"),
        (libc::ENETUNREACH, "ENETUNREACH"),
        (libc::ECONNABORTED, "ECONNABORTED"),
        (libc::ECONNRESET, "ECONNRESET"),
        (libc::EISCONN, "EISCONN"),
        (libc::ENOTCONN, "ENOTCONN"),
        (libc::ETIMEDOUT, "ETIMEDOUT"),
        (libc::ECONNREFUSED, "ECONNREFUSED"),
        (libc::EALREADY, "EALREADY"),
        (libc::EINPROGRESS, "EINPROGRESS"),
    ];
    NAMES.iter().find(|(n, _)| *n == e).map_or_else(|| format!("errno {e}"), |(_, name)| (*name).to_owned())
}
