//! Benchmark of redis and nginx in one container with their clients in another, stock and ours in turns.
//!
//! The containers are network namespaces on two bridges of a host, which forwards between them. Each server runs
//! twice, stock and with the library. So do its clients, of which only one runs at a time. The third way has the
//! library, and both programs are in the server's container and use loopback addresses. Its result is the least
//! that connections through the bridges can cost.

use anyhow::{bail, ensure, Context, Result};
use clap::Parser;
use comfy_table::{presets, Table};
use fsocket_measure::median;
use fsocket_testkit::host::{Accel, Host, Side, Stock};
use fsocket_testkit::netns::{self, Containers};
use fsocket_testkit::{find_program, net, Delta, Proc};
use serde_json::json;
use std::net::IpAddr;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

/// redis and nginx between containers, stock and ours in turns.
///
/// Needs root, a release build (`make`), nft, redis, nginx, wrk. Exit status 1 if a bar was missed or
/// something could not be measured: keep-alive at least 3 times stock, a connection a request at least 0.95.
#[derive(Debug, Parser)]
#[command(name = "containers-bench", max_term_width = 100)]
struct Args {
    /// Turns of each row
    #[arg(long, default_value_t = 5)]
    rounds: usize,
    /// Seconds of each measurement
    #[arg(long, default_value_t = 2)]
    time: u64,
    /// Only rows whose name has this in it
    #[arg(long, default_value = "")]
    only: String,
    /// Write everything
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
}

/// The address through which a client reaches the server.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Way {
    Bridge,
    Published,
}

struct Row {
    name: &'static str,
    way: Way,
    port: fn(&Servers) -> Port,
    /// A connection has only one or a few requests. Selects the bar: 0.95 times stock, otherwise 3 times.
    once: bool,
    /// The client's command line for a host and a port.
    load: fn(&str, u16, &Args) -> Vec<String>,
    rate: fn(&str) -> Option<f64>,
}

/// The ports of one kind of server, each as `[stock, ours]`: in the container, and published on the host.
#[derive(Clone, Copy)]
struct Port {
    own: [u16; 2],
    published: [u16; 2],
}

struct Servers {
    redis: Port,
    nginx: Port,
    _running: Vec<Proc>,
}

fn words(text: String) -> Vec<String> {
    text.split(' ').map(str::to_owned).collect()
}

fn get(host: &str, port: u16, clients: u32, keep: u8, args: &Args) -> Vec<String> {
    // redis-benchmark takes a number of requests, not a time.
    let n = u64::from(if keep == 0 { 6_000 } else { 25_000 + clients * 1_000 }) * args.time;
    words(format!("redis-benchmark -h {host} -p {port} -t get -n {n} -c {clients} -k {keep} --csv"))
}

fn wrk(host: &str, port: u16, clients: u32, args: &Args) -> Vec<String> {
    words(format!("wrk -t 1 -c {clients} -d {}s http://{host}:{port}/small", args.time))
}

/// `requests`: the server ends a connection after this many requests; one of [`PACES`].
fn paced(host: &str, port: u16, requests: u32, args: &Args) -> Vec<String> {
    words(format!("wrk -t 1 -c 20 -d {}s http://{host}:{port}/{requests}/small", args.time))
}

fn close(mut command: Vec<String>) -> Vec<String> {
    command.splice(1..1, ["-H".to_owned(), "Connection: close".to_owned()]);
    command
}

fn redis_rate(said: &str) -> Option<f64> {
    said.lines().last()?.split("\",\"").nth(1)?.trim_matches('"').parse().ok()
}

fn wrk_rate(said: &str) -> Option<f64> {
    if said.contains("Socket errors") || said.contains("Non-2xx") {
        return None;
    }
    said.lines().find_map(|l| l.strip_prefix("Requests/sec:"))?.trim().parse().ok()
}

/// Numbers of requests after which the server ends a connection.
const PACES: [u32; 4] = [3, 10, 20, 40];

fn rows() -> Vec<Row> {
    let redis = |name, way, once, load| Row { name, way, port: |s| s.redis, once, load, rate: redis_rate };
    let nginx = |name, way, once, load| Row { name, way, port: |s| s.nginx, once, load, rate: wrk_rate };
    vec![
        redis("redis get, 1 connection", Way::Bridge, false, |h, p, a| get(h, p, 1, 1, a)),
        redis("redis get, 50 connections", Way::Bridge, false, |h, p, a| get(h, p, 50, 1, a)),
        redis("redis get, 50 connections, published", Way::Published, false, |h, p, a| get(h, p, 50, 1, a)),
        redis("redis get, each its own connection", Way::Bridge, true, |h, p, a| get(h, p, 20, 0, a)),
        redis("redis get, each its own connection, published", Way::Published, true, |h, p, a| get(h, p, 20, 0, a)),
        nginx("nginx, 1 connection", Way::Bridge, false, |h, p, a| wrk(h, p, 1, a)),
        nginx("nginx, 50 connections", Way::Bridge, false, |h, p, a| wrk(h, p, 50, a)),
        nginx("nginx, 50 connections, published", Way::Published, false, |h, p, a| wrk(h, p, 50, a)),
        nginx("nginx, each its own connection", Way::Bridge, true, |h, p, a| close(wrk(h, p, 20, a))),
        nginx("nginx, 3 requests a connection", Way::Bridge, true, |h, p, a| paced(h, p, 3, a)),
        nginx("nginx, 10 requests a connection", Way::Bridge, true, |h, p, a| paced(h, p, 10, a)),
        nginx("nginx, 20 requests a connection", Way::Bridge, true, |h, p, a| paced(h, p, 20, a)),
        nginx("nginx, 40 requests a connection", Way::Bridge, true, |h, p, a| paced(h, p, 40, a)),
        nginx("nginx, each its own connection, published", Way::Published, true, |h, p, a| close(wrk(h, p, 20, a))),
    ]
}

