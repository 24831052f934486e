//! Options that the program has set on listeners, and on sockets before their path was chosen.

use core::sync::atomic::{AtomicI32, AtomicU32, AtomicU64, Ordering::Relaxed};
use fsocket_runtime::options::{COUNT, DEFAULTS, KEPT};

/// The recorded options ([`fsocket_runtime::options::TABLE`]), the time limits, and a list of
/// options that only the placeholder has.
pub struct Options {
    values: [AtomicI32; COUNT],
    receive_timeout: AtomicU64,
    send_timeout: AtomicU64,
    kept: Kept,
}

impl Options {
    pub(super) fn reset(&self) {
        self.set_values(DEFAULTS);
        self.kept.0.iter().for_each(|entry| entry.store(0, Relaxed));
        self.set_receive_timeout(0);
        self.set_send_timeout(0);
    }

    /// The value of option `i` of the table.
    pub fn value(&self, i: usize) -> i32 {
        self.values[i].load(Relaxed)
    }
    pub fn set_value(&self, i: usize, value: i32) {
        self.values[i].store(value, Relaxed);
    }
    pub fn values(&self) -> [i32; COUNT] {
        core::array::from_fn(|i| self.value(i))
    }
    pub fn set_values(&self, values: [i32; COUNT]) {
        self.values.iter().zip(values).for_each(|(place, value)| place.store(value, Relaxed));
    }

    /// SO_RCVTIMEO, nanoseconds; 0: none.
    pub fn receive_timeout(&self) -> u64 {
        self.receive_timeout.load(Relaxed)
    }
    pub fn set_receive_timeout(&self, ns: u64) {
        self.receive_timeout.store(ns, Relaxed);
    }
    /// SO_SNDTIMEO, nanoseconds; 0: none.
    pub fn send_timeout(&self) -> u64 {
        self.send_timeout.load(Relaxed)
    }
    pub fn set_send_timeout(&self, ns: u64) {
        self.send_timeout.store(ns, Relaxed);
    }

    /// The options that only the placeholder has.
    pub fn kept(&self) -> &Kept {
        &self.kept
    }
}

/// A list of socket options by level and name. The list only grows. If it overflows, it stands
/// for all options. Zero is the empty list.
pub struct Kept([AtomicU32; KEPT]);

/// An entry of [`Kept`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum KeptOption {
    /// Level and name.
    One(i32, i32),
    /// The list was too short: any option may be set.
    All,
}

impl KeptOption {
    fn packed(self) -> u32 {
        match self {
            KeptOption::One(level, name) => (level as u32) << 16 | name as u32 & 0xFFFF,
            KeptOption::All => u32::MAX,
        }
    }
    fn of(packed: u32) -> Option<KeptOption> {
        match packed {
            0 => None,
            u32::MAX => Some(KeptOption::All),
            one => Some(KeptOption::One((one >> 16) as i32, (one & 0xFFFF) as i32)),
        }
    }
}

impl Kept {
    #[allow(clippy::new_without_default)]
    pub const fn new() -> Kept {
        Kept([const { AtomicU32::new(0) }; KEPT])
    }
    #[inline]
    pub fn is_empty(&self) -> bool {
        self.0[0].load(Relaxed) == 0
    }
    pub fn iter(&self) -> impl Iterator<Item = KeptOption> + '_ {
        self.0.iter().map_while(|entry| KeptOption::of(entry.load(Relaxed)))
    }
    /// Adds an option. Numbers that do not fit into an entry are left out.
    pub fn insert(&self, option: KeptOption) {
        if let KeptOption::One(level, name) = option {
            if !(0..0x8000).contains(&level) || !(0..0x8000).contains(&name) {
                return;
            }
        }
        let new = option.packed();
        for entry in &self.0 {
            match entry.load(Relaxed) {
                0 => return entry.store(new, Relaxed),
                there if there == new => return,
                _ => {}
            }
        }
        self.0[KEPT - 1].store(u32::MAX, Relaxed);
    }
    /// Adds all options of `from` to this list.
    pub fn merge(&self, from: &Kept) {
        from.iter().for_each(|option| self.insert(option));
    }
    /// Makes this list equal to `from`.
    pub fn copy(&self, from: &Kept) {
        self.0.iter().zip(&from.0).for_each(|(to, from)| to.store(from.load(Relaxed), Relaxed));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_full_list_means_all() {
        let list = Kept::new();
        assert!(list.is_empty());
        for name in 0..KEPT as i32 {
            list.insert(KeptOption::One(1, name));
            list.insert(KeptOption::One(1, name));
        }
        assert_eq!(list.iter().count(), KEPT);
        assert!(!list.iter().any(|o| o == KeptOption::All));
        list.insert(KeptOption::One(6, 99));
        assert_eq!(list.iter().last(), Some(KeptOption::All));
        let other = Kept::new();
        other.merge(&list);
        assert_eq!(other.iter().last(), Some(KeptOption::All));
    }

    #[test]
    fn numbers_that_do_not_fit_are_left_out() {
        let list = Kept::new();
        for (level, name) in [(-1, 1), (0x8000, 1), (1, -1), (1, 0x8000)] {
            list.insert(KeptOption::One(level, name));
        }
        assert!(list.is_empty());
    }
}
