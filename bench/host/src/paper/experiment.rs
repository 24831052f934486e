//! Experiments of a section: steps that take turns, their measures, and the paper's values.

use crate::report::value_text;
use crate::runner;
use crate::scenario::{size_name, Better, Layout, Unit};
use crate::step::{Step, Values};
use crate::worker::Op;
use anyhow::Result;
use fsocket_bench_args::Path;
use serde::Serialize;

/// Stock, ours over shared memory, and stock again.
pub const WAYS: &[Path] = &[Path::Stock, Path::Ours, Path::Control];
/// A row of the bare machine or of pipes: there is nothing to compare.
pub const STOCK: &[Path] = &[Path::Stock];
/// [`WAYS`], and a bare queue in shared memory.
pub const WAYS_AND_QUEUE: &[Path] = &[Path::Stock, Path::Ours, Path::Control, Path::Queue];

/// The paper's value, in the unit of the row.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Claim {
    /// The values of Linux and of the paper's system.
    Values { linux: f64, system: f64, source: &'static str },
    /// The value of the paper's system. The paper gives none for Linux.
    Value { system: f64, source: &'static str },
    /// How many times better than Linux the paper's system is: from, to.
    Times { low: f64, high: f64, source: &'static str },
}

impl Claim {
    /// How many times better than Linux the paper's system is.
    pub fn times(self, better: Better) -> Option<[f64; 2]> {
        match self {
            Claim::Values { linux, system, .. } => {
                let times = if better == Better::Higher { system / linux } else { linux / system };
                Some([times, times])
            }
            Claim::Value { .. } => None,
            Claim::Times { low, high, .. } => Some([low, high]),
        }
    }

    pub fn text(self, unit: Unit, better: Better) -> String {
        let value = |v| value_text(v, unit);
        match self {
            Claim::Values { linux, system, source } => {
                let times = self.times(better).map_or(0.0, |t| t[0]);
                format!("{}, Linux {}: {} ({source})", value(system), value(linux), times_text(times))
            }
            Claim::Value { system, source } => format!("{} ({source})", value(system)),
            Claim::Times { low, high, source } if low == high => format!("{} ({source})", times_text(low)),
            Claim::Times { low, high, source } => format!("{} to {} ({source})", times_text(low), times_text(high)),
        }
    }
}

/// A factor with three digits; one below 1 is not rounded to 1.
pub fn times_text(times: f64) -> String {
    match times {
        t if t >= 99.5 => format!("{t:.0}x"),
        t if t >= 9.95 => format!("{t:.1}x"),
        t if (0.995..1.0).contains(&t) => format!("{:.3}x", t.min(0.999)),
        t => format!("{t:.2}x"),
    }
}

/// One value of an experiment's result.
#[derive(Debug, Clone)]
pub struct Measure {
    /// Key in the result of a step.
    pub key: &'static str,
    pub label: &'static str,
    pub unit: Unit,
    pub better: Better,
    pub claim: Option<Claim>,
    /// Is 0 a value? If not, it is an error.
    pub may_be_zero: bool,
}

impl Measure {
    pub fn lower(key: &'static str, label: &'static str, unit: Unit) -> Self {
        Measure { key, label, unit, better: Better::Lower, claim: None, may_be_zero: false }
    }

    pub fn higher(key: &'static str, label: &'static str, unit: Unit) -> Self {
        Measure { key, label, unit, better: Better::Higher, claim: None, may_be_zero: false }
    }

    pub fn may_be_zero(self) -> Self {
        Measure { may_be_zero: true, ..self }
    }

    pub fn claims(self, claim: impl Into<Option<Claim>>) -> Self {
        Measure { claim: claim.into(), ..self }
    }
}

type Run = Box<dyn Fn(&Step) -> Result<Values>>;

/// A program with one set of parameters. The ways take turns.
pub struct Experiment {
    pub name: String,
    pub layout: Layout,
    pub ways: &'static [Path],
    pub measures: Vec<Measure>,
    /// Programs that the experiment starts.
    pub programs: &'static [&'static str],
    /// Must the library's counters confirm the path? If not, the program confirms it, or makes no connection.
    pub is_counted: bool,
    /// A known limit that makes connections leave shared memory. The row fails then, but the command does not.
    pub limit: Option<&'static str>,
    /// Maximum number of rounds, for experiments that take long.
    pub most_rounds: usize,
    /// The reason why the experiment cannot run here.
    pub skip: Option<String>,
    /// Position on the axis of a curve: the axis and the value.
    pub at: Option<(&'static str, f64)>,
    pub run: Run,
}

impl std::fmt::Debug for Experiment {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.name)
    }
}

impl Experiment {
    pub fn new(name: impl Into<String>, run: impl Fn(&Step) -> Result<Values> + 'static) -> Self {
        let (layout, run) = (Layout::TwoCpus, Box::new(run));
        let (ways, measures, programs) = (WAYS, Vec::new(), &[][..]);
        let (name, is_counted, limit, most_rounds, skip, at) = (name.into(), true, None, usize::MAX, None, None);
        Experiment { name, layout, ways, measures, programs, is_counted, limit, most_rounds, skip, at, run }
    }

    /// One operation of `fastsocket-bench worker`.
    pub fn micro(name: impl Into<String>, op: Op, size: usize) -> Self {
        Experiment::new(name, move |step| runner::micro(step, op, size))
    }

    pub fn measures(self, measures: impl Into<Vec<Measure>>) -> Self {
        Experiment { measures: measures.into(), ..self }
    }

    pub fn ways(self, ways: &'static [Path]) -> Self {
        Experiment { ways, ..self }
    }

    pub fn on(self, layout: Layout) -> Self {
        Experiment { layout, ..self }
    }

    pub fn at(self, axis: &'static str, x: f64) -> Self {
        Experiment { at: Some((axis, x)), ..self }
    }

    pub fn not_counted(self) -> Self {
        Experiment { is_counted: false, ..self }
    }

    pub fn limit(self, limit: impl Into<Option<&'static str>>) -> Self {
        Experiment { limit: limit.into(), ..self }
    }

    pub fn most_rounds(self, most_rounds: usize) -> Self {
        Experiment { most_rounds, ..self }
    }

    pub fn skip(self, skip: Option<String>) -> Self {
        Experiment { skip, ..self }
    }

    pub fn programs(self, programs: &'static [&'static str]) -> Self {
        Experiment { programs, ..self }
    }
}

/// A size in bytes as it appears in the names of rows.
pub fn bytes_text(size: usize) -> String {
    match size_name(size) {
        name if name.ends_with(['K', 'M']) => format!("{name}iB").replace("KiB", " KiB").replace("MiB", " MiB"),
        name => format!("{name} B"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn claims_say_value_factor_and_source() {
        let claim = Claim::Values { linux: 11000.0, system: 300.0, source: "table 2" };
        assert_eq!(claim.text(Unit::Nanoseconds, Better::Lower), "300 ns, Linux 11 us: 36.7x (table 2)");
        assert_eq!(claim.times(Better::Higher), Some([300.0 / 11000.0; 2]));
        let claim = Claim::Times { low: 20.0, high: 30.0, source: "text" };
        assert_eq!(claim.text(Unit::Nanoseconds, Better::Lower), "20.0x to 30.0x (text)");
        assert_eq!(bytes_text(8) + " " + &bytes_text(16 << 10) + " " + &bytes_text(1 << 20), "8 B 16 KiB 1 MiB");
    }
}
