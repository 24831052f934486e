//! `fastsocket bench`: measures stock and ours in turn, in one run, on the same CPUs, and the bare queue as the
//! limit.

use crate::report::{self, Row};
use crate::scenario::{self, Layout, Scenario};
use crate::step::{NotAccelerated, Setting};
use crate::{accel, apps, hogs, html, runner};
use anyhow::{bail, Context, Result};
use fsocket_bench_args::{Bench, Layouts, Path};
use fsocket_client::EXIT_OWN;
use fsocket_measure::Progress;

fn has(layouts: Layouts, layout: Layout) -> bool {
    match layouts {
        Layouts::Both => true,
        Layouts::TwoCpus => layout == Layout::TwoCpus,
        Layouts::SameCpu => layout == Layout::SameCpu,
    }
}

fn needs_library(path: Path) -> bool {
    path == Path::Ours || path.is_kernel()
}

/// Returns the exit status. An error if nothing was measured.
// Long: the decisions about what to measure, in their order.
pub fn run(args: &Bench) -> Result<i32> {
    let mut scenarios = scenario::all();
    if args.list {
        report::list(&scenarios);
        return Ok(0);
    }
    for name in &args.only {
        if !scenarios.iter().any(|s| matches(s, name)) {
            eprintln!("fastsocket bench: nothing is called '{name}' (see --list)");
            return Ok(EXIT_OWN);
        }
    }
    scenarios.retain(|s| args.only.is_empty() || args.only.iter().any(|name| matches(s, name)));
    let mut bad = false;
    scenarios.retain(|s| {
        let missing: Vec<_> = s.programs.iter().filter(|p| apps::find_program(p).is_none()).collect();
        for program in &missing {
            eprintln!("fastsocket bench: SKIPPED {}: {program} is not installed", s.name);
        }
        missing.is_empty()
    });

    // A file that cannot be written is reported now, and not after ten minutes.
    for file in args.json.iter().chain(&args.report) {
        std::fs::File::create(file).with_context(|| file.display().to_string())?;
    }
    let dir = tempfile::Builder::new().prefix("fastsocket-bench-").tempdir()?;
    let cpus = fsocket_measure::allowed_cpus()?;
    let mut setting = Setting {
        own: std::env::current_exe()?,
        dir: dir.path().to_owned(),
        accel: None,
        cpus: [cpus[0], *cpus.get(1).unwrap_or(&cpus[0])],
        quick: args.quick,
    };
    let wanted = |path: Path| match args.paths.is_empty() {
        true => Path::MAIN.contains(&path),
        false => args.paths.iter().any(|way| way.has(path)),
    };
    if Path::ALL.iter().any(|path| needs_library(*path) && wanted(*path)) {
        match accel::Accel::start(&args.pieces, dir.path()) {
            Ok(accel) => setting.accel = Some(accel),
            Err(e) => {
                bad = true;
                eprintln!("fastsocket bench: NOT ACCELERATED: {e:#}; only the others are measured");
            }
        }
    }
    let reps = args.reps.map_or(if args.quick { 3 } else { 5 }, |n| n as usize);

    let mut plan = Vec::new();
    for scenario in &scenarios {
        for layout in scenario.layouts.iter().copied().filter(|l| has(args.layout, *l)) {
            if layout == Layout::TwoCpus && cpus.len() < 2 {
                eprintln!("fastsocket bench: SKIPPED {} on two CPUs: only one is allowed", scenario.name);
                continue;
            }
            let usable = |path: &Path| {
                wanted(*path)
                    && (!needs_library(*path) || setting.accel.is_some())
                    // Two ends that spin on one CPU only wait for the scheduler.
                    && (*path != Path::Queue || layout == Layout::TwoCpus)
            };
            let paths: Vec<Path> = scenario.paths.iter().copied().filter(usable).collect();
            if !paths.is_empty() {
                plan.push((scenario, layout, paths));
            }
        }
    }
    let hogs = hogs::Hogs::start(&setting.cpus, args.hogs);
    let rows = measure(&setting, &plan, reps);
    drop(hogs);
    bad |= rows.iter().any(|row| !row.problems.is_empty());
    report::print(&rows);
    let machine = fsocket_measure::shape(&setting.cpus);
    if let Some(file) = &args.json {
        let text = serde_json::to_string_pretty(&report::json(&machine, &rows, reps, args.hogs))?;
        std::fs::write(file, text + "\n").with_context(|| file.display().to_string())?;
    }
    if let Some(file) = &args.report {
        std::fs::write(file, html::page(&machine, &rows)?).with_context(|| file.display().to_string())?;
    }
    if rows.is_empty() {
        bail!("nothing was measured");
    }
    let missed = args.strict && rows.iter().any(|row| row.verdict() == Some(false) || !row.below().is_empty());
    Ok((bad || missed) as i32)
}

fn matches(scenario: &Scenario, name: &str) -> bool {
    scenario.name == name || scenario.name.strip_prefix(name).is_some_and(|rest| rest.starts_with('-'))
}

/// Runs every step of the plan. Within one scenario the paths take turns.
fn measure(setting: &Setting, plan: &[(&Scenario, Layout, Vec<Path>)], reps: usize) -> Vec<Row> {
    let steps = plan.iter().map(|(s, _, paths)| paths.len() * reps.min(s.max_reps)).sum::<usize>();
    let mut progress = Progress::new(steps);
    let mut rows = Vec::new();
    for (scenario, layout, paths) in plan {
        let mut mine: Vec<Row> = scenario.metrics.iter().map(|m| Row::new(scenario, m, *layout)).collect();
        for rep in 0..reps.min(scenario.max_reps) {
            // The order of the paths rotates, so that the after-effects of a run meet each of the other paths.
            for path in paths.iter().cycle().skip(rep % paths.len()).take(paths.len()) {
                progress.step(&format!("{} {} {} {}", scenario.name, layout.name(), path.name(), rep + 1));
                match runner::step(setting, scenario, *layout, *path) {
                    Ok(values) => {
                        for (row, metric) in mine.iter_mut().zip(&scenario.metrics) {
                            row.add(*path, values[metric.key]);
                        }
                    }
                    Err(e) => {
                        let not_accelerated = e.is::<NotAccelerated>();
                        progress.clear();
                        eprintln!("fastsocket bench: {} {}: {e:#}", scenario.name, path.name());
                        mine.iter_mut().for_each(|row| row.fail(*path, not_accelerated, format!("{e:#}")));
                    }
                }
            }
        }
        rows.append(&mut mine);
    }
    rows
}
