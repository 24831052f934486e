//! The result of one shape.

use super::plan::Shape;
use super::way::{CONTROL, KERNEL, OURS, STOCK};
use serde::Serialize;

/// The result of one repetition.
#[derive(Debug, Clone, Copy, Default, Serialize)]
pub struct Sample {
    /// Requests per second.
    pub rate: f64,
    /// CPU time of all processes per request, the monitor's included, in microseconds.
    pub cpu_us: f64,
    pub p50_us: f64,
    pub p99_us: f64,
    /// Share of the connections accepted in the kernel that came from a zone's own socket.
    pub zoned: f64,
}

#[derive(Debug, Serialize)]
pub struct Row {
    pub shape: String,
    pub what: Shape,
    /// Samples by way, then by repetition.
    pub samples: Vec<(&'static str, Vec<Sample>)>,
    pub problems: Vec<String>,
}

/// A ratio to stock: of the medians, and the lowest and highest of single repetitions.
#[derive(Debug, Clone, Copy, Serialize)]
pub struct Ratio {
    pub median: f64,
    pub low: f64,
    pub high: f64,
}

/// A way over kernel TCP compared with stock, and the control: stock a second time.
#[derive(Debug, Serialize)]
pub struct Beside {
    pub way: &'static str,
    /// Ratios to stock: requests per second, and CPU time per request.
    pub rate: Ratio,
    pub cpu: Ratio,
    pub control_rate: Ratio,
    pub control_cpu: Ratio,
}

impl Row {
    fn of(&self, way: &str) -> Option<&[Sample]> {
        self.samples.iter().find(|(name, _)| *name == way).map(|(_, samples)| &samples[..])
    }

    /// Ratios to stock of each repetition. Empty if a repetition failed.
    pub fn ratios(&self, way: &str, of: fn(&Sample) -> f64) -> Vec<f64> {
        match (self.of(STOCK), self.of(way)) {
            (Some(stock), Some(way)) if stock.len() == way.len() => {
                way.iter().zip(stock).map(|(a, b)| of(a) / of(b)).collect()
            }
            _ => Vec::new(),
        }
    }

    /// Ratio to stock, of the medians.
    pub fn ratio(&self, way: &str, of: fn(&Sample) -> f64) -> Option<Ratio> {
        let [_, low, high] = spread(self.ratios(way, of));
        let median = |samples: &[Sample]| spread(samples.iter().map(of).collect())[0];
        let median = median(self.of(way)?) / median(self.of(STOCK)?);
        median.is_finite().then_some(Ratio { median, low, high })
    }

    /// Requests per second as a ratio to stock: the median, the lowest and the highest repetition.
    pub fn rate(&self) -> Option<[f64; 3]> {
        self.ratio(OURS, |s| s.rate).map(|r| [r.median, r.low, r.high])
    }

    /// All ways over kernel TCP that were measured.
    pub fn beside(&self) -> Vec<Beside> {
        let of = |way| {
            let [rate, cpu]: [fn(&Sample) -> f64; 2] = [|s| s.rate, |s| s.cpu_us];
            let (control_rate, control_cpu) = (self.ratio(CONTROL, rate)?, self.ratio(CONTROL, cpu)?);
            Some(Beside { way, rate: self.ratio(way, rate)?, cpu: self.ratio(way, cpu)?, control_rate, control_cpu })
        };
        KERNEL.into_iter().filter_map(of).collect()
    }
}

/// Median, lowest and highest value.
pub fn spread(values: Vec<f64>) -> [f64; 3] {
    let lowest = values.iter().copied().reduce(f64::min);
    let highest = values.iter().copied().reduce(f64::max);
    [fsocket_measure::median(&values), lowest, highest].map(|v| v.unwrap_or(f64::NAN))
}
