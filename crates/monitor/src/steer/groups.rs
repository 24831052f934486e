//! Which CPU a flow group is steered to, by whom it was moved, and when it may come
//! back (Affinity-Accept, 3.3.2).

use fsocket_bpf::steer::{dealt, GROUPS};
use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

/// In the paper one of 85 groups of a core (4,096 over 48) moves every 100 ms: a whole
/// CPU's share in 8.5 s. Fewer CPUs have more groups each, and move as many more at a time.
const SHARE: usize = 85;

/// The flow groups of a steered device.
#[derive(Debug)]
pub struct Groups {
    now: Vec<u32>,
    home: Vec<u32>,
    cpus: usize,
    /// Where the search for the next one begins.
    next: usize,
    pub moved: u64,
    pub returned: u64,
}

impl Groups {
    /// Dealt out in turn, as `Programs::set_groups` does.
    pub fn dealt(cpus: &[u32]) -> Groups {
        Groups::at((0..GROUPS).filter_map(|group| dealt(group, cpus)).collect(), cpus.len())
    }

    /// As they are found: by group its CPU, one of so many.
    pub fn at(home: Vec<u32>, cpus: usize) -> Groups {
        Groups { now: home.clone(), home, cpus, next: 0, moved: 0, returned: 0 }
    }

    /// How many move at a time.
    pub fn step(&self, asked: u32) -> usize {
        match asked {
            0 => (self.now.len() / self.cpus.max(1)).div_ceil(SHARE),
            n => n as usize,
        }
    }

    /// Is any group not where it was at first?
    pub fn any_away(&self) -> bool {
        self.now != self.home
    }

    /// Number of groups by CPU.
    pub fn by_cpu(&self) -> BTreeMap<u32, u32> {
        let mut sum = BTreeMap::new();
        for cpu in self.home.iter().chain(&self.now) {
            sum.entry(*cpu).or_insert(0);
        }
        for cpu in &self.now {
            *sum.entry(*cpu).or_default() += 1;
        }
        sum
    }

    /// Moves up to `n` groups from one CPU to another. `set` tells the program; false: it
    /// could not be told.
    pub fn take(&mut self, from: u32, to: u32, n: usize, set: impl FnMut(u32, u32) -> bool) {
        let moved = self.change(n, |now, _| (now == from).then_some(to), set);
        self.moved += moved;
    }

    /// The one of these CPUs that has the fewest groups.
    pub fn least(&self, cpus: impl Iterator<Item = u32>) -> Option<u32> {
        let by_cpu = self.by_cpu();
        cpus.min_by_key(|cpu| by_cpu.get(cpu).copied().unwrap_or(0))
    }

    /// Brings up to `n` groups of a CPU back to it.
    pub fn bring_back(&mut self, cpu: u32, n: usize, set: impl FnMut(u32, u32) -> bool) {
        let back = self.change(n, |now, home| (home == cpu && now != cpu).then_some(cpu), set);
        self.returned += back;
    }

    fn change(&mut self, n: usize, to: impl Fn(u32, u32) -> Option<u32>, mut set: impl FnMut(u32, u32) -> bool) -> u64 {
        let mut changed = 0;
        for k in 0..self.now.len() {
            if changed as usize == n {
                break;
            }
            let g = (self.next + k) % self.now.len();
            if let Some(cpu) = to(self.now[g], self.home[g]) {
                if set(g as u32, cpu) {
                    self.now[g] = cpu;
                    changed += 1;
                }
            }
        }
        // Not always the same clients.
        self.next = (self.next + n) % self.now.len().max(1);
        changed
    }
}

/// Idle time and all time by CPU, in clock ticks.
type Times = BTreeMap<u32, (u64, u64)>;

/// Which CPUs have time to spare and which have none, from /proc/stat.
#[derive(Debug, Default)]
pub struct Spare {
    last: Option<(Instant, Times)>,
    pub idle: BTreeSet<u32>,
    /// Somebody else's work is done there, or more of ours than fits.
    pub full: BTreeSet<u32>,
}

impl Spare {
    /// A clock tick is 10 ms: over less, a share says little.
    const OVER: Duration = Duration::from_millis(300);
    /// A CPU with that share of idle time can take its groups back, percent.
    const IDLE: u64 = 20;
    /// One with less than that has none, percent.
    const FULL: u64 = 3;

