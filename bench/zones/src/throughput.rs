//! Measures requests per second, with one connection per request. The servers of all ways run at the same time, and
//! each way gets one second of load in turn. (The machine's speed changes within minutes by more than the
//! differences of interest.)

use crate::stage::Stage;
use crate::{Scenario, Setting};
use anyhow::{bail, ensure, Context, Result};
use fsocket_testkit::servers::{self, Way};
use fsocket_testkit::{find_program, Proc};
use serde_json::{json, Value};
use std::process::Command;
use std::time::Duration;

/// Bytes of an answer, as in the papers.
const SIZE: usize = 64;

/// A way whose servers run and have had a first load.
pub struct Ready {
    // Fields are dropped in order: the servers before the hosts they run on.
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
        // All ways use the same backend, the lightest that is available.
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

    /// The median rate of all turns, and the counters that prove that the way was used.
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
