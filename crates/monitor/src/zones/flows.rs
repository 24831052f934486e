//! Flow groups of a listener: which worker gets a new connection, by the CPU that receives its SYN
//! and by a hash of its addresses.
//!
//! If no device is steered by flow groups, these groups move between zones instead. They are slots
//! of the selection program. The packets of a moved group are still handled on the CPU that
//! receives them, and the connections are served on another CPU (as happens to every second one
//! with plain SO_REUSEPORT).

use crate::steer::groups::{Groups, Spare};
use crate::steer::Move;
use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

/// The monitor decides which CPUs receive connections after this time and this many connections.
const WINDOW: Duration = Duration::from_secs(2);
const ENOUGH: u64 = 256;
/// A CPU that receives less than this percentage of an even share keeps all its connections.
const EVEN: u64 = 150;
/// A CPU that receives less than this percentage of an even share has nothing worth moving.
const NOTHING: u64 = 5;
/// A CPU's connections are divided into this many parts. The CPU may keep only some of them.
const PARTS: u64 = 8;

pub struct Flows {
    /// The CPUs with workers, in order.
    cpus: Vec<u32>,
    per_cpu: usize,
    /// The CPUs that receive connections, as far as is known.
    sources: Vec<u32>,
    /// The flow groups, by source CPU and, within a source, by slot.
    groups: Groups,
    /// Connections that each CPU had received by the start of this time window.
    seen: BTreeMap<u32, u64>,
    since: Instant,
    /// The number of parts that each CPU of `cpus` keeps.
    kept: Vec<u64>,
}

impl Flows {
    pub fn new(cpus: Vec<u32>, per_cpu: usize, now: Instant) -> Flows {
        let kept = vec![PARTS; cpus.len()];
        let groups = Groups::at(homes(&cpus, &cpus, per_cpu, &kept), cpus.len());
        Flows { sources: cpus.clone(), cpus, per_cpu, groups, seen: BTreeMap::new(), since: now, kept }
    }

    pub fn cpus(&self) -> &[u32] {
        &self.cpus
    }

    pub fn groups(&self) -> &Groups {
        &self.groups
    }

    /// The CPU that serves a slot of `cpu`, if that is a different CPU.
    pub fn elsewhere(&self, cpu: u32, slot: usize) -> Option<u32> {
        self.slot(cpu, slot).map(|(now, _)| now).filter(|now| *now != cpu)
    }

    /// The CPU that serves a slot of a source CPU, and the slot's home CPU.
    fn slot(&self, cpu: u32, slot: usize) -> Option<(u32, u32)> {
        let at = self.sources.binary_search(&cpu).ok()?;
        self.groups.of(at * self.per_cpu + slot)
    }

    /// Moves groups and brings them back, see [`Groups::turn`]. Returns whether some are not at
    /// home, and whether any has moved.
    pub fn turn(&mut self, moves: &[Move], spare: &Spare, asked: u32) -> (bool, bool) {
        let Flows { cpus, groups, .. } = self;
        let moves: Vec<&Move> = moves.iter().filter(|m| cpus.contains(&m.from) && cpus.contains(&m.to)).collect();
        let mut changed = false;
        let away = groups.turn(
            &moves,
            |cpu| cpus.contains(cpu),
            spare,
            asked,
            |_, _| {
                changed = true;
                true
            },
        );
        (away, changed)
    }

