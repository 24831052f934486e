//! What was measured of one shape.

use super::plan::Shape;
use super::verdict;
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
}

#[derive(Debug, Serialize)]
pub struct Row {
    pub shape: String,
    pub what: Shape,
    /// By way, then by repetition.
    pub samples: Vec<(&'static str, Vec<Sample>)>,
    pub problems: Vec<String>,
}

impl Row {
    /// Ours to stock in each repetition; none where one of them failed.
    pub fn ratios(&self, of: fn(&Sample) -> f64) -> Vec<f64> {
        match (self.samples.first(), self.samples.last()) {
            (Some((_, stock)), Some((_, ours))) if stock.len() == ours.len() => {
                ours.iter().zip(stock).map(|(a, b)| of(a) / of(b)).collect()
            }
            _ => Vec::new(),
        }
    }

    /// Requests a second, ours to stock: of the medians, the lowest and the highest repetition.
    pub fn rate(&self) -> Option<[f64; 3]> {
        let [_, low, high] = spread(self.ratios(|s| s.rate));
        let median = |(_, samples): &(&str, Vec<Sample>)| spread(samples.iter().map(|s| s.rate).collect())[0];
        let ratio = median(self.samples.last()?) / median(self.samples.first()?);
        ratio.is_finite().then_some([ratio, low, high])
    }

    pub fn measured(&self) -> Option<verdict::Measured<'_>> {
        let [rate, _, best] = self.rate()?;
        let low = |of| {
            let [median, low, _] = spread(self.ratios(of));
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
