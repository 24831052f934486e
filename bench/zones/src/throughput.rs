//! Requests a second, one connection a request. All ways are up at once, and a
//! load of one second goes from one to the next: the machine's own speed changes
//! within minutes by more than what is looked for.

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

/// One way, up and warm.
pub struct Ready {
    // Dropped in this order: servers before the hosts they run on.
    _servers: Vec<Proc>,
    stage: Stage,
    way: Way,
    rates: Vec<f64>,
}

impl Ready {
    pub fn new(scenario: Scenario, setting: &Setting, way: Way) -> Result<Ready> {
        let stage = Stage::new(setting, way)?;
        let (front, back, cpus) = (stage.front(), stage.back(), setting.cpus);
        stage.middle.file("www/64", [b'x'; SIZE]);
        // The same backend for all ways, as light as can be had.
        let backend = || servers::demo(&stage.backend, Way::Reuseport, &[back], cpus, &["--quiet"]);
        let proxy = back.to_string();
        let servers: Vec<Proc> = match scenario {
            Scenario::Nginx => vec![servers::nginx(&stage.middle, way, &[front], cpus)],
            Scenario::Demo => vec![servers::demo(&stage.middle, way, &[front], cpus, &["--quiet"])],
            Scenario::Haproxy => vec![backend(), servers::haproxy(&stage.middle, way, front, back, cpus)],
            Scenario::DemoProxy => {
                vec![backend(), servers::demo(&stage.middle, way, &[front], cpus, &["--quiet", "--proxy", &proxy])]
            }
            _ => bail!("not a throughput"),
        };
        wrk(&stage, setting)?;
        Ok(Ready { _servers: servers, stage, way, rates: Vec::new() })
    }

    /// One second of load.
    pub fn turn(&mut self, setting: &Setting) -> Result<()> {
        self.rates.push(wrk(&self.stage, setting)?);
        Ok(())
    }

    /// The median second, and what proves that it was measured this way.
    pub fn finish(self) -> Result<Value> {
        let rate = fsocket_measure::median(&self.rates).context("nothing was measured")?;
        Ok(json!({ "requests_per_second": rate, "turns": self.rates, "counters": self.stage.proof(self.way)? }))
    }
}

/// Requests a second, over one second; an error if any request failed.
fn wrk(stage: &Stage, setting: &Setting) -> Result<f64> {
    let mut command = Command::new(find_program("wrk").context("wrk is not installed")?);
    stage.chain.client.place(&mut command);
    command.args([format!("-t{}", setting.cpus), format!("-c{}", setting.concurrency), "-d1s".to_owned()]);
    command.args(["-H", "Connection: close"]).arg(format!("http://{}/64", stage.front()));
    let limit = Duration::from_secs(20);
    let said = Proc::spawn(stage.middle.logs(), "wrk", command).finish(limit).success().stdout;
    for bad in ["Socket errors", "Non-2xx"] {
        ensure!(!said.contains(bad), "wrk: {said}");
    }
    let rate = said.lines().find_map(|line| line.strip_prefix("Requests/sec:")?.trim().parse().ok());
    rate.with_context(|| format!("wrk: no rate in {said}"))
}
