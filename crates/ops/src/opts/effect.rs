//! Each socket option of Linux 6.18, and its effect on a connection over shared memory.
//! [`super::set`] and [`super::get`] follow this table. An option that is not in the table moves
//! the connection to the kernel, so no option is stored and returned without having its effect.

/// The effect of an option.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Effect {
    /// The library implements the option.
    Acts,
    /// The option changes nothing that a program can see over shared memory, or the kernel uses
    /// it before there is a connection (`bind`, `listen`). The placeholder checks and keeps it,
    /// and a kernel connection gets it.
    Inert,
    /// The option can only be read; the placeholder has the right answer.
    Says,
    /// As [`Effect::Says`], but the answer depends on the kernel connection: reading the option
    /// moves the connection there.
    SaysBelow,
    /// The administrator's rules may depend on the option (`docs/policy.md`). Otherwise as
    /// [`Effect::Inert`].
    Policy,
    /// Only a kernel connection can have the effect. Such values of the option move the
    /// connection to the kernel.
    Moves(If),
    /// Options that this table does not know.
    Unknown,
}

/// The values of an option that move a connection to the kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum If {
    Always,
    NotZero,
    Positive,
    NotNegative,
    /// The option is a rate: any value except "unlimited", which is all ones.
    Limited,
    /// A positive value, on a listener. (`listen` checks a value that was set before.)
    Listening,
    /// Any value before `connect`, because the option decides the connection's address; no value
    /// afterwards.
    Unconnected,
    /// The value turns an IPv4 connection through an IPv6 socket into an IPv4 socket.
    ToIpv4,
}

use Effect::*;

/// The effect of option `name` of `level`. The numbers are from include/uapi: asm-generic/socket.h, linux/in.h,
/// linux/in6.h, linux/tcp.h.
pub fn of(level: i32, name: i32) -> Effect {
    match level {
        libc::SOL_SOCKET => socket(name),
        libc::IPPROTO_IP => ip(name),
        libc::IPPROTO_IPV6 => ipv6(name),
        libc::IPPROTO_TCP => tcp(name),
        _ => Unknown,
    }
}

fn socket(name: i32) -> Effect {
    match name {
        // REUSEADDR, ERROR, SNDBUF, RCVBUF, KEEPALIVE, LINGER, REUSEPORT, RCVLOWAT, RCVTIMEO, SNDTIMEO (twice),
        // SNDBUFFORCE, RCVBUFFORCE; OOBINLINE, because urgent data go over the kernel; ZEROCOPY, as for
        // MSG_ZEROCOPY.
        2 | 4 | 7 | 8 | 9 | 13 | 15 | 18 | 20 | 21 | 32 | 33 | 66 | 67 | 10 | 60 => Acts,
        // PRIORITY, BINDTODEVICE, MARK, BINDTOIFINDEX
        12 | 25 | 36 | 62 => Policy,
        // TYPE, PEERNAME, ACCEPTCONN, PROTOCOL, DOMAIN, BPF_EXTENSIONS, MEMINFO, INCOMING_NAPI_ID, COOKIE, NETNS_COOKIE
        3 | 28 | 30 | 38 | 39 | 48 | 55 | 56 | 57 | 71 => Says,
        // PEERSEC: the label that a security module gives to the peer's packets.
        31 => SaysBelow,
        // TIMESTAMP, TIMESTAMPNS, TIMESTAMPING (twice)
        29 | 35 | 37 | 63..=65 => Moves(If::NotZero),
        // PEEK_OFF
        42 => Moves(If::NotNegative),
        // ATTACH_FILTER, ATTACH_BPF, TXTIME. ATTACH_REUSEPORT_CBPF and _EBPF: the program itself
        // selects among its listeners.
        26 | 50 | 61 | 51 | 52 => Moves(If::Always),
        // MAX_PACING_RATE
        47 => Moves(If::Limited),
        // DETACH_FILTER, LOCK_FILTER, DETACH_REUSEPORT_BPF: they concern filters, which only
        // kernel sockets have.
        27 | 44 | 68 => Inert,
        // How packets travel; shared memory has no packets: DEBUG, DONTROUTE, BROADCAST, NO_CHECK, BSDCOMPAT,
        // WIFI_STATUS, NOFCS, CNX_ADVICE, TXREHASH.
        1 | 5 | 6 | 11 | 14 | 41 | 43 | 53 | 74 => Inert,
        // How the kernel waits for a device: BUSY_POLL, PREFER_BUSY_POLL, BUSY_POLL_BUDGET; INCOMING_CPU, a hint;
        // `getsockopt` answers with the other side's CPU.
        46 | 69 | 70 | 49 => Inert,
        // Memory of the kernel: BUF_LOCK, RESERVE_MEM.
        72 | 73 => Inert,
        // For datagrams: RXQ_OVFL, RCVMARK, RCVPRIORITY. SELECT_ERR_QUEUE: only kernel connections fill that queue.
        40 | 75 | 82 | 45 => Inert,
        // For Unix sockets: PASSCRED, PEERCRED, PASSSEC, PEERGROUPS, PASSPIDFD, PEERPIDFD, PASSRIGHTS, INQ.
        16 | 17 | 34 | 59 | 76 | 77 | 83 | 84 => Inert,
        // SNDLOWAT and SECURITY_*, which no kernel accepts.
        19 | 22..=24 => Inert,
        _ => Unknown,
    }
}

