//! Kills a worker, or reloads the server, every second under load, and counts the failed requests by cause.

use crate::stage::{Stage, PORT};
use crate::{Scenario, Setting};
use anyhow::{bail, ensure, Context, Result};
use fsocket_testkit::load::{Load, Plan};
use fsocket_testkit::servers::{self, Way};
use fsocket_testkit::workers::{children, Killed};
use fsocket_testkit::{find_program, net, Proc};
use serde_json::{json, Value};
use std::process::Command;
use std::time::{Duration, Instant};

/// Bytes of an answer.
const SIZE: usize = 64;

pub fn run(scenario: Scenario, setting: &Setting, way: Way) -> Result<Value> {
    let stage = Stage::new(setting, way)?;
    let front = stage.front();
    stage.middle.file("www/64", [b'x'; SIZE]);
    let mut server = match scenario {
        Scenario::KillNginx | Scenario::ReloadNginx => servers::nginx(&stage.middle, way, &[front], setting.cpus),
        Scenario::KillDemo | Scenario::ReloadDemo => {
            servers::demo(&stage.middle, way, &[front], setting.cpus, &["--quiet"])
        }
        _ => bail!("not a disturbance"),
    };
    let workers = || children(server.pid()).len();
    net::wait_until(Duration::from_secs(10), || workers() == setting.cpus).ok().context("workers")?;

    let plan = Plan::get(front, "/64", &[b'x'; SIZE], setting.concurrency);
    let load = Load::start(&plan, Some(&stage.chain.client), None);
    let mut killed = Killed::default();
    let mut times = 0;
    let started = Instant::now();
    while times < setting.disturb {
        times += 1;
        let next = started + Duration::from_secs(times.into());
        std::thread::sleep(next.saturating_duration_since(Instant::now()));
        match scenario {
            Scenario::KillNginx | Scenario::KillDemo => killed.kill_oldest(&stage.chain.middle, server.pid(), PORT),
            Scenario::ReloadNginx => reload(&stage)?,
            _ => server.signal(libc::SIGHUP),
        }
        ensure!(server.running(), "the server ended: {}", server.stderr());
    }
    std::thread::sleep(Duration::from_secs(1));
    let outcome = load.stop();
    let kills = matches!(scenario, Scenario::KillNginx | Scenario::KillDemo);
    let unexplained = outcome.failures().saturating_sub(killed.accepted);
    Ok(json!({
        "failed": outcome.failures(),
        "of": outcome.answered + outcome.failures(),
        "unexplained": if kills { json!(unexplained) } else { Value::Null },
        "causes": outcome.failed,
        "retried": outcome.retried,
        "slowest_seconds": outcome.slowest.as_secs_f64(),
        "times": times,
        "accepted_by_the_dead": if kills { json!(killed.accepted) } else { Value::Null },
        "queued_at_death": if kills { json!(killed.queued) } else { Value::Null },
        "kernel": stage.kernel_counts(),
        "counters": stage.proof(way)?,
    }))
}

fn reload(stage: &Stage) -> Result<()> {
    let mut command = Command::new(find_program("nginx").context("nginx is not installed")?);
    let dir = stage.middle.path().join("nginx");
    command.arg("-p").arg(&dir).arg("-c").arg(dir.join("nginx.conf")).arg("-e").arg(dir.join("error.log"));
    command.args(["-s", "reload"]);
    stage.chain.middle.place(&mut command);
    Proc::spawn(stage.middle.logs(), "nginx-reload", command).finish(Duration::from_secs(10)).success();
    Ok(())
}
