//! `fastsocket bench shapes`: servers and clients of typical structures ("shapes"). They are processes and threads
//! of several kinds, more of them than CPUs, with some work in each request. Stock and ours take turns.

mod map;
mod measure;
mod plan;
mod row;
mod table;
mod verdict;
mod way;

use crate::ends;
use anyhow::{bail, Context, Result};
use fsocket_bench_args::Shapes;
use fsocket_measure::Machine;
use measure::{measure, Setting};
use plan::Shape;
use row::Row;
use std::time::Instant;
use way::Way;

/// Returns the exit status. An error if nothing was measured.
pub fn run(args: &Shapes) -> Result<i32> {
    let mut shapes = plan::all();
    shapes.retain(|s| args.only.is_empty() || args.only.iter().any(|text| s.name().contains(text.as_str())));
    shapes.retain(|s| !args.quick || s.quick);
    if args.list {
        shapes.iter().for_each(|s| println!("{}", s.name()));
        return Ok(0);
    }
    if shapes.is_empty() {
        bail!("there is no such shape (see --list)");
    }
    let dir = tempfile::Builder::new().prefix("fastsocket-shapes-").tempdir()?;
    let ways = way::all(args, dir.path())?;
    let reps = args.reps.map_or(if args.quick { 3 } else { 5 }, |n| n as usize);
    let secs = args.secs.unwrap_or(if args.quick { 0.3 } else { 1.0 });
    let cpus = fsocket_measure::allowed_cpus()?;
    let used = [cpus[0], *cpus.get(1).unwrap_or(&cpus[0])];
    let setting = Setting { own: std::env::current_exe()?, secs, per_us: turns_per_us(), cpus: used };
    let rows = measured(&shapes, &ways, reps, &setting);
    table::print(&rows, cpus.len());
    let is_missed = judge(&rows, cpus.len());
    write(args, &fsocket_measure::shape(&used), &rows, reps, secs)?;
    Ok((rows.iter().any(|r| !r.problems.is_empty()) || args.strict && is_missed) as i32)
}

/// Measures every shape in every way. The order of the ways rotates from repetition to repetition.
fn measured(shapes: &[Shape], ways: &[Way], reps: usize, setting: &Setting) -> Vec<Row> {
    let of = |shape: &Shape| ways.iter().filter(|w| w.is_for(shape)).collect::<Vec<_>>();
    let steps = shapes.iter().map(|shape| of(shape).len() * reps).sum();
    let mut progress = fsocket_measure::Progress::new(steps);
    let mut rows = Vec::new();
    for shape in shapes {
        let ways = of(shape);
        let samples = ways.iter().map(|w| (w.name, Vec::new())).collect();
        let mut row = Row { shape: shape.name(), what: *shape, samples, problems: Vec::new() };
        for rep in 0..reps {
            for turn in 0..ways.len() {
                let at = (rep + turn) % ways.len();
                progress.step(&format!("{} {}", row.shape, ways[at].name));
                match measure(shape, ways[at], setting) {
                    Ok(sample) => row.samples[at].1.push(sample),
                    Err(e) => row.problems.push(format!("{}: {e:#}", ways[at].name)),
                }
            }
        }
        rows.push(row);
    }
    rows
}

/// Writes the files that the command line names.
fn write(args: &Shapes, machine: &Machine, rows: &[Row], reps: usize, secs: f64) -> Result<()> {
    if let Some(file) = &args.report {
        std::fs::write(file, map::page(machine, rows, reps)).with_context(|| file.display().to_string())?;
    }
    if let Some(file) = &args.json {
        let beside: Vec<_> = rows.iter().map(|row| (&row.shape, row.beside())).filter(|(_, b)| !b.is_empty()).collect();
        let page = serde_json::json!({
            "machine": machine, "reps": reps, "secs": secs, "shapes": rows, "kernel": beside,
        });
        std::fs::write(file, serde_json::to_string_pretty(&page)? + "\n")
            .with_context(|| file.display().to_string())?;
    }
    Ok(())
}

/// Prints the number of shapes that miss a bar, and the means. Returns true if something is missed.
fn judge(rows: &[Row], cpus: usize) -> bool {
    let measured: Vec<_> = rows.iter().filter_map(verdict::Measured::of).collect();
    let below = measured.iter().filter(|m| !verdict::missed(m, cpus).is_empty()).count();
    println!("{} shapes, {below} below stock in rate, CPU time or tail by more than their spread", measured.len());
    let means = verdict::means(&measured, cpus);
    for m in &means {
        let verdict = if m.is_missed() { "MISSED" } else { "ok" };
        println!(
            "more runnable threads than CPUs, {} us of work: {:.2} of stock (geometric mean of {}), bar {}: {verdict}",
            m.work, m.mean, m.shapes, m.bar
        );
    }
    let beside: Vec<_> = rows.iter().flat_map(Row::beside).collect();
    let slower = beside.iter().filter(|b| !b.missed().is_empty()).count();
    if !beside.is_empty() {
        println!("{} rows in the kernel, {slower} below stock by more than the control", beside.len());
    }
    below > 0 || slower > 0 || means.iter().any(verdict::Mean::is_missed)
}

/// Turns of [`ends::work`] per microsecond, when nothing interrupts it.
fn turns_per_us() -> f64 {
    const TURNS: u64 = 200_000;
    let once = || {
        let started = Instant::now();
        ends::work(TURNS);
        started.elapsed()
    };
    let best = (0..50).map(|_| once()).min().unwrap_or_default();
    TURNS as f64 / (best.as_secs_f64() * 1e6)
}