    /// Decides again how many connections each CPU keeps. `received`: connections that each CPU
    /// has received so far. Some CPUs may receive far more than their share (a card with few
    /// queues, or a single client on this host). If that takes half of their time while other CPUs
    /// have time to spare, the others get a part, because their workers would otherwise be idle.
    /// Returns whether a slot has a new home CPU.
    pub fn share(&mut self, received: &BTreeMap<u32, u64>, spare: &Spare, now: Instant) -> bool {
        if now.saturating_duration_since(self.since) < WINDOW {
            return false;
        }
        let of = |m: &BTreeMap<u32, u64>, cpu| m.get(&cpu).copied().unwrap_or(0);
        // Saturating, because counters may be reset.
        let came = |cpu: &u32| of(received, *cpu).saturating_sub(of(&self.seen, *cpu));
        let lately: Vec<u64> = self.cpus.iter().map(came).collect();
        self.since = now;
        self.seen.clone_from(received);
        if lately.iter().sum::<u64>() < ENOUGH {
            return false;
        }
        let (all, n) = (lately.iter().sum::<u64>(), self.cpus.len() as u64);
        let receives = |received: &&(&u32, &u64)| received.1 * n * 100 >= all * NOTHING;
        let sources: Vec<u32> = self.cpus.iter().zip(&lately).filter(|r| receives(&r)).map(|(cpu, _)| *cpu).collect();
        let wanted = keep(&lately);
        let any = |keeps: bool, such: &BTreeSet<u32>| {
            self.cpus.iter().zip(&wanted).any(|(cpu, kept)| (*kept == PARTS) == keeps && such.contains(cpu))
        };
        let is_even = wanted.iter().all(|k| *k == PARTS);
        let kept =
            if is_even || any(false, &spare.half) && any(true, &spare.idle) { wanted } else { self.kept.clone() };
        // A difference of one part is ignored, so that the parts do not move back and forth.
        if sources == self.sources && kept.iter().zip(&self.kept).all(|(new, old)| new.abs_diff(*old) <= 1) {
            return false;
        }
        let homes = homes(&sources, &self.cpus, self.per_cpu, &kept);
        if sources != self.sources {
            let slots = sources.iter().flat_map(|cpu| (0..self.per_cpu).map(move |slot| (*cpu, slot)));
            let as_they_are: Vec<_> = slots.map(|(cpu, slot)| self.slot(cpu, slot).unwrap_or((cpu, cpu))).collect();
            self.groups.replace(as_they_are.into_iter());
            self.sources = sources;
        }
        self.kept = kept;
        self.groups.rehome(homes);
        true
    }
}

/// How many parts of its connections each CPU keeps.
fn keep(received: &[u64]) -> Vec<u64> {
    let (all, n) = (received.iter().sum::<u64>().max(1), received.len() as u64);
    if received.iter().all(|r| r * n * 100 < all * EVEN) {
        return vec![PARTS; received.len()];
    }
    // (all / n is an even share.)
    received.iter().map(|r| (all * PARTS + r * n / 2).checked_div(r * n).map_or(PARTS, |k| k.clamp(1, PARTS))).collect()
}

