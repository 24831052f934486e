//! Tests of sockets that processes pass to each other.

use super::support::*;
use fsocket_proto::raw::Packet;
use fsocket_proto::values::Passing;
use fsocket_proto::{request, Payload};
use rustix::fd::AsFd;
use rustix::net::sockopt::{self, socket_cookie};
use rustix::net::{AddressFamily, SocketType};
use std::net::{Ipv4Addr, SocketAddr, TcpStream};
use std::time::Duration;

/// A child that has given up rights may still have the listening socket. It can accept connections
/// and pass them on. Such a connection must not lead to memory of workers with other rights.
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
        for (sends, arg0) in
            [(true, Passing::Sent as u64), (false, Passing::Arrived as u64), (true, Passing::Released as u64)]
        {
            let p = if sends { &mut sender } else { &mut receiver };
            p.tell(Packet { id, arg0, ..Packet::new(request::Passed::KIND) }, None);
            p.sync();
        }
        let offer = Packet { id: 5, arg1: 1, ..Packet::new(request::Offer::KIND) };
        assert_eq!(receiver.request(offer, Some(accepted.as_fd())).0.result, 0);
        let upgrade = Packet { id: ch.id.into(), arg0: 3, arg1: 9, ..Packet::new(request::Upgrade::KIND) };
        assert_eq!(client.request(upgrade, Some(end.as_fd())).0.result, then, "{class}");
        let named = Packet { id: ch.id.into(), arg0: 1, ..Packet::new(request::ChannelHandle::KIND) };
        assert_eq!(receiver.request(named, None).1.is_some(), class == 0);
    }
}

/// A process offers its end of a connection and closes it without a message. The next connection
/// between the same addresses and ports does not belong to this process, perhaps not even to its
/// user.
#[test]
fn an_offer_is_of_the_socket_that_is_there() {
    let d = Daemon::start();
    for (is_same, then) in [(true, 0), (false, libc::ENOENT)] {
        let (mut server, mut client, l, ch) = d.acquainted();
        let accept = || l.socket.accept().unwrap().0;
        let to = SocketAddr::from((Ipv4Addr::LOCALHOST, l.port));
        // (A client address of its own, because other tests connect at the same time.)
        let from = |own: SocketAddr| -> TcpStream {
            let socket = rustix::net::socket(AddressFamily::INET, SocketType::STREAM, None).unwrap();
            sockopt::set_socket_reuseaddr(&socket, true).unwrap();
            rustix::net::bind(&socket, &own).unwrap();
            rustix::net::connect(&socket, &to).unwrap();
            socket.into()
        };
        let (mut end, mut accepted) = (from((Ipv4Addr::new(127, 0, 41, 1), 0).into()), accept());
        let offer = Packet { id: 5, ..Packet::new(request::Offer::KIND) };
        assert_eq!(server.request(offer, Some(accepted.as_fd())).0.result, 0);
        if !is_same {
            let own = end.local_addr().unwrap();
            sockopt::set_socket_linger(&end, Some(Duration::ZERO)).unwrap();
            drop((end, accepted));
            (end, accepted) = (from(own), accept());
        }
        let upgrade = Packet { id: ch.id.into(), arg0: 3, arg1: 9, ..Packet::new(request::Upgrade::KIND) };
        assert_eq!(client.request(upgrade, Some(end.as_fd())).0.result, then);
        drop(accepted);
    }
}
