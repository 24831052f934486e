//! Many CPUs, with as many receive queues and workers: each connection's packets must arrive where
//! its worker is. Run by `make test-manycore` in an emulated machine, because one or two CPUs
//! would show little.

use fsocket_testkit::load::{Load, Plan};
use fsocket_testkit::netns::{Chain, Receive};
use fsocket_testkit::servers::{self, Way};
use fsocket_testkit::workers::children;
use fsocket_testkit::{artifacts, net, process, Finished, Host, Proc, Side};
use serde_json::Value;
use std::net::SocketAddr;
use std::time::Duration;

/// Connections are spread over CPUs by a hash. With 24 connections per CPU, some CPU gets none in
/// one of 10^9 runs.
const EACH: u64 = 24;

/// Runs the demo server with `cpus` pinned workers, and connections that arrive on all CPUs alike.
/// Returns the server's counts.
fn serve(way: Way, cpus: usize) -> Value {
    let chain = Chain::new(cpus, &Receive::Threads((0..cpus).collect())).expect("hosts");
    serve_on(&chain, &Host::on(&chain.middle), way, cpus, &[])
}

/// The same, with further arguments.
fn serve_on(chain: &Chain, host: &Host, way: Way, cpus: usize, more: &[&str]) -> Value {
    let address: SocketAddr = (chain.middle_front(), 80).into();
    let server = servers::demo(host, way, &[address], cpus, &[&["--locality", "--json", "--quiet"], more].concat());
    if way.is_ours() {
        servers::wait_zones(host, cpus as u64);
    }
    // Few connections at a time, because emulated CPUs are slow and a flood would only fill
    // queues.
    let plan = Plan::get(address, "/", &[b'x'; 64], 4);
    let requests = EACH * cpus as u64 / plan.concurrency as u64;
    let outcome = Load::start(&plan, Some(&chain.client), Some(requests)).finish();
    assert_eq!(outcome.failures(), 0, "{outcome:?}");
    server.signal(libc::SIGTERM);
    let said = server.finish(Duration::from_secs(60)).success().stdout;
    let last = said.lines().last().expect("totals");
    let counted: Value = serde_json::from_str(last).unwrap_or_else(|e| panic!("{e}: {said}"));
    assert_eq!(number(&counted["total"], "requests"), outcome.answered, "{last}");
    counted
}

fn number(values: &Value, name: &str) -> u64 {
    values[name].as_u64().unwrap_or_else(|| panic!("no {name} in {values}"))
}

fn many_cpus() -> usize {
    let cpus = std::thread::available_parallelism().expect("CPUs").get();
    assert!(cpus >= 4, "{cpus} CPUs are not many: run this with `make test-manycore`");
    // Use all CPUs, even if the caller was pinned to one.
    process::set_affinity(0, &(0..cpus).collect::<Vec<_>>()).expect("affinity");
    cpus
}

/// Every CPU receives and every worker serves. But the kernel's hash ignores the receiving CPU, so
/// most connections are not local. This shows what zones can improve.
#[test]
#[ignore = "needs many CPUs: make test-manycore"]
fn stock_reuseport_spreads_connections_but_not_by_cpu() {
    let cpus = many_cpus();
    let counted = serve(Way::Reuseport, cpus);
    let workers = counted["workers"].as_array().expect("workers");
    assert_eq!(workers.len(), cpus);
    for (cpu, worker) in workers.iter().enumerate() {
        assert!(number(worker, "accepted") > 0, "worker {cpu} of {cpus} accepted nothing: {counted}");
    }
    let (local, all) = (number(&counted["total"], "passive_local"), number(&counted["total"], "passive"));
    println!("{cpus} CPUs, stock SO_REUSEPORT: {local} of {all} connections local");
    // By chance, one in `cpus` connections is local. A half would not be chance.
    assert!(local > 0 && local < all / 2, "{local} of {all} connections are local: {counted}");
}

/// Every connection is accepted by the worker on the CPU that receives it.
#[test]
#[ignore = "needs many CPUs: make test-manycore"]
fn zones_accept_every_connection_where_it_is_received() {
    let cpus = many_cpus();
    let counted = serve(Way::Ours, cpus);
    for (cpu, worker) in counted["workers"].as_array().expect("workers").iter().enumerate() {
        assert!(number(worker, "accepted") > 0, "worker {cpu} of {cpus} accepted nothing: {counted}");
    }
    let (local, all) = (number(&counted["total"], "passive_local"), number(&counted["total"], "passive"));
    println!("{cpus} CPUs, zones: {local} of {all} connections local");
    assert_eq!(local, all, "{counted}");
}

