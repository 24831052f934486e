//! The experiment of Affinity-Accept's section 6.5, at this machine's size. A web server has half
//! load; CPU hogs use half of the cores, and a CPU-bound job runs beside the server. It compares
//! stock SO_REUSEPORT, ours without balance, and ours with balance.
//!
//! Clients begin requests at a fixed rate, independently of the server, so that a slow server cannot slow them
//! down. Each request uses a new connection.
//!
//! With `--path network` the clients are in a namespace of their own, and the kernel assigns their connections to
//! workers (flow groups, stealing). With `--path shm` the clients are on the server's host with the library, and
//! choose a worker themselves; stock clients connect over loopback.

#[path = "balance/client.rs"]
mod client;
#[path = "balance/cpu.rs"]
mod cpu;
#[path = "balance/stage.rs"]
mod stage;

use anyhow::{bail, ensure, Context, Result};
use clap::{Parser, ValueEnum};
use client::Outcome;
use comfy_table::{presets, Table};
use fsocket_testkit::netns;
use fsocket_testkit::servers::Way;
use serde_json::{json, Value};
use stage::Stage;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::{Duration, Instant};

/// nginx at half load beside CPU hogs: SO_REUSEPORT, ours without and with balance.
///
/// Needs root, a release build (`make`), nginx, wrk. Exit status 1 if a bar was missed or
/// something could not be measured.
#[derive(Debug, Parser)]
#[command(name = "balance-bench", max_term_width = 100)]
struct Args {
    /// How clients come
    #[arg(long, value_enum, default_value_t = Path::Network)]
    path: Path,
    /// Steer the device by flow group (XDP and a cpumap, which copies on veth and wakes a thread for
    /// each packet that changes its CPU). Otherwise flow groups are those of the listener
    #[arg(long)]
    steer: bool,
    /// Share of all CPUs' time that goes into this with SO_REUSEPORT undisturbed: server, clients and
    /// the card together, for they share the CPUs. The rate at which clients come follows from it
    #[arg(long, default_value_t = 0.4)]
    load: f64,
    /// Hogs on each of the upper half of the CPUs
    #[arg(long, default_value_t = 4)]
    hogs: usize,
    /// Seconds without, with, and after the hogs
    #[arg(long, value_delimiter = ',', default_values_t = [8, 14, 12])]
    phases: Vec<u64>,
    /// A client gives up after this, seconds
    #[arg(long, default_value_t = 5)]
    timeout: u64,
    /// The application's backlog
    #[arg(long, default_value_t = 256)]
    backlog: u32,
    /// Only these ways: 0 SO_REUSEPORT, 1 ours without balance, 2 with
    #[arg(long, value_delimiter = ',', default_values_t = [0, 1, 2])]
    ways: Vec<usize>,
    /// Turns of the comparison at full, even load, a second each; 0: not made
    #[arg(long, default_value_t = 100)]
    turns: usize,
    /// Write everything
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// Where time-lines are written
    #[arg(long, value_name = "DIR")]
    timeline: Option<PathBuf>,
    /// Be the clients: to this address, at that rate, until SIGTERM
    #[arg(long, hide = true, requires = "rate")]
    drive: Option<SocketAddr>,
    #[arg(long, hide = true)]
    rate: Option<f64>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Path {
    Network,
    Shm,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Reuseport,
    Unbalanced,
    Balanced,
}

impl Kind {
    const ALL: [Kind; 3] = [Kind::Reuseport, Kind::Unbalanced, Kind::Balanced];
    fn name(self) -> &'static str {
        match self {
            Kind::Reuseport => "reuseport",
            Kind::Unbalanced => "ours, no balance",
            Kind::Balanced => "ours, balance",
        }
    }
    fn way(self, path: Path) -> Way {
        match (self, path) {
            (Kind::Reuseport, _) => Way::Reuseport,
            (_, Path::Network) => Way::Ours,
            (_, Path::Shm) => Way::Shm,
        }
    }
}

/// Number of CPUs that receive packets: the lower half. The disturbed CPUs receive none, because the experiment
/// compares where connections go after they are received.
fn lower_half() -> usize {
    cpu::count().div_ceil(2)
}

