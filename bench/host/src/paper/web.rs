//! Rows of nginx and haproxy with wrk.

use super::experiment::{bytes_text, Experiment, Measure};
use crate::apps::{self, Server};
use crate::child::Child;
use crate::scenario::Unit;
use crate::step::{NotAccelerated, Step, Values};
use anyhow::{Context, Result};
use fsocket_bench_args::{Paper as Args, Path, Role};
use std::fs;
use std::time::Duration;

/// Stock, zones in kernel TCP, shared memory, and stock again.
const WAYS: &[Path] = &[Path::Stock, Path::KernelServer, Path::Ours, Path::Control];
const PROGRAMS: &[&str] = &["nginx", "wrk"];
const CLOSE: &[&str] = &["-H", "Connection: close"];
/// A load that takes longer to end has failed.
const LIMIT: Duration = Duration::from_secs(20);

/// The configuration of an nginx.
struct Site {
    name: &'static str,
    role: Role,
    workers: u32,
    /// Requests after which it closes a connection.
    requests: u64,
    /// Bytes of the file at `/`.
    file: usize,
    /// Port of another server that answers instead.
    origin: Option<u16>,
    cpu: Option<usize>,
}

impl Site {
    fn new(file: usize) -> Self {
        let requests = 1_000_000_000;
        Site { name: "site", role: Role::Server, workers: 2, requests, file, origin: None, cpu: None }
    }

    fn start(&self, step: &Step) -> Result<Server> {
        let port = apps::free_port()?;
        let dir = step.context.dir.join(self.name);
        fs::create_dir_all(dir.join("html"))?;
        fs::write(dir.join("html/index.html"), vec![b'x'; self.file])?;
        let configuration = dir.join("nginx.conf");
        fs::write(&configuration, self.configuration(&dir.display().to_string(), port))?;
        let (prefix, configuration) = (dir.display().to_string(), configuration.display().to_string());
        let log = dir.join("nginx.log").display().to_string();
        apps::start_on(step, self.role, "nginx", port, &["-p", &prefix, "-c", &configuration, "-e", &log], self.cpu)
    }

    fn configuration(&self, dir: &str, port: u16) -> String {
        // A worker under another user could not read the bench's directory.
        let user = if rustix::process::geteuid().is_root() { "user root;\n" } else { "" };
        let mut http = String::new();
        for kind in ["client_body", "proxy", "fastcgi", "uwsgi", "scgi"] {
            http += &format!("{kind}_temp_path {dir}/tmp_{kind};\n");
        }
        let location = match self.origin {
            None => format!("root {dir}/html;"),
            Some(origin) => {
                http += &format!("upstream origin {{ server 127.0.0.1:{origin}; keepalive 64; }}\n");
                "proxy_pass http://origin; proxy_http_version 1.1; proxy_set_header Connection \"\"; \
                 proxy_max_temp_file_size 0;"
                    .to_owned()
            }
        };
        format!(
            "{user}daemon off;\nworker_processes {};\npid {dir}/nginx.pid;\nerror_log {dir}/nginx.log;\n\
             events {{ worker_connections 4096; }}\nhttp {{\naccess_log off;\nkeepalive_requests {};\n{http}\
             server {{ listen 127.0.0.1:{port}; location / {{ {location} }} }}\n}}\n",
            self.workers, self.requests
        )
    }
}

/// The parameters of wrk.
struct Load<'a> {
    threads: u32,
    connections: u32,
    think_ms: u32,
    more: &'a [&'a str],
    seconds: u32,
    cpu: Option<usize>,
}

