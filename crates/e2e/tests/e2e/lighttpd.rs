//! lighttpd: one process, its own event loop, sendfile.

use fsocket_e2e as e2e;
use fsocket_testkit::host::Accel;
use fsocket_testkit::{need, net, Host};

#[test]
fn lighttpd_serves_curl_and_ab() {
    let lighttpd = need!("lighttpd");
    let ab = need!("ab");
    need!("curl");
    let host = Host::new();
    let root = e2e::document_root(&host);
    let port = net::free_port();
    let config = host.file(
        "lighttpd.conf",
        format!(
            "server.document-root = \"{}\"\nserver.bind = \"127.0.0.1\"\nserver.port = {port}\n\
             server.max-keep-alive-requests = 100000\nserver.errorlog = \"{}\"\n",
            root.display(),
            host.path().join("lighttpd.log").display()
        ),
    );
    let _server = host.server(Accel, "lighttpd", port, lighttpd, &["-D", "-f", &config.display().to_string()]);
    let before = host.snapshot();
    for size in ["1", "64", "65536", "20000000"] {
        e2e::curl_compare(&host, Accel, &format!("http://127.0.0.1:{port}/{size}"), &root.join(size), &[]);
    }
    let url = format!("http://127.0.0.1:{port}/1000");
    e2e::ab_anew_and_kept(&host, Accel, &ab, &url, 1000);
    host.snapshot().since(&before).assert_shm(2014);
}