struct Stage {
    servers: Servers,
    host: Host,
    net: Containers,
}

impl Stage {
    fn new() -> Result<Stage> {
        let net = Containers::new().map_err(anyhow::Error::msg)?;
        let host = Host::on(&net.host);
        let port =
            || Port { own: [net::free_port(), net::free_port()], published: [net::free_port(), net::free_port()] };
        let (redis, nginx) = (port(), port());
        let mut running = Vec::new();
        for (i, side) in [Stock, Accel].into_iter().enumerate() {
            running.push(start_redis(&host, &net, side, redis.own[i])?);
            running.push(start_nginx(&host, &net, side, nginx.own[i])?);
        }
        let server = net.server.interfaces[0].v4;
        let map: Vec<String> = [redis, nginx]
            .iter()
            .flat_map(|p| p.published.iter().zip(p.own))
            .map(|(published, own)| format!("tcp dport {published} dnat to {server}:{own};"))
            .collect();
        // These are Docker's rules: published ports lead to containers, and traffic from another bridge is
        // masqueraded as the host's.
        net.nft(&format!(
            "table ip containers {{ chain in {{ type nat hook prerouting priority -100; {} }}; chain out {{ type nat hook \
             postrouting priority 100; ip saddr 10.88.1.0/24 oifname br2 masquerade; }}; }}",
            map.join(" ")
        ))
        .map_err(anyhow::Error::msg)?;
        for port in redis.own.iter().chain(&nginx.own) {
            let listens = || net.server.within(|| net::kernel_sockets(*port, "0A")) > 0;
            net::wait_until(Duration::from_secs(10), listens).ok().context("a server does not listen")?;
        }
        let known = || redis.own[1..].iter().chain(&nginx.own[1..]).all(|port| host.knows(*port));
        net::wait_until(Duration::from_secs(10), known).ok().context("the monitor does not know a server")?;
        let stage = Stage { servers: Servers { redis, nginx, _running: running }, host, net };
        stage.settle()?;
        Ok(stage)
    }

    /// Waits until connections use shared memory. The first process of a container makes the monitor load its BPF
    /// program, and connections before that use the kernel.
    fn settle(&self) -> Result<()> {
        let small = Args { rounds: 1, time: 1, only: String::new(), json: None };
        for _ in 0..20 {
            if rows().iter().take(1).any(|r| self.measure(r, Accel, false, &small).is_ok_and(|(_, d)| stayed(&d) <= 1))
            {
                return Ok(());
            }
        }
        bail!("no connection goes over to shared memory")
    }

    /// One measurement: requests per second, and the change of the counters. `near`: the client runs in the
    /// server's container.
    fn measure(&self, row: &Row, side: Side, near: bool, args: &Args) -> Result<(f64, Delta)> {
        let port = (row.port)(&self.servers);
        let i = usize::from(side == Accel);
        let (to, port): (IpAddr, u16) = match row.way {
            _ if near => ([127, 0, 0, 1].into(), port.own[i]),
            Way::Bridge => (self.net.server4(), port.own[i]),
            Way::Published => (self.net.gateway(), port.published[i]),
        };
        let load = (row.load)(&to.to_string(), port, args);
        let before = self.host.snapshot();
        let mut command = self.host.command(side, find_program(&load[0]).context("redis or wrk is not installed")?);
        command.args(&load[1..]);
        if near { &self.net.server } else { &self.net.client }.place(&mut command);
        let done = Proc::spawn(self.host.logs(), &load[0], command).finish(Duration::from_secs(120)).success();
        let rate = (row.rate)(&done.stdout).with_context(|| format!("{}: {}", load.join(" "), done.stdout))?;
        Ok((rate, self.host.snapshot().since(&before)))
    }
}

