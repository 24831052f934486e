//! Addresses at which nobody on this host is, as the monitor has said lately.
//!
//! A program that talks to other hosts asks about one connection to each address in a while, and not
//! about every one.

use crate::fnv::Fnv;
use core::sync::atomic::{AtomicU64, Ordering};
use fsocket_sys as sys;

/// As long as other answers of the monitor's hold.
const SECS: u64 = fsocket_proto::ROUTE_SECS;
const PLACES: usize = 64;
/// Of each address: 32 bits of its hash, and the second until which it holds. One that shares the
/// place of another takes it.
static KNOWN: [AtomicU64; PLACES] = [const { AtomicU64::new(0) }; PLACES];

fn hash(ip: &[u8; 16], port: u16) -> u64 {
    let mut h = Fnv::new();
    h.add(ip);
    h.add(&port.to_ne_bytes());
    h.value()
}

fn now() -> u64 {
    sys::now_ns() / 1_000_000_000
}

fn place(h: u64) -> &'static AtomicU64 {
    &KNOWN[(h >> 32) as usize % PLACES]
}

/// Nobody is there; `port` 0: with whatever port.
pub fn note(ip: &[u8; 16], port: u16) {
    let h = hash(ip, port);
    place(h).store(h << 32 | (now() + SECS) & 0xffff_ffff, Ordering::Relaxed);
}

pub fn is_one(ip: &[u8; 16], port: u16) -> bool {
    let h = hash(ip, port);
    let known = place(h).load(Ordering::Relaxed);
    known >> 32 == h & 0xffff_ffff && known & 0xffff_ffff > now() & 0xffff_ffff
}

#[cfg(test)]
mod tests {
    #[test]
    fn an_address_is_known_with_its_port() {
        let ip = [7; 16];
        assert!(!super::is_one(&ip, 80));
        super::note(&ip, 80);
        assert!(super::is_one(&ip, 80));
        assert!(!super::is_one(&ip, 81) && !super::is_one(&[8; 16], 80));
    }
}
