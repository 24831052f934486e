//! Connections that processes pass to each other.

use super::support::*;
use fsocket_proto::{kind, passed, Msg};
use rustix::fd::AsFd;
use rustix::net::sockopt::socket_cookie;
use std::net::{Ipv4Addr, TcpStream};

/// A child that has given up rights may have kept the listening socket, accept, and pass on what it has accepted.
#[test]
fn a_passed_connection_goes_into_no_memory_of_workers_with_other_rights() {
    let d = Daemon::start();
    for (class, then) in [(0, 0), (1, libc::ENOENT)] {
        let (_server, mut client, l, ch) = d.acquainted();
        let end = TcpStream::connect((Ipv4Addr::LOCALHOST, l.port)).unwrap();
        let (accepted, _) = l.socket.accept().unwrap();
        let (mut sender, mut receiver) = (d.stranger(), d.stranger());
        sender.hello_with(class);
        receiver.hello_with(class);
        sender.listen(&l.socket);
        let id = socket_cookie(&accepted).unwrap();
        for (sends, arg0) in [(true, passed::SENT), (false, passed::ARRIVED), (true, passed::RELEASED)] {
            let p = if sends { &mut sender } else { &mut receiver };
            p.tell(Msg { id, arg0, ..Msg::new(kind::PASSED) }, None);
            p.sync();
        }
        let offer = Msg { id: 5, arg1: 1, ..Msg::new(kind::OFFER) };
        assert_eq!(receiver.request(offer, Some(accepted.as_fd())).0.result, 0);
        let upgrade = Msg { id: ch.id.into(), arg0: 3, arg1: 9, ..Msg::new(kind::UPGRADE) };
        assert_eq!(client.request(upgrade, Some(end.as_fd())).0.result, then, "{class}");
        let named = Msg { id: ch.id.into(), arg0: 1, ..Msg::new(kind::CHANNEL_HANDLE) };
        assert_eq!(receiver.request(named, None).1.is_some(), class == 0);
    }
}
