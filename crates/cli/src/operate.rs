//! `fastsocket off` and `on`: move the connections of running programs to the kernel, and back (ADR 51).

use crate::text::print;
use crate::units;
use clap::Args;
use fsocket_client::control;
use fsocket_proto::operate::{Request, Target};
use fsocket_proto::paths;
use serde::Serialize;
use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// `off` waits this long for programs that make no call, and asks the monitor every `LOOK` whether
/// they have switched.
const PATIENCE: Duration = Duration::from_secs(1);
const LOOK: Duration = Duration::from_millis(20);

/// Some connections are still over shared memory.
const EXIT_SOME_LEFT: i32 = 1;
/// There is no such process or unit, it belongs to another user, or no monitor answers.
const EXIT_NOTHING: i32 = 2;

/// Have a running program use the kernel, with all its connections
///
/// Packet filters, captures and `ss` see them from then on. New connections use the kernel, those over
/// shared memory change their path when the program next waits or asks for readiness; nothing is lost. Children
/// that it forks are meant, too, and of a unit what it starts later. Until `fastsocket on`, or the end of the
/// monitor for processes that it starts afterwards.
///
/// Exit status: 0 all have changed; 1 some will at the program's next call; 2 there is no such process or unit
/// with the library, or it belongs to somebody else.
#[derive(Debug, Args)]
pub struct Off {
    #[command(flatten)]
    which: Which,
}

/// Undo `fastsocket off`
///
/// New connections use shared memory again; those that were switched come back while they are used, at a moment
/// at which nothing is under way.
///
/// Exit status: 0 done; 2 there is no such process or unit with the library, or it belongs to somebody else.
#[derive(Debug, Args)]
pub struct On {
    #[command(flatten)]
    which: Which,
}

#[derive(Debug, Args)]
struct Which {
    /// A process, or a systemd unit
    #[arg(value_name = "PID|UNIT", value_parser = parse)]
    target: Target,
    /// JSON output
    #[arg(long)]
    json: bool,
}

pub fn parse(text: &str) -> Result<Target, String> {
    match text.parse::<u32>() {
        Ok(pid) if pid > 0 => Ok(Target::Process(pid)),
        Ok(_) => Err(format!("{text} is not a process")),
        Err(_) => units::full_name(text).map(Target::Unit).map_err(|e| e.to_string()),
    }
}

/// The result for the connections of one process.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
pub struct Row {
    comm: String,
    /// Number of connections over shared memory, before the command and now.
    before: u32,
    left: u32,
}

#[derive(Debug, Serialize)]
pub struct Outcome {
    off: bool,
    moved: u32,
    pub left: u32,
    pub processes: BTreeMap<u32, Row>,
}

/// `fastsocket off`.
pub fn off(args: &Off) -> i32 {
    finish(&args.which, true)
}

/// `fastsocket on`.
pub fn on(args: &On) -> i32 {
    finish(&args.which, false)
}

fn finish(which: &Which, off: bool) -> i32 {
    let outcome = match socket(&which.target).and_then(|socket| ask(&socket, &which.target, off)) {
        Ok(outcome) => outcome,
        Err(e) => {
            eprintln!("fastsocket: {}", why(&which.target, &e));
            return EXIT_NOTHING;
        }
    };
    match which.json {
        true => anstream::println!("{}", serde_json::to_string_pretty(&outcome).unwrap_or_default()),
        false => print(text(&outcome)),
    }
    if off && outcome.left > 0 {
        EXIT_SOME_LEFT
    } else {
        0
    }
}

/// The socket of the monitor that the process uses. For a unit: of the monitor that `fastsocket
/// run` would use.
pub fn socket(target: &Target) -> anyhow::Result<PathBuf> {
    let Target::Process(pid) = target else { return control::find() };
    let process = i32::try_from(*pid).map(procfs::process::Process::new);
    let environ = process.ok().and_then(|p| p.ok()?.environ().ok()).unwrap_or_default();
    match environ.get(OsStr::new(paths::ENV_SOCKET)).filter(|v| !v.is_empty()) {
        Some(path) => Ok(seen_by(*pid, Path::new(path))),
        None => control::find(),
    }
}

