//! Rows with medians and verdicts, printed as tables or written as JSON.

use crate::scenario::{Bar, Better, Layout, Metric, Scenario, Unit};
use comfy_table::{presets, Attribute, Cell, CellAlignment, Color, Table};
use fsocket_bench_args::Path;
use fsocket_measure::Machine;
use serde_json::{json, Value};
use std::collections::BTreeMap;
use std::io::IsTerminal;

/// The results of one measure in one layout, on all paths.
#[derive(Debug)]
pub struct Row {
    pub measure: String,
    pub layout: Layout,
    pub unit: Unit,
    pub better: Better,
    pub bars: Vec<Bar>,
    pub values: BTreeMap<Path, Vec<f64>>,
    pub problems: Vec<Problem>,
}

/// Ratio of a path to stock. Above 1 the path is better.
#[derive(Debug, Clone, Copy, PartialEq, serde::Serialize)]
pub struct Beside {
    pub median: f64,
    pub low: f64,
    pub high: f64,
}

#[derive(Debug)]
pub struct Problem {
    pub path: Path,
    pub not_accelerated: bool,
    pub text: String,
}

impl Row {
    pub fn new(scenario: &Scenario, metric: &Metric, layout: Layout) -> Self {
        let mut bars = metric.bars.clone();
        // A bar below 1 means "about as fast as stock", and holds in every layout.
        let is_judged = metric.unit != Unit::CpuMicroseconds;
        if is_judged && layout == Layout::SameCpu && !bars.iter().any(|bar| matches!(bar, Bar::Stock(f) if *f < 1.0)) {
            bars = vec![Bar::Stock(1.0)];
        }
        Row {
            measure: format!("{} {}", scenario.name, metric.label).trim().to_owned(),
            layout,
            unit: metric.unit,
            better: metric.better,
            bars,
            values: BTreeMap::new(),
            problems: Vec::new(),
        }
    }

    pub fn add(&mut self, path: Path, value: f64) {
        self.values.entry(path).or_default().push(value);
    }

    pub fn fail(&mut self, path: Path, not_accelerated: bool, text: String) {
        self.problems.push(Problem { path, not_accelerated, text });
    }

    pub fn median(&self, path: Path) -> Option<f64> {
        fsocket_measure::median(self.values.get(&path)?)
    }

    /// How many times better ours is than `other`.
    pub fn factor(&self, other: Path) -> Option<f64> {
        self.times_better(self.median(Path::Ours)?, self.median(other)?)
    }

    fn times_better(&self, one: f64, other: f64) -> Option<f64> {
        let factor = if self.better == Better::Higher { one / other } else { other / one };
        factor.is_finite().then_some(factor)
    }

    /// How many times better than stock a path is: by the medians, and in the worst and the best repetition.
    pub fn beside_stock(&self, path: Path) -> Option<Beside> {
        let median = self.times_better(self.median(path)?, self.median(Path::Stock)?)?;
        let turns = self.values.get(&path)?.iter().zip(self.values.get(&Path::Stock)?);
        let each = || turns.clone().filter_map(|(one, stock)| self.times_better(*one, *stock));
        Some(Beside { median, low: each().reduce(f64::min)?, high: each().reduce(f64::max)? })
    }

    /// Kernel paths that are worse than stock in every repetition, and whose median is worse than the control's
    /// worst repetition. Empty if there are fewer than three repetitions.
    pub fn below(&self) -> Vec<Path> {
        let is_enough = self.values.get(&Path::Control).is_some_and(|values| values.len() >= 3);
        let Some(control) = self.beside_stock(Path::Control).filter(|_| is_enough) else { return Vec::new() };
        let is_below = |path: &Path| {
            let beside = self.beside_stock(*path);
            beside.is_some_and(|b| path.is_kernel() && b.high < 1.0 && b.median < control.low)
        };
        Path::BESIDE.into_iter().filter(is_below).collect()
    }

    fn meets(&self, bar: Bar) -> Option<bool> {
        match bar {
            Bar::Stock(least) => self.factor(Path::Stock).map(|f| f >= least),
            Bar::Queue(least) => self.factor(Path::Queue).map(|f| f >= least),
            Bar::StockPlus(more) => Some(self.median(Path::Ours)? <= self.median(Path::Stock)? + more),
            Bar::AtMost(most) => Some(self.median(Path::Ours)? <= most),
        }
    }

    /// Are all bars met? None if there is no bar, or nothing to compare.
    pub fn verdict(&self) -> Option<bool> {
        let verdicts: Vec<bool> = self.bars.iter().filter_map(|bar| self.meets(*bar)).collect();
        (!verdicts.is_empty()).then(|| verdicts.iter().all(|ok| *ok))
    }

    /// Text of the last column.
    pub fn judgement(&self) -> &'static str {
        if self.problems.iter().any(|p| p.not_accelerated) {
            "ANOTHER PATH"
        } else if !self.problems.is_empty() {
            "FAILED"
        } else {
            match self.verdict() {
                Some(true) => "ok",
                Some(false) => "MISSED",
                None => "",
            }
        }
    }

    pub fn required(&self) -> String {
        let text: Vec<String> = self.bars.iter().map(|bar| bar_text(*bar, self)).collect();
        text.join(", ")
    }
}

