//! Between the monitor and the agent of its host, which carries connections to other hosts.
//!
//! The agent is a program with the library. For each connection it has a *stand-in*: a kernel connection with itself,
//! whose one end it shows as it would show any connection that may go over to shared memory. The monitor has the stand-in
//! go over in place of the other host's end.

use crate::{Addr, Msg};

/// To the monitor: an agent of the host with address `addr.ip` can be reached (`arg0` 1), or cannot (0). *Sync*: `result`
/// ENOENT: no listener of this agent's is known, by which programs could reach it; EINVAL: the configuration does not
/// name that host.
pub const LINK: u32 = 85;
/// From the monitor: a process wants its connection to such a host to go over. `id` names the wish; the connection's
/// addresses ([`ends`]). [`COUNTS`] comes right before. An answer is [`TAKE`] or [`REFUSE`], or none.
pub const OPEN: u32 = 86;
/// Both ways, right before the message that it belongs to: what the end with `id` has sent (`arg0`) and received (`arg1`).
pub const COUNTS: u32 = 87;
/// To the monitor: the wish `id` is fulfilled by the stand-in whose socket has the number (SO_COOKIE) `arg0`, which has
/// sent `arg1` and received `arg2` bytes. No answer.
pub const TAKE: u32 = 88;
/// To the monitor: the wish `id` is not fulfilled. No answer.
pub const REFUSE: u32 = 89;
/// To the monitor: the stand-in with the number `id` is to go over in place of the other host's end of a connection, whose
/// addresses follow ([`ends`], as this host sees them); that end is at rest, as [`COUNTS`] has said. *Sync*: `result`
/// ENOENT: nobody here has offered this host's end.
pub const PAIR: u32 = 90;

/// Level and name of the `getsockopt` by which the agent asks the library about a connection ([`Place`]).
pub const SOCKOPT: (i32, i32) = (0x4653, 1);
/// A connection over shared memory; what it is not, `getsockopt` refuses (ENOPROTOOPT).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct Place {
    /// 1: the peer has changed the path, what it has left in the ring comes first.
    pub draining: u32,
    /// The peer has closed.
    pub closed: u32,
    /// At most so many bytes of what was sent the peer has not read.
    pub unread: u64,
}

impl Place {
    pub const SIZE: usize = core::mem::size_of::<Place>();
    pub fn bytes(self) -> [u8; Place::SIZE] {
        let mut b = [0; Place::SIZE];
        b[..4].copy_from_slice(&self.draining.to_ne_bytes());
        b[4..8].copy_from_slice(&self.closed.to_ne_bytes());
        b[8..].copy_from_slice(&self.unread.to_ne_bytes());
        b
    }
    pub fn of(b: &[u8; Place::SIZE]) -> Place {
        let int = |at: usize| u32::from_ne_bytes([b[at], b[at + 1], b[at + 2], b[at + 3]]);
        let [.., a, b, c, d, e, f, g, h] = *b;
        Place { draining: int(0), closed: int(4), unread: u64::from_ne_bytes([a, b, c, d, e, f, g, h]) }
    }
}

/// A connection's own address and its peer's, IPv4 in v4-mapped form.
pub type Ends = [([u8; 16], u16); 2];

/// Puts addresses into a message.
pub fn with_ends(m: Msg, [own, peer]: Ends) -> Msg {
    let ip = u128::from_le_bytes(peer.0);
    let addr = Addr { ip: own.0, port: own.1, ..Addr::default() };
    Msg { arg0: ip as u64, arg1: (ip >> 64) as u64, arg2: peer.1.into(), addr, ..m }
}

/// Out of it.
pub fn ends(m: &Msg) -> Ends {
    let ip = u128::from(m.arg0) | u128::from(m.arg1) << 64;
    [(m.addr.ip, m.addr.port), (ip.to_le_bytes(), m.arg2 as u16)]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_and_places_come_back() {
        let both = [([1; 16], 80), (core::array::from_fn(|i| i as u8), 65535)];
        assert_eq!(ends(&with_ends(Msg::new(OPEN), both)), both);
        let place = Place { draining: 1, closed: 2, unread: 1 << 40 };
        assert_eq!(Place::of(&place.bytes()), place);
    }
}
