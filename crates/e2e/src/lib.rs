//! Shared parts of the end-to-end tests: server configurations, hashes, and parsers for the output
//! of ab, wrk and redis-benchmark.

pub mod busy;
pub mod containers;
pub mod cpus;
pub mod native;
pub mod zones;

use fsocket_testkit::{net, stock_mode, Delta, Host, Proc, Side};
use std::path::{Path, PathBuf};

/// Pseudo-random bytes without repetition; the same on every run.
pub fn noise(seed: u64, len: usize) -> Vec<u8> {
    let mut state = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
    let mut bytes = Vec::with_capacity(len + 8);
    while bytes.len() < len {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        bytes.extend_from_slice(&state.to_le_bytes());
    }
    bytes.truncate(len);
    bytes
}

/// A directory with files of many sizes to serve; the names are the sizes.
pub fn document_root(host: &Host) -> PathBuf {
    for size in [0usize, 1, 64, 1000, 4096, 65536, 1_000_000, 20_000_000] {
        host.file(&format!("www/{size}"), noise(size as u64, size));
    }
    host.path().join("www")
}

/// Starts nginx with two workers. The configuration is that of the package, except for paths and
/// ports. Returns the master process and its port.
#[track_caller]
pub fn nginx(host: &Host, side: Side) -> (Proc, u16) {
    let port = net::free_port();
    let root = document_root(host);
    let dir = host.path().display();
    host.file("nginx/placeholder", "");
    let config = format!(
        "daemon off;\nworker_processes 2;\npid {dir}/nginx/pid;\nerror_log {dir}/nginx/error.log info;\n\
         worker_rlimit_nofile 4096;\nevents {{ worker_connections 1024; }}\n\
         http {{\n  access_log off;\n  sendfile on;\n  tcp_nopush on;\n  keepalive_requests 1000000;\n\
         client_body_temp_path {dir}/nginx/body;\n  proxy_temp_path {dir}/nginx/proxy;\n\
         fastcgi_temp_path {dir}/nginx/fastcgi;\n  uwsgi_temp_path {dir}/nginx/uwsgi;\n  scgi_temp_path {dir}/nginx/scgi;\n\
         server {{ listen 127.0.0.1:{port}; root {}; }}\n}}\n",
        root.display()
    );
    let config = host.file("nginx/nginx.conf", config);
    let args = ["-p", &host.path().join("nginx").display().to_string(), "-c", &config.display().to_string()];
    let program = fsocket_testkit::find_program("nginx").expect("nginx");
    (host.server(side, "nginx", port, program, &args), port)
}

/// Runs `nginx -s reload` without the library, as from an administrator's shell.
#[track_caller]
pub fn nginx_reload(host: &Host) {
    let dir = host.path().join("nginx").display().to_string();
    let config = host.path().join("nginx/nginx.conf").display().to_string();
    let program = fsocket_testkit::find_program("nginx").expect("nginx");
    host.run(Side::Stock, "nginx-reload", 60, program, &["-p", &dir, "-c", &config, "-s", "reload"]).success();
}

/// Fetches `url` with curl and compares the bytes with `expected`.
#[track_caller]
pub fn curl_compare(host: &Host, side: Side, url: &str, expected: &Path, extra: &[&str]) {
    let target = host.path().join("curl.download");
    let target_text = target.display().to_string();
    let mut args = vec!["-sS", "--fail", "--max-time", "30", "-o", &target_text, url];
    args.extend_from_slice(extra);
    host.run(side, "curl", 60, "/usr/bin/curl", &args).success();
    let (got, want) = (std::fs::read(&target).expect("download"), std::fs::read(expected).expect("original"));
    assert!(got == want, "{url}: {} bytes instead of {}, or other bytes", got.len(), want.len());
}

/// The number after `label` in the output of ab.
#[track_caller]
pub fn ab_number(output: &str, label: &str) -> u64 {
    let line = output.lines().find(|line| line.starts_with(label));
    let line = line.unwrap_or_else(|| panic!("ab did not print {label:?}:\n{output}"));
    let number = line[label.len()..].split_whitespace().next().and_then(|word| word.parse().ok());
    number.unwrap_or_else(|| panic!("no number in {line:?}"))
}

