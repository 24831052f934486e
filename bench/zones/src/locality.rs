//! Measures the share of packets that the kernel handles on the CPU where the application runs, for accepted
//! (passive) and opened (active) connections. BPF counts the packets of the middle host's server.

use crate::stage::Stage;
use crate::{Scenario, Setting};
use anyhow::{bail, ensure, Result};
use fsocket_bpf::locality::{Kind, Locality};
use fsocket_testkit::load::{Load, Plan};
use fsocket_testkit::servers::{self, Way};
use fsocket_testkit::workers::children;
use serde_json::{json, Value};

/// Number of requests of each concurrent client.
const REQUESTS: u64 = 100;

pub fn run(scenario: Scenario, setting: &Setting, way: Way) -> Result<Value> {
    let stage = Stage::new(setting, way)?;
    let (front, back) = (stage.front(), stage.back());
    stage.middle.file("www/64", [b'x'; 64]);
    let mut backend = None;
    // Counting starts before the server, because BPF must see every connection from its beginning.
    let locality = Locality::start()?;
    let server = match scenario {
        Scenario::LocalityNginx => servers::nginx(&stage.middle, way, &[front], setting.cpus),
        Scenario::LocalityHaproxy => {
            backend = Some(servers::demo(&stage.backend, Way::Reuseport, &[back], setting.cpus, &["--quiet"]));
            servers::haproxy(&stage.middle, way, front, back, setting.cpus)
        }
        _ => bail!("not a locality"),
    };
    if way.is_ours() {
        servers::wait_zones(&stage.middle, setting.cpus as u64);
    }
    let plan = Plan::get(front, "/64", &[b'x'; 64], setting.concurrency);
    let outcome = Load::start(&plan, Some(&stage.chain.client), Some(REQUESTS)).finish();
    ensure!(outcome.failures() == 0, "failed requests: {:?}", outcome.failed);
    let counters = stage.proof(way)?;
    // BPF also counts the packets of other servers on this machine.
    let mut processes = children(server.pid());
    processes.push(server.pid() as i32);
    let cells = locality.cells()?;
    let share = |kind: Kind| -> Result<Value> {
        let mine = cells.iter().filter(|cell| cell.kind == kind && processes.contains(&(cell.tgid as i32)));
        let (local, all) = mine.fold((0, 0), |(local, all), cell| {
            (local + if cell.is_local() { cell.packets } else { 0 }, all + cell.packets)
        });
        ensure!(all >= outcome.answered, "{all} packets of {kind:?} connections for {} requests", outcome.answered);
        Ok(json!({ "percent": local as f64 * 100.0 / all as f64, "packets": all }))
    };
    let passive = share(Kind::Passive)?;
    let active = if backend.is_some() { share(Kind::Active)? } else { Value::Null };
    Ok(json!({
        "passive_percent": passive["percent"],
        "passive_packets": passive["packets"],
        "active_percent": active["percent"],
        "active_packets": active["packets"],
        "counters": counters,
    }))
}
