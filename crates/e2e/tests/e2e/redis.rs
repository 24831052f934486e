//! redis: its own benchmark, a pipeline of mixed commands, BGSAVE's fork.

use fsocket_e2e as e2e;
use fsocket_testkit::host::{Accel, Stock};
use fsocket_testkit::{need, Host};

const TESTS: &str = "ping_inline,ping_mbulk,set,get,incr,lpush,rpop,hset,mset,lrange_100";

/// Runs redis's benchmark: so many `requests` for each of `tests`, over so many connections.
#[track_caller]
fn benchmark(tests: &str, requests: &str, connections: &str, more: &[&str]) {
    need!("redis-server");
    let bench = need!("redis-benchmark");
    let host = Host::new();
    let (_redis, port) = e2e::redis(&host, Accel);
    let before = host.snapshot();
    let port = port.to_string();
    let mut args = vec!["-h", "127.0.0.1", "-p", &port, "-t", tests, "-n", requests, "-c", connections, "--csv"];
    args.extend_from_slice(more);
    let done = host.run(Accel, "redis-benchmark", 120, bench, &args).success();
    let rows = done.stdout.lines().filter(|line| line.starts_with('"')).count();
    assert!(rows > tests.split(',').count(), "a row per test, and the heading:\n{}", done.stdout);
    assert!(!done.stderr.to_lowercase().contains("error"), "{}", done.stderr);
    host.snapshot().since(&before).assert_shm(connections.parse().expect("number"));
}

#[test]
fn benchmark_50_connections() {
    benchmark(TESTS, "5000", "50", &[]);
}

#[test]
fn benchmark_1_connection() {
    benchmark(TESTS, "3000", "1", &[]);
}

#[test]
fn benchmark_pipelined() {
    benchmark(TESTS, "20000", "20", &["-P", "16"]);
}

#[test]
fn benchmark_large_values_from_two_threads() {
    benchmark("set,get", "2000", "10", &["-d", "200000", "--threads", "2"]);
}

#[test]
fn mixed_pipeline_answers_as_on_stock_sockets() {
    need!("redis-server");
    let host = Host::new();
    let (_redis, port) = e2e::redis(&host, Accel);
    let before = host.snapshot();
    let ours = e2e::python(&host, Accel, 60, "redis_mixed.py", &[&port.to_string()]);
    host.snapshot().since(&before).assert_shm(1);
    let (_stock, port) = e2e::redis(&host, Stock);
    let stock = e2e::python(&host, Stock, 60, "redis_mixed.py", &[&port.to_string()]);
    assert_eq!(ours, stock, "answers differ");
}

#[test]
fn bgsave_forks_while_clients_are_connected() {
    need!("redis-server");
    let host = Host::new();
    let (redis, port) = e2e::redis(&host, Accel);
    let before = host.snapshot();
    let descriptors = redis.descriptors();
    for _ in 0..2 {
        let output = e2e::python(&host, Accel, 60, "redis_mixed.py", &[&port.to_string(), "bgsave"]);
        assert!(output.contains("saved"));
    }
    assert!(host.path().join("redis/dump.rdb").is_file(), "no dump was written");
    host.snapshot().since(&before).assert_shm(2);
    let after = redis.descriptors();
    assert!(after <= descriptors + 32, "descriptors grew from {descriptors} to {after}");
}

#[test]
fn redis_cli_one_shot_and_mixed_pairs() {
    need!("redis-server");
    let cli = need!("redis-cli");
    for (server, client, shm) in [(Accel, Accel, true), (Accel, Stock, false), (Stock, Accel, false)] {
        let host = Host::new();
        let (_redis, port) = e2e::redis(&host, server);
        let before = host.snapshot();
        let port = port.to_string();
        host.run(client, "redis-cli", 60, &cli, &["-p", &port, "SET", "key", "value"]).success().says("OK");
        host.run(client, "redis-cli", 60, &cli, &["-p", &port, "GET", "key"]).success().says("value");
        let delta = host.snapshot().since(&before);
        if shm {
            delta.assert_shm(2);
        } else {
            delta.assert_kernel_only();
        }
    }
}