fn bar_text(bar: Bar, row: &Row) -> String {
    match (bar, row.better) {
        (Bar::Stock(f), Better::Lower) if f < 1.0 => format!("<={:.2}x stock", 1.0 / f),
        (Bar::Stock(f), _) => format!(">={}x stock", trimmed(f)),
        (Bar::Queue(f), Better::Lower) => format!("<={:.1}x queue", 1.0 / f),
        (Bar::Queue(f), Better::Higher) => format!(">={} of queue", trimmed(f)),
        (Bar::StockPlus(v), _) => format!("<=stock+{}", value_text(v, row.unit)),
        (Bar::AtMost(v), _) => format!("<={}", value_text(v, row.unit)),
    }
}

fn trimmed(value: f64) -> String {
    format!("{value:.1}").trim_end_matches(".0").to_owned()
}

/// Formats a value with the unit prefix that keeps the text short.
pub fn value_text(value: f64, unit: Unit) -> String {
    let scaled = |step: f64, names: &[&str]| {
        let (mut value, mut at) = (value, 0);
        while value.abs() >= step && at + 1 < names.len() {
            value /= step;
            at += 1;
        }
        let digits = match value.abs() {
            v if v >= 99.95 || v.fract() == 0.0 => 0,
            v if v >= 9.995 => 1,
            _ => 2,
        };
        format!("{value:.digits$} {}", names[at]).trim_end().to_owned()
    };
    match unit {
        Unit::Nanoseconds => scaled(1000.0, &["ns", "us", "ms", "s"]),
        Unit::PerSecond => scaled(1000.0, &["/s", "k/s", "M/s", "G/s"]),
        Unit::BytesPerSecond => scaled(1000.0, &["B/s", "kB/s", "MB/s", "GB/s"]),
        Unit::Seconds => scaled(1000.0, &["s"]),
        Unit::CpuMicroseconds => scaled(1000.0, &["us", "ms", "s"]),
        Unit::CpuMilliseconds => scaled(1e9, &["ms"]),
        Unit::Percent => scaled(1e9, &["%"]),
        Unit::Count => scaled(1000.0, &["", "k", "M"]),
        Unit::Bytes => scaled(1024.0, &["B", "KiB", "MiB", "GiB"]),
    }
}

/// Text of the ratio column.
pub fn factor_text(row: &Row) -> String {
    row.factor(Path::Stock)
        .map_or_else(String::new, |f| if f < 9.995 { format!("{f:.2}x") } else { format!("{f:.1}x") })
}

/// An empty table in this program's style, without colour if NO_COLOR is set or stdout is no terminal.
pub fn table(header: &[&str]) -> Table {
    let mut table = Table::new();
    table.load_preset(presets::NOTHING).set_header(header);
    if std::env::var_os("NO_COLOR").is_some_and(|v| !v.is_empty()) || !std::io::stdout().is_terminal() {
        table.force_no_tty();
    }
    table
}

pub fn print(rows: &[Row]) {
    for layout in [Layout::TwoCpus, Layout::SameCpu] {
        let here: Vec<&Row> = rows.iter().filter(|row| row.layout == layout).collect();
        if here.is_empty() {
            continue;
        }
        let header = ["measure", "stock", "unix", "ours", "queue", "ours vs stock", "must show", ""];
        let mut table = table(&header);
        for row in here {
            let value = |path| row.median(path).map_or_else(|| "-".to_owned(), |v| value_text(v, row.unit));
            let mut cells = vec![Cell::new(&row.measure)];
            cells.extend(Path::MAIN.map(|path| Cell::new(value(path)).set_alignment(CellAlignment::Right)));
            cells.push(Cell::new(factor_text(row)).set_alignment(CellAlignment::Right));
            cells.push(Cell::new(row.required()));
            let judgement = Cell::new(row.judgement());
            cells.push(match row.judgement() {
                "ok" => judgement.fg(Color::Green),
                _ => judgement.fg(Color::Red).add_attribute(Attribute::Bold),
            });
            table.add_row(cells);
        }
        anstream::println!("\nlayout {}: medians; 'ours vs stock' is how many times better", layout.name());
        table.lines().for_each(|line| anstream::println!("{}", line.trim_end()));
        print_kernel(rows, layout);
    }
}

/// Prints how the paths over kernel TCP compare with stock, if they were measured.
fn print_kernel(rows: &[Row], layout: Layout) {
    let measured = |row: &&Row| row.layout == layout && row.values.keys().any(|path| Path::BESIDE.contains(path));
    let mut rows = rows.iter().filter(measured).peekable();
    if rows.peek().is_none() {
        return;
    }
    let mut table = table(&["measure", "stock", "library at server", "at client", "control", "below stock"]);
    for row in rows {
        let mut cells = vec![row.measure.clone()];
        cells.push(row.median(Path::Stock).map_or_else(|| "-".to_owned(), |v| value_text(v, row.unit)));
        cells.extend(Path::BESIDE.map(|path| {
            let beside = row.beside_stock(path);
            beside.map_or_else(|| "-".to_owned(), |b| format!("{:.3} ({:.2}-{:.2})", b.median, b.low, b.high))
        }));
        cells.push(row.below().iter().map(|p| p.name()).collect::<Vec<_>>().join(" "));
        table.add_row(cells);
    }
    anstream::println!(
        "\nlayout {}, connections in the kernel: times better than stock (range of the repetitions); control: stock again",
        layout.name()
    );
    table.lines().for_each(|line| anstream::println!("{}", line.trim_end()));
}

