//! Rows with medians and ratios, printed as a table or written as JSON.

use crate::Setting;
use anyhow::{Context, Result};
use comfy_table::{presets, ContentArrangement, Table};
use fsocket_testkit::servers::Way;
use serde_json::{json, Value};
use std::path::PathBuf;

/// The results of one scenario in one way.
pub struct Row {
    pub scenario: String,
    pub way: Way,
    values: Vec<Value>,
    failures: Vec<String>,
}

impl Row {
    pub fn new(scenario: &str, way: Way) -> Row {
        Row { scenario: scenario.to_owned(), way, values: Vec::new(), failures: Vec::new() }
    }

    /// Adds the figures of a measurement, or its error.
    pub fn take(&mut self, result: Result<Value>) {
        match result {
            Ok(values) => self.values.push(values),
            Err(e) => self.failed(e),
        }
    }

    pub fn failed(&mut self, why: anyhow::Error) {
        eprintln!("zones-bench: {}, {}: FAILED: {why:#}", self.scenario, self.way.name());
        self.failures.push(format!("{why:#}"));
    }

    fn median(&self, key: &str) -> Option<f64> {
        let values: Vec<f64> = self.values.iter().filter_map(|v| v[key].as_f64()).collect();
        fsocket_measure::median(&values)
    }

    /// The medians (of a disturbance, the first result) as text.
    fn summary(&self) -> String {
        if let Some(rate) = self.median("requests_per_second") {
            return format!("{rate:.0} requests/s");
        }
        if let Some(passive) = self.median("passive_percent") {
            let active =
                self.median("active_percent").map_or(String::new(), |active| format!(", active {active:.1} %"));
            return format!("local packets: passive {passive:.1} %{active}");
        }
        let Some(first) = self.values.first() else { return "-".to_owned() };
        let mut text = format!("{} failed of {} in {} times", first["failed"], first["of"], first["times"]);
        if let Some(unexplained) = first["unexplained"].as_u64() {
            text += &format!(
                "; the dead had accepted {}, {unexplained} more failed; {} waited",
                first["accepted_by_the_dead"], first["queued_at_death"]
            );
        }
        if let Some(causes) = first["causes"].as_object().filter(|causes| !causes.is_empty()) {
            let all: Vec<String> = causes.iter().map(|(cause, count)| format!("{cause} {count}")).collect();
            text += &format!(" ({})", all.join(", "));
        }
        format!(
            "{text}; SYN sent again {}, slowest {:.2} s",
            first["retried"],
            first["slowest_seconds"].as_f64().unwrap_or(0.0)
        )
    }

    fn json(&self, ratio: Option<f64>) -> Value {
        json!({
            "scenario": self.scenario,
            "way": self.way.name(),
            "values": self.values,
            "median_requests_per_second": self.median("requests_per_second"),
            "ratio_to_reuseport": ratio,
            "failures": self.failures,
        })
    }
}

pub struct Report {
    pub rows: Vec<Row>,
    file: Option<PathBuf>,
}

impl Report {
    /// Creates the file at once, so that an unwritable path is reported now, and not after half an hour.
    pub fn new(file: Option<PathBuf>) -> Result<Report> {
        if let Some(file) = &file {
            std::fs::File::create(file).with_context(|| file.display().to_string())?;
        }
        Ok(Report { rows: Vec::new(), file })
    }

    /// The row's median rate, divided by that of stock SO_REUSEPORT in the same scenario.
    fn ratio(&self, row: &Row) -> Option<f64> {
        let fair = self.rows.iter().find(|r| r.scenario == row.scenario && r.way == Way::Reuseport)?;
        Some(row.median("requests_per_second")? / fair.median("requests_per_second")?)
    }

    /// Writes all results so far to the JSON file.
    pub fn write(&self, setting: &Setting) -> Result<()> {
        let Some(file) = &self.file else { return Ok(()) };
        let rows: Vec<Value> = self.rows.iter().map(|row| row.json(self.ratio(row))).collect();
        let whole = json!({
            "machine": fsocket_measure::shape(&(0..setting.cpus).collect::<Vec<_>>()),
            "receive": format!("{:?}", setting.receive),
            "concurrency": setting.concurrency,
            "rows": rows,
        });
        let text = serde_json::to_string_pretty(&whole)? + "\n";
        std::fs::write(file, text).with_context(|| file.display().to_string())
    }

    /// Prints the table; false if something failed.
    pub fn print(&self) -> bool {
        let mut table = Table::new();
        table
            .load_preset(presets::UTF8_HORIZONTAL_ONLY)
            .set_content_arrangement(ContentArrangement::Dynamic)
            .set_width(130)
            .set_header(["scenario", "way", "median", "to reuseport"]);
        for row in &self.rows {
            let ratio = self.ratio(row).map_or(String::new(), |ratio| format!("{ratio:.2}"));
            let mut text = row.summary();
            for why in &row.failures {
                text += &format!("\nFAILED: {why}");
            }
            table.add_row([row.scenario.clone(), row.way.name().to_owned(), text, ratio]);
        }
        println!("{table}");
        self.rows.iter().all(|row| row.failures.is_empty() && !row.values.is_empty())
    }
}
