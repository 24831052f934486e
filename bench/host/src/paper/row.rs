//! A row of a section, and what it shows.

use super::experiment::{times_text, Experiment, Measure};
use crate::report::{Beside, Row as Values};
use fsocket_bench_args::Path;
use serde::Serialize;

/// One measure of one experiment.
#[derive(Debug)]
pub struct Row {
    pub values: Values,
    pub measure: Measure,
    pub at: Option<(&'static str, f64)>,
    /// The experiment's known limit.
    pub limit: Option<&'static str>,
}

/// The result of comparing a way with stock.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Verdict {
    /// A step failed, or its connections took another path.
    Failed,
    /// The row contains stock alone.
    Reference,
    Above,
    /// Within the range of the control, stock's second run.
    Same,
    /// Below stock by the medians, but within the range of the control.
    BelowWithinControl,
    Below,
}

impl Row {
    pub fn new(experiment: &Experiment, measure: &Measure) -> Self {
        let values = Values {
            measure: format!("{} {}", experiment.name, measure.label).trim().to_owned(),
            layout: experiment.layout,
            unit: measure.unit,
            better: measure.better,
            bars: Vec::new(),
            values: Default::default(),
            problems: Vec::new(),
        };
        Row { values, measure: measure.clone(), at: experiment.at, limit: experiment.limit }
    }

    /// The ways that are compared with stock; stock itself in a row of stock alone.
    pub fn compared(&self) -> Vec<Path> {
        let tried =
            |path: &Path| self.values.values.contains_key(path) || self.values.problems.iter().any(|p| p.path == *path);
        let ways: Vec<Path> =
            Path::ALL.into_iter().filter(|p| (*p == Path::Ours || p.is_kernel()) && tried(p)).collect();
        if ways.is_empty() {
            vec![Path::Stock]
        } else {
            ways
        }
    }

    fn has_failed(&self, way: Path) -> bool {
        self.values.problems.iter().any(|p| [way, Path::Stock, Path::Control].contains(&p.path))
    }

    pub fn verdict(&self, way: Path) -> Verdict {
        if self.has_failed(way) {
            return Verdict::Failed;
        }
        let Some(beside) = self.values.beside_stock(way) else { return self.without_ratio(way) };
        if way == Path::Stock {
            return Verdict::Reference;
        }
        let control = self.values.beside_stock(Path::Control);
        let is_noise = control.is_some_and(|c| c.low <= beside.median && beside.median <= c.high);
        match beside.median {
            m if m < 1.0 && is_noise => Verdict::BelowWithinControl,
            m if m < 1.0 => Verdict::Below,
            _ if is_noise => Verdict::Same,
            _ => Verdict::Above,
        }
    }

    /// Has a way failed for another reason than the known limit?
    pub fn is_bad(&self) -> bool {
        let is_known = |p: &crate::report::Problem| p.not_accelerated && self.limit.is_some();
        let failed = self.compared().into_iter().any(|way| self.verdict(way) == Verdict::Failed);
        let is_limit = !self.values.problems.is_empty() && self.values.problems.iter().all(is_known);
        failed && !is_limit
    }

    /// The verdict if the median of stock or of the way is 0, so that there is no ratio.
    fn without_ratio(&self, way: Path) -> Verdict {
        match [Path::Stock, way].map(|p| self.values.median(p)) {
            [Some(0.0), Some(0.0)] => Verdict::Same,
            [Some(_), Some(0.0)] => Verdict::Above,
            [Some(0.0), Some(_)] => Verdict::Below,
            _ => Verdict::Failed,
        }
    }

    /// The verdict as a sentence, with the ratio and its spread.
    pub fn sentence(&self, way: Path) -> String {
        let verdict = self.verdict(way);
        if verdict == Verdict::Failed {
            let problem = self.values.problems.iter().find(|p| p.path == way).or(self.values.problems.first());
            let text = problem.map_or("no value", |p| p.text.as_str());
            // The mark is not repeated if the error's text begins with it.
            let is_marked = problem.is_some_and(|p| p.not_accelerated) && !text.starts_with("ANOTHER PATH");
            let limit = self.limit.map_or_else(String::new, |limit| format!(" (known: {limit})"));
            return format!("FAILED{}: {text}{limit}", if is_marked { ", ANOTHER PATH" } else { "" });
        }
        let Some(beside) = self.values.beside_stock(way) else {
            return if verdict == Verdict::Below {
                "BELOW STOCK, which has none".to_owned()
            } else {
                "none".to_owned()
            };
        };
        let control = self.values.beside_stock(Path::Control).map_or_else(String::new, |c| range_text(&c));
        match verdict {
            Verdict::Above => "above stock".to_owned(),
            Verdict::Reference => "stock alone".to_owned(),
            Verdict::Same => format!("as stock: the control has {control}"),
            Verdict::BelowWithinControl => format!("BELOW STOCK, within the control's {control}"),
            _ => format!("BELOW STOCK: {} of it; the control has {control}", times_text(beside.median)),
        }
    }
}