/// A path of the file system that process `pid` sees, as a path for this process.
fn seen_by(pid: u32, path: &Path) -> PathBuf {
    let mut seen = PathBuf::from(format!("/proc/{pid}/root")).into_os_string();
    seen.push(path);
    // (Paths of Unix sockets are short, and the command's own file system is the usual case.)
    match path.exists() {
        true => path.to_owned(),
        false => seen.into(),
    }
}

/// Asks the monitor to switch the connections, and waits for a limited time until they are switched.
pub fn ask(socket: &Path, target: &Target, off: bool) -> anyhow::Result<Outcome> {
    let request = Request { target: target.clone(), off };
    let mut rows = BTreeMap::<u32, Row>::new();
    let began = Instant::now();
    loop {
        rows.values_mut().for_each(|row| row.left = 0);
        for process in control::operate(socket, &request)?.processes {
            let row = rows.entry(process.pid).or_default();
            row.comm = process.comm;
            row.before = row.before.max(process.connections);
            row.left = process.connections;
        }
        let left = rows.values().map(|row| row.left).sum();
        if !off || left == 0 || began.elapsed() > PATIENCE {
            let moved = rows.values().map(|row| row.before - row.left).sum();
            return Ok(Outcome { off, moved, left, processes: rows });
        }
        std::thread::sleep(LOOK);
    }
}

/// The errno in the monitor's answer.
pub fn errno(e: &anyhow::Error) -> Option<i32> {
    e.chain().find_map(|e| e.downcast_ref::<std::io::Error>()?.raw_os_error())
}

/// The text for an error.
pub fn why(target: &Target, e: &anyhow::Error) -> String {
    let name = match target {
        Target::Process(pid) => format!("process {pid}"),
        Target::Unit(unit) => unit.clone(),
    };
    match errno(e) {
        Some(libc::ENOENT) => format!("{name}: no such process runs with the library (fastsocket explain PID)"),
        Some(libc::EPERM) => format!("{name} belongs to another user: run this as root"),
        _ => format!("{name}: {e:#}"),
    }
}

fn text(o: &Outcome) -> String {
    let n = o.processes.len();
    let processes = if n == 1 { "1 process".to_owned() } else { format!("{n} processes") };
    let Outcome { moved, left, .. } = o;
    match (o.off, left) {
        (false, _) => format!("on: {processes}; switched connections come back while they are used"),
        (true, 0) => format!("off: {processes}, {moved} connections moved to the kernel"),
        (true, _) => {
            let rows = o.processes.iter().filter(|(_, row)| row.left > 0);
            let rows: Vec<_> = rows.map(|(pid, row)| format!("\n  {pid} ({}): {}", row.comm, row.left)).collect();
            format!(
                "off: {processes}, {moved} of {} connections moved to the kernel, {left} will move at the \
                 program's next call:{}",
                moved + left,
                rows.concat()
            )
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn targets() {
        assert_eq!(parse("17"), Ok(Target::Process(17)));
        assert_eq!(parse("redis"), Ok(Target::Unit("redis.service".into())));
        assert_eq!(parse("a@b.service"), Ok(Target::Unit("a@b.service".into())));
        for bad in ["0", "", "-1/x", "a.socket", "a b"] {
            assert!(parse(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn what_is_left_is_said() {
        let row = |before, left| Row { comm: "redis".into(), before, left };
        let outcome = |off, rows: &[(u32, Row)]| Outcome {
            off,
            moved: rows.iter().map(|(_, r)| r.before - r.left).sum(),
            left: rows.iter().map(|(_, r)| r.left).sum(),
            processes: rows.iter().cloned().collect(),
        };
        assert_eq!(text(&outcome(true, &[(7, row(3, 0))])), "off: 1 process, 3 connections moved to the kernel");
        let some = text(&outcome(true, &[(7, row(12, 0)), (8, row(2, 2))]));
        assert_eq!(
            some,
            "off: 2 processes, 12 of 14 connections moved to the kernel, 2 will move at the program's next call:\n  \
             8 (redis): 2"
        );
        assert!(text(&outcome(false, &[(7, row(0, 0))])).starts_with("on: 1 process;"));
    }
}