/// Bytes of an answer's body.
const BODY: usize = 64;

/// Runs the whole experiment for one way.
// Long: one experiment from start to figures.
fn run(kind: Kind, rate: f64, work: u64, args: &Args) -> Result<Value> {
    let job_limit = Duration::from_secs(60);
    let alone_before = cpu::job(args.hogs, work, job_limit)?;
    let stage = Stage::new(kind, args, args.backlog, lower_half())?;
    let [before, during, after] = args.phases[..] else { bail!("--phases: three numbers") };
    let recorder = match (&args.timeline, kind) {
        (Some(dir), Kind::Balanced) if args.path == Path::Network => {
            std::fs::create_dir_all(dir)?;
            let file = std::fs::canonicalize(dir)?.join("balance-timeline.json").display().to_string();
            let seconds = (before + during + after + 4).to_string();
            Some(stage.watch(&["stat", "--zones", "--timeline", &file, "--seconds", &seconds]))
        }
        _ => None,
    };
    let has_groups = kind == Kind::Balanced && args.path == Path::Network;
    // The number of flow groups on each CPU, and the number of flow groups away from their home CPU.
    let groups = |stage: &Stage| -> Value {
        if has_groups {
            let of = &stage.zones()["flow_groups"][0];
            json!({ "by_cpu": of["by_cpu"], "away": of["away"] })
        } else {
            Value::Null
        }
    };
    let counted = stage.counted();
    let client = stage.drive(rate, args.timeout)?;
    let started = Instant::now();
    let used = cpu::Used::now();
    std::thread::sleep(Duration::from_secs(before));
    let used = used.since();
    let home = groups(&stage);
    let hogs_from = started.elapsed();
    let hogs = cpu::Hogs::start(args.hogs);
    std::thread::sleep(Duration::from_secs(during));
    hogs.stop();
    let hogs_to = started.elapsed();
    let away = groups(&stage);
    // Flow groups that have migrated are still away.
    let job = cpu::job(args.hogs, work, job_limit)?;
    let job_to = started.elapsed();
    let mut back = None;
    let ends = Instant::now() + Duration::from_secs(after);
    while Instant::now() < ends {
        std::thread::sleep(Duration::from_millis(200));
        if has_groups && back.is_none() && groups(&stage)["away"] == 0 {
            back = Some((started.elapsed() - job_to).as_secs_f64());
        }
    }
    let outcome = client.stop()?;
    let alone = cpu::job(args.hogs, work, job_limit)?;
    drop(recorder.map(|r| r.finish(Duration::from_secs(20)).success()));
    let zones = if kind == Kind::Reuseport { Value::Null } else { stage.zones() };
    if has_groups {
        let stolen = zones["counters"]["accept_stolen"].as_u64().unwrap_or(0);
        ensure!(stolen > 0, "NOT OURS: nothing was stolen");
    }
    let over_shm = stage.counted().zip(counted).map(|(now, before)| now.since(&before));
    if let (Some(counted), Path::Shm) = (&over_shm, args.path) {
        let [shm, kernel] = ["accept_shm", "accept_kernel"].map(|name| counted.get(name));
        // (If a worker's connections wait for so long that a channel has no free slot, the other
        // connections use the kernel.)
        ensure!(shm > kernel, "NOT OURS: {shm} over shared memory, {kernel} not: {counted}");
    }
    let part = |from: Duration, to: Duration| outcome.between(from, to).json();
    Ok(json!({
        "way": kind.name(),
        "cpu_percent_undisturbed": used,
        // Only the second half: the monitor needs two seconds to find out which CPUs receive.
        "undisturbed": part(hogs_from / 2, hogs_from),
        "hogs": part(hogs_from, hogs_to),
        "hogs_last_third": part(hogs_to - (hogs_to - hogs_from) / 3, hogs_to),
        "job_seconds": job.as_secs_f64(),
        // The mean of one run before and one run after, because the machine's speed changes within minutes.
        "job_alone_seconds": (alone_before + alone).as_secs_f64() / 2.0,
        "after": part(job_to + Duration::from_secs(1), started.elapsed()),
        "groups": { "home": home, "away": away, "back_after_seconds": back },
        "counters": zones["counters"].clone(),
        "accept_shm": over_shm.as_ref().map(|c| c.get("accept_shm")),
        "accept_kernel": over_shm.as_ref().map(|c| c.get("accept_kernel")),
    }))
}

