//! Where packets are received, as the demo server's kernel tells it for each
//! connection at its end (`SO_INCOMING_CPU` against the worker's CPU).

use crate::stage::Stage;
use crate::Setting;
use anyhow::{ensure, Context, Result};
use fsocket_testkit::load::{Load, Plan};
use fsocket_testkit::servers::{self, Way};
use serde_json::{json, Value};
use std::time::Duration;

/// For each concurrent one.
const REQUESTS: u64 = 100;

pub fn run(setting: &Setting, way: Way) -> Result<Value> {
    let stage = Stage::new(setting, way)?;
    let (front, back) = (stage.front(), stage.back());
    let _backend = servers::demo(&stage.backend, Way::Reuseport, &[back], setting.cpus, &["--quiet"]);
    let more = ["--quiet", "--json", "--locality", "--proxy", &back.to_string()];
    let server = servers::demo(&stage.middle, way, &[front], setting.cpus, &more);
    let plan = Plan::get(front, "/64", &[b'x'; 64], setting.concurrency);
    let outcome = Load::start(&plan, Some(&stage.chain.client), Some(REQUESTS)).finish();
    ensure!(outcome.failures() == 0, "failed requests: {:?}", outcome.failed);
    let counters = stage.proof(way)?;
    server.signal(libc::SIGTERM);
    let said = server.finish(Duration::from_secs(20)).success().stdout;
    let last: Value = serde_json::from_str(said.lines().last().context("no totals")?)?;
    let share = |kind: &str| {
        let number = |name: String| last["total"][&name].as_f64().unwrap_or(0.0);
        let (part, of) = (number(format!("{kind}_local")), number(kind.to_owned()));
        ensure!(of >= outcome.answered as f64, "{of} {kind} connections for {} requests", outcome.answered);
        Ok(part * 100.0 / of)
    };
    Ok(json!({ "passive_percent": share("passive")?, "active_percent": share("active")?, "counters": counters }))
}
