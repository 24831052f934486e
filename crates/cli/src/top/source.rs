//! The monitor's reports for `top`, with the time between two of them.

use super::open::InKernel;
use super::view::View;
use anyhow::Result;
use fsocket_client::control;
use fsocket_proto::report::Report;
use std::time::{Duration, Instant};

/// The first output comes this long after the start, because a rate needs two reports.
pub const FIRST: Duration = Duration::from_millis(300);

/// Fetches reports and remembers the last one with its time.
pub struct Source {
    last: Option<(Instant, Report)>,
}

impl Source {
    /// # Errors
    /// There is no monitor.
    pub fn new() -> Result<Source> {
        let report = control::brief_report(&control::find()?)?;
        Ok(Source { last: Some((Instant::now(), report)) })
    }

    /// Returns the changes since the last call. If the monitor does not answer, the error is a
    /// text to show; `top` then goes on, because another monitor may start.
    pub fn look(&mut self) -> Result<View, String> {
        let report = control::find().and_then(|path| control::brief_report(&path)).map_err(|e| format!("{e:#}"));
        let (now, report) = (Instant::now(), report?);
        let since = match self.last.take() {
            // Differences make sense only within one monitor, because another monitor counts from
            // 0.
            Some((at, before)) if before.monitor_pid == report.monitor_pid => Some((now - at, before)),
            _ => None,
        };
        let view = View::new(since.as_ref().map(|(time, before)| (*time, before)), &report, &InKernel::of(&report));
        self.last = Some((now, report));
        Ok(view)
    }
}