fn start_redis(host: &Host, net: &Containers, side: Side, port: u16) -> Result<Proc> {
    let mut command = host.command(side, find_program("redis-server").context("redis-server is not installed")?);
    command.args(["--port", &port.to_string(), "--bind", "0.0.0.0", "--save", "", "--appendonly", "no"]);
    command.args(["--protected-mode", "no"]);
    net.server.place(&mut command);
    Ok(Proc::spawn(host.logs(), "redis", command))
}

fn start_nginx(host: &Host, net: &Containers, side: Side, port: u16) -> Result<Proc> {
    let name = format!("nginx-{port}");
    host.file("www/small", "x".repeat(612));
    let root = host.path().join("www").display().to_string();
    let paces = PACES.map(|n| format!("location /{n}/ {{ keepalive_requests {n}; alias {root}/; }}")).join(" ");
    let dir = host.path().join(&name).display().to_string();
    let config = format!(
        "daemon off;\nuser root;\nworker_processes 2;\npid {dir}/pid;\nerror_log {dir}/error.log;\nevents {{ }}\nhttp {{\n\
         access_log off; sendfile on; tcp_nopush on; keepalive_requests 100000000;\nclient_body_temp_path {dir}/body; \
         proxy_temp_path {dir}/proxy; fastcgi_temp_path {dir}/fastcgi; uwsgi_temp_path {dir}/uwsgi; scgi_temp_path {dir}/scgi;\n\
         server {{ listen {port} backlog=4096; root {root}; {paces} }}\n}}\n"
    );
    let config = host.file(&format!("{name}/nginx.conf"), config);
    let mut command = host.command(side, find_program("nginx").context("nginx is not installed")?);
    command.args(["-p", &dir, "-c"]).arg(config);
    net.server.place(&mut command);
    Ok(Proc::spawn(host.logs(), "nginx", command))
}

/// Number of connections that stayed in the kernel. (redis-benchmark and wrk open a test connection before the
/// others.)
fn stayed(delta: &Delta) -> i128 {
    // `path_upgrade` counts both ends of a connection that moves to shared memory.
    delta.get("connect_kernel") - delta.get("path_upgrade") / 2
}

struct Measured {
    stock: f64,
    ours: f64,
    near: f64,
    ratio: f64,
    stayed: i128,
}

fn row(stage: &Stage, row: &Row, args: &Args) -> Result<Measured> {
    let (mut stock, mut ours, mut near, mut ratios) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
    let mut most = 0;
    for _ in 0..args.rounds {
        let (a, _) = stage.measure(row, Stock, false, args)?;
        let (b, delta) = stage.measure(row, Accel, false, args)?;
        let (c, _) = stage.measure(row, Accel, true, args)?;
        most = most.max(stayed(&delta));
        ratios.push(b / a);
        stock.push(a);
        ours.push(b);
        near.push(c);
    }
    let [stock, ours, near, ratio] = [stock, ours, near, ratios].map(|v| median(&v).unwrap_or(f64::NAN));
    Ok(Measured { stock, ours, near, ratio, stayed: most })
}

fn measure_all(args: &Args) -> Result<bool> {
    if let Some(why) = netns::unavailable() {
        bail!(why);
    }
    let stage = Stage::new()?;
    let mut table = Table::new();
    table.load_preset(presets::UTF8_FULL_CONDENSED);
    table.set_header(["requests/s", "stock", "ours", "ratio", "ours, one namespace", "stayed in the kernel"]);
    let (mut all, mut met) = (Vec::new(), true);
    let chosen: Vec<Row> = rows().into_iter().filter(|r| r.name.contains(&args.only)).collect();
    ensure!(!chosen.is_empty(), "no row has {:?} in its name", args.only);
    for r in &chosen {
        let m = row(&stage, r, args).with_context(|| r.name)?;
        let bar = if r.once { 0.95 } else { 3.0 };
        met &= m.ratio >= bar && (r.once || m.stayed <= 1);
        let cells = [m.stock, m.ours].map(|v| format!("{v:.0}"));
        let [stock, ours] = cells;
        let (ratio, near) = (format!("{:.2} (bar {bar})", m.ratio), format!("{:.0}", m.near));
        eprintln!("{}: {stock} {ours} {ratio}", r.name);
        table.add_row([r.name.to_owned(), stock, ours, ratio, near, m.stayed.to_string()]);
        all.push(json!({
            "name": r.name, "stock": m.stock, "ours": m.ours, "ratio": m.ratio, "bar": bar,
            "ours_one_namespace": m.near, "stayed_in_the_kernel": m.stayed as i64,
        }));
    }
    println!("{table}");
    if let Some(file) = &args.json {
        let text = serde_json::to_string_pretty(&json!({ "rows": all }))?;
        std::fs::write(file, text).with_context(|| file.display().to_string())?;
    }
    Ok(met)
}

fn main() -> ExitCode {
    match measure_all(&Args::parse()) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => {
            eprintln!("containers-bench: a bar was missed");
            ExitCode::FAILURE
        }
        Err(e) => {
            eprintln!("containers-bench: {e:#}");
            ExitCode::FAILURE
        }
    }
}