/// The range of the ratios to stock over the rounds, as text.
pub fn range_text(beside: &Beside) -> String {
    format!("{} to {}", times_text(beside.low), times_text(beside.high))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::scenario::Unit;

    fn row(stock: &[f64], ours: &[f64], control: &[f64]) -> Row {
        let experiment = Experiment::new("x", |_| unreachable!());
        let measure = Measure::higher("v", "", Unit::PerSecond);
        let mut row = Row::new(&experiment, &measure);
        for (path, values) in [(Path::Stock, stock), (Path::Ours, ours), (Path::Control, control)] {
            values.iter().for_each(|v| row.values.add(path, *v));
        }
        row
    }

    #[test]
    fn below_stock_is_said() {
        let below = row(&[100.0; 3], &[80.0, 81.0, 79.0], &[99.0, 101.0, 100.0]);
        assert_eq!(below.verdict(Path::Ours), Verdict::Below);
        assert_eq!(below.sentence(Path::Ours), "BELOW STOCK: 0.80x of it; the control has 0.99x to 1.01x");
        let noise = row(&[100.0; 3], &[98.0; 3], &[97.0, 101.0, 100.0]);
        assert_eq!(noise.verdict(Path::Ours), Verdict::BelowWithinControl);
        assert!(noise.sentence(Path::Ours).starts_with("BELOW STOCK"));
        assert_eq!(row(&[100.0; 3], &[100.5; 3], &[97.0, 101.0, 100.0]).verdict(Path::Ours), Verdict::Same);
        assert_eq!(row(&[100.0; 3], &[300.0; 3], &[97.0, 101.0, 100.0]).verdict(Path::Ours), Verdict::Above);
    }

    #[test]
    fn a_row_of_stock_alone_is_compared_with_nothing() {
        let bare = row(&[100.0; 3], &[], &[]);
        assert_eq!((bare.compared(), bare.verdict(Path::Stock)), (vec![Path::Stock], Verdict::Reference));
        assert_eq!(bare.sentence(Path::Stock), "stock alone");
    }

    #[test]
    fn none_is_a_result() {
        assert_eq!(row(&[0.0; 3], &[0.0; 3], &[0.0; 3]).verdict(Path::Ours), Verdict::Same);
        assert_eq!(row(&[0.0; 3], &[2.0; 3], &[0.0; 3]).verdict(Path::Ours), Verdict::Below);
        assert_eq!(row(&[0.0; 3], &[2.0; 3], &[0.0; 3]).sentence(Path::Ours), "BELOW STOCK, which has none");
        assert_eq!(row(&[], &[2.0; 3], &[]).verdict(Path::Ours), Verdict::Failed);
    }

    #[test]
    fn a_fallback_is_a_failure() {
        let mut fell_back = row(&[100.0; 3], &[300.0; 3], &[100.0; 3]);
        fell_back.values.fail(Path::Ours, true, "1 connection over the kernel".to_owned());
        assert_eq!(fell_back.verdict(Path::Ours), Verdict::Failed);
        assert_eq!(fell_back.sentence(Path::Ours), "FAILED, ANOTHER PATH: 1 connection over the kernel");
        assert!(fell_back.is_bad());
        fell_back.limit = Some("splice");
        assert!(!fell_back.is_bad() && fell_back.sentence(Path::Ours).ends_with("kernel (known: splice)"));
        fell_back.values.fail(Path::Ours, false, "no answer".to_owned());
        assert!(fell_back.is_bad(), "another reason");
        let mut stock = row(&[100.0; 2], &[300.0; 3], &[100.0; 3]);
        stock.values.fail(Path::Stock, false, "no answer".to_owned());
        assert_eq!(stock.verdict(Path::Ours), Verdict::Failed);
    }
}
