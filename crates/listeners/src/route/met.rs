//! Remembers to which channel connections to another network namespace have moved.
//!
//! An entry is a hint that saves a message, not a permission: the monitor compares the channel
//! with the connection that it is shown, and judges each connection. So an entry may be wrong (two
//! destinations with one hash, or another server at the address).

use crate::chan::{self, Chan};
use core::sync::atomic::{AtomicU64, Ordering};
use fsocket_abi::channel::CLIENT;
use fsocket_proto::Addr;

const ENTRIES: usize = 64;
/// In place of a channel: there are several listeners at this address.
const SEVERAL: u32 = u32::MAX;

/// Each entry has a hash of the destination (upper half) and a channel's number (lower half).
static MET: [AtomicU64; ENTRIES] = [const { AtomicU64::new(0) }; ENTRIES];

/// The entry of a destination, and the expected value of its upper half.
fn entry(dst: &Addr) -> (&'static AtomicU64, u64) {
    let mix = |k: u64, b: &u8| (k ^ u64::from(*b)).wrapping_mul(0x0100_0000_01b3);
    let hash = dst.ip.iter().fold(0xcbf2_9ce4_8422_2325 ^ u64::from(dst.port), mix);
    (&MET[hash as usize % ENTRIES], hash & !u64::from(u32::MAX))
}

/// The channel of the last connection to `dst`, if it still exists.
pub(super) fn known(dst: &Addr) -> Option<&'static Chan> {
    let (entry, tag) = entry(dst);
    let known = entry.load(Ordering::Relaxed);
    let id = known as u32;
    (known & !u64::from(u32::MAX) == tag && ![0, SEVERAL].contains(&id)).then(|| chan::by_id(id, CLIENT)).flatten()
}

/// Records that a connection to `dst` moves to this channel.
pub(super) fn note(dst: &Addr, c: &Chan) {
    let (entry, tag) = entry(dst);
    let new = tag | u64::from(c.id.load(Ordering::Relaxed));
    let old = entry.load(Ordering::Relaxed);
    if old != new && old != tag | u64::from(SEVERAL) {
        entry.store(new, Ordering::Relaxed);
    }
}

/// Records that connections to `dst` have different channels: from now on the monitor is asked for
/// each.
pub fn several(dst: &Addr) {
    let (entry, tag) = entry(dst);
    entry.store(tag | u64::from(SEVERAL), Ordering::Relaxed);
}
