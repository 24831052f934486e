//! Copies every option of a listen socket to another one.
//!
//! An accepted connection inherits the options of its listen socket. So the options that the application has set on
//! the global listen socket must be on the local ones as well. The tables list the options that Linux 6.18 can both
//! read and set. An option that reads the same on both sockets is not set.

use fsocket_sys::{getsockopt, setsockopt, Errno, Result};
use libc::*;

/// Bytes of the longest option (IP options and names; TCP_INFO is longer, but is not copied).
const LONG: usize = 64;

/// How an option is copied.
#[derive(Clone, Copy, PartialEq, Eq)]
enum How {
    /// The value is set as it was read.
    Same,
    /// A buffer size. The kernel doubles the value that is set, and an explicit size switches auto-tuning off. So
    /// it is copied only if the application has set it.
    Buffer,
}
use How::*;

struct Opt {
    level: i32,
    name: i32,
    how: How,
}
const fn same(level: i32, name: i32) -> Opt {
    Opt { level, name, how: Same }
}

// Numbers that the libc crate lacks, from include/uapi/asm-generic/socket.h and include/uapi/linux/{tcp,in,in6}.h.
const SO_BUF_LOCK: i32 = 72;
const SO_RESERVE_MEM: i32 = 73;
const SO_TXREHASH: i32 = 74;
const SO_BUSY_POLL: i32 = 46;
const SO_PREFER_BUSY_POLL: i32 = 69;
const SO_BUSY_POLL_BUDGET: i32 = 70;
const SO_MAX_PACING_RATE: i32 = 47;
const SO_LOCK_FILTER: i32 = 44;
const SO_TIMESTAMP_NEW: i32 = 63;
const SO_TIMESTAMPNS_NEW: i32 = 64;
const TCP_NOTSENT_LOWAT: i32 = 25;
const TCP_SAVE_SYN: i32 = 27;
const TCP_FASTOPEN_NO_COOKIE: i32 = 34;
const TCP_INQ: i32 = 36;
const TCP_TX_DELAY: i32 = 37;
const TCP_RTO_MAX_MS: i32 = 44;
const TCP_RTO_MIN_US: i32 = 45;
const TCP_DELACK_MAX_US: i32 = 46;
const IP_BIND_ADDRESS_NO_PORT: i32 = 24;
const IP_LOCAL_PORT_RANGE: i32 = 51;
const IPV6_MINHOPCOUNT: i32 = 73;
const IPV6_ADDR_PREFERENCES: i32 = 72;
const IPV6_AUTOFLOWLABEL: i32 = 70;
const IPV6_TRANSPARENT: i32 = 75;
pub(crate) const IPV6_FREEBIND: i32 = 78;
const SO_GET_FILTER: i32 = 26;

/// Numbers of further options that the kernel accepts and that connections inherit, mostly for datagrams.
static OTHERS: [(i32, &[i32]); 3] = [
    (SOL_SOCKET, &[6, 11, 41, 42, 43, 45, 65, SO_BUF_LOCK, 75, 82]),
    (IPPROTO_IP, &[6, 7, 18, 20, 23, 26, 34, 49]),
    (IPPROTO_IPV6, &[2, 3, 4, 5, 8, 11, 19, 29, 30, 31, 33, 49, 51, 53, 56, 58, 60, 66, 74, 77]),
];

/// Options that must be set before `bind`.
static BEFORE_BIND: [Opt; 7] = [
    same(SOL_SOCKET, SO_REUSEADDR),
    same(SOL_SOCKET, libc::SO_BINDTOIFINDEX),
    same(IPPROTO_IP, IP_TRANSPARENT),
    same(IPPROTO_IP, IP_FREEBIND),
    same(IPPROTO_IPV6, IPV6_V6ONLY),
    same(IPPROTO_IPV6, IPV6_TRANSPARENT),
    same(IPPROTO_IPV6, IPV6_FREEBIND),
];

