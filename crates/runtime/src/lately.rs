//! Facts about addresses that stay valid for some seconds.

use crate::fnv::Fnv;
use core::sync::atomic::{AtomicU64, Ordering};
use fsocket_sys as sys;

/// Addresses at which the monitor knows no listener of this host. (Port 0: any port.) So a program
/// that talks to other hosts asks the monitor once in a while for each address, and not for each
/// connection.
pub static STRANGERS: Lately = Lately::new();
/// Addresses of listeners whose process passes its connections to other processes. A connection to
/// them moves to shared memory in the receiving process.
pub static PASSED_ON: Lately = Lately::new();

/// Seconds for which an entry is valid, as for other answers of the monitor.
const SECS: u64 = fsocket_proto::ROUTE_SECS;
const PLACES: usize = 64;

/// Entries for addresses with ports. An entry has 32 bits of the address's hash, and the second
/// until which it is valid. A new entry replaces an older one in the same place.
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
