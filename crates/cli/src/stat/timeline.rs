//! `fastsocket stat --zones --timeline FILE.json`: how queues, steals and flow groups go
//! over time, as JSON and as a picture.

use crate::control;
use anyhow::{anyhow, ensure, Context, Result};
use fsocket_proto::report::{Balance, FlowGroups, Report};
use plotters::coord::Shift;
use plotters::prelude::*;
use serde::Serialize;
use std::collections::BTreeMap;
use std::path::Path;
use std::time::{Duration, Instant};

const EVERY: Duration = Duration::from_millis(100);
const SIZE: (u32, u32) = (900, 720);

/// One look.
#[derive(Debug, Clone, Default, Serialize)]
struct Sample {
    /// Seconds since the first one.
    t: f64,
    groups: Vec<Group>,
    flow_groups: Vec<FlowGroups>,
}

/// A listener.
#[derive(Debug, Clone, Default, Serialize)]
struct Group {
    id: u64,
    local: String,
    balance: Balance,
}

#[derive(Debug, Serialize)]
struct Timeline {
    version: u32,
    every_ms: u64,
    samples: Vec<Sample>,
}

fn sample(report: Report, t: f64) -> Sample {
    let group = |g: fsocket_proto::report::Group| Some(Group { id: g.id, local: g.local, balance: g.balance? });
    Sample { t, groups: report.groups.into_iter().filter_map(group).collect(), flow_groups: report.flow_groups }
}

/// Records for so many seconds; a monitor that ends ends it, with what there is.
///
/// # Errors
/// No monitor, or a file that cannot be written.
pub fn record(file: &Path, seconds: f64) -> Result<i32> {
    ensure!((0.1..=86_400.0).contains(&seconds), "--seconds: between 0.1 and 86400");
    let svg = file.with_extension("svg");
    ensure!(svg != file, "the picture would be written to the same file: name it FILE.json");
    let path = control::find()?;
    // Before a long wait, not after it.
    std::fs::write(file, b"").with_context(|| file.display().to_string())?;
    let started = Instant::now();
    let mut samples = Vec::new();
    let mut next = started;
    while started.elapsed().as_secs_f64() < seconds {
        match control::report(&path) {
            Ok(report) => samples.push(sample(report, started.elapsed().as_secs_f64())),
            Err(e) if samples.is_empty() => return Err(e),
            Err(e) => {
                eprintln!("fastsocket: ended early: {e:#}");
                break;
            }
        }
        next += EVERY;
        std::thread::sleep(next.saturating_duration_since(Instant::now()));
    }
    let timeline = Timeline { version: 1, every_ms: EVERY.as_millis() as u64, samples };
    let text = serde_json::to_string(&timeline)? + "\n";
    std::fs::write(file, text).with_context(|| file.display().to_string())?;
    std::fs::write(&svg, draw(&timeline.samples)?).with_context(|| svg.display().to_string())?;
    anstream::println!("{} samples: {} and {}", timeline.samples.len(), file.display(), svg.display());
    Ok(0)
}

/// A line: its name, and its points over time.
type Lines = BTreeMap<String, Vec<(f64, f64)>>;

