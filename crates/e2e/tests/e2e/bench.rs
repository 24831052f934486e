//! Checks that `fastsocket bench shapes` and `bench paper` run, over shared memory and in the
//! kernel, and report what they measured. The numbers are not checked, because the machine may be
//! loaded.

use fsocket_testkit::host::Stock;
use fsocket_testkit::{artifacts, stock_mode, Finished, Host, Proc};
use std::time::Duration;

#[test]
fn shapes() {
    if stock_mode() {
        return eprintln!("SKIPPED: it measures stock and ours itself");
    }
    let host = Host::new();
    // Builds the benchmark if needed; `fastsocket` executes it.
    artifacts::bench();
    let json = host.file("shapes.json", "");
    let mut command = host.command(Stock, artifacts::cli());
    command
        .args(["bench", "shapes", "--reps", "1", "--secs", "0.1", "--paths", "stock,ours,kernel", "--json"])
        .arg(&json);
    command.args([
        "--only",
        "process/processes/1/0us/8,fork-epoll/threads/4/5us/64,loop/loop/4/0us/64,pool/processes/4/5us/1K",
    ]);
    command.arg("--library").arg(artifacts::library()).arg("--monitor").arg(artifacts::monitor());
    // The exit status is 1 if something was not measured, or took another path.
    let done = Proc::spawn(host.logs(), "shapes", command).finish(Duration::from_secs(60)).success();
    let page: serde_json::Value = serde_json::from_str(&std::fs::read_to_string(json).unwrap()).unwrap();
    let shapes = page["shapes"].as_array().unwrap();
    assert!(shapes.len() >= 4, "{}", done.stdout);
    // Each shape is also measured with the library at only one side: the server or the clients.
    // Servers that share a listener are also measured without zones.
    let kernel: usize = page["kernel"].as_array().unwrap().iter().map(|row| row[1].as_array().unwrap().len()).sum();
    assert!(kernel > 2 * shapes.len(), "{}", done.stdout);
    for way in shapes.iter().flat_map(|s| s["samples"].as_array().unwrap()) {
        assert!(way[1][0]["rate"].as_f64().unwrap() > 0.0 && way[1][0]["cpu_us"].as_f64().unwrap() > 0.0, "{way}");
    }
}

#[test]
fn paper() {
    if stock_mode() {
        return eprintln!("SKIPPED: it measures stock and ours itself");
    }
    let host = Host::new();
    // Builds the benchmark if needed; `fastsocket` executes it.
    artifacts::bench();
    let json = host.file("paper.json", "");
    let only = "socksdirect-4.1.1,socksdirect-6,socksdirect-fig-8";
    let run = || {
        let mut command = host.command(Stock, artifacts::cli());
        command.args(["bench", "paper", "--quick", "--reps", "1", "--only", only]);
        command.arg("--out").arg(json.parent().unwrap());
        command.arg("--library").arg(artifacts::library()).arg("--monitor").arg(artifacts::monitor());
        Proc::spawn(host.logs(), "paper", command).finish(Duration::from_secs(60))
    };
    // The exit status is 1 if a row failed or took another path. Try again if a busy monitor
    // answered too late for the single connection of a row.
    let late = |done: &Finished| done.stdout.contains("no connection over shared memory");
    let done = (0..4).map(|_| run()).find(|done| !late(done)).expect("a run over shared memory").success();
    let page: serde_json::Value = serde_json::from_str(&std::fs::read_to_string(&json).unwrap()).unwrap();
    let sections = page["sections"].as_array().unwrap();
    assert_eq!(sections.len(), 3, "{}", done.stdout);
    for row in sections.iter().flat_map(|s| s["rows"].as_array().unwrap()) {
        let median = |way: &str| row["medians"][way].as_f64().unwrap();
        assert!(median("stock") > 0.0 && median("ours") > 0.0 && median("control") > 0.0, "{row}");
    }
    // A figure that needs RDMA has no rows, but names the test of its function.
    let between_hosts = sections.iter().find(|s| s["name"] == "socksdirect-fig-8").unwrap();
    assert!(between_hosts["rows"].as_array().unwrap().is_empty());
    assert_eq!(between_hosts["listed"]["check"], "make test-rdma-hosts");
    let html = std::fs::read_to_string(json.with_extension("html")).unwrap();
    assert!(html.contains("id=socksdirect-fig-8") && html.contains("token take-over"));
}
