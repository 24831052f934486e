//! node: net and http, client and server.

use fsocket_e2e as e2e;
use fsocket_testkit::host::{Accel, Side, Stock};
use fsocket_testkit::{helper, need, net, Host, Proc};

fn server(host: &Host, side: Side) -> (Proc, u16) {
    // Two ports next to each other.
    let port = loop {
        let port = net::free_port();
        if net::free_port() == port + 1 {
            break port;
        }
    };
    let node = fsocket_testkit::find_program("node").expect("node");
    let path = helper("echo_server.js").display().to_string();
    let mut server = host.server(side, "node-server", port, node, &[&path, &port.to_string()]);
    server.wait_stdout("listening", std::time::Duration::from_secs(60));
    (server, port)
}

fn client(host: &Host, side: Side, port: u16, extra: &[&str]) {
    let node = fsocket_testkit::find_program("node").expect("node");
    let path = helper("echo_client.js").display().to_string();
    let port = port.to_string();
    let mut args = vec![path.as_str(), &port, "8", "1000000"];
    args.extend_from_slice(extra);
    host.run(side, "node-client", 70, node, &args).success().says("ok 8 1000000");
}

#[test]
fn node_to_node_over_shared_memory() {
    need!("node");
    let host = Host::new();
    let (_server, port) = server(&host, Accel);
    let before = host.snapshot();
    client(&host, Accel, port, &["http"]);
    host.snapshot().since(&before).assert_shm(12);
}

#[test]
fn node_mixed_pairs() {
    need!("node");
    for (one, two) in [(Accel, Stock), (Stock, Accel)] {
        let host = Host::new();
        let (_server, port) = server(&host, one);
        client(&host, two, port, &["http"]);
    }
}

#[test]
fn node_client_to_python_server_and_back() {
    need!("node");
    let host = Host::new();
    let (_python, port) = e2e::echo_server(&host, Accel, "asyncio", "127.0.0.1");
    let before = host.snapshot();
    client(&host, Accel, port, &[]);
    let (_node, port) = server(&host, Accel);
    e2e::python(&host, Accel, 60, "echo_client.py", &["asyncio", &port.to_string()]);
    host.snapshot().since(&before).assert_shm(16);
}
