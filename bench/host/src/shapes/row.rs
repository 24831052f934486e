//! What was measured of one shape.

use super::plan::Shape;
use super::verdict;
use super::way::{CONTROL, KERNEL, OURS, STOCK};
use serde::Serialize;

/// What one repetition measured.
#[derive(Debug, Clone, Copy, Default, Serialize)]
pub struct Sample {
    /// Requests a second.
    pub rate: f64,
    /// Microseconds of CPU time of all processes, the monitor's included, for a request.
    pub cpu_us: f64,
    pub p50_us: f64,
    pub p99_us: f64,
    /// Share of accepts from a zone's own socket in all accepts in the kernel.
    pub zoned: f64,
}

#[derive(Debug, Serialize)]
pub struct Row {
    pub shape: String,
    pub what: Shape,
    /// By way, then by repetition.
    pub samples: Vec<(&'static str, Vec<Sample>)>,
    pub problems: Vec<String>,
}

/// Lowest and highest are of single repetitions.
#[derive(Debug, Clone, Copy, Serialize)]
pub struct Ratio {
    pub median: f64,
    pub low: f64,
    pub high: f64,
}

/// A way over the kernel beside stock, and the control: stock a second time.
#[derive(Debug, Serialize)]
pub struct Beside {
    pub way: &'static str,
    /// Requests a second and CPU time of a request, to stock.
    pub rate: Ratio,
    pub cpu: Ratio,
    pub control_rate: Ratio,
    pub control_cpu: Ratio,
}

impl Row {
    fn of(&self, way: &str) -> Option<&[Sample]> {
        self.samples.iter().find(|(name, _)| *name == way).map(|(_, samples)| &samples[..])
    }

    /// To stock in each repetition; none where one of them failed.
    fn ratios(&self, way: &str, of: fn(&Sample) -> f64) -> Vec<f64> {
        match (self.of(STOCK), self.of(way)) {
            (Some(stock), Some(way)) if stock.len() == way.len() => {
                way.iter().zip(stock).map(|(a, b)| of(a) / of(b)).collect()
            }
            _ => Vec::new(),
        }
    }

    /// To stock, of the medians.
    pub fn ratio(&self, way: &str, of: fn(&Sample) -> f64) -> Option<Ratio> {
        let [_, low, high] = spread(self.ratios(way, of));
        let median = |samples: &[Sample]| spread(samples.iter().map(of).collect())[0];
        let median = median(self.of(way)?) / median(self.of(STOCK)?);
        median.is_finite().then_some(Ratio { median, low, high })
    }

    /// Requests a second, ours to stock: of the medians, the lowest and the highest repetition.
    pub fn rate(&self) -> Option<[f64; 3]> {
        self.ratio(OURS, |s| s.rate).map(|r| [r.median, r.low, r.high])
    }

    /// Every way over the kernel that was measured.
    pub fn beside(&self) -> Vec<Beside> {
        let of = |way| {
            let [rate, cpu]: [fn(&Sample) -> f64; 2] = [|s| s.rate, |s| s.cpu_us];
            let (control_rate, control_cpu) = (self.ratio(CONTROL, rate)?, self.ratio(CONTROL, cpu)?);
            Some(Beside { way, rate: self.ratio(way, rate)?, cpu: self.ratio(way, cpu)?, control_rate, control_cpu })
        };
        KERNEL.into_iter().filter_map(of).collect()
    }

    pub fn measured(&self) -> Option<verdict::Measured<'_>> {
        let [rate, _, best] = self.rate()?;
        let low = |of| {
            let [median, low, _] = spread(self.ratios(OURS, of));
            verdict::Ratio { median, best: low }
        };
        let rate = verdict::Ratio { median: rate, best };
        Some(verdict::Measured { shape: &self.what, rate, cpu: low(|s| s.cpu_us), p99: low(|s| s.p99_us) })
    }
}

/// Median, lowest and highest.
pub fn spread(values: Vec<f64>) -> [f64; 3] {
    let lowest = values.iter().copied().reduce(f64::min);
    let highest = values.iter().copied().reduce(f64::max);
    [fsocket_measure::median(&values), lowest, highest].map(|v| v.unwrap_or(f64::NAN))
}
