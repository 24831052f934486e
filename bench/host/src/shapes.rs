//! `fastsocket bench shapes`: the shapes in which servers live. Processes and threads of several
//! kinds, more of them than CPUs, with some work in each request; stock and ours in turn.

mod map;
mod plan;
mod row;
mod verdict;

use crate::accel::{clean_environment, Accel};
use crate::child::Child;
use crate::ends::{self, Clients, Done};
use crate::hogs::Hogs;
use crate::step::READY_LIMIT;
use anyhow::{bail, Context, Result};
use clap::ValueEnum;
use fsocket_bench_args::Shapes;
use fsocket_client::locate::Pieces;
use plan::{Extra, Shape};
use row::{spread, Row, Sample};
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

/// One way to carry the bytes.
struct Way {
    name: &'static str,
    accel: Option<Accel>,
}

/// The exit status, or why nothing was measured.
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
    let mut ways = vec![Way { name: "stock", accel: None }];
    if let Some(at) = &args.before {
        let pieces = Pieces { library: Some(at.join("libfsocket.so")), monitor: Some(at.join("fastsocketd")) };
        let own = dir.path().join("before");
        std::fs::create_dir(&own)?;
        ways.push(Way { name: "before", accel: Some(Accel::start(&pieces, &own)?) });
    }
    ways.push(Way { name: "ours", accel: Some(Accel::start(&args.pieces, dir.path())?) });
    let reps = args.reps.map_or(if args.quick { 3 } else { 5 }, |n| n as usize);
    let secs = args.secs.unwrap_or(if args.quick { 0.3 } else { 1.0 });
    let per_us = turns_per_us();
    let cpus = fsocket_measure::allowed_cpus()?;
    let used = [cpus[0], *cpus.get(1).unwrap_or(&cpus[0])];
    let own = std::env::current_exe()?;
    let mut rows = Vec::new();
    let mut progress = fsocket_measure::Progress::new(shapes.len() * reps * ways.len());
    for shape in shapes {
        let samples = ways.iter().map(|w| (w.name, Vec::new())).collect();
        let mut row = Row { shape: shape.name(), what: shape, samples, problems: Vec::new() };
        for _ in 0..reps {
            for (way, (_, samples)) in ways.iter().zip(&mut row.samples) {
                progress.step(&format!("{} {}", row.shape, way.name));
                match measure(&own, &shape, way, &Setting { secs, per_us, cpus: used }) {
                    Ok(sample) => samples.push(sample),
                    Err(e) => row.problems.push(format!("{}: {e:#}", way.name)),
                }
            }
        }
        rows.push(row);
    }
    drop(progress);
    print(&rows, cpus.len());
    let is_missed = judge(&rows, cpus.len());
    let machine = fsocket_measure::shape(&used);
    if let Some(file) = &args.report {
        std::fs::write(file, map::page(&machine, &rows, reps)).with_context(|| file.display().to_string())?;
    }
    if let Some(file) = &args.json {
        let page = serde_json::json!({ "machine": machine, "reps": reps, "secs": secs, "shapes": rows });
        std::fs::write(file, serde_json::to_string_pretty(&page)? + "\n")
            .with_context(|| file.display().to_string())?;
    }
    Ok((rows.iter().any(|r| !r.problems.is_empty()) || args.strict && is_missed) as i32)
}

/// Says how many shapes miss a bar, and the means. True: something is missed.
fn judge(rows: &[Row], cpus: usize) -> bool {
    let measured: Vec<_> = rows.iter().filter_map(Row::measured).collect();
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
    below > 0 || means.iter().any(verdict::Mean::is_missed)
}

/// Turns of [`ends::work`] in a microsecond, when nothing interrupts it.
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

/// What all measurements have in common.
struct Setting {
    secs: f64,
    /// Turns of [`ends::work`] in a microsecond.
    per_us: f64,
    cpus: [usize; 2],
}