/// Lengths of queues, connections stolen in each interval, flow groups by CPU.
fn lines(samples: &[Sample]) -> [(&'static str, Lines); 3] {
    let (mut lengths, mut steals, mut groups) = (Lines::new(), Lines::new(), Lines::new());
    let mut before: BTreeMap<String, u64> = BTreeMap::new();
    for s in samples {
        let point = |lines: &mut Lines, name: String, v: f64| lines.entry(name).or_default().push((s.t, v));
        for g in &s.groups {
            let cpu = |place: u32| g.balance.queues.iter().find(|q| q.place == place).map_or(place, |q| q.cpu);
            for q in &g.balance.queues {
                point(&mut lengths, format!("CPU {} of {}", q.cpu, g.local), q.length.into());
            }
            for p in &g.balance.steals {
                let name = format!("CPU {} from {}, {}", cpu(p.thief), cpu(p.victim), g.local);
                let last = before.insert(name.clone(), p.connections).unwrap_or(p.connections);
                point(&mut steals, name, p.connections.saturating_sub(last) as f64);
            }
        }
        for f in &s.flow_groups {
            for (cpu, n) in &f.by_cpu {
                point(&mut groups, format!("CPU {cpu}, {}", f.device), (*n).into());
            }
        }
    }
    [("Accept queues, connections", lengths), ("Stolen, connections in 100 ms", steals), ("Flow groups", groups)]
}

fn draw(samples: &[Sample]) -> Result<String> {
    let mut svg = String::new();
    {
        let root = SVGBackend::with_string(&mut svg, SIZE).into_drawing_area();
        root.fill(&WHITE).map_err(|e| anyhow!("{e}"))?;
        let end = samples.last().map_or(0.0, |s| s.t).max(0.1);
        for ((title, lines), area) in lines(samples).iter().zip(root.split_evenly((3, 1))) {
            panel(&area, title, lines, end).map_err(|e| anyhow!("{e}"))?;
        }
        root.present().map_err(|e| anyhow!("{e}"))?;
    }
    Ok(svg)
}

fn panel<B: DrawingBackend>(
    area: &DrawingArea<B, Shift>,
    title: &str,
    lines: &Lines,
    end: f64,
) -> Result<(), DrawingAreaErrorKind<B::ErrorType>> {
    let high = lines.values().flatten().map(|p| p.1).fold(1.0, f64::max) * 1.05;
    let mut chart = ChartBuilder::on(area)
        .caption(title, ("sans-serif", 16))
        .margin(8)
        .x_label_area_size(28)
        .y_label_area_size(60)
        .build_cartesian_2d(0.0..end, 0.0..high)?;
    chart.configure_mesh().light_line_style(WHITE).x_desc("seconds").draw()?;
    for (n, (name, points)) in lines.iter().enumerate() {
        let color = Palette99::pick(n).to_rgba();
        chart
            .draw_series(LineSeries::new(points.iter().copied(), color.stroke_width(2)))?
            .label(name)
            .legend(move |(x, y)| PathElement::new([(x, y), (x + 14, y)], color.stroke_width(2)));
    }
    if !lines.is_empty() {
        chart.configure_series_labels().background_style(WHITE.mix(0.8)).border_style(BLACK.mix(0.3)).draw()?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use fsocket_proto::report::{Queue, Steals};

    #[test]
    fn a_line_for_each_queue_pair_and_cpu() {
        let at = |t: f64, length: u32, stolen: u64, there: u32| Sample {
            t,
            groups: vec![Group {
                id: 1,
                local: "0.0.0.0:80".to_owned(),
                balance: Balance {
                    limit: 32,
                    queues: vec![Queue { place: 1, cpu: 0, length, ..Default::default() }],
                    steals: vec![Steals { thief: 1, victim: 2, connections: stolen }],
                },
            }],
            flow_groups: vec![FlowGroups {
                device: "eth0".to_owned(),
                by_cpu: [(0, there), (1, 4096 - there)].into(),
                ..Default::default()
            }],
        };
        let samples = [at(0.0, 5, 100, 2048), at(0.1, 7, 130, 2000)];
        let [(_, lengths), (_, steals), (_, groups)] = lines(&samples);
        assert_eq!(lengths["CPU 0 of 0.0.0.0:80"], [(0.0, 5.0), (0.1, 7.0)]);
        assert_eq!(steals["CPU 0 from 2, 0.0.0.0:80"], [(0.0, 0.0), (0.1, 30.0)]);
        assert_eq!(groups["CPU 1, eth0"], [(0.0, 2048.0), (0.1, 2096.0)]);
        let svg = draw(&samples).unwrap();
        assert!(svg.contains("Flow groups") && svg.contains("CPU 1, eth0") && svg.contains("polyline"), "{svg}");
        assert!(draw(&[]).unwrap().contains("Accept queues"));
    }
}
