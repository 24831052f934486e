//! Measures how long the loop works on one thing before it turns to the next.
//!
//! Wall time says how long other clients wait. On a busy machine it includes time that the
//! scheduler gave to other programs. CPU time says what the turn itself has cost.

use crate::report::cpu_time;
use fsocket_proto::{report, Request};
use std::collections::BTreeMap;
use std::time::{Duration, Instant};

/// Buckets for the duration of turns: up to 1 µs, 2 µs, 4 µs, … and longer.
const BUCKETS: usize = 24;
/// Reading CPU time takes a system call. So it is read only when this much wall time has passed
/// since the last reading. The CPU time of a turn is overestimated by this much at most.
const EACH: Duration = Duration::from_micros(100);

/// Kinds of work. If a user's turn has several pieces of work, its time counts for the last one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Doing {
    /// Handling what epoll reports.
    Events,
    /// Accepting new clients.
    Accepting,
    /// Handling a request of this kind.
    Request(u32),
    /// Removing a process that has ended.
    Ending,
    /// Removing listeners that have ended.
    Unlistening,
    /// Searching for channels that have lost a side.
    Sweeping,
    /// Work that is due at a certain time: sending again, looking at channels.
    Due,
    /// Local listen sockets and their queues.
    Zones,
    /// Deciding where connections over shared memory go.
    Dispatching,
}

impl Doing {
    fn name(self) -> String {
        match self {
            Doing::Request(kind) => Request::name(kind).map_or_else(|| format!("request {kind}"), str::to_owned),
            other => format!("{other:?}").to_lowercase(),
        }
    }
}

/// The longest turn of one kind, in wall time and in CPU time.
#[derive(Clone, Copy, Default)]
struct Longest {
    wall: Duration,
    cpu: Duration,
}

pub struct Pace {
    since: Instant,
    doing: Doing,
    /// When CPU time was last read, and its value then.
    read_at: Instant,
    cpu: Duration,
    longest: BTreeMap<Doing, Longest>,
    wall: [u64; BUCKETS],
    cpus: [u64; BUCKETS],
}

impl Default for Pace {
    fn default() -> Pace {
        let now = Instant::now();
        Pace {
            since: now,
            doing: Doing::Events,
            read_at: now,
            cpu: cpu_time(),
            longest: BTreeMap::new(),
            wall: [0; BUCKETS],
            cpus: [0; BUCKETS],
        }
    }
}

impl Pace {
    /// Begins to measure: the loop has slept until now.
    pub fn begin(&mut self) {
        self.since = Instant::now();
        self.doing = Doing::Events;
    }

    /// Sets the kind of work that follows.
    pub fn is(&mut self, doing: Doing) {
        self.doing = doing;
    }

    /// Ends one turn and begins the next one.
    pub fn lap(&mut self) {
        let now = Instant::now();
        let wall = now.duration_since(self.since);
        let mut cpu = wall;
        if now.duration_since(self.read_at) >= EACH {
            let all = cpu_time();
            cpu = wall.min(all.saturating_sub(self.cpu));
            (self.read_at, self.cpu) = (now, all);
        }
        self.note(wall, cpu);
        self.since = now;
    }

    fn note(&mut self, wall: Duration, cpu: Duration) {
        self.wall[bucket(wall)] += 1;
        self.cpus[bucket(cpu)] += 1;
        let longest = self.longest.entry(self.doing).or_default();
        longest.wall = longest.wall.max(wall);
        longest.cpu = longest.cpu.max(cpu);
    }

    pub fn report(&self) -> report::Loop {
        let us = |d: Duration| d.as_micros() as u64;
        let of = |(doing, l): (&Doing, &Longest)| report::Piece {
            name: doing.name(),
            longest_us: us(l.wall),
            longest_cpu_us: us(l.cpu),
        };
        let pieces: Vec<_> = self.longest.iter().map(of).collect();
        report::Loop {
            longest_us: pieces.iter().map(|p| p.longest_us).max().unwrap_or_default(),
            longest_cpu_us: pieces.iter().map(|p| p.longest_cpu_us).max().unwrap_or_default(),
            turns: self.wall.to_vec(),
            turns_cpu: self.cpus.to_vec(),
            pieces,
        }
    }

    /// Sets all counts and maxima to zero.
    pub fn reset(&mut self) {
        *self = Pace { since: self.since, doing: self.doing, ..Pace::default() };
    }
}

fn bucket(took: Duration) -> usize {
    let us = took.as_nanos().div_ceil(1000).max(1).next_power_of_two();
    (us.trailing_zeros() as usize).min(BUCKETS - 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn turns_are_counted_by_their_length() {
        let mut p = Pace::default();
        for us in [0, 1, 2, 3, 4, 5, 1_000_000, 100_000_000] {
            p.note(Duration::from_micros(us), Duration::ZERO);
        }
        assert_eq!((p.wall[0], p.wall[1], p.wall[2], p.wall[3]), (2, 1, 2, 1));
        assert_eq!((p.wall[20], p.wall[BUCKETS - 1], p.cpus[0]), (1, 1, 8));
        assert_eq!((p.report().longest_us, p.report().longest_cpu_us), (100_000_000, 0));
        p.reset();
        assert_eq!(p.report().longest_us, 0);
    }

    #[test]
    fn a_turn_that_sleeps_costs_no_cpu_time() {
        let mut p = Pace::default();
        p.begin();
        p.is(Doing::Request(1));
        std::thread::sleep(Duration::from_millis(20));
        p.lap();
        let report = p.report();
        assert!(report.longest_us >= 20_000 && report.longest_cpu_us < report.longest_us, "{report:?}");
        assert_eq!((report.pieces.len(), report.pieces[0].name.as_str()), (1, "Hello"));
    }
}