fn measure(own: &Path, shape: &Shape, way: &Way, setting: &Setting) -> Result<Sample> {
    let secs = setting.secs;
    let _hogs = (shape.extra == Extra::Hogs).then(|| Hogs::start(&setting.cpus, 1));
    let cpus = if shape.extra == Extra::Pinned { setting.cpus.map(Some) } else { [None; 2] };
    let before = way.accel.as_ref().map(|a| a.report()).transpose()?;
    let command = |role: &str, kind: Option<clap::builder::PossibleValue>, work: u64| {
        let mut c = Command::new(own);
        clean_environment(&mut c);
        if let Some(a) = &way.accel {
            a.environment(&mut c);
        }
        let number = |n: usize| n.to_string();
        c.args(["end", role, kind.as_ref().map_or("", |k| k.get_name())]);
        c.args(["--work", &((work as f64 * setting.per_us) as u64).to_string(), "--secs", &secs.to_string()]);
        c.args(["--request", &number(shape.request()), "--answer", &number(shape.size)]);
        match shape.extra {
            Extra::Pipeline(n) => drop(c.args(["--pipeline", &number(n)])),
            Extra::Think(us) => drop(c.args(["--think", &us.to_string()])),
            Extra::Short => drop(c.arg("--short")),
            Extra::Nothing | Extra::Hogs | Extra::Pinned => {}
        }
        c.stdin(Stdio::piped());
        c
    };
    let mut server = Child::spawn(command("--server", shape.server.to_possible_value(), shape.work[0]), cpus[0])?;
    let port = server.line(READY_LIMIT)?;
    let (processes, each) = match shape.clients {
        Clients::Processes => (shape.conns, 1),
        _ => (1, shape.conns),
    };
    let mut clients = Vec::new();
    for _ in 0..processes {
        let mut c = command("--clients", shape.clients.to_possible_value(), shape.work[1]);
        c.args(["--port", &port, "--conns", &each.to_string()]);
        clients.push(Child::spawn(c, cpus[1])?);
    }
    for c in &mut clients {
        c.line(READY_LIMIT)?;
    }
    let mut groups: Vec<u32> = clients.iter().map(Child::pid).chain([server.pid()]).collect();
    groups.extend(way.accel.as_ref().map(Accel::monitor_pid));
    let used = cpu_time(&groups)?;
    let started = Instant::now();
    for c in &mut clients {
        c.poke()?;
    }
    let limit = Duration::from_secs_f64(secs) + READY_LIMIT;
    let mut done = Done::default();
    for c in &mut clients {
        done.add(&serde_json::from_str(&c.line(limit)?).context("a client says something else")?);
    }
    let took = started.elapsed().as_secs_f64().max(secs);
    // All are there still: they wait for the end of their input.
    let used = cpu_time(&groups)? - used;
    if let (Some(accel), Some(before)) = (&way.accel, before) {
        accel.check(&before.totals)?;
    }
    Ok(Sample {
        rate: done.requests as f64 / took,
        cpu_us: used * 1e6 / done.requests.max(1) as f64,
        p50_us: done.quantile(0.5) / 1e3,
        p99_us: done.quantile(0.99) / 1e3,
    })
}

/// Seconds on a CPU of all threads of all processes in these process groups.
fn cpu_time(groups: &[u32]) -> Result<f64> {
    let mut ns = 0u64;
    for entry in std::fs::read_dir("/proc")?.flatten() {
        let Some(pid) = entry.file_name().to_str().and_then(|n| n.parse::<u32>().ok()) else { continue };
        // A process may end meanwhile.
        let Ok(stat) = std::fs::read_to_string(format!("/proc/{pid}/stat")) else { continue };
        let group = stat.rsplit(')').next().and_then(|rest| rest.split_whitespace().nth(2)?.parse().ok());
        if !group.is_some_and(|g: u32| groups.contains(&g)) {
            continue;
        }
        let Ok(tasks) = std::fs::read_dir(format!("/proc/{pid}/task")) else { continue };
        for task in tasks.flatten() {
            let text = std::fs::read_to_string(task.path().join("schedstat")).unwrap_or_default();
            ns += text.split(' ').next().and_then(|n| n.parse::<u64>().ok()).unwrap_or(0);
        }
    }
    Ok(ns as f64 / 1e9)
}

fn print(rows: &[Row], cpus: usize) {
    let mut table = comfy_table::Table::new();
    table.load_preset(comfy_table::presets::NOTHING);
    table.set_header([
        "server/clients/connections/us/answer",
        "",
        "requests/s",
        "to stock",
        "spread",
        "CPU us",
        "p50 us",
        "p99 us",
        "below stock",
    ]);
    for row in rows {
        let below = row.measured().map_or_else(String::new, |m| verdict::missed(&m, cpus).join(" "));
        for (k, (way, samples)) in row.samples.iter().enumerate() {
            let of = |f: fn(&Sample) -> f64| spread(samples.iter().map(f).collect())[0];
            let ratios = samples.iter().zip(&row.samples[0].1).map(|(a, stock)| a.rate / stock.rate).collect();
            let [ratio, low, high] = spread(ratios);
            table.add_row([
                if k == 0 { row.shape.clone() } else { String::new() },
                (*way).to_owned(),
                format!("{:.0}", of(|s| s.rate)),
                if k == 0 { String::new() } else { format!("{ratio:.2}") },
                if k == 0 { String::new() } else { format!("{low:.2}-{high:.2}") },
                format!("{:.1}", of(|s| s.cpu_us)),
                format!("{:.1}", of(|s| s.p50_us)),
                format!("{:.1}", of(|s| s.p99_us)),
                if *way == "ours" { below.clone() } else { String::new() },
            ]);
        }
        for problem in &row.problems {
            table.add_row([String::new(), problem.clone()]);
        }
    }
    println!("{table}");
}
