//! Facts about addresses that hold for some seconds.

use crate::fnv::Fnv;
use core::sync::atomic::{AtomicU64, Ordering};
use fsocket_sys as sys;

/// Nobody on this host is at these, as the monitor has said. (Port 0: with whatever port.) A program that talks to
/// other hosts asks about one connection to each address in a while, and not about every one.
pub static STRANGERS: Lately = Lately::new();
/// The process that accepts there passes its connections to others: one has gone over where it was passed to.
pub static PASSED_ON: Lately = Lately::new();

/// As long as other answers of the monitor's hold.
const SECS: u64 = fsocket_proto::ROUTE_SECS;
const PLACES: usize = 64;

/// Addresses with their ports. Of each: 32 bits of its hash, and the second until which it holds. One that shares
/// the place of another takes it.
pub struct Lately([AtomicU64; PLACES]);

impl Lately {
    const fn new() -> Lately {
        Lately([const { AtomicU64::new(0) }; PLACES])
    }

    fn place(&self, h: u64) -> &AtomicU64 {
        &self.0[(h >> 32) as usize % PLACES]
    }

    pub fn note(&self, ip: &[u8; 16], port: u16) {
        let h = hash(ip, port);
        self.place(h).store(h << 32 | (now() + SECS) & 0xffff_ffff, Ordering::Relaxed);
    }

    pub fn has(&self, ip: &[u8; 16], port: u16) -> bool {
        let h = hash(ip, port);
        let known = self.place(h).load(Ordering::Relaxed);
        known >> 32 == h & 0xffff_ffff && known & 0xffff_ffff > now() & 0xffff_ffff
    }
}

fn hash(ip: &[u8; 16], port: u16) -> u64 {
    let mut h = Fnv::new();
    h.add(ip);
    h.add(&port.to_ne_bytes());
    h.value()
}

fn now() -> u64 {
    sys::now_ns() / 1_000_000_000
}

#[cfg(test)]
mod tests {
    use super::Lately;

    #[test]
    fn an_address_is_known_with_its_port() {
        let (known, ip) = (Lately::new(), [7; 16]);
        assert!(!known.has(&ip, 80));
        known.note(&ip, 80);
        assert!(known.has(&ip, 80));
        assert!(!known.has(&ip, 81) && !known.has(&[8; 16], 80));
    }
}
