//! Measures zones between hosts: clients, server or proxy, and backend are
//! network namespaces joined by multi-queue veth. Stock, stock with
//! SO_REUSEPORT, and ours take turns in one run, each on fresh hosts.

mod disturb;
mod locality;
mod report;
mod stage;
mod throughput;

use anyhow::{bail, Result};
use clap::{Parser, ValueEnum};
use fsocket_testkit::netns::{self, Receive};
use fsocket_testkit::servers::Way;
use report::{Report, Row};
use serde_json::Value;
use std::path::PathBuf;
use throughput::Ready;

/// Stock, SO_REUSEPORT and ours in turn, between hosts made of network namespaces.
///
/// Needs root, a release build (`make`), and nginx, haproxy, wrk. Exit status: 1 if a
/// measurement failed or what was to be ours was not; else 0.
#[derive(Debug, Parser)]
#[command(name = "zones-bench", max_term_width = 100)]
struct Args {
    /// Only these scenarios
    #[arg(long, value_enum, value_delimiter = ',')]
    only: Vec<Scenario>,
    /// Only these ways
    #[arg(long, value_enum, value_delimiter = ',')]
    ways: Vec<WayName>,
    /// Repetitions of throughput and locality; the median counts
    #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u16).range(1..))]
    reps: u16,
    /// Seconds of each throughput measurement; each second is the next way's turn
    #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..=600))]
    seconds: u32,
    /// Seconds of killing or reloading, once each second
    #[arg(long, default_value_t = 30, value_parser = clap::value_parser!(u32).range(1..=3600))]
    disturb: u32,
    /// Concurrent requests
    #[arg(long, default_value_t = 64, value_parser = clap::value_parser!(u16).range(1..=1024))]
    concurrency: u16,
    /// Workers, receiving queues and the CPUs they are pinned to [default: all CPUs]
    #[arg(long, value_parser = clap::value_parser!(u16).range(1..=64))]
    cpus: Option<u16>,
    /// How a host receives (see crates/testkit/src/netns/link.rs)
    #[arg(long, value_enum, default_value_t = ReceiveName::Threads)]
    receive: ReceiveName,
    /// Write machine, command and every value
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Scenario {
    /// Requests a second: wrk, nginx
    Nginx,
    /// Requests a second: wrk, haproxy, backend
    Haproxy,
    /// Requests a second: wrk, demo server
    Demo,
    /// Requests a second: wrk, demo server as a proxy, backend
    DemoProxy,
    /// Share of packets handled on the worker's CPU: nginx
    LocalityNginx,
    /// The same, also for its connections to a backend: haproxy
    LocalityHaproxy,
    /// kill -9 of an nginx worker every second
    KillNginx,
    /// kill -9 of a worker of the demo server every second
    KillDemo,
    /// nginx -s reload every second
    ReloadNginx,
    /// SIGHUP to the demo server every second: new workers, the old ones finish
    ReloadDemo,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum WayName {
    Stock,
    Reuseport,
    Ours,
    /// Ours, with the sockets of SO_REUSEPORT
    Own,
    /// Ours, and RFD by XDP on the way to the backend
    Steered,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum ReceiveName {
    /// A pinned thread for each queue, like a card's interrupt
    Threads,
    /// RPS
    Rps,
    /// The sender's CPU
    Inline,
}

/// Parameters that all measurements share.
pub struct Setting {
    pub cpus: usize,
    pub receive: Receive,
    pub seconds: u32,
    pub disturb: u32,
    pub concurrency: usize,
}

fn main() -> std::process::ExitCode {
    match run() {
        Ok(true) => std::process::ExitCode::SUCCESS,
        Ok(false) => {
            eprintln!("zones-bench: not everything was measured, or was what it should be: see above");
            std::process::ExitCode::FAILURE
        }
        Err(e) => {
            eprintln!("zones-bench: {e:#}");
            std::process::ExitCode::FAILURE
        }
    }
}

/// False if a measurement failed.
fn run() -> Result<bool> {
    let args = Args::parse();
    if let Some(why) = netns::unavailable() {
        bail!("{why}");
    }
    let cpus = args.cpus.map_or_else(|| std::thread::available_parallelism().map_or(1, |n| n.get()), usize::from);
    let list: Vec<usize> = (0..cpus).collect();
    let receive = match args.receive {
        ReceiveName::Threads => Receive::Threads(list),
        ReceiveName::Rps => Receive::Rps(list),
        ReceiveName::Inline => Receive::Inline,
    };
    let setting =
        Setting { cpus, receive, seconds: args.seconds, disturb: args.disturb, concurrency: args.concurrency.into() };
    let ways: Vec<Way> = Way::ALL
        .into_iter()
        .filter(|way| {
            args.ways.is_empty() || args.ways.iter().any(|name| format!("{name:?}").eq_ignore_ascii_case(way.name()))
        })
        .collect();
    let mut report = Report::new(args.json.clone())?;
    for scenario in Scenario::value_variants() {
        if args.only.is_empty() || args.only.contains(scenario) {
            measure(*scenario, &setting, &ways, args.reps, &mut report);
            report.write(&setting)?;
        }
    }
    Ok(report.print())
}

/// Measures one scenario in all ways, which take turns.
fn measure(scenario: Scenario, setting: &Setting, ways: &[Way], reps: u16, report: &mut Report) {
    let once =
        matches!(scenario, Scenario::KillNginx | Scenario::KillDemo | Scenario::ReloadNginx | Scenario::ReloadDemo);
    let reps = if once { 1 } else { reps };
    let name = scenario.to_possible_value().expect("none is skipped").get_name().to_owned();
    let backend = matches!(scenario, Scenario::Haproxy | Scenario::DemoProxy | Scenario::LocalityHaproxy);
    // Steering changes nothing for a server that opens no connections.
    let ways = ways.iter().filter(|way| backend || **way != Way::Steered);
    let mut rows: Vec<Row> = ways.map(|way| Row::new(&name, *way)).collect();
    for rep in 1..=reps {
        match scenario {
            Scenario::Nginx | Scenario::Haproxy | Scenario::Demo | Scenario::DemoProxy => {
                eprintln!("zones-bench: {name}, {rep} of {reps}");
                throughput(scenario, setting, &mut rows);
            }
            _ => {
                for row in &mut rows {
                    eprintln!("zones-bench: {name}, {}, {rep} of {reps}", row.way.name());
                    let result = guarded(|| one(scenario, setting, row.way));
                    row.take(result);
                }
            }
        }
    }
    report.rows.append(&mut rows);
}

/// One repetition of all ways. In each of `setting.seconds` rounds, every way is measured for one second. The order
/// of the ways is reversed from round to round.
fn throughput(scenario: Scenario, setting: &Setting, rows: &mut [Row]) {
    let mut ready: Vec<Option<Ready>> = Vec::new();
    for row in rows.iter_mut() {
        let result = guarded(|| Ready::new(scenario, setting, row.way));
        ready.push(result.map_err(|e| row.failed(e)).ok());
    }
    for turn in 0..setting.seconds as usize {
        for n in 0..rows.len() {
            let n = if turn % 2 == 0 { n } else { rows.len() - 1 - n };
            let Some(way) = ready[n].as_mut() else { continue };
            if let Err(e) = guarded(|| way.turn(setting)) {
                rows[n].failed(e);
                ready[n] = None;
            }
        }
    }
    for (row, ready) in rows.iter_mut().zip(ready) {
        if let Some(ready) = ready {
            row.take(guarded(|| ready.finish()));
        }
    }
}

/// Turns a panic of a testkit check into an error, so that the other measurements still run.
fn guarded<T>(work: impl FnOnce() -> Result<T>) -> Result<T> {
    let result = std::panic::catch_unwind(std::panic::AssertUnwindSafe(work));
    result.unwrap_or_else(|_| Err(anyhow::anyhow!("panicked, see above")))
}

/// Makes one measurement of a scenario that is measured alone. The result is a JSON object of numbers.
fn one(scenario: Scenario, setting: &Setting, way: Way) -> Result<Value> {
    match scenario {
        Scenario::LocalityNginx | Scenario::LocalityHaproxy => locality::run(scenario, setting, way),
        Scenario::KillNginx | Scenario::KillDemo | Scenario::ReloadNginx | Scenario::ReloadDemo => {
            disturb::run(scenario, setting, way)
        }
        Scenario::Nginx | Scenario::Haproxy | Scenario::Demo | Scenario::DemoProxy => bail!("not measured alone"),
    }
}
