//! The report of `bench shapes`: an HTML table in which colours show how ours compares with stock.

use super::row::Row;
use crate::html::escape;
use fsocket_measure::Machine;
use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write;

const STYLE: &str = "body{font:14px/1.4 sans-serif;margin:2em}table{border-collapse:collapse;margin:1em 0}\
    td,th{padding:.25em .6em;border:1px solid #fff;text-align:right;font-size:12px}th{font-weight:normal;color:#555}\
    th:first-child{text-align:left}.below{font-weight:bold}";

/// Colour of a ratio: from red (half of stock) through white (stock) to green (four times stock).
fn color(ratio: f64) -> String {
    let fraction = if ratio < 1.0 { ratio.log2() } else { ratio.log2() / 2.0 }.clamp(-1.0, 1.0);
    let [r, g, b] = match fraction < 0.0 {
        true => [235.0, 245.0 + 155.0 * fraction, 245.0 + 165.0 * fraction],
        false => [245.0 - 125.0 * fraction, 245.0 - 35.0 * fraction, 245.0 - 115.0 * fraction],
    };
    format!("#{:02x}{:02x}{:02x}", r as u8, g as u8, b as u8)
}

/// One HTML file. The rows are servers and clients, the columns are the other properties of a shape. A cell is the
/// ratio of the medians; its tooltip is the range over the repetitions.
pub fn page(machine: &Machine, rows: &[Row], reps: usize) -> String {
    let title = "fastsocket bench shapes";
    let mut page = format!("<!doctype html><meta charset=utf-8><title>{title}</title><style>{STYLE}</style>");
    let _ = write!(
        page,
        "<h1>{title}</h1><p>Requests a second, ours to stock loopback TCP, median of {reps} turns. Red: below stock. \
         {} · {} CPUs · kernel {}</p>",
        escape(&machine.cpu),
        machine.cpus,
        escape(&machine.kernel)
    );
    let column = |row: &Row| row.shape[row.what.ends().len() + 1..].to_owned();
    let mut columns: Vec<String> = Vec::new();
    let mut seen = BTreeSet::new();
    let mut sorted: Vec<&Row> = rows.iter().collect();
    sorted.sort_by_key(|r| (format!("{:?}", r.what.extra), r.what.size, r.what.conns, r.what.work));
    for row in sorted {
        if seen.insert(column(row)) {
            columns.push(column(row));
        }
    }
    let mut lines: BTreeMap<String, BTreeMap<String, &Row>> = BTreeMap::new();
    for row in rows {
        lines.entry(row.what.ends()).or_default().insert(column(row), row);
    }
    // Tables are split so that they fit the width of a page.
    for columns in columns.chunks(12) {
        page += "<table><tr><th>server/clients</th>";
        columns.iter().for_each(|c| page += &format!("<th>{}</th>", escape(c)));
        page += "</tr>";
        for (ends, cells) in &lines {
            let _ = write!(page, "<tr><th>{}</th>", escape(ends));
            for column in columns {
                match cells.get(column).and_then(|row| row.rate()) {
                    Some([ratio, low, high]) => {
                        let class = if ratio < 1.0 { " class=below" } else { "" };
                        let _ = write!(
                            page,
                            "<td{class} style=\"background:{}\" title=\"{low:.2} to {high:.2}\">{ratio:.2}</td>",
                            color(ratio)
                        );
                    }
                    None => page += "<td></td>",
                }
            }
            page += "</tr>";
        }
        page += "</table>";
    }
    page
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn colours_go_from_red_to_green() {
        let part = |ratio: f64, at: usize| u8::from_str_radix(&color(ratio)[at..at + 2], 16).unwrap();
        assert!(part(0.5, 1) > 200 && part(0.5, 3) < 100);
        assert!(part(4.0, 3) > part(4.0, 1) && part(1.0, 1) == part(1.0, 3));
    }
}