/// Standard error of the mean.
fn standard_error(v: &[f64]) -> f64 {
    let n = v.len() as f64;
    let mean = v.iter().sum::<f64>() / n;
    (v.iter().map(|x| (x - mean).powi(2)).sum::<f64>() / (n - 1.0) / n).sqrt()
}

fn main() -> ExitCode {
    let args = Args::parse();
    if let (Some(to), Some(rate)) = (args.drive, args.rate) {
        client::serve(to, rate, Duration::from_secs(args.timeout));
        return ExitCode::SUCCESS;
    }
    match measure(&args) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(e) => {
            eprintln!("balance-bench: {e:#}");
            ExitCode::FAILURE
        }
    }
}

fn measure(args: &Args) -> Result<bool> {
    if let Some(why) = netns::unavailable().filter(|_| args.path == Path::Network) {
        bail!("{why}");
    }
    ensure!(cpu::count() >= 2, "needs two CPUs");
    ensure!(args.phases.len() == 3, "--phases: three numbers");
    let (full, rate) = rates(args)?;
    let (work, alone) = cpu::calibrate(args.hogs)?;
    eprintln!(
        "balance-bench: full rate {full:.0}/s, clients come at {rate:.0}/s; job alone {:.2} s",
        alone.as_secs_f64()
    );
    let mut rows = Vec::new();
    for kind in args.ways.iter().filter_map(|n| Kind::ALL.get(*n).copied()) {
        eprintln!("balance-bench: {}", kind.name());
        rows.push(run(kind, rate, work, args)?);
    }
    let even = if args.turns == 0 { Vec::new() } else { even(args)? };
    report(args, full, rate, alone, &rows, &even)
}

/// The highest rate of stock, and the rate that uses the wanted share of the CPUs (`--load`).
fn rates(args: &Args) -> Result<(f64, f64)> {
    let stage = Stage::new(Kind::Reuseport, args, 4096, lower_half())?;
    let full = stage.full_rate(3)?;
    let trial = full / 4.0;
    let client = stage.drive(trial, args.timeout)?;
    std::thread::sleep(Duration::from_secs(1));
    let used = cpu::Used::now();
    std::thread::sleep(Duration::from_secs(3));
    let used = used.since();
    client.stop()?;
    let share = used.iter().sum::<f64>() / used.len().max(1) as f64 / 100.0;
    ensure!(share > 0.01, "{trial:.0} requests a second use no time: {used:?}");
    Ok((full, (trial * args.load / share).min(full)))
}

/// Requests per second at full, even load, without and with balance. Both servers run at the same time. Each turn
/// is one second of load on one server and one on the other; which of them is first changes from turn to turn.
fn even(args: &Args) -> Result<Vec<[f64; 2]>> {
    // The load is even: all CPUs receive.
    let stage = |kind| Stage::new(kind, args, 4096, cpu::count());
    let stages = [stage(Kind::Unbalanced)?, stage(Kind::Balanced)?];
    for stage in &stages {
        stage.full_rate(1)?;
    }
    let mut turns = Vec::new();
    for turn in 0..args.turns {
        eprintln!("balance-bench: full load, {} of {}", turn + 1, args.turns);
        let mut pair = [0.0; 2];
        for n in [turn % 2, 1 - turn % 2] {
            pair[n] = stages[n].full_rate(1)?;
        }
        turns.push(pair);
    }
    if args.path == Path::Network {
        let zones = stages[1].zones();
        let counters = &zones["counters"];
        eprintln!(
            "balance-bench: full load: {} accepted from the own queue, {} stolen; flow groups {}",
            counters["accept_local"], counters["accept_stolen"], zones["flow_groups"]
        );
    }
    Ok(turns)
}

