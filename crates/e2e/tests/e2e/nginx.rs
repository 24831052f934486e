//! nginx (2 workers), alone and behind haproxy.

use fsocket_e2e as e2e;
use fsocket_testkit::host::{Accel, Stock};
use fsocket_testkit::workers::children;
use fsocket_testkit::{find_program, need, net, Host};
use std::time::Duration;

fn www(host: &Host, name: &str) -> std::path::PathBuf {
    host.path().join("www").join(name)
}

#[test]
fn curl_gets_every_size_unchanged() {
    need!("nginx");
    need!("curl");
    let host = Host::new();
    let (_nginx, port) = e2e::nginx(&host, Accel);
    let before = host.snapshot();
    for size in ["0", "1", "64", "1000", "4096", "65536", "1000000"] {
        e2e::curl_compare(&host, Accel, &format!("http://127.0.0.1:{port}/{size}"), &www(&host, size), &[]);
    }
    host.snapshot().since(&before).assert_shm(7);
}

#[test]
fn curl_gets_20_megabytes_unchanged() {
    need!("nginx");
    need!("curl");
    let host = Host::new();
    let (_nginx, port) = e2e::nginx(&host, Accel);
    let before = host.snapshot();
    for _ in 0..3 {
        e2e::curl_compare(&host, Accel, &format!("http://127.0.0.1:{port}/20000000"), &www(&host, "20000000"), &[]);
    }
    let delta = host.snapshot().since(&before);
    delta.assert_shm(3);
}

#[test]
fn ab_one_connection_per_request() {
    need!("nginx");
    let ab = need!("ab");
    let host = Host::new();
    let (_nginx, port) = e2e::nginx(&host, Accel);
    let before = host.snapshot();
    let url = format!("http://127.0.0.1:{port}/64");
    let done = host.run(Accel, "ab", 60, ab, &["-q", "-n", "5000", "-c", "20", &url]).success();
    e2e::ab_clean(&done.stdout);
    assert_eq!(e2e::ab_number(&done.stdout, "Complete requests:"), 5000);
    assert_eq!(e2e::ab_number(&done.stdout, "HTML transferred:"), 5000 * 64);
    host.snapshot().since(&before).assert_shm(5000);
}

#[test]
fn ab_keep_alive() {
    need!("nginx");
    let ab = need!("ab");
    let host = Host::new();
    let (_nginx, port) = e2e::nginx(&host, Accel);
    let before = host.snapshot();
    let url = format!("http://127.0.0.1:{port}/1000");
    let done = host.run(Accel, "ab", 60, ab, &["-q", "-k", "-n", "20000", "-c", "20", &url]).success();
    e2e::ab_clean(&done.stdout);
    assert_eq!(e2e::ab_number(&done.stdout, "Complete requests:"), 20000);
    assert_eq!(e2e::ab_number(&done.stdout, "HTML transferred:"), 20000 * 1000);
    host.snapshot().since(&before).assert_shm(20);
}

#[test]
fn wrk_threads() {
    need!("nginx");
    let wrk = need!("wrk");
    let host = Host::new();
    let (_nginx, port) = e2e::nginx(&host, Accel);
    let before = host.snapshot();
    let url = format!("http://127.0.0.1:{port}/4096");
    let done = host.run(Accel, "wrk", 60, wrk, &["-t", "2", "-c", "40", "-d", "2", "--timeout", "30s", &url]).success();
    e2e::wrk_clean(&done.stdout);
    host.snapshot().since(&before).assert_shm(40);
}

#[test]
fn reload_under_load_fails_no_request() {
    need!("nginx");
    let ab = need!("ab");
    let host = Host::new();
    let (nginx, port) = e2e::nginx(&host, Accel);
    let first_workers = children(nginx.pid());
    assert_eq!(first_workers.len(), 2, "two workers");
    let before = host.snapshot();
    let url = format!("http://127.0.0.1:{port}/64");
    let mut load = host.start(Accel, "ab", ab, &["-q", "-t", "5", "-n", "1000000", "-c", "16", &url]);
    for _ in 0..3 {
        std::thread::sleep(Duration::from_millis(800));
        assert!(load.running(), "ab ended before the reload: {}", load.stderr());
        e2e::nginx_reload(&host);
    }
    let done = load.finish(Duration::from_secs(60)).success();
    e2e::ab_clean(&done.stdout);
    host.snapshot().since(&before).assert_shm(1000);
    net::wait_until(Duration::from_secs(60), || {
        let now = children(nginx.pid());
        now.len() == 2 && now.iter().all(|pid| !first_workers.contains(pid))
    })
    .expect("the first workers are gone, two new ones are there");
    // The new workers serve, too.
    e2e::curl_compare(&host, Accel, &format!("http://127.0.0.1:{port}/65536"), &www(&host, "65536"), &[]);
}

#[test]
fn haproxy_in_front_of_nginx() {
    need!("nginx");
    let haproxy = need!("haproxy");
    let ab = need!("ab");
    let host = Host::new();
    let (_nginx, backend) = e2e::nginx(&host, Accel);
    let port = net::free_port();
    let config = host.file(
        "haproxy.cfg",
        format!(
            "global\n  maxconn 500\n  nbthread 2\ndefaults\n  mode http\n  timeout connect 5s\n  timeout client 20s\n  \
             timeout server 20s\nfrontend f\n  bind 127.0.0.1:{port}\n  default_backend b\nbackend b\n  \
             server s1 127.0.0.1:{backend}\n"
        ),
    );
    let _haproxy = host.server(Accel, "haproxy", port, haproxy, &["-db", "-f", &config.display().to_string()]);
    let (before, began) = (host.snapshot(), std::time::Instant::now());
    for size in ["64", "65536", "1000000", "20000000"] {
        e2e::curl_compare(&host, Accel, &format!("http://127.0.0.1:{port}/{size}"), &www(&host, size), &[]);
    }
    let url = format!("http://127.0.0.1:{port}/1000");
    e2e::ab_anew_and_kept(&host, Accel, &ab, &url, 1000);
    // Both connections of a request count: client to haproxy, and haproxy to nginx. haproxy sets
    // no_new_privs, so each of its threads may make one connection in 2 s over the kernel.
    let most = 2 * (1 + began.elapsed().as_secs() as i128 / 5);
    host.snapshot().since(&before).assert_shm_but_first(2014 + 4, most);
}

#[test]
fn mixed_pairs_serve_the_same_bytes() {
    need!("nginx");
    need!("curl");
    for (server, client) in [(Accel, Stock), (Stock, Accel), (Stock, Stock)] {
        let host = Host::new();
        let (_nginx, port) = e2e::nginx(&host, server);
        let before = host.snapshot();
        let url = format!("http://127.0.0.1:{port}/1000000");
        e2e::curl_compare(&host, client, &url, &www(&host, "1000000"), &[]);
        let ab = find_program("ab").expect("ab");
        let url = format!("http://127.0.0.1:{port}/64");
        let done = host.run(client, "ab", 60, ab, &["-q", "-n", "1000", "-c", "10", &url]).success();
        e2e::ab_clean(&done.stdout);
        host.snapshot().since(&before).assert_kernel_only();
    }
}
