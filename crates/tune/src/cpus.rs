//! Sets of CPUs, and the two formats in which the kernel writes them.

use serde::{de, Deserialize, Deserializer, Serialize, Serializer};
use std::collections::BTreeSet;
use std::fmt;
use std::str::FromStr;

/// A set of CPU (or queue) numbers, of any size (not limited to 64).
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct CpuSet(BTreeSet<u32>);

/// A limit above the NR_CPUS of every kernel. A text with higher numbers is rejected.
const LIMIT: u32 = 1 << 16;

impl CpuSet {
    pub fn new() -> CpuSet {
        CpuSet::default()
    }

    pub fn one(cpu: u32) -> CpuSet {
        CpuSet(BTreeSet::from([cpu]))
    }

    pub fn len(&self) -> usize {
        self.0.len()
    }

    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    pub fn contains(&self, cpu: u32) -> bool {
        self.0.contains(&cpu)
    }

    pub fn insert(&mut self, cpu: u32) {
        self.0.insert(cpu);
    }

    pub fn first(&self) -> Option<u32> {
        self.0.first().copied()
    }

    pub fn iter(&self) -> impl Iterator<Item = u32> + '_ {
        self.0.iter().copied()
    }

    pub fn and(&self, other: &CpuSet) -> CpuSet {
        CpuSet(self.0.intersection(&other.0).copied().collect())
    }

    pub fn or(&self, other: &CpuSet) -> CpuSet {
        CpuSet(self.0.union(&other.0).copied().collect())
    }

    pub fn minus(&self, other: &CpuSet) -> CpuSet {
        CpuSet(self.0.difference(&other.0).copied().collect())
    }

    /// Parses the format of `smp_affinity_list`, `isolated`, `Cpus_allowed_list`: `0-3,8,10-11`,
    /// or nothing for the empty set.
    pub fn parse_list(text: &str) -> Result<CpuSet, BadCpus> {
        let bad = || BadCpus(text.trim().to_owned());
        let number = |t: &str| t.trim().parse::<u32>().ok().filter(|n| *n < LIMIT);
        let mut set = BTreeSet::new();
        for range in text.trim().split(',').filter(|r| !r.is_empty()) {
            let (first, last) = range.split_once('-').unwrap_or((range, range));
            let (first, last) = (number(first).ok_or_else(bad)?, number(last).ok_or_else(bad)?);
            if first > last {
                return Err(bad());
            }
            set.extend(first..=last);
        }
        Ok(CpuSet(set))
    }

    /// Parses the format of `rps_cpus`, `xps_cpus`: hexadecimal words of 32 bits with commas
    /// between them, the highest word first. Source: `bitmap_parse` in the kernel's
    /// lib/bitmap-str.c.
    pub fn parse_mask(text: &str) -> Result<CpuSet, BadCpus> {
        let bad = || BadCpus(text.trim().to_owned());
        let mut set = BTreeSet::new();
        for (i, word) in text.trim().rsplit(',').enumerate() {
            if word.is_empty() || word.len() > 8 || i as u32 * 32 >= LIMIT {
                return Err(bad());
            }
            let word = u32::from_str_radix(word, 16).map_err(|_| bad())?;
            set.extend((0..32).filter(|bit| word >> bit & 1 == 1).map(|bit| i as u32 * 32 + bit));
        }
        Ok(CpuSet(set))
    }

    /// The set in the format of `parse_mask`, with as many words as the highest CPU needs.
    pub fn mask(&self) -> String {
        let words = self.0.last().map_or(1, |last| last / 32 + 1);
        let word = |w: u32| self.0.range(w * 32..(w + 1) * 32).fold(0u32, |bits, cpu| bits | 1 << (cpu % 32));
        let mut text = format!("{:x}", word(words - 1));
        for w in (0..words - 1).rev() {
            text.push_str(&format!(",{:08x}", word(w)));
        }
        text
    }
}

impl FromIterator<u32> for CpuSet {
    fn from_iter<I: IntoIterator<Item = u32>>(cpus: I) -> CpuSet {
        CpuSet(cpus.into_iter().collect())
    }
}

/// Writes the set as a list such as `0-3,8`, and the empty set as `-`.
impl fmt::Display for CpuSet {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.is_empty() {
            return f.write_str("-");
        }
        f.write_str(&self.list())
    }
}

impl CpuSet {
    /// The set in the format of `parse_list`.
    pub fn list(&self) -> String {
        let mut ranges: Vec<(u32, u32)> = Vec::new();
        for cpu in self.iter() {
            match ranges.last_mut() {
                Some((_, last)) if *last + 1 == cpu => *last = cpu,
                _ => ranges.push((cpu, cpu)),
            }
        }
        let text: Vec<String> = ranges
            .iter()
            .map(|(first, last)| if first == last { first.to_string() } else { format!("{first}-{last}") })
            .collect();
        text.join(",")
    }
}

impl FromStr for CpuSet {
    type Err = BadCpus;
    fn from_str(text: &str) -> Result<CpuSet, BadCpus> {
        CpuSet::parse_list(text)
    }
}

impl Serialize for CpuSet {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(&self.list())
    }
}

impl<'de> Deserialize<'de> for CpuSet {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<CpuSet, D::Error> {
        let text = String::deserialize(deserializer)?;
        CpuSet::parse_list(&text).map_err(de::Error::custom)
    }
}

/// A text that does not describe a set of CPUs.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
#[error("'{0}' is not a set of CPUs")]
pub struct BadCpus(String);

#[cfg(test)]
mod tests {
    use super::*;

    fn list(text: &str) -> CpuSet {
        CpuSet::parse_list(text).unwrap()
    }

    #[test]
    fn lists() {
        assert_eq!(list("0-3,8\n").iter().collect::<Vec<_>>(), [0, 1, 2, 3, 8]);
        assert_eq!(list("\n"), CpuSet::new());
        assert_eq!(list("255").list(), "255");
        assert_eq!(list("0,1,2,4").list(), "0-2,4");
        for bad in ["3-1", "a", "1-", "-1", "0-99999999", "4294967296"] {
            assert!(CpuSet::parse_list(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn masks_beyond_64_cpus() {
        assert_eq!(CpuSet::parse_mask("3\n").unwrap(), list("0-1"));
        assert_eq!(CpuSet::parse_mask("00000001,00000000,80000001\n").unwrap(), list("0,31,64"));
        assert_eq!(list("0,31,64").mask(), "1,00000000,80000001");
        assert_eq!(CpuSet::new().mask(), "0");
        assert_eq!(list("255").mask(), format!("80000000{}", ",00000000".repeat(7)));
        for bad in ["", "g", "1,", "123456789", "0x3"] {
            assert!(CpuSet::parse_mask(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn a_mask_read_back_is_the_same_set() {
        for text in ["0", "5", "31-32", "0-255", "63,64,95,96,1023"] {
            assert_eq!(CpuSet::parse_mask(&list(text).mask()).unwrap(), list(text));
        }
    }
}