impl Load<'_> {
    /// Requests per second, and the number of requests, from which the CPU time of a request follows.
    fn run(&self, step: &Step, port: u16) -> Result<Values> {
        let output = self.output(step, port)?;
        let rate = apps::wrk_rate(&output)?;
        Ok(Values::from([("rate", rate), ("ops", apps::wrk_requests(&output)?)]))
    }

    fn output(&self, step: &Step, port: u16) -> Result<String> {
        self.start(step, port)?.finish(LIMIT)
    }

    fn start(&self, step: &Step, port: u16) -> Result<Child> {
        let (threads, connections) = (format!("-t{}", self.threads), format!("-c{}", self.connections));
        let url = format!("http://127.0.0.1:{port}/");
        let script = step.context.dir.join("think.lua").display().to_string();
        let duration = format!("-d{}s", self.seconds);
        let mut args = vec![threads.as_str(), &connections, &duration];
        if self.think_ms > 0 {
            fs::write(&script, format!("function delay() return {} end\n", self.think_ms))?;
            args.extend(["-s", &script]);
        }
        args.extend(self.more);
        args.push(&url);
        apps::start_client(step, "wrk", &args, self.cpu)
    }
}

/// A load from two threads of wrk, on all CPUs, for one second.
fn shared(connections: u32, think_ms: u32) -> Load<'static> {
    Load { threads: 2, connections, think_ms, more: &[], seconds: 1, cpu: None }
}

/// Runs `load`. Where only servers have the library, it is an error if no connection was accepted from a zone.
fn zoned(step: &Step, load: impl FnOnce() -> Result<Values>) -> Result<Values> {
    let local = || -> Result<u64> {
        let totals = step.context.accel.as_ref().map(|a| a.report()).transpose()?.map(|r| r.totals);
        Ok(totals.and_then(|t| t.get("accept_local").copied()).unwrap_or(0))
    };
    let before = local()?;
    let values = load()?;
    if step.path == Path::KernelServer && local()? == before {
        return Err(anyhow::anyhow!("no connection was accepted in a zone").context(NotAccelerated));
    }
    Ok(values)
}

fn count(n: impl Into<u64>, what: &str) -> String {
    let n = n.into();
    format!("{n} {what}{}", if n == 1 { "" } else { "s" })
}

/// The known limit of servers with one process, if the monitor may not load its BPF program.
pub fn one_process() -> Option<&'static str> {
    (!rustix::process::geteuid().is_root())
        .then_some("without a monitor of root a listener of one process may have no zones")
}

fn curve(name: String, axis: &'static str, x: f64, run: impl Fn(&Step) -> Result<Values> + 'static) -> Experiment {
    Experiment::new(name, move |step| zoned(step, || run(step)))
        .ways(WAYS)
        .programs(PROGRAMS)
        .at(axis, x)
        .measures([Measure::higher("rate", "requests/s", Unit::PerSecond)])
}

/// Affinity-Accept, figure 7.
pub fn by_requests(_: &Args) -> Vec<Experiment> {
    let row = |n: u64| {
        curve(format!("{} a connection,", count(n, "request")), "requests a connection", n as f64, move |step| {
            let server = Site { requests: n, ..Site::new(700) }.start(step)?;
            shared(64, 0).run(step, server.port)
        })
    };
    [1, 6, 30, 100, 1000].map(row).into()
}

/// Affinity-Accept, figure 8. The number of connections grows with the time, so that the server stays busy.
pub fn by_think_time(_: &Args) -> Vec<Experiment> {
    let row = |(ms, connections): (u32, u32)| {
        curve(format!("{ms} ms, {connections} connections,"), "ms between requests", f64::from(ms), move |step| {
            let server = Site { requests: 6, ..Site::new(700) }.start(step)?;
            shared(connections, ms).run(step, server.port)
        })
    };
    [(0, 64), (1, 128), (10, 400), (50, 800)].map(row).into()
}

/// Affinity-Accept, figure 9.
pub fn by_size(_: &Args) -> Vec<Experiment> {
    let row = |size: usize| {
        curve(bytes_text(size) + ",", "bytes of a file", size as f64, move |step| {
            let server = Site { requests: 6, ..Site::new(size) }.start(step)?;
            shared(64, 0).run(step, server.port)
        })
    };
    [64, 700, 4 << 10, 16 << 10, 64 << 10].map(row).into()
}

