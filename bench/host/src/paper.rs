//! `fastsocket bench paper`: the figures and tables of the three papers, with stock and ours on this machine.
//!
//! Each section is measured, or listed with the reason why it is not. The order of the ways rotates from round to
//! round. A second run of stock is the control. The library's counters must confirm the path of each row. A row
//! that took another path has failed.

mod affinity;
mod bare;
mod build;
mod catalogue;
mod done;
mod experiment;
mod fastsocket;
mod json;
mod kernel;
mod micro;
mod notes;
mod page;
mod programs;
mod row;
mod rpc;
mod section;
mod several;
mod socksdirect;
mod table;
mod web;

use crate::step::{NotAccelerated, Setting, Step, Values};
use crate::{accel, apps, runner};
use anyhow::{Context, Result};
use done::Done;
use experiment::Experiment;
use fsocket_bench_args::{Paper as Args, Path};
use fsocket_client::EXIT_OWN;
use fsocket_measure::Progress;
use row::Row;
use section::{Kind, Section};

/// Returns the exit status. An error if nothing was measured.
pub fn run(args: &Args) -> Result<i32> {
    let mut sections = catalogue::all();
    if args.list {
        sections.iter().for_each(|s| println!("{:28} {}, {}: {}", s.name, s.paper.title(), s.item, s.title));
        return Ok(0);
    }
    for name in &args.only {
        if !sections.iter().any(|s| s.matches(name)) {
            eprintln!("fastsocket bench paper: no section is called '{name}' (see --list)");
            return Ok(EXIT_OWN);
        }
    }
    sections.retain(|s| args.only.is_empty() || args.only.iter().any(|name| s.matches(name)));
    // A file that cannot be written is reported now, and not after twenty minutes.
    std::fs::create_dir_all(&args.out).with_context(|| args.out.display().to_string())?;
    let file = |name| {
        let path = args.out.join(name);
        std::fs::File::create(&path).with_context(|| path.display().to_string()).map(|_| path)
    };
    let (html, data) = (file("paper.html")?, file("paper.json")?);

    let dir = tempfile::Builder::new().prefix("fastsocket-paper-").tempdir()?;
    let cpus = fsocket_measure::allowed_cpus()?;
    let setting = Setting {
        own: std::env::current_exe()?,
        dir: dir.path().to_owned(),
        accel: Some(accel::Accel::start(&args.pieces, dir.path()).context("NOT ACCELERATED")?),
        cpus: [cpus[0], *cpus.get(1).unwrap_or(&cpus[0])],
        quick: args.quick,
    };
    let reps = args.reps.map_or(if args.quick { 3 } else { 5 }, |n| n as usize);
    let notes = notes::of(&fsocket_measure::shape(&setting.cpus));
    let machine = fsocket_measure::shape(&setting.cpus);
    let write = |done: &[Done]| -> Result<()> {
        let values = json::page(&machine, done, &notes, reps, args.quick);
        std::fs::write(&data, serde_json::to_string_pretty(&values)? + "\n")?;
        Ok(std::fs::write(&html, page::page(&machine, done, &notes, reps)?)?)
    };
    let done = measured(&setting, args, sections, reps, write)?;
    table::print(&done, &notes);
    println!("\n{} and {}", html.display(), data.display());
    Ok(done.iter().flat_map(|d| &d.rows).any(Row::is_bad).into())
}

/// Runs every section's experiments. Writes what there is after each section, because a run takes long and may be cut
/// off.
fn measured(
    setting: &Setting,
    args: &Args,
    sections: Vec<Section>,
    reps: usize,
    write: impl Fn(&[Done]) -> Result<()>,
) -> Result<Vec<Done>> {
    let mut plan = Vec::new();
    for section in sections {
        let (mut wanted, mut skipped) = (Vec::new(), Vec::new());
        if let Kind::Measured(experiments, _) = section.kind {
            for experiment in experiments(args) {
                match reason_to_skip(setting, &experiment) {
                    Some(reason) => skipped.push(format!("{}: {reason}", experiment.name.trim_end_matches([',', ':']))),
                    None => wanted.push(experiment),
                }
            }
        }
        plan.push((section, wanted, skipped));
    }
    let steps = plan.iter().flat_map(|(_, wanted, _)| wanted).map(|e| e.ways.len() * reps.min(e.most_rounds)).sum();
    let mut progress = Progress::new(steps);
    let mut all = Vec::new();
    for (section, wanted, skipped) in plan {
        let rows = wanted.iter().flat_map(|e| rounds(setting, &section, e, reps, &mut progress)).collect();
        all.push(Done { section, rows, skipped });
        write(&all)?;
    }
    Ok(all)
}

fn reason_to_skip(setting: &Setting, experiment: &Experiment) -> Option<String> {
    use crate::scenario::Layout;
    let missing = experiment.programs.iter().find(|p| apps::find_program(p).is_none());
    match missing {
        Some(program) => Some(format!("{program} is not installed")),
        None if experiment.skip.is_some() => experiment.skip.clone(),
        None if experiment.layout == Layout::TwoCpus && setting.cpus[0] == setting.cpus[1] => {
            Some("needs two CPUs".to_owned())
        }
        None => None,
    }
}

/// Runs one experiment. The order of the ways rotates from round to round.
fn rounds(setting: &Setting, section: &Section, e: &Experiment, reps: usize, progress: &mut Progress) -> Vec<Row> {
    let mut rows: Vec<Row> = e.measures.iter().map(|m| Row::new(e, m)).collect();
    for rep in 0..reps.min(e.most_rounds) {
        for way in e.ways.iter().cycle().skip(rep % e.ways.len()).take(e.ways.len()) {
            progress.step(&format!("{} {} {} {}", section.name, e.name, way.name(), rep + 1));
            match step(setting, e, *way) {
                Ok(values) => {
                    for row in &mut rows {
                        let least = if row.measure.may_be_zero { 0.0 } else { f64::MIN_POSITIVE };
                        let value = values.get(row.measure.key).copied().filter(|v| v.is_finite() && *v >= least);
                        match value {
                            Some(value) => row.values.add(*way, value),
                            None => row.values.fail(*way, false, format!("no {}", row.measure.key)),
                        }
                    }
                }
                Err(error) => {
                    let other_path = error.is::<NotAccelerated>();
                    // Print nothing if the experiment meets a known limit: the row reports it.
                    if !other_path || e.limit.is_none() {
                        progress.clear();
                        eprintln!("fastsocket bench paper: {} {}: {error:#}", e.name, way.name());
                    }
                    rows.iter_mut().for_each(|row| row.values.fail(*way, other_path, format!("{error:#}")));
                }
            }
        }
    }
    rows
}

/// Measures one way once. Each accelerated connection must start in shared memory and stay there.
fn step(setting: &Setting, experiment: &Experiment, path: Path) -> Result<Values> {
    let step = Step { context: setting, path, layout: experiment.layout };
    if !experiment.is_counted {
        return (experiment.run)(&step);
    }
    let accel = setting.accel.as_ref().filter(|_| path == Path::Ours);
    let before = accel.map(|accel| accel.report()).transpose()?;
    let values = runner::checked(&step, true, &experiment.run)?;
    if let (Some(accel), Some(before)) = (accel, before) {
        accel.check_stayed(&before.totals).map_err(|e| e.context(NotAccelerated))?;
    }
    Ok(values)
}
