//! Affinity-Accept, section 6.5: a parallel build beside a web server.

use super::experiment::{Experiment, Measure, STOCK};
use super::web;
use crate::child::Child;
use crate::scenario::Unit;
use crate::step::{Step, Values};
use anyhow::{Context, Result};
use fsocket_bench_args::{Paper as Args, Path as Way};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

/// A build that takes longer has failed.
const LIMIT: Duration = Duration::from_secs(600);

/// The build alone; and the time of the build and the latency of the server, while both run.
pub fn experiments(args: &Args) -> Vec<Experiment> {
    let skip = args.build.is_none().then(|| "needs a project to build: --build DIR".to_owned());
    let dir = args.build.clone().unwrap_or_default();
    let alone = dir.clone();
    let seconds = || Measure::lower("seconds", "", Unit::Seconds);
    vec![
        Experiment::new("build alone", move |step| Ok(Values::from([("seconds", built(step, &alone)?)])))
            .ways(STOCK)
            .not_counted()
            .most_rounds(2)
            .skip(skip.clone())
            .programs(&["make", "gcc"])
            .measures([seconds()]),
        Experiment::new("beside each other:", move |step| beside(step, &dir))
            .ways(&[Way::Stock, Way::KernelServer, Way::Ours, Way::Control])
            .most_rounds(3)
            .skip(skip)
            .programs(&["make", "gcc", "nginx", "wrk"])
            .measures([
                Measure { label: "build", ..seconds() },
                Measure::lower("p50", "web server's latency, p50", Unit::Nanoseconds),
                Measure::lower("p90", "web server's latency, p90", Unit::Nanoseconds),
            ]),
    ]
}

/// Runs the build beside a web server. The server's load lasts as long as the build.
fn beside(step: &Step, project: &Path) -> Result<Values> {
    let project = project.to_owned();
    web::while_loaded(step, move |step| built(step, &project))
}

/// Builds a copy of the project, with a job for each CPU. Returns the seconds that make takes. The build has no
/// library on any way.
fn built(step: &Step, project: &Path) -> Result<f64> {
    let copy: PathBuf = step.context.dir.join("build");
    let _ = std::fs::remove_dir_all(&copy);
    let run = |program: &str, args: &[&str]| -> Result<()> {
        let mut command = Command::new(program);
        crate::accel::clean_environment(&mut command);
        command.args(args).current_dir(&step.context.dir).stdin(Stdio::null()).stderr(Stdio::null());
        Child::spawn(command, None)?.finish(LIMIT).map(drop)
    };
    let [from, to] = [project, &copy].map(|p| p.display().to_string());
    run("cp", &["-a", &from, &to]).context("copying the project")?;
    // Old results would make the build shorter.
    run("make", &["-s", "-C", &to, "clean"]).context("make clean")?;
    let jobs = fsocket_measure::allowed_cpus()?.len().to_string();
    let started = Instant::now();
    run("make", &["-s", "-C", &to, "-j", &jobs]).context("make")?;
    Ok(started.elapsed().as_secs_f64())
}
