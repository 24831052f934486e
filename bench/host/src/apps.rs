//! Measurements with real programs, as the distribution installs them.

use crate::child::Child;
use crate::scenario::Job;
use crate::step::{Step, Values, READY_LIMIT};
use anyhow::{anyhow, bail, Context, Result};
use fsocket_bench_args::Role;
use fsocket_client::locate;
use std::fs;
use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::path::PathBuf;
use std::time::{Duration, Instant};

/// Path of a program, if it is installed. (`sbin` is not in every PATH.)
pub fn find_program(name: &str) -> Option<PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let system = ["/usr/sbin", "/usr/local/sbin", "/sbin"].map(PathBuf::from);
    std::env::split_paths(&path).chain(system).map(|dir| dir.join(name)).find(|p| p.is_file())
}

fn program(name: &str) -> Result<PathBuf> {
    find_program(name).with_context(|| format!("{name} is not installed"))
}

/// A port that was free a moment ago.
pub fn free_port() -> Result<u16> {
    Ok(TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?.local_addr()?.port())
}

/// A running server, and the port on which it accepts.
pub struct Server {
    pub child: Child,
    pub port: u16,
}

fn start(step: &Step, role: Role, name: &str, port: u16, args: &[&str]) -> Result<Server> {
    start_on(step, role, name, port, args, Some(step.server_cpu()))
}

