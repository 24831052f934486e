//! Messages between the monitor and the agent of its host, which carries connections to other
//! hosts.
//!
//! The agent is a program with the library. For each connection it makes a *stand-in*: a kernel
//! connection between two of its own sockets. The agent offers one end to the monitor, as it
//! would offer any connection that may move to shared memory. The monitor then connects the local
//! program with the stand-in over shared memory, as if the stand-in were the other host's end.

/// Level and name of the `getsockopt` by which the agent asks the library about a connection ([`Place`]).
pub const SOCKOPT: (i32, i32) = (0x4653, 1);
/// The answer for a connection over shared memory. For any other socket `getsockopt` fails with
/// ENOPROTOOPT.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct Place {
    /// 1: the peer has moved to the kernel, but the ring still has bytes, which must be read
    /// first.
    pub draining: u32,
    /// The peer has closed.
    pub closed: u32,
    /// Upper bound of the number of sent bytes that the peer has not read.
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_place_comes_back() {
        let place = Place { draining: 1, closed: 2, unread: 1 << 40 };
        assert_eq!(Place::of(&place.bytes()), place);
    }
}
