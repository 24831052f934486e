//! The table that `bench shapes` prints.

use super::row::{spread, Row, Sample};
use super::verdict;
use super::way::OURS;

/// Prints a line for each way of each shape.
pub fn print(rows: &[Row], cpus: usize) {
    let mut table = comfy_table::Table::new();
    table.load_preset(comfy_table::presets::NOTHING);
    table.set_header([
        "server/clients/connections/us/answer",
        "",
        "requests/s",
        "to stock",
        "spread",
        "CPU us",
        "to stock",
        "p50 us",
        "p99 us",
        "below stock",
    ]);
    for row in rows {
        let below = verdict::Measured::of(row).map_or_else(String::new, |m| verdict::missed(&m, cpus).join(" "));
        let beside = row.beside();
        for (k, (way, samples)) in row.samples.iter().enumerate() {
            let of = |f: fn(&Sample) -> f64| spread(samples.iter().map(f).collect())[0];
            let ratio = row.ratio(way, |s| s.rate).filter(|_| k > 0);
            let cpu = row.ratio(way, |s| s.cpu_us).filter(|_| k > 0);
            let missed = match beside.iter().find(|b| b.way == *way) {
                Some(beside) => beside.missed().join(" "),
                None if *way == OURS => below.clone(),
                None => String::new(),
            };
            table.add_row([
                if k == 0 { row.shape.clone() } else { String::new() },
                (*way).to_owned(),
                format!("{:.0}", of(|s| s.rate)),
                ratio.map_or_else(String::new, |r| format!("{:.3}", r.median)),
                ratio.map_or_else(String::new, |r| format!("{:.2}-{:.2}", r.low, r.high)),
                format!("{:.1}", of(|s| s.cpu_us)),
                cpu.map_or_else(String::new, |r| format!("{:.2}", r.median)),
                format!("{:.1}", of(|s| s.p50_us)),
                format!("{:.1}", of(|s| s.p99_us)),
                missed,
            ]);
        }
        for problem in &row.problems {
            table.add_row([String::new(), problem.clone()]);
        }
    }
    println!("{table}");
}
