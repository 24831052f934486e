//! `fsocket-faults`: fails system calls one by one.

use anyhow::{Context, Result};
use clap::Parser;
use fsocket_faults::campaign::{Campaign, Side, Verdict};
use fsocket_faults::plan::Extent;
use fsocket_faults::trap::Fault;
use fsocket_faults::{daemon, errors, pairs, places};
use fsocket_testkit::artifacts;
use std::collections::BTreeMap;
use std::process::ExitCode;
use std::time::Instant;

/// Fails the system calls of the library, and of the monitor, one by one
#[derive(Parser)]
#[command(name = "fsocket-faults")]
struct Options {
    /// Programs, with their side if only one: nginx redis:server monitor [default: all]
    programs: Vec<String>,
    /// The first call of each place only
    #[arg(long)]
    short: bool,
    /// Up to so many calls of each place
    #[arg(long, value_name = "CALLS")]
    full: Option<u32>,
    /// One fault, as a run prints it
    #[arg(long)]
    fault: Vec<Fault>,
    /// Only with this error, such as EMFILE
    #[arg(long)]
    error: Option<String>,
    /// Print every run
    #[arg(short, long)]
    verbose: bool,
}

#[derive(Default)]
struct Sum {
    runs: usize,
    same: usize,
    told: usize,
    missed: usize,
    wrong: Vec<String>,
    /// Places at which the program was told of the error, with the number of times.
    told_at: BTreeMap<String, usize>,
}

impl Sum {
    fn add(&mut self, who: &str, fault: &Fault, verdict: &Verdict, file: &std::path::Path, verbose: bool) {
        self.runs += 1;
        let say = |what: &str| println!("{what} {who} --fault {fault}  {}", places::describe(file, &fault.site));
        match verdict {
            Verdict::Same => self.same += 1,
            Verdict::Missed => self.missed += 1,
            Verdict::Told => {
                self.told += 1;
                *self.told_at.entry(format!("{who} {}", places::describe(file, &fault.site))).or_default() += 1;
            }
            Verdict::Wrong(why) => {
                say("WRONG");
                println!("{why}\n");
                self.wrong.push(format!("{who} --fault {fault}"));
            }
        }
        if verbose && !matches!(verdict, Verdict::Wrong(_)) {
            say(&format!("{verdict:?}"));
        }
    }
}

impl Options {
    /// The faults to run: those that the user has named, else the planned ones.
    fn choose(&self, plan: impl FnOnce() -> Result<Vec<Fault>>) -> Result<Vec<Fault>> {
        let mut faults = if self.fault.is_empty() { plan()? } else { self.fault.clone() };
        if let Some(name) = &self.error {
            let error = errors::error_number(name).with_context(|| format!("no error {name}"))?;
            faults.retain(|f| f.error == error);
        }
        Ok(faults)
    }
}

fn main() -> Result<ExitCode> {
    let options = Options::parse();
    let extent = match options.full {
        Some(most) => Extent::Full(most),
        None if options.short => Extent::Short,
        None => Extent::Usual,
    };
    let all = pairs::NAMES.iter().map(|n| n.0.to_owned()).chain(["monitor".to_owned()]);
    let programs: Vec<String> = if options.programs.is_empty() { all.collect() } else { options.programs.clone() };
    let mut sum = Sum::default();
    for program in &programs {
        let started = Instant::now();
        let (name, side) = program.split_once(':').unwrap_or((program, ""));
        if name == "monitor" {
            let file = artifacts::monitor();
            let faults = options.choose(|| daemon::plan(extent))?;
            for fault in &faults {
                sum.add("monitor", fault, &daemon::run(*fault)?, &file, options.verbose);
            }
            println!("monitor: {} faults, {:.0?}", faults.len(), started.elapsed());
            continue;
        }
        let Some(campaign) = Campaign::new(name)? else {
            println!("SKIPPED: {name}: unknown, or a program is not installed");
            continue;
        };
        for (which, text) in [(Side::Client, "client"), (Side::Server, "server")] {
            if !side.is_empty() && side != text {
                continue;
            }
            let started = Instant::now();
            let faults = options.choose(|| campaign.plan(which, extent))?;
            let who = format!("{name}:{text}");
            let file = artifacts::library();
            let before = sum.wrong.len();
            campaign.run(which, &faults, |run| sum.add(&who, &run.fault, &run.verdict, &file, options.verbose))?;
            let wrong = sum.wrong.len() - before;
            println!("{who}: {} faults, {wrong} wrong, {:.0?}", faults.len(), started.elapsed());
        }
    }
    println!("\ntold (the program saw the error itself), by place:");
    for (place, n) in &sum.told_at {
        println!("  {n:4} {place}");
    }
    println!(
        "\nfaults: {} runs: {} same, {} told, {} not reached, {} wrong",
        sum.runs,
        sum.same,
        sum.told,
        sum.missed,
        sum.wrong.len()
    );
    for wrong in &sum.wrong {
        println!("  {wrong}");
    }
    Ok(if sum.wrong.is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}
