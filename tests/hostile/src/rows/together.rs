//! All attacks at once, by four users of each kind.

use super::line::{Line, Rows};
use super::probe::Figure::{Asked, Connect, Hello, Request};
use super::probe::Figures;
use super::scene::{Scene, LEFT, USERS};
use super::table::Who;
use anyhow::{Context, Result};
use std::time::{Duration, Instant};

/// Other processes notice turns of the monitor's loop that take longer than this.
const LONGEST_US: u64 = 5000;
const P999_US: u64 = 1024;

/// The upper end of the class (a power of two) below which this many of a thousand turns are.
fn quantile(turns: &[u64], per_mille: u64) -> u64 {
    let all: u64 = turns.iter().sum();
    let mut seen = 0;
    let power = turns.iter().position(|n| {
        seen += n;
        seen * 1000 >= all * per_mille
    });
    1 << power.unwrap_or(turns.len())
}

pub fn run(r: &Rows, scene: &Scene) -> Result<Line> {
    let before = scene.size();
    let (alone, stock_alone) = (scene.figures(r.time, false)?, scene.figures(r.time, true)?);
    let begin = |kernel| {
        let mut all = scene.assault(None, Who::Stranger, USERS / 2, kernel);
        all.extend(scene.assault(None, Who::Shared, USERS / 2, kernel));
        std::thread::sleep(Duration::from_millis(500));
        all
    };
    let attackers = begin(false);
    scene.report(true).context("no report")?;
    let ours = scene.figures(r.together, false)?;
    let seen = scene.report(false).context("no report")?.event_loop;
    let during = scene.size();
    drop(attackers);
    let ended = Instant::now();
    let left = scene.time_until_nothing_is_left();
    std::thread::sleep(LEFT.saturating_sub(ended.elapsed()));
    let after = scene.size();
    let attackers = begin(true);
    let stock = scene.figures(r.together, true)?;
    drop(attackers);
    let mut wrong = Vec::new();
    if ours.failed > 0 {
        wrong.push(format!("{} failed ({})", ours.failed, ours.why));
    }
    let p999 = quantile(&seen.turns, 999);
    println!(
        "     turns of the loop: longest {} us, p99.9 below {p999} us, by powers of two: {:?}",
        seen.longest_us, seen.turns
    );
    let cpu = quantile(&seen.turns_cpu, 999);
    println!(
        "     of CPU time: longest {} us, p99.9 below {cpu} us, by powers of two: {:?}",
        seen.longest_cpu_us, seen.turns_cpu
    );
    let mut pieces = seen.pieces.clone();
    pieces.sort_by_key(|p| std::cmp::Reverse(p.longest_cpu_us));
    let text = pieces.iter().take(12).map(|p| format!("{} {} ({})", p.name, p.longest_cpu_us, p.longest_us));
    println!("     longest by what was done, us of CPU (wall): {}", text.collect::<Vec<_>>().join(", "));
    println!(
        "     the monitor: {before:?} before, {during:?} during, {after:?} 5 s after; nothing left after {left:.1?}"
    );
    for (figure, times) in [(Hello, 10.0), (Connect, 10.0), (Asked, 10.0), (Request, 1.2)] {
        let [a, b, c, d] = [&alone, &ours, &stock_alone, &stock].map(|f| f.p99(figure));
        println!("     {figure:?} p99, ms: {a:.2} alone, {b:.2} attacked; stock {c:.2}, {d:.2}");
        if r.strict && b > times * a && b > 1.2 * d {
            wrong.push(format!("{figure:?} {:.1} times", b / a));
        }
    }
    if r.strict && (seen.longest_us > LONGEST_US || p999 > P999_US) {
        wrong.push(format!("turns of {} us, p99.9 {p999} us", seen.longest_us));
    }
    match left {
        Err(e) => wrong.push(e.to_string()),
        Ok(took) if r.strict && took > LEFT => wrong.push(format!("something is left for {took:.1?}")),
        Ok(_) => {}
    }
    let ms = |f: &Figures| format!("{:.2}", f.p99(Hello));
    Ok(Line {
        row: 0,
        name: "all at once".into(),
        figure: "Hello p99, ms".into(),
        alone: ms(&alone),
        attacked: ms(&ours),
        stock: format!("{}, {}", ms(&stock_alone), ms(&stock)),
        wrong,
    })
}