pub fn list(scenarios: &[Scenario]) {
    let mut table = table(&["name", "measure", "paths", "must show (two CPUs)"]);
    for scenario in scenarios {
        for metric in &scenario.metrics {
            let row = Row::new(scenario, metric, Layout::TwoCpus);
            let paths: Vec<&str> = scenario.paths.iter().map(|p| p.name()).collect();
            table.add_row([scenario.name.clone(), row.measure.clone(), paths.join(" "), row.required()]);
        }
    }
    anstream::println!("{table}");
}

/// All results as JSON, for other programs.
pub fn json(machine: &Machine, rows: &[Row], reps: usize, hogs: u32) -> Value {
    let row = |row: &Row| {
        let medians: BTreeMap<&str, f64> = Path::ALL.iter().filter_map(|p| Some((p.name(), row.median(*p)?))).collect();
        json!({
            "measure": row.measure,
            "layout": row.layout,
            "unit": row.unit,
            "better": row.better,
            "values": row.values,
            "medians": medians,
            "times_better_than_stock": row.factor(Path::Stock),
            "times_better_than_queue": row.factor(Path::Queue),
            "beside_stock": Path::BESIDE.iter().filter_map(|p| Some((p.name(), row.beside_stock(*p)?))).collect::<BTreeMap<_, _>>(),
            "below_stock": row.below(),
            "must_show": row.required(),
            "met": row.verdict(),
            "judgement": row.judgement(),
            "problems": row.problems.iter().map(|p| json!({"path": p.path, "text": p.text})).collect::<Vec<_>>(),
        })
    };
    json!({
        "version": 1,
        "machine": machine,
        "repetitions": reps,
        "hogs": hogs,
        "results": rows.iter().map(row).collect::<Vec<_>>(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(better: Better, ours: &[f64], stock: &[f64], bars: &[Bar]) -> Row {
        let values = BTreeMap::from([(Path::Ours, ours.to_vec()), (Path::Stock, stock.to_vec())]);
        let (layout, unit) = (Layout::TwoCpus, Unit::Nanoseconds);
        Row { measure: "m".to_owned(), layout, unit, better, bars: bars.to_vec(), values, problems: Vec::new() }
    }

    #[test]
    fn factors_say_how_much_better() {
        let lower = row(Better::Lower, &[90.0, 100.0, 300.0], &[4000.0], &[Bar::Stock(35.0)]);
        assert_eq!(lower.factor(Path::Stock), Some(40.0));
        assert_eq!(lower.judgement(), "ok");
        let higher = row(Better::Higher, &[100.0], &[50.0], &[Bar::Stock(3.0)]);
        assert_eq!(higher.factor(Path::Stock), Some(2.0));
        assert_eq!(higher.judgement(), "MISSED");
        let plus = row(Better::Lower, &[12.0], &[3.0], &[Bar::StockPlus(10.0)]);
        assert_eq!(plus.verdict(), Some(true));
    }

    #[test]
    fn a_run_over_another_path_is_not_a_result() {
        let mut row = row(Better::Lower, &[1.0], &[100.0], &[Bar::Stock(35.0)]);
        row.fail(Path::Ours, true, "kernel".to_owned());
        assert_eq!(row.judgement(), "ANOTHER PATH");
    }

    #[test]
    fn the_kernel_is_below_by_more_than_the_control() {
        let mut row = row(Better::Higher, &[], &[100.0, 100.0, 100.0], &[]);
        row.values.insert(Path::Control, vec![97.0, 99.0, 102.0]);
        row.values.insert(Path::KernelServer, vec![96.0, 95.0, 94.0]);
        row.values.insert(Path::KernelClient, vec![98.0, 97.5, 99.0]);
        assert_eq!(row.below(), [Path::KernelServer]);
        assert_eq!(row.beside_stock(Path::Control), Some(Beside { median: 0.99, low: 0.97, high: 1.02 }));
        row.values.insert(Path::KernelServer, vec![96.0, 95.0, 101.0]);
        assert!(row.below().is_empty(), "once it was not below");
    }

    #[test]
    fn values_are_short() {
        assert_eq!(value_text(312.4, Unit::Nanoseconds), "312 ns");
        assert_eq!(value_text(12_345.0, Unit::Nanoseconds), "12.3 us");
        assert_eq!(value_text(41_234_567.0, Unit::PerSecond), "41.2 M/s");
        assert_eq!(value_text(16384.0, Unit::Bytes), "16 KiB");
    }
}