static ANY_TIME: [Opt; 67] = [
    same(SOL_SOCKET, SO_DEBUG),
    same(SOL_SOCKET, SO_DONTROUTE),
    same(SOL_SOCKET, SO_KEEPALIVE),
    same(SOL_SOCKET, SO_OOBINLINE),
    same(SOL_SOCKET, SO_LINGER),
    same(SOL_SOCKET, SO_RCVLOWAT),
    same(SOL_SOCKET, SO_RCVTIMEO),
    same(SOL_SOCKET, SO_SNDTIMEO),
    Opt { level: SOL_SOCKET, name: SO_SNDBUF, how: Buffer },
    Opt { level: SOL_SOCKET, name: SO_RCVBUF, how: Buffer },
    same(SOL_SOCKET, SO_PRIORITY),
    same(SOL_SOCKET, SO_MARK),
    same(SOL_SOCKET, SO_TIMESTAMP),
    same(SOL_SOCKET, SO_TIMESTAMPNS),
    same(SOL_SOCKET, SO_TIMESTAMP_NEW),
    same(SOL_SOCKET, SO_TIMESTAMPNS_NEW),
    same(SOL_SOCKET, SO_TIMESTAMPING),
    same(SOL_SOCKET, SO_RXQ_OVFL),
    same(SOL_SOCKET, SO_ZEROCOPY),
    same(SOL_SOCKET, SO_BUSY_POLL),
    same(SOL_SOCKET, SO_PREFER_BUSY_POLL),
    same(SOL_SOCKET, SO_BUSY_POLL_BUDGET),
    same(SOL_SOCKET, SO_MAX_PACING_RATE),
    same(SOL_SOCKET, SO_LOCK_FILTER),
    same(SOL_SOCKET, SO_TXREHASH),
    same(SOL_SOCKET, SO_RESERVE_MEM),
    same(IPPROTO_TCP, TCP_NODELAY),
    same(IPPROTO_TCP, TCP_CORK),
    same(IPPROTO_TCP, TCP_KEEPIDLE),
    same(IPPROTO_TCP, TCP_KEEPINTVL),
    same(IPPROTO_TCP, TCP_KEEPCNT),
    same(IPPROTO_TCP, TCP_SYNCNT),
    same(IPPROTO_TCP, TCP_LINGER2),
    same(IPPROTO_TCP, TCP_DEFER_ACCEPT),
    same(IPPROTO_TCP, TCP_WINDOW_CLAMP),
    same(IPPROTO_TCP, TCP_CONGESTION),
    same(IPPROTO_TCP, TCP_THIN_LINEAR_TIMEOUTS),
    same(IPPROTO_TCP, TCP_USER_TIMEOUT),
    same(IPPROTO_TCP, TCP_NOTSENT_LOWAT),
    same(IPPROTO_TCP, TCP_SAVE_SYN),
    same(IPPROTO_TCP, TCP_FASTOPEN_NO_COOKIE),
    same(IPPROTO_TCP, TCP_INQ),
    same(IPPROTO_TCP, TCP_TX_DELAY),
    same(IPPROTO_TCP, TCP_RTO_MAX_MS),
    same(IPPROTO_TCP, TCP_RTO_MIN_US),
    same(IPPROTO_TCP, TCP_DELACK_MAX_US),
    // haproxy switches it off on its listeners, so a request is acknowledged with its answer.
    same(IPPROTO_TCP, TCP_QUICKACK),
    same(IPPROTO_TCP, TCP_MAXSEG),
    same(IPPROTO_IP, IP_TOS),
    same(IPPROTO_IP, IP_TTL),
    same(IPPROTO_IP, IP_MTU_DISCOVER),
    same(IPPROTO_IP, IP_RECVERR),
    same(IPPROTO_IP, IP_RECVTOS),
    same(IPPROTO_IP, IP_RECVTTL),
    same(IPPROTO_IP, IP_PKTINFO),
    same(IPPROTO_IP, IP_MINTTL),
    same(IPPROTO_IP, IP_BIND_ADDRESS_NO_PORT),
    same(IPPROTO_IP, IP_LOCAL_PORT_RANGE),
    same(IPPROTO_IP, IP_OPTIONS),
    same(IPPROTO_IPV6, IPV6_UNICAST_HOPS),
    same(IPPROTO_IPV6, IPV6_TCLASS),
    same(IPPROTO_IPV6, IPV6_MTU_DISCOVER),
    same(IPPROTO_IPV6, IPV6_RECVERR),
    same(IPPROTO_IPV6, IPV6_DONTFRAG),
    same(IPPROTO_IPV6, IPV6_MINHOPCOUNT),
    same(IPPROTO_IPV6, IPV6_ADDR_PREFERENCES),
    same(IPPROTO_IPV6, IPV6_AUTOFLOWLABEL),
];

/// Copies options on which `bind` depends.
pub(crate) fn before_bind(from: i32, to: i32, v6: bool) -> Result<()> {
    all(&BEFORE_BIND, from, to, v6)
}

/// Makes every option of `to` equal to that of `from`. `to` may listen already.
///
/// # Errors
/// Errors of the kernel, for a value that the calling process may not set. EOPNOTSUPP: `from` has something that
/// cannot be copied (a socket filter).
pub fn options(from: i32, to: i32, v6: bool) -> Result<()> {
    if has_filter(from) {
        return Err(Errno::new(EOPNOTSUPP));
    }
    all(&ANY_TIME, from, to, v6)?;
    for (level, names) in OTHERS.iter().filter(|o| v6 || o.0 != IPPROTO_IPV6) {
        names.iter().try_for_each(|name| one(&same(*level, *name), from, to))?;
    }
    // An upper-layer protocol (ULP) cannot be removed again. Listeners rarely have one.
    one(&same(IPPROTO_TCP, TCP_ULP), from, to)
}