    /// What they had lately.
    pub fn look(&mut self, now: Instant) -> &Spare {
        match &self.last {
            Some((at, _)) if now.saturating_duration_since(*at) < Self::OVER => {}
            // Too long ago to say anything about now.
            Some((at, _)) if now.saturating_duration_since(*at) > Self::OVER * 4 => {
                self.idle.clear();
                self.full.clear();
                self.last = Some((now, read()));
            }
            Some((_, before)) => {
                let here = read();
                self.idle = share(before, &here, |idle| idle >= Self::IDLE);
                self.full = share(before, &here, |idle| idle < Self::FULL);
                self.last = Some((now, here));
            }
            None => self.last = Some((now, read())),
        }
        self
    }

    /// Has the one no time left and the other some?
    pub fn is_worse(&self, one: u32, other: u32) -> bool {
        self.full.contains(&one) && !self.full.contains(&other)
    }
}

/// CPUs whose idle time in between, percent, is such.
fn share(before: &Times, now: &Times, such: impl Fn(u64) -> bool) -> BTreeSet<u32> {
    let is_such = |(cpu, (idle, all)): (&u32, &(u64, u64))| {
        let (idle_then, all_then) = before.get(cpu)?;
        let (idle, all) = (idle.saturating_sub(*idle_then), all.saturating_sub(*all_then));
        (all > 0 && such(idle * 100 / all)).then_some(*cpu)
    };
    now.iter().filter_map(is_such).collect()
}

fn read() -> Times {
    parse(&std::fs::read_to_string("/proc/stat").unwrap_or_default())
}

fn parse(text: &str) -> Times {
    let line = |line: &str| {
        let (name, rest) = line.split_once(' ')?;
        let cpu = name.strip_prefix("cpu")?.parse().ok()?;
        // user nice system idle iowait irq softirq steal; guests are in user.
        let v: Vec<u64> = rest.split_whitespace().take(8).filter_map(|w| w.parse().ok()).collect();
        Some((cpu, (v.get(3)? + v.get(4).copied().unwrap_or(0), v.iter().sum())))
    };
    text.lines().filter_map(line).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn groups_move_and_come_back() {
        let mut g = Groups::dealt(&[0, 1]);
        assert_eq!(g.step(0), 25);
        assert_eq!(g.step(3), 3);
        assert!(!g.any_away());
        // A client that takes every second port.
        for cpu in 0..2 {
            assert_eq!((0..GROUPS).step_by(2).filter(|n| g.now[*n] == cpu).count(), 1024);
        }
        g.take(1, 0, 100, |group, cpu| group / 2 % 2 == 1 && cpu == 0);
        assert_eq!((g.by_cpu()[&0], g.by_cpu()[&1], g.moved), (2148, 1948, 100));
        assert!(g.any_away());
        g.take(1, 0, 4096, |_, _| true);
        assert_eq!(g.by_cpu(), BTreeMap::from([(0, 4096), (1, 0)]));
        g.bring_back(0, 4096, |_, _| panic!("they are not his"));
        while g.any_away() {
            g.bring_back(1, 100, |_, _| true);
        }
        assert_eq!((g.moved, g.returned), (2048, 2048));
        g.take(1, 0, 10, |_, _| false);
        assert!(!g.any_away(), "the program could not be told");
        // 48 CPUs, as the paper: one at a time.
        assert_eq!(Groups::dealt(&(0..48).collect::<Vec<_>>()).step(0), 1);
        assert!(Groups::dealt(&[]).by_cpu().is_empty());
        // A card's table of 128 entries.
        assert_eq!(Groups::at((0..128).map(|i| i % 4).collect(), 4).step(0), 1);
    }

    #[test]
    fn only_one_that_has_no_time_is_worse_than_one_that_has() {
        let mut spare = Spare::default();
        assert!(!spare.is_worse(0, 1));
        spare.full = BTreeSet::from([1]);
        assert!(spare.is_worse(1, 0));
        assert!(!spare.is_worse(0, 1));
        spare.full.insert(0);
        assert!(!spare.is_worse(1, 0), "neither has any");
    }

    #[test]
    fn time_to_spare() {
        let text = |idle: u64, user: u64| format!("cpu  9 9 9 9\ncpu0 {user} 0 0 {idle} 0 0 0 0 0 0\nintr 5\n");
        let then = parse(&text(100, 100));
        assert_eq!(then[&0], (100, 200));
        let idle = |then: &Times, now: &str| share(then, &parse(now), |idle| idle >= Spare::IDLE);
        assert!(idle(&then, &text(101, 129)).is_empty());
        assert!(idle(&then, &text(107, 123)).contains(&0));
        assert!(idle(&then, &text(100, 100)).is_empty());
        assert!(share(&then, &parse(&text(100, 140)), |idle| idle < Spare::FULL).contains(&0));
    }
}
