//! `fastsocket stat --zones --timeline FILE.json`: records queues, steals and flow groups over time, as JSON and as a
//! picture.

use anyhow::{ensure, Context, Result};
use fsocket_client::control;
use fsocket_proto::report::{Balance, FlowGroups, Report};
use serde::Serialize;
use std::collections::BTreeMap;
use std::fmt::Write;
use std::path::Path;
use std::time::{Duration, Instant};

const EVERY: Duration = Duration::from_millis(100);

/// One sample: the state of all listeners and devices at one time.
#[derive(Debug, Clone, Default, Serialize)]
struct Sample {
    /// Seconds since the first sample.
    t: f64,
    groups: Vec<Group>,
    flow_groups: Vec<FlowGroups>,
}

/// The state of a listener in a sample.
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

/// Records for this many seconds. If the monitor ends meanwhile, the file has the samples so far.
///
/// # Errors
/// There is no monitor, or the file cannot be written.
pub fn record(file: &Path, seconds: f64) -> Result<i32> {
    ensure!((0.1..=86_400.0).contains(&seconds), "--seconds: between 0.1 and 86400");
    let svg = file.with_extension("svg");
    ensure!(svg != file, "the picture would be written to the same file: name it FILE.json");
    let path = control::find()?;
    // Try to write the file now, so that the user does not learn of an error only after the
    // recording.
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
    std::fs::write(&svg, draw(&timeline.samples)).with_context(|| svg.display().to_string())?;
    anstream::println!("{} samples: {} and {}", timeline.samples.len(), file.display(), svg.display());
    Ok(0)
}

/// Lines of a diagram: name, and points (time, value).
type Lines = BTreeMap<String, Vec<(f64, f64)>>;

/// Data of the three diagrams: lengths of queues, connections stolen in each interval, flow groups
/// on each CPU.
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

/// Width and height of each of the three diagrams, with numbers at the left and names at the
/// right.
const PANEL: (f64, f64) = (900.0, 240.0);
const LEFT: f64 = 60.0;
const RIGHT: f64 = 700.0;
const TOP: f64 = 30.0;
const BOTTOM: f64 = 205.0;
const COLORS: [&str; 8] = ["#d75a1e", "#5a96d2", "#3c8c3c", "#8c50b4", "#646464", "#c8a000", "#00a0a0", "#c83264"];

fn draw(samples: &[Sample]) -> String {
    let end = samples.last().map_or(0.0, |s| s.t).max(0.1);
    let (width, height) = (PANEL.0, PANEL.1 * 3.0);
    let mut svg = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{width}\" height=\"{height}\" font-family=\"sans-serif\" \
         font-size=\"12\">\n<rect width=\"100%\" height=\"100%\" fill=\"white\"/>\n"
    );
    for (n, (title, lines)) in lines(samples).iter().enumerate() {
        let _ = writeln!(svg, "<g transform=\"translate(0 {})\">", n as f64 * PANEL.1);
        panel(&mut svg, title, lines, end);
        svg += "</g>\n";
    }
    svg + "</svg>\n"
}

/// Draws one diagram: axes with five numbers each, and a named curve for each of `lines`.
fn panel(svg: &mut String, title: &str, lines: &Lines, end: f64) {
    let high = lines.values().flatten().map(|p| p.1).fold(1.0, f64::max) * 1.05;
    let at = |(t, v): (f64, f64)| (LEFT + t / end * (RIGHT - LEFT), BOTTOM - v / high * (BOTTOM - TOP));
    let mut text = |(x, y): (f64, f64), anchor: &str, words: &str| {
        let words = words.replace('&', "&amp;").replace('<', "&lt;");
        let _ = writeln!(svg, "<text x=\"{x:.1}\" y=\"{y:.1}\" text-anchor=\"{anchor}\">{words}</text>");
    };
    text((LEFT, TOP - 12.0), "start", title);
    for part in [0.0, 0.25, 0.5, 0.75, 1.0] {
        let ((x, _), (_, y)) = (at((end * part, 0.0)), at((0.0, high * part)));
        text((x, BOTTOM + 16.0), "middle", &format!("{:.1} s", end * part));
        text((LEFT - 6.0, y + 4.0), "end", &format!("{:.1}", high * part));
    }
    for (n, name) in lines.keys().enumerate() {
        text((RIGHT + 30.0, TOP + 16.0 * n as f64), "start", name);
    }
    let mut line = |points: &mut dyn Iterator<Item = (f64, f64)>, color: &str| {
        let points: Vec<String> = points.map(|(x, y)| format!("{x:.1},{y:.1}")).collect();
        let points = points.join(" ");
        let _ = writeln!(svg, "<polyline fill=\"none\" stroke=\"{color}\" stroke-width=\"2\" points=\"{points}\"/>");
    };
    line(&mut [(LEFT, TOP), (LEFT, BOTTOM), (RIGHT, BOTTOM)].into_iter(), "#ccc");
    for ((n, points), color) in lines.values().enumerate().zip(COLORS.iter().cycle()) {
        line(&mut points.iter().copied().map(at), color);
        let y = TOP + 16.0 * n as f64 - 4.0;
        line(&mut [(RIGHT + 10.0, y), (RIGHT + 24.0, y)].into_iter(), color);
    }
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
        let svg = draw(&samples);
        assert!(svg.contains("Flow groups") && svg.contains("CPU 1, eth0") && svg.contains("polyline"), "{svg}");
        assert!(draw(&[]).contains("Accept queues"));
    }
}
