//! Limits how often something may happen, for each of many keys.

use std::collections::HashMap;
use std::hash::Hash;
use std::time::{Duration, Instant};

/// Number of keys that are remembered at once.
const MOST: usize = 1 << 14;

/// Each key may take `burst` at once, and one more after each interval `each`.
pub struct Rates<K> {
    burst: u32,
    each: Duration,
    /// When a key will have its whole burst again.
    full_at: HashMap<K, Instant>,
}

impl<K: Eq + Hash> Rates<K> {
    pub fn new(burst: u32, each: Duration) -> Rates<K> {
        Rates { burst, each, full_at: HashMap::new() }
    }

    /// Takes one for this key. False: the key has none left.
    pub fn take(&mut self, key: K, now: Instant) -> bool {
        if self.full_at.len() >= MOST && !self.full_at.contains_key(&key) {
            self.full_at.retain(|_, at| *at > now);
            if self.full_at.len() >= MOST {
                return false;
            }
        }
        let full = self.full_at.entry(key).or_insert(now);
        let then = (*full).max(now) + self.each;
        let may = then <= now + self.each * self.burst;
        if may {
            *full = then;
        }
        may
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_has_its_own_burst_and_rate() {
        let (start, each) = (Instant::now(), Duration::from_millis(10));
        let mut r = Rates::new(5, each);
        let mut took = |key, now| (0..100).filter(|_| r.take(key, now)).count();
        assert_eq!((took(1, start), took(1, start), took(2, start)), (5, 0, 5));
        assert_eq!((took(1, start + each * 3), took(1, start + each * 1000)), (3, 5));
    }

    #[test]
    fn those_that_have_rested_are_forgotten() {
        let (start, each) = (Instant::now(), Duration::from_secs(1));
        let mut r = Rates::new(1, each);
        let took = (0..2 * MOST).filter(|key| r.take(*key, start)).count();
        assert_eq!(took, MOST);
        assert!(r.take(usize::MAX, start + each * 2) && r.full_at.len() == 1);
    }
}
