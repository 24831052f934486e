//! The words of a packet as plain fields. Tests and fuzzers use them to send messages that the
//! library never sends.

use crate::packet::Wire;
use crate::values::Waiter;
use crate::{Addr, Msg, VERSION};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// The same bytes as [`Msg`]. [`crate::request`], [`crate::answer`] and [`crate::notice`] define
/// the words of each kind.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct Packet {
    pub kind: u32,
    pub seq: u32,
    pub version: u16,
    pub _pad: u16,
    pub result: i32,
    pub id: u64,
    pub arg0: u64,
    pub arg1: u64,
    pub arg2: u64,
    pub addr: Addr,
}

impl Packet {
    pub fn new(kind: u32) -> Packet {
        Packet { kind, version: VERSION, ..Packet::default() }
    }
}

impl From<Packet> for Msg {
    fn from(packet: Packet) -> Msg {
        zerocopy::transmute!(packet)
    }
}

impl From<Msg> for Packet {
    fn from(msg: Msg) -> Packet {
        zerocopy::transmute!(msg)
    }
}

/// The word that names a waiter.
pub fn waiter(side: usize, number: usize) -> u64 {
    Waiter { side, number }.to_wire()
}
