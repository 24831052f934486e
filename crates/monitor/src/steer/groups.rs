//! Which CPU each flow group is steered to, which zone has moved it there, and when it returns
//! (Affinity-Accept, section 3.3.2).

use fsocket_bpf::steer::{dealt, GROUPS};
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

/// In the paper, a core has 85 flow groups (4,096 over 48 cores) and moves one every 100 ms: all
/// of them in 8.5 s. With fewer CPUs each has more groups, and moves proportionally more at a
/// time.
const SHARE: usize = 85;

/// A wish to move flow groups: a zone that is not busy takes them from the zone from which it has
/// stolen most.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub struct Move {
    /// SO_NETNS_COOKIE of the listener.
    pub netns: u64,
    /// The CPUs that give and take the groups.
    pub from: u32,
    pub to: u32,
    /// The giving zone is busy: its queue is long.
    pub busy: bool,
    /// The giving zone has lost most of its connections to thieves.
    pub most: bool,
}

/// The flow groups of a steered device: the present CPU of each, and its own (home) CPU.
#[derive(Debug)]
pub struct Groups {
    now: Vec<u32>,
    home: Vec<u32>,
    cpus: usize,
    /// Where the search for the next group begins.
    next: usize,
    pub moved: u64,
    pub returned: u64,
}

impl Groups {
    /// Groups dealt out to the CPUs in turn, as `Programs::set_groups` does.
    pub fn dealt(cpus: &[u32]) -> Groups {
        Groups::at((0..GROUPS).filter_map(|group| dealt(group, cpus)).collect(), cpus.len())
    }

    /// `home` has the present CPU of each group. `cpus`: the number of CPUs.
    pub fn at(home: Vec<u32>, cpus: usize) -> Groups {
        Groups { now: home.clone(), home, cpus, next: 0, moved: 0, returned: 0 }
    }

    /// How many groups move at a time.
    pub fn step(&self, asked: u32) -> usize {
        match asked {
            0 => (self.now.len() / self.cpus.max(1)).div_ceil(SHARE),
            n => n as usize,
        }
    }

    /// Whether any group is not on its home CPU.
    pub fn any_away(&self) -> bool {
        self.now != self.home
    }

    /// How many groups are not on their home CPUs.
    pub fn away(&self) -> u32 {
        self.now.iter().zip(&self.home).filter(|(now, home)| now != home).count() as u32
    }

    /// The present CPU and the home CPU of a group.
    pub fn of(&self, group: usize) -> Option<(u32, u32)> {
        self.now.get(group).copied().zip(self.home.get(group).copied())
    }

    /// Replaces all groups. Each item: present CPU and home CPU.
    pub fn replace(&mut self, groups: impl Iterator<Item = (u32, u32)>) {
        (self.now, self.home) = groups.unzip();
    }

    /// Gives the groups new home CPUs. Groups that were at home move along.
    pub fn rehome(&mut self, home: Vec<u32>) {
        for (now, (old, new)) in self.now.iter_mut().zip(self.home.iter().zip(&home)) {
            if now == old {
                *now = *new;
            }
        }
        self.home = home;
    }

    /// Makes one round of moves and returns, of `asked` groups at a time (0: the paper's share).
    /// `moves`: those between CPUs of this device. `zone`: whether a CPU is a balanced zone. `set`
    /// sets a group in the BPF program or card; false: it failed. Returns whether some groups are
    /// not at home.
    /// A zone whose CPU has no time left also gives groups to one that has time, even if no
    /// connection was stolen. (The scheduler would perhaps run its worker at once, but at the cost
    /// of other work on that CPU.)
    pub fn turn(
        &mut self,
        moves: &[&Move],
        zone: impl Fn(&u32) -> bool,
        spare: &Spare,
        asked: u32,
        mut set: impl FnMut(u32, u32) -> bool,
    ) -> bool {
        let n = self.step(asked);
        let mut left = Vec::new();
        for m in moves.iter().filter(|m| spare.agrees(m)) {
            self.take(m.from, m.to, n, &mut set);
            left.push(m.from);
        }
        for from in spare.lasting.iter().filter(|cpu| zone(cpu) && !left.contains(cpu)) {
            if let Some(to) = self.least(spare.idle.iter().copied().filter(&zone)) {
                self.take(*from, to, n, &mut set);
            }
        }
        let away = self.any_away();
        if away {
            for cpu in spare.idle.iter().filter(|cpu| !left.contains(cpu)) {
                self.bring_back(*cpu, n, &mut set);
            }
        }
        away
    }

    /// Number of groups on each CPU.
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

    /// Moves up to `n` groups from one CPU to another. `set` sets a group in the BPF program or
    /// card; false: it failed.
    pub fn take(&mut self, from: u32, to: u32, n: usize, set: impl FnMut(u32, u32) -> bool) {
        let moved = self.change(n, |now, _| (now == from).then_some(to), set);
        self.moved += moved;
    }