/// `fastsocket steer` in the middle host.
fn steer(host: &Host, args: &[&str]) -> Finished {
    let mut command = host.command(Side::Stock, artifacts::cli());
    command.arg("steer").args(args).env("FASTSOCKET_SOCKET", host.socket());
    Proc::spawn(host.logs(), "steer", command).finish(Duration::from_secs(60)).success()
}

/// The CPU that opened a connection to the backend host must handle its packets: by slices or,
/// before kernel 6.3, by the table. Connections that a worker accepts must be local, too.
#[test]
#[ignore = "needs many CPUs: make test-manycore"]
fn steering_brings_every_connection_to_the_cpu_that_opened_it() {
    let cpus = many_cpus();
    let chain = Chain::new(cpus, &Receive::Threads((0..cpus).collect())).expect("hosts");
    let host = Host::on(&chain.middle);
    let address = SocketAddr::from((chain.backend_address(), 80)).to_string();
    let mut command = host.command(Side::Stock, artifacts::demo());
    command.args(["--workers", "4", "--address", &address, "--quiet"]);
    chain.backend.place(&mut command);
    let _backend = Proc::spawn(host.logs(), "backend", command);
    let listens = || chain.backend.within(|| net::kernel_sockets(80, "0A")) > 0;
    net::wait_until(Duration::from_secs(60), listens).expect("the backend listens");
    let serve = |policy: &str| {
        let counted = serve_on(&chain, &host, Way::Ours, cpus, &["--proxy", &address]);
        for (cpu, worker) in counted["workers"].as_array().expect("workers").iter().enumerate() {
            assert!(number(worker, "active") > 0, "worker {cpu} of {cpus} opened nothing: {counted}");
        }
        let of = |name| number(&counted["total"], name);
        println!("{cpus} CPUs, {policy}: {} of {} opened connections local", of("active_local"), of("active"));
        assert_eq!(of("passive_local"), of("passive"), "accepted ones, {policy}: {counted}");
        (of("active_local"), of("active"))
    };
    // Without steering, most connections are not local: this shows what steering can improve.
    let (local, all) = serve("not steered");
    assert!(local < all / 2, "{local} of {all} opened connections are local");
    for policy in ["rfd", "connect-cpu"] {
        let said = steer(&host, &[&chain.middle.interfaces[1].device, "--policy", policy, "--json"]).stdout;
        let (local, all) = serve(policy);
        assert_eq!(local, all, "{policy}: {said}");
        let status: Value = serde_json::from_str(&steer(&host, &["--json"]).stdout).expect("JSON");
        let device = &status["devices"][0];
        println!("{cpus} CPUs, {policy} by {}; {}", device["by"], device["because"]);
        let count = |name: &str, cpu: usize| device["packets"][name][cpu].as_u64().expect(name);
        for cpu in 0..cpus {
            assert!(count("to_other", cpu) > 0, "what CPU {cpu} received was not steered: {status}");
            assert_eq!(count("no_cpu", cpu) + count("queue_full", cpu), 0, "{status}");
        }
    }
}

/// One worker is stopped. The others must serve the connections that arrive on its CPU.
#[test]
#[ignore = "needs many CPUs: make test-manycore"]
fn others_serve_what_comes_to_a_worker_that_stands_still() {
    let cpus = many_cpus();
    let chain = Chain::new(cpus, &Receive::Threads((0..cpus).collect())).expect("hosts");
    let host = Host::on(&chain.middle);
    let address: SocketAddr = (chain.middle_front(), 80).into();
    let server = servers::demo(&host, Way::Ours, &[address], cpus, &["--quiet"]);
    servers::wait_zones(&host, cpus as u64);
    let before = host.snapshot();
    let workers = children(server.pid());
    assert_eq!(workers.len(), cpus, "workers");
    // SAFETY: `kill` takes no pointers.
    assert_eq!(unsafe { libc::kill(workers[cpus / 2], libc::SIGSTOP) }, 0);
    let plan = Plan::get(address, "/", &[b'x'; 64], 4);
    let requests = EACH * cpus as u64 / plan.concurrency as u64;
    let outcome = Load::start(&plan, Some(&chain.client), Some(requests)).finish();
    // SAFETY: `kill` takes no pointers.
    unsafe { libc::kill(workers[cpus / 2], libc::SIGCONT) };
    assert_eq!(outcome.failures(), 0, "{outcome:?}");
    let delta = host.snapshot().since(&before);
    println!(
        "{cpus} CPUs, one worker of them stopped: {} answered, {} stolen",
        outcome.answered,
        delta.get("accept_stolen")
    );
    assert!(delta.get("accept_stolen") > 0, "nobody took what waited for it\n{delta}");
}