/// The home CPU of each slot, if each CPU keeps this many parts. The remaining slots go in turn to
/// the CPUs that keep everything.
fn homes(sources: &[u32], cpus: &[u32], per_cpu: usize, kept: &[u64]) -> Vec<u32> {
    let short: Vec<u32> = cpus.iter().zip(kept).filter(|(_, k)| **k == PARTS).map(|(cpu, _)| *cpu).collect();
    let mut turn = 0;
    let mut homes = Vec::with_capacity(sources.len() * per_cpu);
    for (cpu, kept) in cpus.iter().zip(kept).filter(|(cpu, _)| sources.contains(cpu)) {
        for slot in 0..per_cpu {
            homes.push(if (slot as u64 % PARTS) < *kept || short.is_empty() {
                *cpu
            } else {
                turn += 1;
                short[turn % short.len()]
            });
        }
    }
    homes
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Flow groups where all CPUs have time to spare, although those that receive are half busy.
    struct Seen {
        flows: Flows,
        spare: Spare,
        now: Instant,
    }

    impl Seen {
        fn new(cpus: u32, per_cpu: usize) -> Seen {
            let now = Instant::now();
            let mut spare = Spare::default();
            spare.idle = (0..cpus).collect();
            spare.half = (0..cpus).collect();
            Seen { flows: Flows::new((0..cpus).collect(), per_cpu, now), spare, now }
        }
        /// Ends a time window. `by_cpu`: all connections received so far.
        fn share(&mut self, by_cpu: &[u64]) -> bool {
            self.now += WINDOW;
            let received = by_cpu.iter().enumerate().map(|(cpu, n)| (cpu as u32, *n)).collect();
            self.flows.share(&received, &self.spare, self.now)
        }
        fn turn(&mut self) -> bool {
            self.flows.turn(&[], &self.spare, 0).1
        }
        fn elsewhere(&self, cpu: u32, to: u32) -> usize {
            (0..self.flows.per_cpu).filter(|slot| self.flows.elsewhere(cpu, *slot) == Some(to)).count()
        }
        fn by_cpu(&self) -> Vec<u32> {
            self.flows.groups().by_cpu().into_values().collect()
        }
    }

    #[test]
    fn what_is_received_evenly_stays() {
        let mut s = Seen::new(2, 1024);
        assert!(!s.share(&[10, 0]), "too few to tell");
        assert!(!s.share(&[600, 420]));
        assert_eq!((s.elsewhere(0, 1), s.elsewhere(1, 0)), (0, 0));
        assert_eq!(s.by_cpu(), [1024, 1024]);
    }

    #[test]
    fn one_that_receives_everything_shares_it() {
        let mut s = Seen::new(2, 1024);
        let half = std::mem::take(&mut s.spare.half);
        s.share(&[1000, 0]);
        assert_eq!(s.elsewhere(0, 1), 0, "it has time enough for that");
        s.spare.half = half;
        s.spare.idle.remove(&1);
        assert!(!s.share(&[2000, 0]), "and the other one has not");
        s.spare.idle.insert(1);
        s.flows.share(&BTreeMap::from([(0, 3000)]), &s.spare, s.now);
        assert_eq!(s.elsewhere(0, 1), 0, "for a moment");
        assert!(s.share(&[4000, 0]));
        assert_eq!((s.elsewhere(0, 1), s.flows.groups().away()), (512, 0), "they belong there");
        assert!(!s.share(&[5000, 0]), "as before");
        assert!(!s.share(&[0, 0]), "reset");
        assert!(s.share(&[500, 500]));
        assert_eq!(s.elsewhere(0, 1), 0);
        // Two of eight CPUs receive connections.
        let mut s = Seen::new(8, 64);
        assert!(s.share(&[900, 1100]));
        for cpu in 0..2 {
            assert!((2..8).all(|to| s.elsewhere(cpu, to) == 8));
            assert_eq!((s.elsewhere(cpu, 1 - cpu), s.elsewhere(cpu, cpu)), (0, 0));
        }
    }

    #[test]
    fn groups_move_and_come_back() {
        let mut s = Seen::new(2, 1024);
        assert!(s.share(&[1000, 0]));
        assert_eq!(s.by_cpu(), [512, 512], "CPU 1 receives nothing that could move");
        (s.spare.lasting, s.spare.idle) = ([1].into(), [0].into());
        while s.by_cpu()[1] > 0 {
            assert!(s.turn());
        }
        assert_eq!((s.elsewhere(0, 1), s.flows.groups().away()), (0, 512));
        // Now CPU 1 receives connections, too. CPU 0's slots that had moved there get it as their
        // home.
        assert!(s.share(&[1500, 500]));
        assert_eq!((s.flows.groups().away(), s.by_cpu()), (0, vec![1024, 1024]));
        while s.by_cpu()[1] > 0 {
            assert!(s.turn());
        }
        assert_eq!(s.elsewhere(1, 0), 1024);
        s.spare.lasting.clear();
        s.spare.idle.insert(1);
        while s.flows.groups().any_away() {
            assert!(s.turn());
        }
        assert_eq!((s.elsewhere(0, 1), s.elsewhere(1, 0)), (0, 0));
    }
}
