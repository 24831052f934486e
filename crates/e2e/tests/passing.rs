//! Listeners that go to another process in a message (SCM_RIGHTS).

use fsocket_e2e as e2e;
use fsocket_testkit::host::{Accel, Stock};
use fsocket_testkit::{need, net, script, stock_mode, Host, Proc, Side, PYTHON};
use std::time::Duration;

const LIMIT: Duration = Duration::from_secs(30);

/// The process that listens, the one that takes the listener, and the port.
fn hand_over(host: &Host, serves: &str, end: &str, to: Side, n: &str, late: bool) -> (Proc, Proc, u16) {
    let script = script("apps/passing.py").display().to_string();
    let path = host.path().join("meeting").display().to_string();
    let port = net::free_port();
    let mut giver = host.start(Accel, "giver", PYTHON, &[&script, "give", &port.to_string(), &path, serves, end]);
    giver.wait_stdout("listens", LIMIT);
    if serves == "serves" {
        ask(host, port, 1);
    }
    let take = [script.as_str(), "take", &path, n, "late"];
    let mut taker = host.start(to, "taker", PYTHON, &take[..if late { 5 } else { 4 }]);
    taker.wait_stdout("taken", LIMIT);
    (giver, taker, port)
}

fn ask(host: &Host, port: u16, n: u32) {
    let said = e2e::python(host, Accel, 30, "passing.py", &["ask", &port.to_string(), &n.to_string()]);
    assert!(said.ends_with(&format!("ok {n}\n")), "{said}");
}

#[test]
fn a_process_that_takes_a_listener_serves_it_over_shared_memory() {
    for serves in ["watches", "serves"] {
        let host = Host::new();
        let (giver, taker, port) = hand_over(&host, serves, "close", Accel, "21", false);
        // By then it accepts.
        ask(&host, port, 1);
        let before = host.snapshot();
        ask(&host, port, 20);
        host.snapshot().since(&before).assert_shm(20);
        taker.finish(LIMIT).success();
        giver.finish(LIMIT).success();
    }
}

#[test]
fn a_process_without_the_library_takes_a_listener() {
    let host = Host::new();
    let (giver, taker, port) = hand_over(&host, "watches", "close", Stock, "5", false);
    let before = host.snapshot();
    ask(&host, port, 5);
    if !stock_mode() {
        assert_eq!(host.snapshot().since(&before).get("connect_shm"), 0);
    }
    taker.finish(LIMIT).success();
    giver.finish(LIMIT).success();
}

/// A connection that the giver had not accepted is the taker's.
#[test]
fn what_waits_is_accepted_by_the_taker() {
    for (end, to) in [("close", Stock), ("exit", Stock), ("close", Accel), ("exit", Accel)] {
        let host = Host::new();
        let (giver, taker, port) = hand_over(&host, "serves", end, to, "2", true);
        let before = host.snapshot();
        let script = script("apps/passing.py").display().to_string();
        let mut client = host.start(Accel, "client", PYTHON, &[&script, "ask", &port.to_string(), "1"]);
        client.wait_stdout("sent", LIMIT);
        host.file("meeting.go", "");
        client.finish(LIMIT).success().says("ok 1");
        let delta = host.snapshot().since(&before);
        if !stock_mode() {
            assert_eq!(delta.get("connect_shm"), 1, "{end}: {delta}");
            // (A taker with the library may come first.)
            let (switched, taken) = (delta.get("path_switch") > 0, delta.get("accept_shm") == 1);
            assert!(switched || to == Accel && taken, "{end}: {delta}");
        }
        ask(&host, port, 1);
        taker.finish(LIMIT).success();
        giver.finish(LIMIT).success();
    }
}

/// haproxy's seamless reload: the next process takes the listeners of the one before.
#[test]
fn haproxy_reloaded_goes_on_over_shared_memory() {
    let haproxy = need!("haproxy");
    let ab = need!("ab");
    let host = Host::new();
    let port = net::free_port();
    let config = format!(
        "global\n  maxconn 500\n  nbthread 2\n  stats socket {}/stats expose-fd listeners\ndefaults\n  mode http\n  timeout \
         connect 5s\n  timeout client 20s\n  timeout server 20s\nfrontend f\n  bind 127.0.0.1:{port}\n  http-request return \
         status 200 content-type text/plain string hello\n",
        host.path().display()
    );
    let config = host.file("haproxy.cfg", config).display().to_string();
    let server = host.server(Accel, "haproxy", port, &haproxy, &["-W", "-f", &config]);
    let url = format!("http://127.0.0.1:{port}/");
    for _ in 0..2 {
        let load = host.start(Accel, "ab", &ab, &["-q", "-t", "2", "-n", "1000000", "-c", "8", &url]);
        std::thread::sleep(Duration::from_millis(500));
        server.signal(libc::SIGUSR2);
        e2e::ab_clean(&load.finish(LIMIT).success().stdout);
    }
    let before = host.snapshot();
    let done = host.run(Accel, "ab", 30, &ab, &["-q", "-n", "1000", "-c", "8", &url]).success();
    e2e::ab_clean(&done.stdout);
    host.snapshot().since(&before).assert_shm(1000);
}
