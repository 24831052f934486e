//! The table that the command prints.

use super::done::Done;
use super::experiment::times_text;
use super::row::{range_text, Row, Verdict};
use super::section::Section;
use crate::report::{self, value_text};
use comfy_table::{Attribute, Cell, CellAlignment, Color};
use fsocket_bench_args::Path;

/// Prints one line for each way of each row, and one for each section that is only listed.
pub fn print(done: &[Done], notes: &[String]) {
    let header = ["row", "paper", "stock", "ours", "times better", "spread", "control", "bare queue", ""];
    let mut table = report::table(&header);
    for d in done.iter().filter(|d| !d.rows.is_empty()) {
        table.add_row([Cell::new(heading(&d.section)).add_attribute(Attribute::Bold)]);
        for row in &d.rows {
            for way in row.compared() {
                table.add_row(line(row, way));
            }
        }
    }
    anstream::println!("medians; 'times better' than stock; 'spread': lowest to highest round");
    table.lines().for_each(|line| anstream::println!("{}", line.trim_end()));
    print_listed(done);
    notes.iter().for_each(|note| println!("\n{note}"));
}

fn line(row: &Row, way: Path) -> Vec<Cell> {
    let right = |text: String| Cell::new(text).set_alignment(CellAlignment::Right);
    let value = |path| row.values.median(path).map_or_else(|| "-".to_owned(), |v| value_text(v, row.values.unit));
    let beside = row.values.beside_stock(way).filter(|_| way != Path::Stock);
    let control = row.values.beside_stock(Path::Control);
    let name = if way == Path::Ours || way == Path::Stock { String::new() } else { format!(" ({})", way.name()) };
    let paper = row.measure.claim.map_or_else(String::new, |c| c.text(row.values.unit, row.values.better));
    let verdict = Cell::new(row.sentence(way));
    vec![
        Cell::new(format!("  {}{name}", row.values.measure)),
        Cell::new(paper),
        right(value(Path::Stock)),
        right(if way == Path::Stock { "-".to_owned() } else { value(way) }),
        right(beside.map_or_else(|| "-".to_owned(), |b| times_text(b.median))),
        right(beside.map_or_else(|| "-".to_owned(), |b| range_text(&b))),
        right(control.map_or_else(|| "-".to_owned(), |b| range_text(&b))),
        right(value(Path::Queue)),
        match row.verdict(way) {
            Verdict::Reference => verdict,
            Verdict::Above | Verdict::Same => verdict.fg(Color::Green),
            _ => verdict.fg(Color::Red).add_attribute(Attribute::Bold),
        },
    ]
}

fn print_listed(done: &[Done]) {
    println!("\nnot measured here:");
    for d in done {
        if let Some(listed) = d.section.listed() {
            let check = listed.check.map_or_else(String::new, |c| format!(" [{c}]"));
            println!("  {}: {}: {}{check}", heading(&d.section), listed.why.text(), listed.text);
        }
        for skipped in &d.skipped {
            println!("  {}: {skipped}", heading(&d.section));
        }
    }
}

pub fn heading(section: &Section) -> String {
    let paper = section.paper.title().split(' ').next().unwrap_or_default();
    format!("{paper} {}, {}", section.item, section.title)
}
