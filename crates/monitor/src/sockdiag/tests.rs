use super::*;
use rustix::net::{AddressFamily, SocketType};

#[test]
fn ports_of_listeners_and_of_connections() {
    use std::io::Read;
    let mut diag = SockDiag::open().unwrap();
    for ip in ["127.0.0.1:0", "[::1]:0"] {
        let Ok(listener) = TcpListener::bind(ip) else { continue };
        let mut client = std::net::TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let (server, client_port) = (listener.accept().unwrap().0, client.local_addr().unwrap().port());
        let port = listener.local_addr().unwrap().port();
        let listened = diag.local_ports(false).unwrap();
        assert!(listened.contains(&port) && !listened.contains(&client_port));
        let connected = diag.local_ports(true).unwrap();
        assert!(connected.contains(&port) && connected.contains(&client_port));
        // From here on, the server's side is in TIME_WAIT because it closes first.
        drop(server);
        assert_eq!(client.read(&mut [0]).unwrap(), 0);
        drop((client, listener));
        assert!(diag.local_ports(true).unwrap().contains(&port));
        assert!(!diag.local_ports(false).unwrap().contains(&port));
    }
}

#[test]
fn tells_live_from_gone() {
    let mut diag = SockDiag::new().expect("kernel with INET_DIAG");
    for bind in ["127.0.0.1:0", "0.0.0.0:0", "[::]:0", "[::1]:0", "[::ffff:127.0.0.1]:0"] {
        let Ok(l) = TcpListener::bind(bind) else { continue };
        let info = descriptor::listening(l.as_fd()).unwrap();
        assert!(diag.listens(&info), "{bind}");
        let (to, other) = (crate::address::destination(info.addr.ip), Listening { cookie: info.cookie ^ 1, ..info });
        assert!(diag.leads_to(to, &info) && !diag.leads_to(to, &other), "{bind}");
        assert!(diag.lookup(info.addr.ip, info.addr.port, |_| true).is_some());
        drop(l);
        assert!(!diag.listens(&info) && !diag.leads_to(to, &info), "{bind}");
        let again = TcpListener::bind(std::net::SocketAddr::new(
            std::net::IpAddr::V6(Ipv6Addr::from(info.addr.ip)).to_canonical(),
            info.addr.port,
        ));
        let Ok(_again) = again else { continue };
        assert!(!diag.listens(&info), "{bind}: another socket on the same port");
    }
}

#[test]
fn an_end_is_one_socket() {
    let mut diag = SockDiag::new().expect("kernel with INET_DIAG");
    for (bind, to) in [("127.0.0.1:0", "127.0.0.1"), ("[::]:0", "127.0.0.1"), ("[::1]:0", "::1")] {
        let Ok(l) = TcpListener::bind(bind) else { continue };
        let to = SocketAddr::new(to.parse().unwrap(), l.local_addr().unwrap().port());
        let opened = std::net::TcpStream::connect(to).unwrap();
        let (own, cookie) = (opened.local_addr().unwrap(), rustix::net::sockopt::socket_cookie(&opened).unwrap());
        let accepted = l.accept().unwrap().0;
        assert!(diag.is_end(own, to, cookie), "{bind}");
        let other = rustix::net::sockopt::socket_cookie(&accepted).unwrap();
        assert!(!diag.is_end(own, to, other), "{bind}: its peer");
        drop(opened);
        assert!(!diag.is_end(own, to, cookie), "{bind}: closed");
    }
}

#[test]
fn many_on_one_address() {
    use rustix::net::sockopt::set_socket_reuseport;
    let mut diag = SockDiag::new().expect("kernel with INET_DIAG");
    let mut port = 0;
    let all: Vec<OwnedFd> = (0..20)
        .map(|_| {
            let s = rustix::net::socket(AddressFamily::INET, SocketType::STREAM, None).unwrap();
            set_socket_reuseport(&s, true).unwrap();
            let addr: std::net::SocketAddr = (Ipv4Addr::LOCALHOST, port).into();
            rustix::net::bind(&s, &addr).unwrap();
            rustix::net::listen(&s, 1).unwrap();
            port = descriptor::listening(s.as_fd()).unwrap().addr.port;
            s
        })
        .collect();
    for s in &all {
        assert!(diag.listens(&descriptor::listening(s.as_fd()).unwrap()));
    }
}