    /// The CPU with the fewest groups among these.
    pub fn least(&self, cpus: impl Iterator<Item = u32>) -> Option<u32> {
        let by_cpu = self.by_cpu();
        cpus.min_by_key(|cpu| by_cpu.get(cpu).copied().unwrap_or(0))
    }

    /// Brings up to `n` groups back to their home CPU.
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
        // The next search starts behind these groups, so that other clients are affected.
        self.next = (self.next + n) % self.now.len().max(1);
        changed
    }
}

/// For each CPU: idle time and total time, in clock ticks.
type Times = BTreeMap<u32, (u64, u64)>;

/// Which CPUs have time to spare and which have none, from /proc/stat.
#[derive(Debug, Default)]
pub struct Spare {
    last: Option<(Instant, Times)>,
    pub idle: BTreeSet<u32>,
    /// CPUs that are idle for less than half of the time.
    pub half: BTreeSet<u32>,
    /// CPUs without idle time: other work or too many workers run there.
    pub full: BTreeSet<u32>,
    /// CPUs that were full at several looks in a row.
    pub lasting: BTreeSet<u32>,
    /// The number of successive looks at which a CPU was full.
    streak: BTreeMap<u32, u32>,
}

impl Spare {
    /// The shortest time between two looks. A clock tick is 10 ms, so a share of less time says
    /// little.
    const OVER: Duration = Duration::from_millis(300);
    /// A CPU with at least this much idle time (percent) can take its groups back.
    const IDLE: u64 = 20;
    /// A CPU with less idle time than this (percent) is full.
    const FULL: u64 = 3;
    /// A CPU that was full at this many looks in a row is lastingly full.
    const LASTS: u32 = 3;

    /// Reads the recent idle time of each CPU, if it is time.
    pub fn look(&mut self, now: Instant) -> &Spare {
        match &self.last {
            Some((at, _)) if now.saturating_duration_since(*at) < Self::OVER => {}
            // The last look is too old to say anything about the present.
            Some((at, _)) if now.saturating_duration_since(*at) > Self::OVER * 4 => {
                *self = Spare { last: Some((now, read())), ..Spare::default() };
            }
            Some((_, before)) => {
                let here = read();
                self.idle = share(before, &here, |idle| idle >= Self::IDLE);
                self.half = share(before, &here, |idle| idle < 50);
                self.full = share(before, &here, |idle| idle < Self::FULL);
                self.streak.retain(|cpu, _| self.full.contains(cpu));
                for cpu in &self.full {
                    *self.streak.entry(*cpu).or_default() += 1;
                }
                self.lasting = self.streak.iter().filter(|(_, n)| **n >= Self::LASTS).map(|(cpu, _)| *cpu).collect();
                self.last = Some((now, here));
            }
            None => self.last = Some((now, read())),
        }
        self
    }

    /// Whether this wish is a reason to move groups. A few connections that were stolen while a
    /// worker did not look for a moment are no reason. Steals also do not move groups to a CPU
    /// that has less time.
    pub fn agrees(&self, m: &Move) -> bool {
        m.busy || m.most && !self.is_worse(m.to, m.from)
    }

    /// Whether CPU `one` is full and the other is not.
    fn is_worse(&self, one: u32, other: u32) -> bool {
        self.full.contains(&one) && !self.full.contains(&other)
    }
}

/// CPUs whose share of idle time (percent) between two readings is `such`.
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
        // The columns: user nice system idle iowait irq softirq steal. Time of guests is included
        // in user.
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
        // A client that uses only every second port.
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
        // With 48 CPUs, as in the paper, one group moves at a time.
        assert_eq!(Groups::dealt(&(0..48).collect::<Vec<_>>()).step(0), 1);
        assert!(Groups::dealt(&[]).by_cpu().is_empty());
        // The table of a card with 128 entries.
        assert_eq!(Groups::at((0..128).map(|i| i % 4).collect(), 4).step(0), 1);
    }

    #[test]
    fn only_one_that_has_no_time_is_worse_than_one_that_has() {
        let mut spare = Spare::default();
        assert!(!spare.is_worse(0, 1));
        spare.full = BTreeSet::from([1]);
        assert!(spare.is_worse(1, 0));
        assert!(!spare.is_worse(0, 1));
        let few = |from, to| Move { netns: 0, from, to, busy: false, most: false };
        let most = |from, to| Move { most: true, ..few(from, to) };
        assert!(spare.agrees(&most(1, 0)) && !spare.agrees(&most(0, 1)));
        assert!(!spare.agrees(&few(1, 0)), "a moment");
        assert!(spare.agrees(&Move { busy: true, ..few(0, 1) }), "its queue is long");
        spare.full.insert(0);
        assert!(!spare.is_worse(1, 0), "neither has any");
        assert!(spare.agrees(&most(1, 0)) && spare.agrees(&most(0, 1)));
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