/// Copies the queue length of TCP Fast Open. The option needs a bound or listening socket, so it is copied after
/// `bind`.
pub(crate) fn fast_open(from: i32, to: i32) -> Result<()> {
    one(&same(IPPROTO_TCP, TCP_FASTOPEN), from, to)
}

/// Copies options that the kernel forgets when a socket begins to listen.
pub(crate) fn after_listen(from: i32, to: i32) -> Result<()> {
    one(&same(IPPROTO_TCP, TCP_QUICKACK), from, to)
}

fn all(opts: &[Opt], from: i32, to: i32, v6: bool) -> Result<()> {
    opts.iter().filter(|o| v6 || o.level != IPPROTO_IPV6).try_for_each(|o| one(o, from, to))
}

fn read<'a>(fd: i32, o: &Opt, buf: &'a mut [u8; LONG]) -> Option<&'a [u8]> {
    // An option that this kernel does not know cannot have been set.
    let n = getsockopt(fd, o.level, o.name, buf).ok()?;
    Some(&buf[..n.min(LONG)])
}

fn one(o: &Opt, from: i32, to: i32) -> Result<()> {
    let (mut a, mut b) = ([0; LONG], [0; LONG]);
    let Some(want) = read(from, o, &mut a) else { return Ok(()) };
    if o.how == Buffer && !is_locked(from, o.name) {
        return Ok(());
    }
    if read(to, o, &mut b) == Some(want) {
        return Ok(());
    }
    match o.how {
        Buffer => {
            let doubled = want.first_chunk().map_or(0, |v| i32::from_ne_bytes(*v));
            setsockopt(to, o.level, o.name, &(doubled / 2).to_ne_bytes())?;
            if read(to, o, &mut b) != Some(want) {
                // The size is beyond the limit, so the application has used the privileged option.
                let force = if o.name == SO_SNDBUF { SO_SNDBUFFORCE } else { SO_RCVBUFFORCE };
                setsockopt(to, o.level, force, &(doubled / 2).to_ne_bytes())?;
            }
            Ok(())
        }
        Same => setsockopt(to, o.level, o.name, want),
    }
}

/// Did the application set this buffer size itself?
fn is_locked(fd: i32, name: i32) -> bool {
    const SNDBUF_LOCK: u8 = 1;
    const RCVBUF_LOCK: u8 = 2;
    let mut lock = [0u8; 4];
    // Kernels before 5.14 do not say. Then the size is copied.
    getsockopt(fd, SOL_SOCKET, SO_BUF_LOCK, &mut lock).is_err()
        || lock[0] & if name == SO_SNDBUF { SNDBUF_LOCK } else { RCVBUF_LOCK } != 0
}

fn has_filter(fd: i32) -> bool {
    // If the buffer is empty, the kernel returns the number of instructions.
    !matches!(getsockopt(fd, SOL_SOCKET, SO_GET_FILTER, &mut []), Ok(0))
}

#[cfg(test)]
mod tests {
    use super::*;
    use fsocket_sys as sys;

    fn int(fd: i32, level: i32, name: i32) -> i32 {
        let mut b = [0; 4];
        getsockopt(fd, level, name, &mut b).unwrap();
        i32::from_ne_bytes(b)
    }
    fn set(fd: i32, level: i32, name: i32, v: i32) {
        setsockopt(fd, level, name, &v.to_ne_bytes()).unwrap();
    }

    #[test]
    fn what_was_set_arrives_and_nothing_else() {
        for family in [AF_INET, AF_INET6] {
            let v6 = family == AF_INET6;
            let [a, b, fresh] = [0; 3].map(|_| sys::socket(family, SOCK_STREAM, 0).unwrap());
            let mut chosen = vec![
                (SOL_SOCKET, SO_KEEPALIVE, 1),
                (SOL_SOCKET, SO_RCVBUF, 20_000),
                (SOL_SOCKET, SO_PRIORITY, 3),
                (IPPROTO_TCP, TCP_NODELAY, 1),
                (IPPROTO_TCP, TCP_KEEPIDLE, 77),
                (IPPROTO_TCP, TCP_KEEPINTVL, 7),
                (IPPROTO_TCP, TCP_KEEPCNT, 5),
                (IPPROTO_TCP, TCP_SYNCNT, 3),
                (IPPROTO_TCP, TCP_DEFER_ACCEPT, 5),
                (IPPROTO_TCP, TCP_USER_TIMEOUT, 1234),
                (IPPROTO_TCP, TCP_NOTSENT_LOWAT, 4096),
                (IPPROTO_IP, IP_TTL, 33),
            ];
            if v6 {
                chosen.push((IPPROTO_IPV6, IPV6_UNICAST_HOPS, 44));
                chosen.push((IPPROTO_IPV6, IPV6_TCLASS, 8));
            }
            for &(level, name, v) in &chosen {
                set(a, level, name, v);
            }
            setsockopt(a, IPPROTO_TCP, TCP_CONGESTION, b"reno").unwrap();
            options(a, b, v6).unwrap();
            for &(level, name, _) in &chosen {
                assert_eq!(int(a, level, name), int(b, level, name), "option {level}/{name}");
            }
            let mut cc = [0; 16];
            getsockopt(b, IPPROTO_TCP, TCP_CONGESTION, &mut cc).unwrap();
            assert!(cc.starts_with(b"reno\0"));
            assert_eq!(int(b, SOL_SOCKET, SO_BUF_LOCK), int(a, SOL_SOCKET, SO_BUF_LOCK));
            // Copying from a fresh socket resets the options.
            options(fresh, b, v6).unwrap();
            for &(level, name, _) in chosen.iter().filter(|o| o.1 != SO_RCVBUF) {
                assert_eq!(int(fresh, level, name), int(b, level, name), "option {level}/{name}");
            }
            for fd in [a, b, fresh] {
                let _ = sys::close(fd);
            }
        }
    }

