//! Decides whether a shape is at least as fast with the library as over loopback TCP.
//!
//! A measure that is missed by less than the spread of its repetitions counts as met: `best` is the value of the
//! best repetition.

use super::plan::Shape;
use super::row::{spread, Beside, Row};
use super::way::OURS;

/// Bar: requests per second, as a share of stock's.
const RATE: f64 = 0.97;
/// Bar: the 99th percentile of the latency, as a multiple of stock's.
const TAIL: f64 = 1.2;
/// Bars by microseconds of work in a request: the geometric mean of requests per second, as a multiple of stock's,
/// over the shapes with more runnable threads than CPUs.
const MEANS: [(u64, f64); 3] = [(5, 1.7), (20, 1.25), (100, 1.03)];

/// Ratio of the accelerated way to stock in one quantity: of the medians, and in the best repetition.
#[derive(Debug, Clone, Copy)]
pub struct Ratio {
    pub median: f64,
    pub best: f64,
}

/// The measured repetitions of one shape.
pub struct Measured<'a> {
    pub shape: &'a Shape,
    pub rate: Ratio,
    pub cpu: Ratio,
    pub p99: Ratio,
}

impl Measured<'_> {
    /// None: ours or stock was not measured.
    pub fn of(row: &Row) -> Option<Measured<'_>> {
        let [median, _, best] = row.rate()?;
        let low = |of| {
            let [median, low, _] = spread(row.ratios(OURS, of));
            Ratio { median, best: low }
        };
        let rate = Ratio { median, best };
        Some(Measured { shape: &row.what, rate, cpu: low(|s| s.cpu_us), p99: low(|s| s.p99_us) })
    }
}

/// The names of the bars that a shape misses.
pub fn missed(m: &Measured, cpus: usize) -> Vec<&'static str> {
    let at_most = |r: Ratio, bar: f64| r.median <= bar || r.best <= bar;
    let mut list = Vec::new();
    if m.rate.median < RATE && m.rate.best < 1.0 {
        list.push("rate");
    }
    if m.shape.is_crowded(cpus) && !at_most(m.cpu, 1.0) {
        list.push("cpu");
    }
    if !at_most(m.p99, TAIL) {
        list.push("p99");
    }
    list
}

impl Beside {
    /// Names the quantities that are worse than stock in every repetition, and whose median is worse than the
    /// control's worst repetition.
    pub fn missed(&self) -> Vec<&'static str> {
        let mut list = Vec::new();
        if self.rate.high < 1.0 && self.rate.median < self.control_rate.low {
            list.push("rate");
        }
        if self.cpu.low > 1.0 && self.cpu.median > self.control_cpu.high {
            list.push("cpu");
        }
        list
    }
}

/// A geometric mean and its bar.
pub struct Mean {
    pub work: u64,
    pub shapes: usize,
    pub mean: f64,
    pub bar: f64,
}

impl Mean {
    pub fn is_missed(&self) -> bool {
        self.mean < self.bar
    }
}

/// The means for which a shape was measured.
pub fn means(all: &[Measured], cpus: usize) -> Vec<Mean> {
    let of = |(work, bar): (u64, f64)| {
        let chosen = all.iter().filter(|m| m.shape.work[0] == work && m.shape.is_crowded(cpus));
        let logs: Vec<f64> = chosen.map(|m| m.rate.median.ln()).collect();
        let mean = (logs.iter().sum::<f64>() / logs.len() as f64).exp();
        (!logs.is_empty()).then_some(Mean { work, shapes: logs.len(), mean, bar })
    };
    MEANS.into_iter().filter_map(of).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::shapes::plan;

    fn ratio(median: f64, best: f64) -> Ratio {
        Ratio { median, best }
    }

    #[test]
    fn what_is_within_the_spread_is_met() {
        let shapes = plan::all();
        let shape = shapes.iter().find(|s| s.is_crowded(2) && s.work[0] == 5).unwrap();
        let good = || Measured { shape, rate: ratio(0.96, 1.01), cpu: ratio(1.1, 0.99), p99: ratio(1.3, 1.1) };
        assert!(missed(&good(), 2).is_empty());
        let rate = Measured { rate: ratio(0.96, 0.99), ..good() };
        let cpu = Measured { cpu: ratio(1.1, 1.01), ..good() };
        let p99 = Measured { p99: ratio(1.3, 1.25), ..good() };
        assert_eq!([rate, cpu, p99].map(|m| missed(&m, 2)), [vec!["rate"], vec!["cpu"], vec!["p99"]]);
        let means = means(&[good(), Measured { rate: ratio(4.0, 4.0), ..good() }], 2);
        assert!(means.len() == 1 && (means[0].mean - (0.96f64 * 4.0).sqrt()).abs() < 1e-9 && !means[0].is_missed());
    }

    #[test]
    fn the_kernel_misses_by_more_than_the_control() {
        use crate::shapes::row::Ratio;
        let ratio = |median, low, high| Ratio { median, low, high };
        let control = ratio(1.0, 0.97, 1.03);
        let of = |rate, cpu| Beside { way: "kernel-server", rate, cpu, control_rate: control, control_cpu: control };
        assert_eq!(of(ratio(0.95, 0.9, 0.99), ratio(1.05, 1.01, 1.1)).missed(), ["rate", "cpu"]);
        assert!(of(ratio(0.98, 0.9, 0.99), ratio(1.02, 1.01, 1.1)).missed().is_empty(), "as the control");
        assert!(of(ratio(0.95, 0.9, 1.01), ratio(1.05, 0.99, 1.1)).missed().is_empty(), "not in every repetition");
    }

    #[test]
    fn names_are_different() {
        let shapes = plan::all();
        let names: std::collections::BTreeSet<String> = shapes.iter().map(plan::Shape::name).collect();
        assert!(names.len() == shapes.len() && shapes.iter().filter(|s| s.quick).count() < 16);
    }
}