/// Fastsocket, figure 4.
pub fn by_cores(_: &Args) -> Vec<Experiment> {
    let measures = || {
        let cpu = Measure::lower("cpu_op", "CPU time", Unit::CpuMicroseconds);
        [Measure::higher("rate", "connections/s", Unit::PerSecond), cpu]
    };
    let nginx = |workers: u32| {
        let run = move |step: &Step| {
            let one = workers == 1;
            let server = Site { workers, cpu: one.then(|| step.server_cpu()), ..Site::new(64) }.start(step)?;
            let load = Load { more: CLOSE, cpu: one.then(|| step.client_cpu()), ..shared(64, 0) };
            load.run(step, server.port)
        };
        curve(format!("nginx, {},", count(workers, "worker")), "workers", f64::from(workers), run)
            .limit(one_process().filter(|_| workers == 1))
            .measures(measures())
    };
    let haproxy = |threads: u32| {
        let run = move |step: &Step| {
            let one = threads == 1;
            let client = one.then(|| step.client_cpu());
            let site = Site { name: "origin", role: Role::Backend, workers: 1, cpu: client, ..Site::new(64) };
            let origin = site.start(step)?;
            let server = haproxy(step, origin.port, threads, "httpclose", one.then(|| step.server_cpu()))?;
            Load { more: CLOSE, cpu: client, ..shared(64, 0) }.run(step, server.port)
        };
        curve(format!("haproxy, {},", count(threads, "thread")), "threads", f64::from(threads), run)
            .programs(&["nginx", "haproxy", "wrk"])
            .limit(one_process())
            .measures(measures())
    };
    vec![nginx(1), nginx(2), haproxy(1), haproxy(2)]
}

/// haproxy in HTTP mode.
fn haproxy(step: &Step, origin: u16, threads: u32, option: &str, cpu: Option<usize>) -> Result<Server> {
    let port = apps::free_port()?;
    let configuration = format!(
        "global\n  maxconn 4096\n  nbthread {threads}\n\
         defaults\n  mode http\n  option {option}\n  timeout connect 5s\n  timeout client 30s\n  timeout server 30s\n\
         frontend f\n  bind 127.0.0.1:{port}\n  default_backend b\n\
         backend b\n  server s 127.0.0.1:{origin}\n"
    );
    let file = step.context.dir.join("haproxy.cfg").display().to_string();
    fs::write(&file, configuration)?;
    apps::start_on(step, Role::Server, "haproxy", port, &["-db", "-f", &file], cpu)
}

/// Starts an origin, haproxy with two threads in front of it, and a load. Runs `meanwhile` during the load. `then`
/// reads the output of wrk.
fn proxied<T>(
    step: &Step,
    load: Load,
    then: impl FnOnce(&str) -> Result<T>,
    meanwhile: impl FnOnce() -> Result<Values>,
) -> Result<(T, Values)> {
    let site = Site { name: "origin", role: Role::Backend, workers: 1, ..Site::new(64) };
    let origin = site.start(step)?;
    let server = haproxy(step, origin.port, 2, "httpclose", None)?;
    let client = load.start(step, server.port)?;
    // Processes need some time to start and to open their connections.
    std::thread::sleep(Duration::from_millis(300));
    let values = meanwhile()?;
    let output = client.finish(LIMIT)?;
    Ok((then(&output)?, values))
}

/// Runs `meanwhile` beside a full load of haproxy. Converts its counts per second to counts per 1,000 connections.
pub fn haproxy_under_load(step: &Step, meanwhile: impl FnOnce() -> Result<Values>) -> Result<Values> {
    zoned(step, || {
        let load = Load { more: CLOSE, seconds: 2, ..shared(64, 0) };
        let (rate, values) = proxied(step, load, apps::wrk_rate, meanwhile)?;
        Ok(values.into_iter().map(|(key, value)| (key, value * 1e3 / rate)).collect())
    })
}

/// Runs `meanwhile` beside a full load of nginx, with a connection for each request. Returns the time of all CPUs
/// per request in nanoseconds, and the counts of `meanwhile` per request.
pub fn nginx_under_load(step: &Step, meanwhile: impl FnOnce() -> Result<Values>) -> Result<Values> {
    zoned(step, || {
        let server = Site::new(700).start(step)?;
        let client = Load { more: CLOSE, seconds: 2, ..shared(64, 0) }.start(step, server.port)?;
        std::thread::sleep(Duration::from_millis(300));
        let values = meanwhile()?;
        let rate = apps::wrk_rate(&client.finish(LIMIT)?)?;
        let cpus = fsocket_measure::allowed_cpus()?.len() as f64;
        let mut all: Values = values.into_iter().map(|(key, value)| (key, value / rate)).collect();
        all.insert("request", cpus * 1e9 / rate);
        Ok(all)
    })
}