fn ip(name: i32) -> Effect {
    match name {
        // TOS, TTL
        1 | 2 => Policy,
        // MTU, PROTOCOL
        14 | 52 => Says,
        // OPTIONS (in each packet), IPSEC_POLICY, XFRM_POLICY
        4 | 16 | 17 => Moves(If::Always),
        // PKTOPTIONS
        9 => SaysBelow,
        // MINTTL: drops packets from farther away; and all packets, if it is above the peer's
        // TTL.
        21 => Moves(If::NotZero),
        // LOCAL_PORT_RANGE
        51 => Moves(If::Unconnected),
        // SO_ORIGINAL_DST
        80 => Acts,
        // For `bind`: FREEBIND, TRANSPARENT, BIND_ADDRESS_NO_PORT.
        15 | 19 | 24 => Inert,
        // How packets travel: ROUTER_ALERT, MTU_DISCOVER, RECVERR (no error comes over a network), NODEFRAG, CHECKSUM,
        // RECVERR_RFC4884, UNICAST_IF.
        5 | 10 | 11 | 22 | 23 | 26 | 50 => Inert,
        // Control messages that a stream does not have: HDRINCL, RECVOPTS, RETOPTS, PKTINFO, RECVTTL, RECVTOS, PASSSEC,
        // RECVORIGDSTADDR, RECVFRAGSIZE.
        3 | 6 | 7 | 8 | 12 | 13 | 18 | 20 | 25 => Inert,
        // Multicast, which streams do not have.
        32..=49 => Inert,
        _ => Unknown,
    }
}

fn ipv6(name: i32) -> Effect {
    match name {
        // UNICAST_HOPS, TCLASS
        16 | 67 => Policy,
        // V6ONLY; IP6T_SO_ORIGINAL_DST
        26 | 80 => Acts,
        // ADDRFORM
        1 => Moves(If::ToIpv4),
        // MTU, PATHMTU
        24 | 61 => Says,
        // 2292PKTOPTIONS
        6 => SaysBelow,
        // In each packet: NEXTHOP, PKTINFO, HOPOPTS, RTHDRDSTOPTS, RTHDR, DSTOPTS; IPSEC_POLICY, XFRM_POLICY.
        9 | 50 | 54 | 55 | 57 | 59 | 34 | 35 => Moves(If::Always),
        // MINHOPCOUNT
        73 => Moves(If::NotZero),
        // For `bind` and `connect` in the kernel: ADDR_PREFERENCES, TRANSPARENT, FREEBIND.
        72 | 75 | 78 => Inert,
        // How packets travel: CHECKSUM, ROUTER_ALERT, MTU_DISCOVER, RECVERR, ROUTER_ALERT_ISOLATE, RECVERR_RFC4884,
        // FLOWLABEL_MGR, FLOWINFO_SEND, HDRINCL, DONTFRAG, AUTOFLOWLABEL, UNICAST_IF, FLOWINFO, HOPLIMIT.
        7 | 22 | 23 | 25 | 30..=33 | 36 | 62 | 70 | 76 | 11 | 52 => Inert,
        // Control messages, which a stream only has in 2292PKTOPTIONS: 2292PKTINFO to 2292RTHDR, 2292HOPLIMIT, RECVPKTINFO,
        // RECVHOPLIMIT, RECVHOPOPTS, RECVRTHDR, RECVDSTOPTS, RECVPATHMTU, RECVTCLASS, RECVORIGDSTADDR, RECVFRAGSIZE.
        2..=5 | 8 | 49 | 51 | 53 | 56 | 58 | 60 | 66 | 74 | 77 => Inert,
        // Multicast and anycast.
        17..=21 | 27..=29 | 42..=48 => Inert,
        _ => Unknown,
    }
}