fn report(args: &Args, full: f64, rate: f64, alone: Duration, rows: &[Value], even: &[[f64; 2]]) -> Result<bool> {
    let mut table = Table::new();
    table.load_preset(presets::UTF8_HORIZONTAL_ONLY).set_header([
        "way",
        "CPUs used alone",
        "alone: median / p90 ms",
        "hogs: median / p90 ms",
        "not answered",
        "last third",
        "job s, alone s",
        "groups back",
    ]);
    let two = |v: &Value| format!("{:.2} / {:.2}", number(&v["median_ms"]), number(&v["p90_ms"]));
    for row in rows {
        table.add_row([
            row["way"].as_str().unwrap_or("").to_owned(),
            row["cpu_percent_undisturbed"].as_array().map_or(String::new(), |v| {
                v.iter().map(|v| format!("{:.0} %", number(v))).collect::<Vec<_>>().join(" ")
            }),
            two(&row["undisturbed"]),
            two(&row["hogs"]),
            format!("{:.2} %", number(&row["hogs"]["lost_percent"])),
            two(&row["hogs_last_third"]),
            format!("{:.2}, {:.2}", number(&row["job_seconds"]), number(&row["job_alone_seconds"])),
            row["groups"]["back_after_seconds"].as_f64().map_or("-".to_owned(), |s| format!("{s:.1} s")),
        ]);
    }
    println!("{table}");
    println!("clients come at {rate:.0}/s, {:.2} of {full:.0}/s; job alone {:.2} s", rate / full, alone.as_secs_f64());
    let ours = rows.last().context("no row")?;
    // Each pair is compared by itself, because the machine's speed changes between pairs.
    let ratios: Vec<f64> = even.iter().map(|pair| pair[1] / pair[0]).collect();
    let (ratio, error) = (fsocket_measure::median(&ratios).unwrap_or(f64::NAN), standard_error(&ratios));
    let job = number(&ours["job_seconds"]) / number(&ours["job_alone_seconds"]);
    let slower = number(&ours["hogs"]["median_ms"]) / number(&ours["undisturbed"]["median_ms"]);
    let lost = number(&ours["hogs"]["lost_percent"]);
    let mut bars = vec![
        ("no time-outs, nothing lost", lost == 0.0, format!("{lost:.2} %")),
        ("median with hogs within 2 times the undisturbed", slower <= 2.0, format!("{slower:.2}")),
        ("job within 10 % of its time alone", job <= 1.1, format!("{job:.2}")),
    ];
    if args.path == Path::Network {
        bars.push((
            "flow groups back",
            number(&ours["groups"]["away"]["away"]) > 0.0 && !ours["groups"]["back_after_seconds"].is_null(),
            format!("{} away, {} before", ours["groups"]["away"], ours["groups"]["home"]),
        ));
    }
    if !even.is_empty() {
        bars.push(("full, even load: on against off within 2 %", ratio >= 0.98, format!("{ratio:.3} +- {error:.3}")));
    }
    for (what, ok, value) in &bars {
        println!("{} {what}: {value}", if *ok { "ok    " } else { "MISSED" });
    }
    if let Some(file) = &args.json {
        let whole = json!({
            "command": std::env::args().collect::<Vec<_>>(),
            "cpus": cpu::count(),
            "kernel": std::fs::read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default().trim(),
            "load_average": std::fs::read_to_string("/proc/loadavg").unwrap_or_default().trim(),
            "full_rate": full, "rate": rate, "job_alone_seconds": alone.as_secs_f64(),
            "rows": rows, "even_off_on": even,
        });
        std::fs::write(file, serde_json::to_string_pretty(&whole)? + "\n")
            .with_context(|| file.display().to_string())?;
    }
    Ok(bars.iter().all(|(_, ok, _)| *ok))
}

fn number(v: &Value) -> f64 {
    v.as_f64().unwrap_or(f64::NAN)
}

impl Outcome {
    fn json(&self) -> Value {
        let [all, timed_out, failed, not_begun] = self.counts();
        json!({
            "requests": all,
            "median_ms": self.percentile(0.5),
            "p90_ms": self.percentile(0.9),
            "p99_ms": self.percentile(0.99),
            "timed_out": timed_out, "failed": failed, "not_begun": not_begun, "causes": self.causes(),
            "lost_percent": (timed_out + failed + not_begun) as f64 * 100.0 / all.max(1) as f64,
        })
    }
}