/// Runs `meanwhile` while 64 clients of haproxy send a request every 40 ms.
pub fn haproxy_at_a_rate(step: &Step, meanwhile: impl FnOnce() -> Result<Values>) -> Result<Values> {
    zoned(step, || {
        let load = Load { more: CLOSE, seconds: 2, ..shared(64, 40) };
        Ok(proxied(step, load, apps::wrk_rate, meanwhile)?.1)
    })
}

/// Runs `work` beside an nginx with load: 64 clients think for 20 ms before each request. Returns the seconds of
/// `work`, and the latencies in nanoseconds.
pub fn while_loaded(step: &Step, work: impl FnOnce(&Step) -> Result<f64>) -> Result<Values> {
    zoned(step, || {
        let server = Site { requests: 6, ..Site::new(700) }.start(step)?;
        let load = Load { more: &["--latency"], seconds: 600, ..shared(64, 20) };
        let client = load.start(step, server.port)?;
        let seconds = work(step)?;
        // An interrupted wrk prints its report.
        client.interrupt()?;
        let output = client.finish(LIMIT)?;
        let at = |name| quantile(&output, name).with_context(|| format!("no latency in: {output}"));
        Ok(Values::from([("seconds", seconds), ("p50", at("50%")?), ("p90", at("90%")?)]))
    })
}

/// A proxy of SocksDirect's figure 11.
#[derive(Debug, Clone, Copy)]
pub enum Front {
    Nginx,
    Haproxy { splice: bool },
}

/// The latency of a request through a proxy to an nginx: SocksDirect, figure 11.
pub fn proxy(step: &Step, front: Front, size: usize) -> Result<Values> {
    let cpu = Some(step.server_cpu());
    let origin = Site { name: "origin", role: Role::Backend, workers: 1, cpu, ..Site::new(size) }.start(step)?;
    let proxy = match front {
        Front::Nginx => {
            Site { name: "proxy", workers: 1, cpu, origin: Some(origin.port), ..Site::new(64) }.start(step)?
        }
        Front::Haproxy { splice } => {
            let option = if splice { "splice-response" } else { "http-keep-alive" };
            haproxy(step, origin.port, 1, option, cpu)?
        }
    };
    let more = &["--latency"];
    let load = Load { threads: 1, more, cpu: Some(step.client_cpu()), ..shared(1, 0) };
    let output = load.output(step, proxy.port)?;
    // This call also checks that no request has failed.
    apps::wrk_rate(&output)?;
    Ok(Values::from([("p50", quantile(&output, "50%").with_context(|| format!("no latency in: {output}"))?)]))
}

/// A percentile of wrk's latency distribution, in nanoseconds.
fn quantile(output: &str, name: &str) -> Option<f64> {
    let line = output.lines().find_map(|l| l.trim().strip_prefix(name))?.trim();
    let units = [("us", 1e3), ("ms", 1e6), ("s", 1e9)];
    units.iter().find_map(|(unit, ns)| Some(line.strip_suffix(unit)?.parse::<f64>().ok()? * ns))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_latencies() {
        let output = "  Latency Distribution\n     50%   35.00us\n     75%    1.20ms\n     99%    2.00s \n";
        let at = |name| quantile(output, name);
        assert_eq!([at("50%"), at("75%"), at("99%"), at("90%")], [Some(35e3), Some(1.2e6), Some(2e9), None]);
    }

    #[test]
    fn a_proxy_has_an_origin() {
        let text = Site { origin: Some(81), ..Site::new(64) }.configuration("/d", 80);
        assert!(text.contains("server 127.0.0.1:81;") && text.contains("proxy_pass") && !text.contains("root /d"));
        let text = Site { requests: 6, ..Site::new(64) }.configuration("/d", 80);
        assert!(text.contains("keepalive_requests 6;") && text.contains("root /d/html;"));
    }
}
