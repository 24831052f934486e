//! Python servers and clients in every style: threads, fork, select, poll,
//! epoll (level and edge), asyncio.

use fsocket_e2e as e2e;
use fsocket_testkit::host::{Accel, Side, Stock};
use fsocket_testkit::{stock_mode, Host};

#[track_caller]
fn clients(host: &Host, side: Side, port: u16, address: &str) {
    let port = port.to_string();
    for (kind, connections, bytes) in [("blocking", "6", "700000"), ("asyncio", "12", "500000"), ("seq", "60", "30000")]
    {
        let args = [kind, &port, "--host", address, "--connections", connections, "--bytes", bytes];
        e2e::python(host, side, 90, "echo_client.py", &args);
    }
}

#[track_caller]
fn echo(kind: &str) {
    let host = Host::new();
    let (_server, port) = e2e::echo_server(&host, Accel, kind, "127.0.0.1");
    let before = host.snapshot();
    clients(&host, Accel, port, "127.0.0.1");
    host.snapshot().since(&before).assert_shm(78);
}

#[test]
fn threaded_blocking_server() {
    echo("threaded");
}

#[test]
fn forking_server() {
    let host = Host::new();
    let (_server, port) = e2e::echo_server(&host, Accel, "fork", "127.0.0.1");
    let before = host.snapshot();
    clients(&host, Accel, port, "127.0.0.1");
    // The server learns that its connections are short-lived (ADR 76), so some use the kernel.
    host.snapshot().since(&before).assert_shm_but_short(78, 16);
}

#[test]
fn select_server() {
    echo("select");
}

#[test]
fn poll_server() {
    echo("poll");
}

#[test]
fn epoll_level_server() {
    echo("epoll");
}

#[test]
fn epoll_edge_server() {
    echo("epoll-edge");
}

#[test]
fn asyncio_server() {
    echo("asyncio");
}

#[test]
fn ipv6_loopback() {
    let host = Host::new();
    let (_server, port) = e2e::echo_server(&host, Accel, "asyncio", "::1");
    let before = host.snapshot();
    clients(&host, Accel, port, "::1");
    host.snapshot().since(&before).assert_shm(78);
}

#[test]
fn wildcard_listener() {
    let host = Host::new();
    let (_server, port) = e2e::echo_server(&host, Accel, "epoll", "0.0.0.0");
    let before = host.snapshot();
    clients(&host, Accel, port, "127.0.0.1");
    // Every address in 127/8 belongs to this host, too.
    e2e::python(&host, Accel, 60, "echo_client.py", &["seq", &port.to_string(), "--host", "127.7.8.9"]);
    host.snapshot().since(&before).assert_shm(86);
}

#[test]
fn mixed_pairs() {
    for (server, client) in [(Accel, Stock), (Stock, Accel), (Stock, Stock)] {
        let host = Host::new();
        let (_server, port) = e2e::echo_server(&host, server, "epoll", "127.0.0.1");
        let before = host.snapshot();
        clients(&host, client, port, "127.0.0.1");
        host.snapshot().since(&before).assert_kernel_only();
    }
}

/// The order of events must be the kernel's, in cases where that order does not depend on chance.
#[test]
fn epoll_reports_in_order() {
    let host = Host::new();
    let mut said = Vec::new();
    for side in [Stock, Accel] {
        let before = host.snapshot();
        let port = fsocket_testkit::net::free_port().to_string();
        said.push(e2e::python(&host, side, 60, "python/epoll_order.py", &[&port]));
        if side == Accel {
            host.snapshot().since(&before).assert_shm(5);
        }
    }
    assert_eq!(said[0], said[1]);
}

/// The instance polls a connection and finds it empty. The thread does not sleep, so it has not
/// asked the peer for a wake-up.
#[test]
fn epoll_reports_in_order_whatever_it_looked_at_before() {
    let host = Host::new();
    for seed in 1..=8 {
        let mut said = Vec::new();
        for side in [Stock, Accel] {
            let before = host.snapshot();
            let port = fsocket_testkit::net::free_port().to_string();
            let args = [&port, &*seed.to_string(), "200"];
            said.push(e2e::python(&host, side, 60, "python/epoll_order_random.py", &args));
            if side == Accel {
                host.snapshot().since(&before).assert_shm(6);
            }
        }
        let mut lines = said[0].lines().zip(said[1].lines());
        let first = lines.find(|(stock, ours)| stock != ours);
        assert!(first.is_none() && said[0].ends_with("ok\n"), "seed {seed}: {first:?}");
    }
}

/// Under the usual limit of descriptors: more channels than a process can have blocks of ports.
#[test]
fn a_client_with_many_upstreams() {
    let args = ["2", "300", "700", "2000"];
    let Some(delta) = e2e::same_transcripts(&Host::new(), 120, "upstreams.py", &args) else { return };
    let counted = (delta.get("connect_shm"), delta.get("accept_shm"));
    assert_eq!(counted, (700, 700), "{delta}");
}

/// The library keeps a descriptor of each channel for the next monitor, but not if the program
/// needs the descriptors.
#[test]
fn a_client_with_many_upstreams_and_few_descriptors() {
    let args = ["1", "200", "1400", "100", "1500"];
    let Some(delta) = e2e::same_transcripts(&Host::new(), 120, "upstreams.py", &args) else { return };
    let counted = (delta.get("connect_shm"), delta.get("accept_shm"));
    assert_eq!(counted, (1400, 1400), "{delta}");
}

/// The library gives a channel without connections back. The next connection to that server must
/// get a new channel.
#[test]
fn channels_at_rest_are_given_back() {
    if stock_mode() {
        return eprintln!("SKIPPED: there are no channels in stock mode");
    }
    let host = Host::new();
    let before = host.snapshot();
    let said = e2e::python(&host, Accel, 90, "python/rest.py", &["32"]);
    host.snapshot().since(&before).assert_shm(5);
    assert_eq!(said, "channels 3\nchannels 1\nchannels 3\nok\n");
}

#[test]
fn an_instance_with_many_listeners() {
    for how in ["epoll", "edge", "late", "poll"] {
        let Some(delta) = e2e::same_transcripts(&Host::new(), 60, "python/many_listeners.py", &[how, "100"]) else {
            return;
        };
        let counted = (delta.get("connect_shm"), delta.get("accept_shm"));
        assert_eq!(counted, (100, 100), "{how}\n{delta}");
    }
}
