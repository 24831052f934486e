//! The attacks of the table in issue 40, each with variants, and with the equivalent over kernel
//! TCP.

pub mod assault;
mod closings;
mod floods;
mod heavy;
pub mod line;
mod means;
pub mod probe;
mod programs;
mod scene;
mod table;
mod together;

use anyhow::{ensure, Result};
use line::{Line, Rows};
use probe::{Figure, Figures};
use scene::{Scene, LEFT};
use std::time::Duration;
use table::{Attack, ATTACKS};

/// Returns true if every attack is held.
///
/// # Errors
/// A failure of the test itself.
pub fn run(r: &Rows) -> Result<bool> {
    // SAFETY: the call takes no argument.
    ensure!(unsafe { libc::geteuid() } == 0, "needs root, to be several users");
    let dir = tempfile::Builder::new().prefix("fastsocket-hostile-").tempdir()?;
    println!(
        "row  {:<40}{:<22}{:>10}{:>10}{:>20}",
        "attack", "honest figure", "alone", "attacked", "stock: alone, att."
    );
    let mut lines = Vec::new();
    if ATTACKS.iter().any(|a| r.wants(a.row)) || r.wants(0) {
        let mut scene = Scene::new(dir.path())?;
        lines.extend(messages(r, &mut scene)?);
        if r.wants(0) {
            lines.push(together::run(r, &scene)?);
        }
    }
    for line in programs::run(r, dir.path()) {
        line.print();
        lines.push(line);
    }
    let wrong = lines.iter().filter(|l| !l.wrong.is_empty()).count();
    println!("attacks: {} held, {wrong} not", lines.len() - wrong);
    Ok(wrong == 0)
}

fn messages(r: &Rows, scene: &mut Scene) -> Result<Vec<Line>> {
    scene.figures(0.5, false)?; // fills caches and pools
    let alone = [scene.figures(r.time, false)?, scene.figures(r.time, true)?];
    let busy = [scene.figures_of_busy(r.time, false)?, scene.figures_of_busy(r.time, true)?];
    let mut lines = Vec::new();
    for (n, attack) in ATTACKS.iter().enumerate().filter(|(_, a)| r.wants(a.row)) {
        let line = one(r, scene, n, if attack.is_busy { &busy } else { &alone })?;
        line.print();
        lines.push(line);
        ensure!(scene.stage.monitor.running(), "the monitor has ended: {}", scene.stage.monitor.stderr());
        ensure!(scene.ours.proc.running(), "the server has ended: {}", scene.ours.proc.stderr());
    }
    Ok(lines)
}

/// Limit of the threads that the monitor starts for all that is slow to close.
const THREADS: usize = 16;
/// Limit of the lines that a monitor writes during an attack.
const LOG: usize = 2000;

fn one(r: &Rows, scene: &mut Scene, which: usize, alone: &[Figures; 2]) -> Result<Line> {
    let attack = &ATTACKS[which];
    let figures = |kernel| match attack.is_busy {
        true => scene.figures_of_busy(r.time, kernel),
        false => scene.figures(r.time, kernel),
    };
    let log = || scene.stage.monitor.stderr().lines().count();
    let (quiet, logged) = (scene.size(), log());
    // Floods come from several users.
    let users = if attack.row == 2 { scene::USERS } else { 1 };
    let attackers = scene.assault(Some(which), attack.who, users, false);
    std::thread::sleep(Duration::from_millis(300));
    let ours = figures(false)?;
    let threads = scene.size().threads.saturating_sub(quiet.threads);
    drop(attackers);
    let left = scene.time_until_nothing_is_left();
    let logged = log() - logged;
    let attackers = scene.assault(Some(which), attack.who, users, true);
    std::thread::sleep(Duration::from_millis(300));
    let stock = figures(true)?;
    drop(attackers);
    let mut wrong = judged(r, attack, &alone[0], &ours, &stock);
    match left {
        Err(e) => wrong.push(e.to_string()),
        Ok(took) if r.strict && took > LEFT => wrong.push(format!("something is left for {took:.1?}")),
        Ok(_) => {}
    }
    if threads > THREADS {
        wrong.push(format!("{threads} threads more"));
    }
    if logged > LOG {
        wrong.push(format!("{logged} lines in the log"));
    }
    if r.verbose {
        for (f, what) in [(&ours, "ours"), (&stock, "stock")] {
            let of = [Figure::Hello, Figure::Connect, Figure::Asked, Figure::Request];
            let text = of.map(|w| format!("{w:?} {:.2} ({:.2})", f.p99(w), f.quantile(w, 50)));
            println!("     {what}, p99 (median), ms: {}", text.join(", "));
        }
    }
    let ms = |f: &Figures| format!("{:.2}", f.p99(attack.figure));
    Ok(Line {
        row: attack.row,
        name: attack.name.into(),
        figure: format!("{:?} p99, ms", attack.figure),
        alone: ms(&alone[0]),
        attacked: ms(&ours),
        stock: format!("{}, {}", ms(&alone[1]), ms(&stock)),
        wrong,
    })
}

/// The faults in the figures of an honest program.
fn judged(r: &Rows, attack: &Attack, alone: &Figures, ours: &Figures, stock: &Figures) -> Vec<String> {
    let mut wrong = Vec::new();
    if ours.failed > 0 {
        wrong.push(format!("{} failed ({})", ours.failed, ours.why));
    }
    // This check does not depend on time limits: the program makes progress.
    let (done, could) = (ours.asked.len(), alone.asked.len());
    if done * 50 < could {
        wrong.push(format!("{done} rounds of {could}"));
    }
    let times = if attack.figure == Figure::Request { 1.2 } else { 10.0 };
    let (a, b, c) = (alone.p99(attack.figure), ours.p99(attack.figure), stock.p99(attack.figure));
    if r.strict && b > times * a && b > 1.2 * c {
        wrong.push(format!("{:.1} times", b / a));
    }
    wrong
}
