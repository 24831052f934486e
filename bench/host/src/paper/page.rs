//! The report for readers: one HTML file with everything in it.

use super::done::Done;
use super::experiment::times_text;
use super::row::{range_text, Row, Verdict};
use super::table::heading;
use crate::html::{color, escape, legend};
use crate::report::value_text;
use crate::scenario::Layout;
use anyhow::{anyhow, Result};
use fsocket_bench_args::Path;
use fsocket_measure::Machine;
use plotters::prelude::*;
use std::fmt::Write;

const SIZE: (u32, u32) = (760, 300);
const STYLE: &str = "body{font:15px/1.45 sans-serif;max-width:72em;margin:2em auto;padding:0 1em;color:#222}\
    table{border-collapse:collapse;font-size:13px}td,th{padding:.2em .7em;text-align:right;border-bottom:1px solid #ddd}\
    td:first-child,th:first-child,td:nth-child(2),td:last-child{text-align:left}.bad{color:#b00;font-weight:bold}\
    .ok{color:#070}.listed{color:#555}svg{max-width:100%;height:auto}code{background:#f4f4f4;padding:.1em .3em}";

pub fn page(machine: &Machine, done: &[Done], notes: &[String], reps: usize) -> Result<String> {
    let mut page = format!(
        "<!doctype html><html lang=en><meta charset=utf-8><title>fastsocket bench paper</title><style>{STYLE}</style>\
         <h1>The papers' figures and tables on this machine</h1><p>{} · {} CPUs · kernel {}{}</p><p><code>{}</code></p>\
         <p>{reps} rounds; in each round another way is the first. Values are medians. <i>Times better</i> is the ratio \
         of the medians to stock, the spread is the lowest and the highest round. The control is stock a second time. \
         The counters of the library confirm the path of each row of ours.</p>",
        escape(&machine.cpu),
        machine.cpus,
        escape(&machine.kernel),
        if machine.virtual_machine { " · virtual machine" } else { "" },
        escape(&machine.command.join(" "))
    );
    for note in notes {
        write!(page, "<p class=bad>{}</p>", escape(note))?;
    }
    page += &contents(done);
    let mut paper = None;
    for d in done {
        if paper.replace(d.section.paper) != Some(d.section.paper) {
            write!(page, "<h2>{}</h2><p>Paper: {}.</p>", d.section.paper.title(), d.section.paper.machine())?;
        }
        page += &section(machine, d)?;
    }
    Ok(page + "</html>\n")
}

/// A line for each section: the number of its rows by verdict, or the reason why it has none.
fn contents(done: &[Done]) -> String {
    let mut text = "<table><tr><th>section<th>rows<th>above stock<th>as stock<th>below stock<th>failed<th>".to_owned();
    for d in done {
        let verdicts: Vec<Verdict> =
            d.rows.iter().flat_map(|row| row.compared().into_iter().map(|way| row.verdict(way))).collect();
        let count = |wanted: &[Verdict]| match verdicts.iter().filter(|v| wanted.contains(v)).count() {
            0 => String::new(),
            n => n.to_string(),
        };
        let listed = d.section.listed().filter(|_| d.rows.is_empty()).map_or("", |listed| listed.why.text());
        let _ = write!(
            text,
            "<tr><td><a href=#{}>{}</a><td>{}<td>{}<td>{}<td class=bad>{}<td class=bad>{}<td>{listed}",
            d.section.name,
            escape(&heading(&d.section)),
            if d.rows.is_empty() { String::new() } else { d.rows.len().to_string() },
            count(&[Verdict::Above]),
            count(&[Verdict::Same]),
            count(&[Verdict::Below, Verdict::BelowWithinControl]),
            count(&[Verdict::Failed]),
        );
    }
    text + "</table>"
}

fn section(machine: &Machine, d: &Done) -> Result<String> {
    let s = &d.section;
    let mut text = format!("<h3 id={}>{}</h3><p>{}</p>", s.name, escape(&heading(s)), escape(s.says));
    if !d.rows.is_empty() {
        write!(
            text,
            "<p>What differs: {} Here: {} CPUs, Linux {}.</p>",
            escape(s.differs),
            machine.cpus,
            escape(&machine.kernel)
        )?;
        text += &charts(&d.rows)?;
        text += &table(&d.rows);
    }
    if let Some(listed) = s.listed() {
        let check = listed.check.map_or_else(String::new, |c| format!(" <code>{}</code>", escape(c)));
        write!(text, "<p class=listed>Not measured here ({}): {}{check}</p>", listed.why.text(), escape(listed.text))?;
    }
    for skipped in &d.skipped {
        write!(text, "<p class=listed>Not measured here: {}</p>", escape(skipped))?;
    }
    Ok(text)
}