    #[test]
    fn no_option_is_forgotten() {
        // Options that zones set themselves, that concern one socket only, or that have no meaning for TCP.
        const NOT: [(i32, i32, &str); 6] = [
            (SOL_SOCKET, SO_REUSEPORT, "every socket of a group has it"),
            (SOL_SOCKET, SO_INCOMING_CPU, "chooses among the sockets of a group, which zones do"),
            (IPPROTO_TCP, TCP_REPAIR, "not of a listener"),
            (IPPROTO_TCP, TCP_FASTOPEN, "`fast_open` copies it, once bound"),
            (IPPROTO_TCP, TCP_FASTOPEN_CONNECT, "of who connects"),
            (IPPROTO_IP, IP_OPTIONS, "no number"),
        ];
        let get = |fd, level, name| {
            let mut b = [0u8; 4];
            matches!(getsockopt(fd, level, name, &mut b), Ok(4)).then(|| i32::from_ne_bytes(b))
        };
        let (mut tried, mut forgotten) = (0, Vec::new());
        for (level, family) in
            [(SOL_SOCKET, AF_INET), (IPPROTO_TCP, AF_INET), (IPPROTO_IP, AF_INET), (IPPROTO_IPV6, AF_INET6)]
        {
            for name in (0..90).filter(|name| !NOT.iter().any(|n| (n.0, n.1) == (level, *name))) {
                for value in [0, 1, 2, 5, 100] {
                    let [a, b] = [0; 2].map(|_| sys::socket(family, SOCK_STREAM, 0).unwrap());
                    let before = get(a, level, name);
                    let set = setsockopt(a, level, name, &i32::to_ne_bytes(value)).is_ok();
                    let after = get(a, level, name);
                    if set && after.is_some() && after != before {
                        tried += 1;
                        before_bind(a, b, family == AF_INET6).unwrap();
                        let copied = options(a, b, family == AF_INET6);
                        if (copied, get(b, level, name)) != (Ok(()), after) {
                            forgotten.push((level, name, value, copied, after, get(b, level, name)));
                        }
                    }
                    let _ = (sys::close(a), sys::close(b));
                }
            }
        }
        assert!(forgotten.is_empty(), "level, name, value, result, there, copied: {forgotten:?}");
        assert!(tried > 60, "{tried} values tried");
    }

    #[test]
    fn every_option_of_the_tables_can_be_copied() {
        for family in [AF_INET, AF_INET6] {
            let [a, b] = [0; 2].map(|_| sys::socket(family, SOCK_STREAM, 0).unwrap());
            before_bind(a, b, family == AF_INET6).unwrap();
            options(a, b, family == AF_INET6).unwrap();
            let _ = (sys::close(a), sys::close(b));
        }
    }

    #[test]
    fn a_filter_is_not_copied() {
        let a = sys::socket(AF_INET, SOCK_STREAM, 0).unwrap();
        assert!(!has_filter(a));
        // ret 0xffff
        let code = sock_filter { code: 6, jt: 0, jf: 0, k: 0xffff };
        let program = sock_fprog { len: 1, filter: &code as *const _ as *mut _ };
        // SAFETY: `program` lives longer than the slice, which covers it.
        let bytes =
            unsafe { core::slice::from_raw_parts(&program as *const _ as *const u8, core::mem::size_of_val(&program)) };
        setsockopt(a, SOL_SOCKET, SO_ATTACH_FILTER, bytes).unwrap();
        assert!(has_filter(a));
        let b = sys::socket(AF_INET, SOCK_STREAM, 0).unwrap();
        assert!(options(a, b, false).is_err());
        let _ = (sys::close(a), sys::close(b));
    }
}
