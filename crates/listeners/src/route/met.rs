//! Which channel connections to a destination in another network namespace have gone over to.
//!
//! A hint that saves an exchange, and no permission: the monitor compares it with the connection that it is shown, and
//! judges each. So an entry may be wrong (two destinations of one hash, another server behind an address).

use crate::chan::{self, Chan};
use core::sync::atomic::{AtomicU64, Ordering};
use fsocket_abi::channel::CLIENT;
use fsocket_proto::Addr;

const ENTRIES: usize = 64;
/// In place of a channel: behind this address are several listeners.
const SEVERAL: u32 = u32::MAX;

/// Hash of the destination, and the channel's number.
static MET: [AtomicU64; ENTRIES] = [const { AtomicU64::new(0) }; ENTRIES];

/// The destination's entry, and what it has in its upper half.
fn entry(dst: &Addr) -> (&'static AtomicU64, u64) {
    let mix = |k: u64, b: &u8| (k ^ u64::from(*b)).wrapping_mul(0x0100_0000_01b3);
    let hash = dst.ip.iter().fold(0xcbf2_9ce4_8422_2325 ^ u64::from(dst.port), mix);
    (&MET[hash as usize % ENTRIES], hash & !u64::from(u32::MAX))
}

/// The channel of the connection before, if it is still one.
pub(super) fn known(dst: &Addr) -> Option<&'static Chan> {
    let (entry, tag) = entry(dst);
    let known = entry.load(Ordering::Relaxed);
    let id = known as u32;
    (known & !u64::from(u32::MAX) == tag && ![0, SEVERAL].contains(&id)).then(|| chan::by_id(id, CLIENT)).flatten()
}

/// A connection to it goes over to this channel.
pub(super) fn note(dst: &Addr, c: &Chan) {
    let (entry, tag) = entry(dst);
    let new = tag | u64::from(c.id.load(Ordering::Relaxed));
    let old = entry.load(Ordering::Relaxed);
    if old != new && old != tag | u64::from(SEVERAL) {
        entry.store(new, Ordering::Relaxed);
    }
}

/// The channel of one connection is not that of another: the monitor is asked for each from here on.
pub fn several(dst: &Addr) {
    let (entry, tag) = entry(dst);
    entry.store(tag | u64::from(SEVERAL), Ordering::Relaxed);
}