/// Asserts that all requests of ab succeeded.
#[track_caller]
pub fn ab_clean(output: &str) {
    let ignorable = "Failed requests:";
    assert!(ab_number(output, ignorable) == 0, "failed requests\n{output}");
    assert!(!output.contains("Non-2xx responses"), "other status\n{output}");
    assert!(!output.contains("Write errors:") || ab_number(output, "Write errors:") == 0, "write errors\n{output}");
}

/// Asserts that wrk finished without errors.
#[track_caller]
pub fn wrk_clean(output: &str) {
    assert!(output.contains("requests in"), "wrk did not finish\n{output}");
    assert!(!output.contains("Socket errors"), "socket errors\n{output}");
    assert!(!output.contains("Non-2xx"), "other status\n{output}");
}

/// redis-server without persistence, in the test's directory.
#[track_caller]
pub fn redis(host: &Host, side: Side) -> (Proc, u16) {
    let port = net::free_port();
    let dir = host.path().join("redis");
    std::fs::create_dir_all(&dir).expect("redis directory");
    let program = fsocket_testkit::find_program("redis-server").expect("redis-server");
    let args = [
        "--port",
        &port.to_string(),
        "--bind",
        "127.0.0.1",
        "--save",
        "",
        "--daemonize",
        "no",
        "--dir",
        &dir.display().to_string(),
        "--appendonly",
        "no",
        "--protected-mode",
        "no",
    ];
    (host.server(side, "redis", port, program, &args), port)
}

/// One of the echo servers of `tests/apps/echo_server.py`.
#[track_caller]
pub fn echo_server(host: &Host, side: Side, kind: &str, address: &str) -> (Proc, u16) {
    let port = net::free_port();
    let script = fsocket_testkit::helper("echo_server.py").display().to_string();
    let args = [script.as_str(), kind, &port.to_string(), address];
    (host.server(side, &format!("echo-{kind}"), port, fsocket_testkit::PYTHON, &args), port)
}

/// Runs a Python script (see [`fsocket_testkit::helper`]) that ends with "ok".
#[track_caller]
pub fn python(host: &Host, side: Side, limit: u64, script: &str, args: &[&str]) -> String {
    let path = fsocket_testkit::helper(script).display().to_string();
    let mut all = vec![path.as_str()];
    all.extend_from_slice(args);
    host.run(side, &script.replace('/', "-"), limit, fsocket_testkit::PYTHON, &all).success().says("ok").stdout
}

/// A Python script must print the same on both sides; see [`same_output`].
#[track_caller]
pub fn same_transcripts(host: &Host, limit: u64, script: &str, args: &[&str]) -> Option<Delta> {
    same_output(host, |side| python(host, side, limit, script, args))
}

/// `run` must print the same with the library as on stock sockets; otherwise the first difference
/// is shown. Returns the changes of the library's counters. `None` in stock mode, where there are
/// no paths to check.
#[track_caller]
pub fn same_output(host: &Host, run: impl Fn(Side) -> String) -> Option<Delta> {
    let stock = run(Side::Stock);
    let before = host.snapshot();
    let ours = run(Side::Accel);
    let mut about = "";
    for (a, b) in stock.lines().zip(ours.lines()) {
        if a.starts_with('#') {
            about = a;
        }
        assert!(a == b, "transcripts differ, {about}; stock:\n{a}\nours:\n{b}");
    }
    assert!(stock == ours, "one transcript is longer; stock:\n{stock}\nours:\n{ours}");
    if stock_mode() {
        eprintln!("PATH NOT ASSERTED: stock mode");
        return None;
    }
    Some(host.snapshot().since(&before))
}

/// Makes requests with ab: 2,000 with a new connection each, and 5,000 over ten connections that
/// are kept.
#[track_caller]
pub fn ab_anew_and_kept(host: &Host, side: Side, ab: &Path, url: &str, size: u64) {
    let done = host.run(side, "ab", 60, ab, &["-q", "-n", "2000", "-c", "10", url]).success();
    ab_clean(&done.stdout);
    let done = host.run(side, "ab", 60, ab, &["-q", "-k", "-n", "5000", "-c", "10", url]).success();
    ab_clean(&done.stdout);
    assert_eq!(ab_number(&done.stdout, "HTML transferred:"), 5000 * size);
}
