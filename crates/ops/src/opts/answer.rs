//! Answers of `getsockopt` in which a connection differs from an unconnected socket such as the
//! placeholder.

use crate::options::IPV6_ADDRFORM;
use crate::table::Desc;
use crate::{name, ready};
use fsocket_abi::channel::status;
use fsocket_abi::flags::FlagSet;
use fsocket_abi::path_switch::PathState;
use fsocket_proto::agent::Place;
use fsocket_sys::{self as sys, cpu, Errno, Result};

const S: i32 = libc::SOL_SOCKET;
const T: i32 = libc::IPPROTO_TCP;
const I4: i32 = libc::IPPROTO_IP;
const I6: i32 = libc::IPPROTO_IPV6;
// Option numbers that the libc crate lacks; include/uapi/linux/in.h, in6.h.
const IP_PROTOCOL: i32 = 52;
const IPV6_PATHMTU: i32 = 61;

/// TCP's maximum segment size if the program has not chosen one: half of the window on a loopback
/// connection, TCP_MSS_DEFAULT on an unconnected socket.
const MSS: i32 = 32768;
const MSS_NONE: i32 = 536;
/// Bytes of each segment that TCP's timestamps take.
const STAMPS: i32 = 12;

/// The answer of `getsockopt`.
pub enum Answer {
    Int(i32),
    Bytes([u8; 32], usize),
}
use Answer::*;

/// The answer to the agent of this host ([`fsocket_proto::agent`]).
pub fn place(d: &Desc) -> [u8; Place::SIZE] {
    let (_, tx, h) = d.tx();
    let draining = matches!(d.path_state(), PathState::Draining(_));
    let closed = d.peer_status().has(status::CLOSED);
    Place { draining: draining.into(), closed: closed.into(), unread: fsocket_ring::unread(tx, h) }.bytes()
}

/// The answer for a connection. None: the placeholder's answer is right. `fd`: the placeholder;
/// `room`: size of the program's buffer.
pub fn of(fd: i32, d: &Desc, level: i32, name: i32, room: u32) -> Option<Result<Answer>> {
    let s = d.sock();
    let family = s.family();
    let v6 = family == libc::AF_INET6 as u16;
    let over = ready::over(d);
    let accepted = d.is_server();
    let from_below = || {
        let mut v = [0u8; 4];
        sys::getsockopt(fd, level, name, &mut v).map(|_| i32::from_ne_bytes(v))
    };
    let below = |default: i32, here: i32| Some(from_below().map(|v| Int(if v == default { here } else { v })));
    match (level, name) {
        // (This still works when `getpeername` fails already.)
        (S, libc::SO_PEERNAME) => Some(peer_name(d, room)),
        (S, libc::SO_INCOMING_CPU) => {
            // The other side's CPU, because on the loopback device the sender's CPU delivers the
            // packets.
            let c = Some(ready::peer_cpu(d)).filter(|c| *c != 0).unwrap_or_else(cpu::current);
            below(-1, c as i32 - 1)
        }
        (I4, libc::IP_MTU) if !over => mtu(fd).map(|m| Ok(Int(if v6 { m } else { m.min(65535) }))),
        (I6, libc::IPV6_MTU) if !over && v6 => mtu(fd).map(|m| Ok(Int(m))),
        (I6, IPV6_PATHMTU) if !over && v6 => mtu(fd).map(|m| path_mtu(m, room)),
        (I4, IP_PROTOCOL) => Some(Ok(Int(s.local().1.into()))),
        (I6, IPV6_ADDRFORM) if v6 => Some(match tcp_state(d) {
            ESTABLISHED => Ok(Int(family.into())),
            _ => Err(Errno::ENOTCONN),
        }),
        // The values that the connection request had.
        (I4, libc::IP_MULTICAST_TTL) if accepted && !v6 => below(1, 64),
        (I6, libc::IPV6_MULTICAST_HOPS) if accepted && v6 => below(1, 64),
        (I6, libc::IPV6_MULTICAST_IF) if accepted && v6 => below(0, loopback(fd).unwrap_or(0)),
        (T, libc::TCP_MAXSEG) => Some(from_below().map(|v| Int(if v == MSS_NONE { MSS } else { v - STAMPS }))),
        (T, libc::TCP_WINDOW_CLAMP) => Some(Ok(Int(match s.option(crate::options::WINDOW_CLAMP) {
            0 => s.option(crate::options::RCVBUF) / 2,
            clamp => clamp.max(crate::values::LEAST_CLAMP),
        }))),
        _ => None,
    }
}

/// As in the kernel: copies as many bytes as the program asks for, and fails if it asks for more
/// than there are.
fn peer_name(d: &Desc, room: u32) -> Result<Answer> {
    let (ip, port) = d.sock().peer();
    let mut b = [0u8; 32];
    let (a, len) = name::sockaddr(d.sock().family().into(), &ip, port);
    if room as usize > len {
        return Err(Errno::EINVAL);
    }
    b[..len].copy_from_slice(&a[..len]);
    Ok(Bytes(b, len))
}

/// `struct ip6_mtuinfo`: an empty address, and the MTU.
fn path_mtu(mtu: i32, room: u32) -> Result<Answer> {
    let mut b = [0u8; 32];
    if (room as usize) < b.len() {
        return Err(Errno::EINVAL);
    }
    b[28..].copy_from_slice(&mtu.to_ne_bytes());
    Ok(Bytes(b, 32))
}

/// `struct ifreq` for the loopback device.
#[repr(C)]
struct Request {
    name: [u8; 16],
    value: i32,
    more: [u8; 20],
}

fn ask(fd: i32, request: usize) -> Option<i32> {
    let mut r = Request { name: *b"lo\0\0\0\0\0\0\0\0\0\0\0\0\0\0", value: 0, more: [0; 20] };
    // SAFETY: the request reads and writes an ifreq of 40 bytes, which `r` is.
    unsafe { sys::raw(libc::SYS_ioctl, [fd as usize, request, &raw mut r as usize, 0, 0, 0]) }.ok()?;
    Some(r.value)
}

fn mtu(fd: i32) -> Option<i32> {
    ask(fd, libc::SIOCGIFMTU as usize)
}

fn loopback(fd: i32) -> Option<i32> {
    ask(fd, libc::SIOCGIFINDEX as usize)
}

const ESTABLISHED: u8 = 1;

/// Number of the TCP state, as in `include/net/tcp_states.h`.
pub fn tcp_state(d: &Desc) -> u8 {
    if ready::over(d) {
        return 7; // CLOSE
    }
    let st = ready::state(d);
    let shut = d.sock().flags.get().has(FlagSet::SHUT_WR);
    match (st.reset, st.eof, shut) {
        (true, _, _) | (_, true, true) => 7,
        (_, false, false) => ESTABLISHED,
        (_, true, false) => 8, // CLOSE_WAIT
        (_, false, true) => 5, // FIN_WAIT2
    }
}
