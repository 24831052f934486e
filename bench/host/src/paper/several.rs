//! Rows of several processes: pairs on one CPU, and a pipeline.

use super::experiment::{Claim, Experiment, Measure, STOCK, WAYS_AND_QUEUE};
use crate::child::Child;
use crate::scenario::{Layout, Unit};
use crate::step::{Step, Values, READY_LIMIT};
use crate::worker::{Op, Outcome, OPEN, READY};
use anyhow::{Context, Result};
use fsocket_bench_args::{Paper as Args, Path, Role};
use std::process::{Command, Stdio};
use std::time::Duration;

/// SocksDirect, figure 10.
pub fn pairs(_: &Args) -> Vec<Experiment> {
    let claim = Claim::Times { low: 20.0, high: 30.0, source: "section 5.2.3" };
    let row = |n: usize| {
        let name = format!("{n} pair{},", if n == 1 { "" } else { "s" });
        Experiment::new(name, move |step| run_pairs(step, n))
            .on(Layout::SameCpu)
            .ways(WAYS_AND_QUEUE)
            .at("pairs on one CPU", n as f64)
            .measures([Measure::lower("mean", "round trip, mean", Unit::Nanoseconds).claims(claim)])
    };
    [1, 2, 4, 8].map(row).into()
}

/// The mean round trip of `n` clients, each with a server of its own. The clients start at once.
fn run_pairs(step: &Step, n: usize) -> Result<Values> {
    let cpu = Some(step.client_cpu());
    let (mut servers, mut clients, mut files) = (Vec::new(), Vec::new(), Vec::new());
    for _ in 0..n {
        let mut file = String::new();
        if step.path == Path::Queue {
            files.push(tempfile::NamedTempFile::new_in(&step.context.dir)?);
            file = files.last().map_or_else(String::new, |f| f.path().display().to_string());
        }
        let mut server = Child::spawn(command(step, Role::Server, Op::Rtt, &file), cpu)?;
        let ready = server.line(READY_LIMIT)?;
        let mut command = command(step, Role::Client, Op::Rtt, address(&ready)?);
        command.args(["--gate", "--secs", &step.seconds().to_string()]).stdin(Stdio::piped());
        let mut client = Child::spawn(command, cpu)?;
        anyhow::ensure!(client.line(READY_LIMIT)? == OPEN, "the client says something else");
        servers.push(server);
        clients.push(client);
    }
    for client in &mut clients {
        client.poke()?;
    }
    let limit = Duration::from_secs_f64(step.seconds() * 3.0) + READY_LIMIT;
    let (mut mean, mut ops) = (0.0, 0);
    for client in clients {
        let output = client.finish(limit)?;
        let outcome: Outcome = serde_json::from_str(output.trim()).context("the client says something else")?;
        mean += outcome.mean / n as f64;
        ops += outcome.warm + outcome.ops;
    }
    for server in servers {
        server.finish(READY_LIMIT)?;
    }
    Ok(Values::from([("mean", mean), ("ops", ops as f64)]))
}

fn address(ready: &str) -> Result<&str> {
    ready.strip_prefix(READY).context("the server says something else")
}

/// Messages of 8 bytes per second, from two threads that send on one socket without taking turns.
pub fn two_senders(step: &Step) -> Result<Values> {
    let mut server = Child::spawn(command(step, Role::Server, Op::BothRate, ""), Some(step.server_cpu()))?;
    let ready = server.line(READY_LIMIT)?;
    let mut client = command(step, Role::Client, Op::BothRate, address(&ready)?);
    client.args(["--secs", &step.seconds().to_string()]);
    let output = Child::spawn(client, None)?.finish(Duration::from_secs_f64(step.seconds() * 3.0) + READY_LIMIT)?;
    server.finish(READY_LIMIT)?;
    let outcome: Outcome = serde_json::from_str(output.trim()).context("the client says something else")?;
    Ok(Values::from([("rate", outcome.ops as f64 / outcome.seconds)]))
}

