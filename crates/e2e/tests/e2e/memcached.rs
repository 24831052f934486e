//! memcached: threads that share one listener through libevent.

use fsocket_e2e as e2e;
use fsocket_testkit::host::Accel;
use fsocket_testkit::{need, net, Host};

#[test]
fn memcached_threads() {
    let memcached = need!("memcached");
    let host = Host::new();
    let port = net::free_port();
    let text = port.to_string();
    let args = ["-p", &text, "-U", "0", "-l", "127.0.0.1", "-t", "4", "-u", "nobody", "-c", "512"];
    let server = host.server(Accel, "memcached", port, memcached, &args);
    let before = host.snapshot();
    let descriptors = server.descriptors();
    for _ in 0..2 {
        let output = e2e::python(&host, Accel, 90, "memcached_client.py", &[&text, "48"]);
        assert!(output.contains(&format!("ok {}", 48 * 40 * 2)), "{output}");
    }
    host.snapshot().since(&before).assert_shm(96);
    let grown = net::wait_until(std::time::Duration::from_secs(60), || server.descriptors() <= descriptors + 48);
    assert!(grown.is_ok(), "descriptors grew from {descriptors} to {}", server.descriptors());
}
