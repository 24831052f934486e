//! The report: one HTML file with everything in it.

use crate::report::{factor_text, value_text, Row};
use crate::scenario::{Layout, Unit};
use anyhow::{anyhow, Result};
use fsocket_bench_args::Path;
use fsocket_measure::Machine;
use plotters::prelude::*;
use plotters::style::text_anchor::{HPos, Pos, VPos};
use std::fmt::Write;

const SIZE: (u32, u32) = (900, 320);
const STYLE: &str = "body{font:15px/1.4 sans-serif;max-width:64em;margin:2em auto;padding:0 1em;color:#222}\
    table{border-collapse:collapse;font-size:13px}td,th{padding:.2em .8em;text-align:right;border-bottom:1px solid #ddd}\
    td:first-child,th:first-child{text-align:left}.MISSED,.ANOTHER,.FAILED{color:#b00;font-weight:bold}.ok{color:#070}\
    svg{max-width:100%;height:auto}code{background:#f4f4f4;padding:.1em .3em}";

pub fn color(path: Path) -> RGBColor {
    match path {
        Path::Stock => RGBColor(150, 150, 150),
        Path::Unix => RGBColor(90, 150, 210),
        Path::Ours => RGBColor(215, 90, 30),
        Path::Queue => RGBColor(60, 60, 60),
        Path::KernelServer => RGBColor(60, 150, 90),
        Path::KernelClient => RGBColor(130, 200, 120),
        Path::Control => RGBColor(200, 200, 200),
    }
}

/// Title of the chart that a row belongs to. None: no chart.
fn group(row: &Row) -> Option<&'static str> {
    let name = row.measure.as_str();
    Some(match row.unit {
        Unit::Nanoseconds if name.ends_with("p50") => "Round trip, median (lower is better)",
        Unit::Nanoseconds => "Round trip, 99th percentile (lower is better)",
        Unit::BytesPerSecond => "One connection, large messages (higher is better)",
        Unit::PerSecond if name.starts_with("rate") => "One connection, messages a second (higher is better)",
        Unit::PerSecond if name == "conn" => "Connect, 64 bytes each way, close (higher is better)",
        Unit::PerSecond => "Programs, requests a second (higher is better)",
        _ => return None,
    })
}

pub fn page(machine: &Machine, rows: &[Row]) -> Result<String> {
    let mut page = format!("<!doctype html><meta charset=utf-8><title>fastsocket bench</title><style>{STYLE}</style>");
    write!(
        page,
        "<h1>fastsocket bench</h1><p>{} · {} CPUs, client on {}, server on {} · kernel {}{}</p><p><code>{}</code></p>",
        escape(&machine.cpu),
        machine.cpus,
        machine.used[0],
        machine.used[1],
        escape(&machine.kernel),
        if machine.virtual_machine { " · virtual machine" } else { "" },
        escape(&machine.command.join(" "))
    )?;
    for layout in [Layout::TwoCpus, Layout::SameCpu] {
        let here: Vec<&Row> = rows.iter().filter(|r| r.layout == layout).collect();
        if here.is_empty() {
            continue;
        }
        write!(page, "<h2>Layout {}</h2>", layout.name())?;
        let mut titles: Vec<&str> = here.iter().filter_map(|r| group(r)).collect();
        titles.dedup();
        let mut done = Vec::new();
        for title in titles {
            if !done.contains(&title) {
                done.push(title);
                let members: Vec<&Row> = here.iter().copied().filter(|r| group(r) == Some(title)).collect();
                page += &chart(title, &members)?;
            }
        }
        page += &table(&here);
    }
    Ok(page)
}