/// Starts a server and waits until it listens at `port`. `cpu`: the CPU to bind it to; None: all CPUs.
pub fn start_on(step: &Step, role: Role, name: &str, port: u16, args: &[&str], cpu: Option<usize>) -> Result<Server> {
    let mut command = step.command(role, program(name)?);
    let errors = fs::File::create(step.context.dir.join(format!("{name}.stderr")))?;
    command.args(args).current_dir(&step.context.dir).stderr(errors);
    let mut child = Child::spawn(command, cpu)?;
    let started = Instant::now();
    while TcpStream::connect((Ipv4Addr::LOCALHOST, port)).is_err() {
        if started.elapsed() > READY_LIMIT || child.has_ended() {
            let said = fs::read_to_string(step.context.dir.join(format!("{name}.stderr"))).unwrap_or_default();
            bail!("{name} does not listen: {}", said.lines().last().unwrap_or("no message"));
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    Ok(Server { child, port })
}

pub fn redis(step: &Step) -> Result<Server> {
    redis_on(step, Some(step.server_cpu()))
}

/// A redis that stores nothing, on one CPU, or (None) on all.
pub fn redis_on(step: &Step, cpu: Option<usize>) -> Result<Server> {
    let port = free_port()?;
    let args = ["--save", "", "--appendonly", "no", "--bind", "127.0.0.1", "--port", &port.to_string()];
    start_on(step, Role::Server, "redis-server", port, &args, cpu)
}

/// nginx with one worker and a file of 64 bytes at `/`.
pub fn nginx(step: &Step, role: Role) -> Result<Server> {
    let port = free_port()?;
    let dir = &step.context.dir;
    fs::create_dir_all(dir.join("html"))?;
    fs::write(dir.join("html/index.html"), [b'x'; 64])?;
    // A worker under another user could not read the bench's directory.
    let user = if rustix::process::geteuid().is_root() { "user root;\n" } else { "" };
    let mut temporary = String::new();
    for kind in ["client_body", "proxy", "fastcgi", "uwsgi", "scgi"] {
        temporary += &format!("{kind}_temp_path {}/tmp_{kind};\n", dir.display());
    }
    let configuration = format!(
        "{user}daemon off;\nworker_processes 1;\npid {0}/nginx.pid;\nerror_log {0}/nginx.log;\n\
         events {{ worker_connections 4096; }}\n\
         http {{\naccess_log off;\nkeepalive_requests 1000000000;\n{temporary}\
         server {{ listen 127.0.0.1:{port}; location / {{ root {0}/html; }} }}\n}}\n",
        dir.display()
    );
    let file = dir.join("nginx.conf").display().to_string();
    fs::write(&file, configuration)?;
    let prefix = dir.display().to_string();
    let log = dir.join("nginx.log").display().to_string();
    start(step, role, "nginx", port, &["-p", &prefix, "-c", &file, "-e", &log])
}

/// haproxy in HTTP mode in front of `backend`.
fn haproxy(step: &Step, backend: u16) -> Result<Server> {
    let port = free_port()?;
    let configuration = format!(
        "global\n  maxconn 4096\n  nbthread 1\n\
         defaults\n  mode http\n  timeout connect 5s\n  timeout client 30s\n  timeout server 30s\n\
         frontend f\n  bind 127.0.0.1:{port}\n  default_backend b\n\
         backend b\n  server s 127.0.0.1:{backend}\n"
    );
    let file = step.context.dir.join("haproxy.cfg").display().to_string();
    fs::write(&file, configuration)?;
    start(step, Role::Server, "haproxy", port, &["-db", "-f", &file])
}

/// Runs a client to its end, and returns its output.
fn client(step: &Step, name: &str, args: &[&str], limit: Duration) -> Result<String> {
    start_client(step, name, args, Some(step.client_cpu()))?.finish(limit)
}

/// Starts a client on one CPU, or (None) on all.
pub fn start_client(step: &Step, name: &str, args: &[&str], cpu: Option<usize>) -> Result<Child> {
    let mut command = step.command(Role::Client, program(name)?);
    command.args(args).stderr(fs::File::create(step.context.dir.join(format!("{name}.stderr")))?);
    Child::spawn(command, cpu)
}

pub fn run(step: &Step, job: Job) -> Result<Values> {
    match job {
        Job::Redis { clients } => {
            let server = redis(step)?;
            redis_benchmark(step, server.port, clients)
        }
        Job::NginxKeepAlive => wrk(step, nginx(step, Role::Server)?, &[]),
        Job::NginxClose => wrk(step, nginx(step, Role::Server)?, &["-H", "Connection: close"]),
        Job::NginxAb => {
            let server = nginx(step, Role::Server)?;
            let count = if step.context.quick { "8000" } else { "20000" };
            let url = format!("http://127.0.0.1:{}/index.html", server.port);
            let output = client(step, "ab", &["-q", "-n", count, "-c", "32", &url], Duration::from_secs(30))?;
            Ok(Values::from([("rate", ab_rate(&output)?), ("ops", count.parse()?)]))
        }
        Job::Haproxy => {
            let backend = nginx(step, Role::Backend)?;
            let front = haproxy(step, backend.port)?;
            wrk(step, front, &[])
        }
        Job::CurlLoop => curl_loop(step, &nginx(step, Role::Server)?),
        Job::TrueLoop => true_loop(step),
        _ => bail!("not a program"),
    }
}

fn redis_benchmark(step: &Step, port: u16, clients: u32) -> Result<Values> {
    let count = if step.context.quick { 30_000 } else { 100_000 } * if clients > 1 { 2 } else { 1 };
    let ops = f64::from(2 * count);
    let (port, clients, count) = (port.to_string(), clients.to_string(), count.to_string());
    let args = ["-p", &port, "-t", "get,set", "-c", &clients, "-n", &count, "--csv"];
    let output = client(step, "redis-benchmark", &args, Duration::from_secs(60))?;
    let value = |test: &str| csv_rate(&output, test).with_context(|| format!("no {test} in: {output}"));
    Ok(Values::from([("get", value("GET")?), ("set", value("SET")?), ("ops", ops)]))
}

/// The second column of the row of `test` in redis-benchmark's CSV output.
pub fn csv_rate(output: &str, test: &str) -> Option<f64> {
    let row = output.lines().find(|line| line.starts_with(&format!("\"{test}\"")))?;
    row.split(',').nth(1)?.trim_matches('"').parse().ok()
}

fn wrk(step: &Step, server: Server, more: &[&str]) -> Result<Values> {
    let duration = if step.context.quick { "-d1s" } else { "-d2s" };
    let url = format!("http://127.0.0.1:{}/", server.port);
    let args = [&["-t1", "-c32", duration], more, &[url.as_str()]].concat();
    let output = client(step, "wrk", &args, Duration::from_secs(15))?;
    Ok(Values::from([("rate", wrk_rate(&output)?), ("ops", wrk_requests(&output)?)]))
}

/// Number of answered requests.
pub fn wrk_requests(output: &str) -> Result<f64> {
    let line = output.lines().find(|l| l.contains(" requests in "));
    let count = line.and_then(|l| l.split_whitespace().next()?.parse().ok());
    count.with_context(|| format!("no number of requests in: {output}"))
}

/// Requests per second; an error if any request failed.
pub fn wrk_rate(output: &str) -> Result<f64> {
    let field = |name: &str| output.lines().find_map(|l| l.trim().strip_prefix(name)).map(str::trim);
    if let Some(bad) = field("Non-2xx or 3xx responses:") {
        bail!("wrk: {bad} bad answers");
    }
    if let Some(bad) = field("Socket errors:") {
        bail!("wrk: socket errors: {bad}");
    }
    field("Requests/sec:").and_then(|v| v.parse().ok()).with_context(|| format!("no rate in: {output}"))
}

fn ab_rate(output: &str) -> Result<f64> {
    let field = |name: &str| {
        let line = output.lines().find_map(|l| l.strip_prefix(name))?;
        line.split_whitespace().next()?.parse::<f64>().ok()
    };
    if field("Failed requests:") != Some(0.0) {
        bail!("ab: failed requests in: {output}");
    }
    field("Requests per second:").with_context(|| format!("no rate in: {output}"))
}

/// A shell that starts one `curl` after the other, as scripts do.
fn curl_loop(step: &Step, server: &Server) -> Result<Values> {
    let curl = format!("curl -s -o /dev/null http://127.0.0.1:{}/", server.port);
    shell_loop(step, &curl, if step.context.quick { 40 } else { 100 })
}

/// A shell that starts programs that open no socket.
fn true_loop(step: &Step) -> Result<Values> {
    shell_loop(step, "/bin/true", if step.context.quick { 200 } else { 500 })
}

/// Measures a shell that starts `program` `count` times, under `fastsocket run` if the path has the library.
fn shell_loop(step: &Step, program: &str, count: u32) -> Result<Values> {
    let script = format!("i=0; while [ $i -lt {count} ]; do {program} || exit 1; i=$((i+1)); done");
    let mut command;
    match &step.context.accel {
        Some(accel) if step.path.has_library(Role::Client) => {
            let cli = locate::program("fastsocket").map_err(|e| anyhow!(e))?;
            command = step.command(Role::Client, cli);
            command.env_remove("LD_PRELOAD").args(["run", "--library"]).arg(&accel.library).args(["--", "sh", "-c"]);
        }
        _ => {
            command = step.command(Role::Client, "sh");
            command.arg("-c");
        }
    }
    command.arg(script);
    let started = Instant::now();
    Child::spawn(command, Some(step.client_cpu()))?.finish(Duration::from_secs(60))?;
    Ok(Values::from([("seconds", started.elapsed().as_secs_f64()), ("ops", f64::from(count))]))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_what_clients_print() {
        let csv = "\"test\",\"rps\",\"avg_latency_ms\"\n\"SET\",\"40000.00\",\"0.1\"\n\"GET\",\"41000.50\",\"0.1\"\n";
        assert_eq!(csv_rate(csv, "GET"), Some(41000.5));
        assert_eq!(csv_rate(csv, "LPUSH"), None);
        assert_eq!(wrk_requests("  4321 requests in 2.00s, 1MB read\n").unwrap(), 4321.0);
        assert_eq!(wrk_rate("  1 threads\nRequests/sec:  12345.67\nTransfer/sec: 1MB\n").unwrap(), 12345.67);
        assert!(wrk_rate("  Socket errors: connect 0, read 7, write 0, timeout 0\nRequests/sec: 1\n").is_err());
        let ab =
            "Complete requests:      8000\nFailed requests:        0\nRequests per second:    9876.5 [#/sec] (mean)\n";
        assert_eq!(ab_rate(ab).unwrap(), 9876.5);
    }
}
