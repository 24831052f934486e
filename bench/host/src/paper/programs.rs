//! Rows of real programs: redis, a proxy, an RPC library.

use super::experiment::{bytes_text, Claim, Experiment, Measure};
use super::web;
use crate::apps;
use crate::child::Child;
use crate::scenario::Unit;
use crate::step::{worker, Step, Values, READY_LIMIT};
use crate::worker::{Op, Outcome};
use anyhow::{Context, Result};
use fsocket_bench_args::{Paper as Args, Role};
use std::time::{Duration, Instant};

const REDIS: &[&str] = &["redis-server", "redis-benchmark"];

/// SocksDirect, section 5.3.2.
pub fn redis(_: &Args) -> Vec<Experiment> {
    let row = |key, label, linux, system| {
        let claim = Claim::Values { linux, system, source: "section 5.3.2" };
        Measure::lower(key, label, Unit::Nanoseconds).claims(claim)
    };
    let benchmark = Experiment::new("redis-benchmark,", |step| {
        let server = apps::redis(step)?;
        let count = if step.context.quick { "20000" } else { "60000" };
        let args = ["-p", &server.port.to_string(), "-t", "set,get", "-d", "8", "-c", "1", "-n", count, "--csv"];
        let client = apps::start_client(step, "redis-benchmark", &args, Some(step.client_cpu()))?;
        let output = client.finish(Duration::from_secs(60))?;
        // One request at a time, so that the mean is the inverse of the rate.
        let rate = apps::csv_rate(&output, "GET").with_context(|| format!("no GET in: {output}"))?;
        Ok(Values::from([("mean", 1e9 / rate)]))
    });
    let own = Experiment::new("own client,", |step| {
        let server = apps::redis(step)?;
        let mut command = worker(step, Role::Client, Op::Redis, &server.port.to_string());
        command.args(["--secs", &step.seconds().to_string()]);
        let output = Child::spawn(command, None)?.finish(READY_LIMIT)?;
        let outcome: Outcome = serde_json::from_str(output.trim()).context("the client says something else")?;
        Ok(Values::from([("p1", outcome.p1), ("p99", outcome.p99)]))
    });
    vec![
        benchmark.programs(REDIS).measures([row("mean", "mean", 38_900.0, 14_100.0)]),
        own.programs(REDIS).measures([row("p1", "p1", 31_600.0, 8_400.0), row("p99", "p99", 56_100.0, 19_100.0)]),
    ]
}

/// Fastsocket, README.
pub fn eight_redis(_: &Args) -> Vec<Experiment> {
    let claim = Claim::Times { low: 1.2, high: 1.45, source: "README" };
    vec![Experiment::new("8 instances, GET", run_eight_redis).programs(REDIS).measures([Measure::higher(
        "rate",
        "",
        Unit::PerSecond,
    )
    .claims(claim)])]
}

/// Requests per second of eight instances with a client each. The scheduler places all of them.
fn run_eight_redis(step: &Step) -> Result<Values> {
    const INSTANCES: usize = 8;
    let servers = (0..INSTANCES).map(|_| apps::redis_on(step, None)).collect::<Result<Vec<_>>>()?;
    let count: usize = if step.context.quick { 4_000 } else { 10_000 };
    let started = Instant::now();
    let start = |server: &apps::Server| {
        let (port, count) = (server.port.to_string(), count.to_string());
        let args = ["-p", &port, "-t", "get", "-c", "10", "-n", &count, "--csv"];
        apps::start_client(step, "redis-benchmark", &args, None)
    };
    let clients = servers.iter().map(start).collect::<Result<Vec<_>>>()?;
    for client in clients {
        client.finish(Duration::from_secs(60))?;
    }
    let requests = (INSTANCES * count) as f64;
    Ok(Values::from([("rate", requests / started.elapsed().as_secs_f64())]))
}

/// SocksDirect, figure 11.
pub fn proxies(_: &Args) -> Vec<Experiment> {
    const SIZES: [usize; 6] = [64, 1 << 10, 16 << 10, 64 << 10, 256 << 10, 1 << 20];
    let row = |size: usize| {
        let claim = match size {
            64 => Some(Claim::Times { low: 5.5, high: 5.5, source: "section 5.3.1" }),
            1048576 => Some(Claim::Times { low: 20.0, high: 20.0, source: "section 5.3.1, up to" }),
            _ => None,
        };
        Experiment::new(format!("nginx, {},", bytes_text(size)), move |step| web::proxy(step, web::Front::Nginx, size))
            .at("bytes of an answer", size as f64)
            .programs(&["nginx", "wrk"])
            .measures([Measure::lower("p50", "latency", Unit::Nanoseconds).claims(claim)])
    };
    let haproxy = |size: usize, splice: bool| {
        let name = format!("haproxy{}, {},", if splice { " with splice" } else { "" }, bytes_text(size));
        Experiment::new(name, move |step| web::proxy(step, web::Front::Haproxy { splice }, size))
            .programs(&["nginx", "haproxy", "wrk"])
            .measures([Measure::lower("p50", "latency", Unit::Nanoseconds)])
    };
    let plain = [64, 64 << 10, 1 << 20].map(|size| haproxy(size, false));
    let haproxies = plain.into_iter().chain([64 << 10, 1 << 20].map(|size| haproxy(size, true)));
    SIZES.map(row).into_iter().chain(haproxies).collect()
}
