//! Looks at the monitor.

use super::open::InKernel;
use super::view::View;
use anyhow::Result;
use fsocket_client::control;
use fsocket_proto::report::Report;
use std::time::{Duration, Instant};

/// The first look is this long after the beginning: rates take two.
pub const FIRST: Duration = Duration::from_millis(300);

/// Reports, and how long after the one before each was made.
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

    /// What happened since the last look. The error of a monitor that does not answer is text to show:
    /// another one may come.
    pub fn look(&mut self) -> Result<View, String> {
        let report = control::find().and_then(|path| control::brief_report(&path)).map_err(|e| format!("{e:#}"));
        let (now, report) = (Instant::now(), report?);
        let since = match self.last.take() {
            // Another monitor counts from 0.
            Some((at, before)) if before.monitor_pid == report.monitor_pid => Some((now - at, before)),
            _ => None,
        };
        let view = View::new(since.as_ref().map(|(time, before)| (*time, before)), &report, &InKernel::of(&report));
        self.last = Some((now, report));
        Ok(view)
    }
}