fn table(rows: &[Row]) -> String {
    let mut text = "<table><tr><th>row<th>paper<th>way<th>stock<th>ours<th>times better<th>spread<th>control<th>bare \
                    queue<th>"
        .to_owned();
    for row in rows {
        for way in row.compared() {
            let value = |path| row.values.median(path).map_or("–".to_owned(), |v| value_text(v, row.values.unit));
            let beside = row.values.beside_stock(way).filter(|_| way != Path::Stock);
            let control = row.values.beside_stock(Path::Control);
            let layout = if row.values.layout == Layout::SameCpu { ", one CPU" } else { "" };
            let claim = row.measure.claim.map_or_else(String::new, |c| c.text(row.values.unit, row.values.better));
            let is_good = matches!(row.verdict(way), Verdict::Above | Verdict::Same | Verdict::Reference);
            let _ = write!(
                text,
                "<tr><td>{}{layout}<td>{}<td>{}<td>{}<td>{}<td>{}<td>{}<td>{}<td>{}<td class={}>{}",
                escape(&row.values.measure),
                escape(&claim),
                way.name(),
                value(Path::Stock),
                if way == Path::Stock { "–".to_owned() } else { value(way) },
                beside.map_or("–".to_owned(), |b| times_text(b.median)),
                beside.map_or("–".to_owned(), |b| range_text(&b)),
                control.map_or("–".to_owned(), |b| range_text(&b)),
                value(Path::Queue),
                if is_good { "ok" } else { "bad" },
                escape(&row.sentence(way))
            );
        }
    }
    text + "</table>"
}

/// A chart for each measure that has three or more points on an axis.
fn charts(rows: &[Row]) -> Result<String> {
    let mut text = String::new();
    let mut labels: Vec<(&str, &str)> = Vec::new();
    for row in rows {
        let label = row.at.map(|(axis, _)| (axis, row.measure.label));
        labels.extend(label.filter(|l| !labels.contains(l)));
    }
    for (axis, label) in labels {
        let points: Vec<&Row> =
            rows.iter().filter(|r| r.measure.label == label && r.at.is_some_and(|(a, _)| a == axis)).collect();
        if points.len() >= 3 {
            text += &chart(axis, label, &points)?;
        }
    }
    Ok(text)
}

/// Draws a line for each way, on two logarithmic axes.
fn chart(axis: &str, label: &str, rows: &[&Row]) -> Result<String> {
    let ways: Vec<Path> = Path::ALL
        .into_iter()
        .filter(|p| *p != Path::Control && rows.iter().any(|r| r.values.median(*p).is_some()))
        .collect();
    let points = |way: Path| {
        rows.iter().filter_map(move |r| Some((r.at?.1, r.values.median(way)?))).filter(|(x, y)| *x > 0.0 && *y > 0.0)
    };
    let all = || ways.iter().flat_map(|way| points(*way));
    let range =
        |values: &mut dyn Iterator<Item = f64>| values.fold((f64::MAX, 0.0f64), |(l, h), v| (l.min(v), h.max(v)));
    let ((left, right), (low, high)) = (range(&mut all().map(|p| p.0)), range(&mut all().map(|p| p.1)));
    if high == 0.0 || right == 0.0 {
        return Ok(String::new());
    }
    let unit = rows[0].values.unit;
    let failed = |e: &dyn std::fmt::Display| anyhow!("{e}");
    let mut svg = String::new();
    {
        let root = SVGBackend::with_string(&mut svg, SIZE).into_drawing_area();
        root.fill(&WHITE).map_err(|e| failed(&e))?;
        let mut chart = ChartBuilder::on(&root)
            .caption(label, ("sans-serif", 16))
            .margin(8)
            .x_label_area_size(38)
            .y_label_area_size(75)
            // Room for the legend at the right.
            .build_cartesian_2d(
                (left / 1.1..right * (right / left).powf(0.2)).log_scale(),
                (low / 1.5..high * 1.5).log_scale(),
            )
            .map_err(|e| failed(&e))?;
        chart
            .configure_mesh()
            .x_desc(axis)
            .x_label_formatter(&|x| format!("{x:.0}"))
            .y_label_formatter(&|v| value_text(*v, unit))
            .draw()
            .map_err(|e| failed(&e))?;
        for way in &ways {
            let colour = color(*way);
            chart
                .draw_series(LineSeries::new(points(*way), colour.stroke_width(2)).point_size(3))
                .map_err(|e| failed(&e))?
                .label(way.name())
                .legend(move |(x, y)| Rectangle::new([(x, y - 5), (x + 12, y + 5)], colour.filled()));
        }
        legend(&mut chart).map_err(|e| failed(&e))?;
        root.present().map_err(|e| failed(&e))?;
    }
    Ok(svg)
}