fn tcp(name: i32) -> Effect {
    match name {
        // DEFER_ACCEPT: only the kernel can hold back connections that have sent nothing. Such
        // connections stay in the kernel, because the monitor does not know the listener.
        9 => Moves(If::Listening),
        // USER_TIMEOUT, NOTSENT_LOWAT, WINDOW_CLAMP. MAXSEG, FASTOPEN, FASTOPEN_CONNECT,
        // FASTOPEN_NO_COOKIE, QUEUE_SEQ: the library refuses what the kernel refuses.
        // ZEROCOPY_RECEIVE, INQ.
        18 | 25 | 10 | 2 | 23 | 30 | 34 | 21 | 35 | 36 => Acts,
        // INFO, and options that identify the connection: CC_INFO, SAVED_SYN, IS_MPTCP.
        11 | 26 | 28 | 43 => Says,
        // MD5SIG, MD5SIG_EXT, the AO options: keys by which peers prove their identity. ULP: a
        // protocol above TCP, which changes the meaning of the bytes.
        14 | 32 | 38..=42 | 31 => Moves(If::Always),
        // SAVE_SYN, TX_DELAY
        27 | 37 => Moves(If::NotZero),
        // REPAIR
        19 => Moves(If::Positive),
        // REPAIR_QUEUE, REPAIR_OPTIONS, TIMESTAMP, REPAIR_WINDOW: only a socket in repair mode
        // accepts them, which is a kernel socket.
        20 | 22 | 24 | 29 => Inert,
        // When a segment is sent; shared memory may always send at once: NODELAY, CORK, QUICKACK,
        // THIN_LINEAR, THIN_DUPACK, DELACK_MAX_US.
        1 | 3 | 12 | 16 | 17 | 46 => Inert,
        // How to treat lost segments; shared memory loses none: SYNCNT, LINGER2, CONGESTION,
        // RTO_MAX_MS, RTO_MIN_US. KEEPIDLE, KEEPINTVL, KEEPCNT: the kernel of a living peer
        // always answers probes, whatever its process does.
        7 | 8 | 13 | 44 | 45 | 4..=6 => Inert,
        // FASTOPEN_KEY: a key for the kernel's handshake.
        33 => Inert,
        _ => Unknown,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Every option that this machine's kernel knows has an effect in the table; a new one has to be added.
    #[test]
    fn all_options_of_6_18_are_known() {
        let highest = [(libc::SOL_SOCKET, 77), (libc::IPPROTO_TCP, 46)];
        for (level, highest) in highest {
            // 54 and 58 are control messages, not options. TCP's 15 was cookies, which no longer
            // exist.
            let none = |name: &i32| {
                level == libc::SOL_SOCKET && matches!(name, 54 | 58) || level == libc::IPPROTO_TCP && *name == 15
            };
            for name in (1..=highest).filter(|n| !none(n)) {
                assert_ne!(of(level, name), Unknown, "{level} {name}");
            }
        }
        assert_eq!((of(libc::IPPROTO_TCP, 47), of(282, 1)), (Unknown, Unknown));
    }
}
