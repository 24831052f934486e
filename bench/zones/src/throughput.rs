//! Requests a second, one connection a request.

use crate::stage::Stage;
use crate::{Scenario, Setting};
use anyhow::{bail, ensure, Context, Result};
use fsocket_testkit::servers::{self, Way};
use fsocket_testkit::{find_program, Proc};
use serde_json::{json, Value};
use std::process::Command;
use std::time::Duration;

/// The papers' size of an answer.
const SIZE: usize = 64;

pub fn run(scenario: Scenario, setting: &Setting, way: Way) -> Result<Value> {
    let stage = Stage::new(setting, way)?;
    let (front, back, cpus) = (stage.front(), stage.back(), setting.cpus);
    stage.middle.file("www/64", [b'x'; SIZE]);
    // The same backend for all ways, as light as can be had.
    let backend = || servers::demo(&stage.backend, Way::Reuseport, &[back], cpus, &["--quiet"]);
    let proxy = back.to_string();
    let _servers: Vec<Proc> = match scenario {
        Scenario::Nginx => vec![servers::nginx(&stage.middle, way, &[front], cpus)],
        Scenario::Demo => vec![servers::demo(&stage.middle, way, &[front], cpus, &["--quiet"])],
        Scenario::Haproxy => vec![backend(), servers::haproxy(&stage.middle, way, front, back, cpus)],
        Scenario::DemoProxy => {
            vec![backend(), servers::demo(&stage.middle, way, &[front], cpus, &["--quiet", "--proxy", &proxy])]
        }
        _ => bail!("not a throughput"),
    };
    wrk(&stage, setting, 1)?;
    let rate = wrk(&stage, setting, setting.seconds)?;
    Ok(json!({ "requests_per_second": rate, "counters": stage.proof(way)? }))
}

/// Requests a second; an error if any request failed.
fn wrk(stage: &Stage, setting: &Setting, seconds: u32) -> Result<f64> {
    let mut command = Command::new(find_program("wrk").context("wrk is not installed")?);
    stage.chain.client.place(&mut command);
    command.args([format!("-t{}", setting.cpus), format!("-c{}", setting.concurrency), format!("-d{seconds}s")]);
    command.args(["-H", "Connection: close"]).arg(format!("http://{}/64", stage.front()));
    let limit = Duration::from_secs(u64::from(seconds) + 20);
    let said = Proc::spawn(stage.middle.logs(), "wrk", command).finish(limit).success().stdout;
    for bad in ["Socket errors", "Non-2xx"] {
        ensure!(!said.contains(bad), "wrk: {said}");
    }
    let rate = said.lines().find_map(|line| line.strip_prefix("Requests/sec:")?.trim().parse().ok());
    rate.with_context(|| format!("wrk: no rate in {said}"))
}
