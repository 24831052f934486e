//! `fastsocket metrics`: prints the monitor's counters in the text format of Prometheus.

use anyhow::{Context, Result};
use clap::Args;
use fsocket_client::control;
use std::io::Write;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// Print metrics in the text format of Prometheus (docs/metrics.md)
///
/// With --output a file is replaced as a whole, as the textfile collector of the node exporter wants it.
/// `fastsocketd --metrics ADDR` serves the same over HTTP.
///
/// Exit status: 0; 1 if no monitor answers, where the metrics are `fastsocket_up 0` alone, or if the file
/// cannot be written.
#[derive(Debug, Args)]
pub struct Metrics {
    /// Write to this file, by renaming a new one
    #[arg(short, long, value_name = "FILE")]
    pub output: Option<PathBuf>,
    /// Write again and again, so often
    #[arg(long, value_name = "SECONDS", requires = "output", value_parser = clap::value_parser!(u64).range(1..))]
    pub every: Option<u64>,
}

/// `fastsocket metrics`.
pub fn run(args: &Metrics) -> Result<i32> {
    loop {
        let report = control::find().and_then(|path| control::brief_report(&path));
        let text = fsocket_metrics::text(report.as_ref().ok());
        match &args.output {
            Some(file) => replace(file, &text).with_context(|| file.display().to_string())?,
            None => anstream::print!("{text}"),
        }
        match (args.every, report) {
            (Some(seconds), _) => std::thread::sleep(Duration::from_secs(seconds)),
            (None, Ok(_)) => return Ok(0),
            (None, Err(e)) => return Err(e),
        }
    }
}

/// Replaces the file in one step: a reader finds either the old text or the new one.
fn replace(file: &Path, text: &str) -> Result<()> {
    let directory = file.parent().filter(|d| !d.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let mut new = tempfile::Builder::new().prefix(".fastsocket").tempfile_in(directory)?;
    new.write_all(text.as_bytes())?;
    // The collector that reads the file runs as another user.
    new.as_file().set_permissions(std::fs::Permissions::from_mode(0o644))?;
    new.persist(file)?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_is_replaced_or_left_alone() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("fastsocket.prom");
        replace(&file, "one").unwrap();
        replace(&file, "two").unwrap();
        assert_eq!(std::fs::read_to_string(&file).unwrap(), "two");
        assert_eq!(file.metadata().unwrap().permissions().mode() & 0o777, 0o644);
        assert!(replace(&dir.path().join("none/fastsocket.prom"), "x").is_err());
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 1, "nothing beside it");
    }
}