/// SocksDirect, figure 12.
pub fn pipeline(_: &Args) -> Vec<Experiment> {
    let claim = Claim::Times { low: 20.0, high: 20.0, source: "section 5.3.4, TCP sockets" };
    let row = |n: usize| {
        Experiment::new(functions(n) + ",", move |step| run_pipeline(step, n, false))
            .at("network functions", n as f64)
            .measures([Measure::higher("rate", "packets/s", Unit::PerSecond).claims(claim)])
    };
    let standard = |n: usize| {
        Experiment::new(functions(n) + ", sockets as 0 and 1,", move |step| run_pipeline(step, n, true))
            .limit("descriptors 0 to 2 stay in the kernel")
            .measures([Measure::higher("rate", "packets/s", Unit::PerSecond).claims(claim)])
    };
    let pipes = |n: usize| {
        Experiment::new(functions(n) + ", pipes,", move |step| run_pipes(step, n))
            .ways(STOCK)
            .not_counted()
            .measures([Measure::higher("rate", "packets/s", Unit::PerSecond)])
    };
    [1, 2, 4].map(row).into_iter().chain([1, 4].map(standard)).chain([1, 2, 4].map(pipes)).collect()
}

fn functions(n: usize) -> String {
    format!("{n} function{}", if n == 1 { "" } else { "s" })
}

/// Packets per second through `n` filters between pipes.
fn run_pipes(step: &Step, n: usize) -> Result<Values> {
    let own = step.context.own.display().to_string();
    let part = |op| format!("'{own}' worker --role client --transport tcp --size {PACKET} --op {op}");
    let mut parts = vec![format!("{} --secs {}", part("pump"), step.seconds())];
    parts.extend((0..n).map(|_| part("filter")));
    parts.push(part("drain"));
    let mut command = step.command(Role::Client, "sh");
    command.args(["-c", &parts.join(" | ")]);
    let output = Child::spawn(command, None)?.finish(Duration::from_secs_f64(step.seconds() * 10.0) + READY_LIMIT)?;
    let outcome: Outcome = serde_json::from_str(output.trim()).context("the sink says something else")?;
    Ok(Values::from([("rate", outcome.ops as f64 / outcome.seconds)]))
}

/// Bytes of a packet, as in the paper.
const PACKET: &str = "64";

/// Packets per second through `n` processes, from a source to a sink. `stdio`: sockets are standard input and
/// output.
fn run_pipeline(step: &Step, n: usize, stdio: bool) -> Result<Values> {
    let server = |op, next: Option<&str>| -> Result<(Child, String)> {
        let mut command = command(step, Role::Server, op, "");
        command.args(["--size", PACKET]);
        next.map(|port| command.args(["--next", port]));
        if stdio && next.is_some() {
            command.arg("--stdio");
        }
        let mut child = Child::spawn(command, None)?;
        let ready = child.line(READY_LIMIT)?;
        let port = address(&ready)?.to_owned();
        Ok((child, port))
    };
    let (sink, mut port) = server(Op::Rate, None)?;
    let mut all = vec![sink];
    for _ in 0..n {
        let (stage, before) = server(Op::Stage, Some(&port))?;
        all.push(stage);
        port = before;
    }
    let mut command = command(step, Role::Client, Op::Rate, &port);
    command.args(["--size", PACKET, "--secs", &step.seconds().to_string()]);
    let limit = Duration::from_secs_f64(step.seconds() * 10.0) + READY_LIMIT;
    let output = Child::spawn(command, None)?.finish(limit)?;
    for child in all.into_iter().rev() {
        child.finish(READY_LIMIT)?;
    }
    let outcome: Outcome = serde_json::from_str(output.trim()).context("the source says something else")?;
    let ops = outcome.ops as f64;
    Ok(Values::from([("rate", ops / outcome.seconds), ("ops", ops)]))
}

/// Command of a worker that is not pinned. Here the bare queue ([`Path::Queue`]) is a pair of processes that sleep
/// on a futex.
fn command(step: &Step, role: Role, op: Op, addr: &str) -> Command {
    let op = clap::ValueEnum::to_possible_value(&op).expect("no operation is skipped");
    let mut command = step.command(role, &step.context.own);
    let role = if role == Role::Client { "client" } else { "server" };
    let transport = if step.path == Path::Queue { "futex" } else { "tcp" };
    command.args(["worker", "--role", role, "--transport", transport, "--op", op.get_name(), "--addr", addr]);
    command
}