/// Draws bars on a logarithmic axis, because the compared values differ by factors.
fn chart(title: &str, rows: &[&Row]) -> Result<String> {
    let all = || rows.iter().flat_map(|r| Path::ALL.iter().filter_map(|p| r.median(*p))).filter(|v| *v > 0.0);
    let (low, high) = all().fold((f64::MAX, 0.0f64), |(l, h), v| (l.min(v), h.max(v)));
    if high == 0.0 {
        return Ok(String::new());
    }
    let unit = rows[0].unit;
    let (low, high) = (low / 2.0, high * 2.0);
    let mut svg = String::new();
    {
        let failed = |e: &dyn std::fmt::Display| anyhow!("{e}");
        let root = SVGBackend::with_string(&mut svg, SIZE).into_drawing_area();
        root.fill(&WHITE).map_err(|e| failed(&e))?;
        let mut chart = ChartBuilder::on(&root)
            .caption(title, ("sans-serif", 18))
            .margin(8)
            .x_label_area_size(30)
            .y_label_area_size(75)
            // Room for the legend at the right.
            .build_cartesian_2d(-0.5..rows.len() as f64 * 1.12 - 0.5, (low..high).log_scale())
            .map_err(|e| failed(&e))?;
        chart
            .configure_mesh()
            .disable_x_mesh()
            .disable_x_axis()
            .y_label_formatter(&|v| value_text(*v, unit))
            .draw()
            .map_err(|e| failed(&e))?;
        let present: Vec<Path> =
            Path::ALL.into_iter().filter(|p| rows.iter().any(|r| r.median(*p).is_some())).collect();
        let width = 0.8 / present.len() as f64;
        for (n, path) in present.iter().copied().enumerate() {
            let bars = rows.iter().enumerate().filter_map(|(i, row)| {
                let left = i as f64 - 0.4 + n as f64 * width;
                let value = row.median(path).filter(|v| *v > 0.0)?;
                Some(Rectangle::new([(left, low), (left + width * 0.92, value)], color(path).filled()))
            });
            chart
                .draw_series(bars)
                .map_err(|e| failed(&e))?
                .label(path.name())
                .legend(move |(x, y)| Rectangle::new([(x, y - 5), (x + 12, y + 5)], color(path).filled()));
        }
        let anchor = Pos::new(HPos::Center, VPos::Top);
        let style = ("sans-serif", 12).into_text_style(&root).pos(anchor);
        chart
            .draw_series(rows.iter().enumerate().map(|(i, row)| {
                let name = row.measure.trim_end_matches(" p50").trim_end_matches(" p99").to_owned();
                EmptyElement::at((i as f64, low)) + Text::new(name, (0, 6), style.clone())
            }))
            .map_err(|e| failed(&e))?;
        legend(&mut chart).map_err(|e| failed(&e))?;
        root.present().map_err(|e| failed(&e))?;
    }
    Ok(svg)
}

fn table(rows: &[&Row]) -> String {
    let mut text = "<table><tr><th>measure".to_owned();
    for name in ["stock", "unix", "ours", "queue", "ours vs stock", "must show", ""] {
        let _ = write!(text, "<th>{name}");
    }
    for row in rows {
        let _ = write!(text, "<tr><td>{}", escape(&row.measure));
        for path in Path::MAIN {
            let _ = write!(text, "<td>{}", row.median(path).map_or("–".to_owned(), |v| value_text(v, row.unit)));
        }
        let (required, judgement) = (escape(&row.required()), row.judgement());
        let _ = write!(text, "<td>{}<td>{required}<td class=\"{judgement}\">{judgement}", factor_text(row));
    }
    text + "</table>"
}

pub fn escape(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;")
}

/// Names the series in the upper right corner of a chart.
pub fn legend<'a, B: DrawingBackend + 'a, C: CoordTranslate>(
    chart: &mut ChartContext<'a, B, C>,
) -> std::result::Result<(), DrawingAreaErrorKind<B::ErrorType>> {
    chart
        .configure_series_labels()
        .background_style(WHITE.mix(0.8))
        .label_font(("sans-serif", 12))
        .position(SeriesLabelPosition::UpperRight)
        .draw()
}
