//! Every way in which a socket begins or stops to listen is counted before the call returns.

use fsocket_bpf::closings::{Closings, SIZE};
use fsocket_bpf::Error;
use std::net::TcpListener;
use std::os::fd::AsRawFd;

#[test]
fn every_end_of_a_listener_is_counted_at_once() {
    let closings = match Closings::start() {
        Ok(closings) => closings,
        Err(Error::Missing(why)) => return println!("SKIPPED: closings: {why}"),
        Err(e) => panic!("{e}"),
    };
    let listener = || {
        let l = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = l.local_addr().unwrap().port();
        (l, port, closings.count(port))
    };
    let (l, port, before) = listener();
    drop(l);
    assert_eq!(closings.count(port), before + 1, "close");
    let (l, port, before) = listener();
    // SAFETY: no memory is involved.
    assert_eq!(unsafe { libc::shutdown(l.as_raw_fd(), libc::SHUT_RD) }, 0);
    assert_eq!(closings.count(port), before + 1, "shutdown");
    drop(l);
    assert_eq!(closings.count(port), before + 1, "it did not listen any more");
    let s = rustix::net::socket(rustix::net::AddressFamily::INET, rustix::net::SocketType::STREAM, None).unwrap();
    rustix::net::bind(&s, &std::net::SocketAddr::from(([127, 0, 0, 1], port))).unwrap();
    let before = closings.count(port);
    rustix::net::listen(&s, 1).unwrap();
    assert_eq!(closings.count(port), before + 1, "listen");
    // Clients rely on the counts, so the page must not be mappable for writing.
    // SAFETY: the mapping is expected to fail.
    let at = unsafe {
        let prot = libc::PROT_READ | libc::PROT_WRITE;
        libc::mmap(std::ptr::null_mut(), SIZE, prot, libc::MAP_SHARED, closings.page().as_raw_fd(), 0)
    };
    assert_eq!(at, libc::MAP_FAILED);
}
