//! Stand-ins: kernel connections from this process to itself. The library knows one end (`near`),
//! and moves it to shared memory like any connection. It does not know the other end (`far`).

use crate::hooked;
use fsocket_proto::agent::Place;
use rustix::fd::{AsFd, OwnedFd};
use rustix::net::{self, AddressFamily, SocketFlags, SocketType};
use std::io;
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream};
use std::time::{Duration, Instant};

/// A stand-in moves at once, or not at all; so wait only this long.
const PATIENCE: Duration = Duration::from_millis(400);
/// The library offers a stand-in to the monitor after at most OFFERS turns of the stream, and
/// tries to move it within TRIES turns (`migrate/upgrade/worth.rs`).
const OFFERS: usize = 24;
const TRIES: usize = 264;

pub struct StandIn {
    pub near: OwnedFd,
    pub far: OwnedFd,
    pub cookie: u64,
}

/// Makes stand-ins.
pub struct Maker {
    /// A listener that the library knows. Programs on this host have their channels to it.
    accepting: TcpListener,
    /// A listener that the library does not know.
    plain: OwnedFd,
    plain_at: SocketAddr,
    spare: Vec<StandIn>,
}

fn socket(ip: IpAddr) -> io::Result<OwnedFd> {
    let family = if ip.is_ipv4() { AddressFamily::INET } else { AddressFamily::INET6 };
    Ok(net::socket_with(family, SocketType::STREAM, SocketFlags::CLOEXEC, None)?)
}

/// Makes a listener that the library does not know.
pub fn listen(at: SocketAddr) -> io::Result<OwnedFd> {
    let fd = socket(at.ip())?;
    net::sockopt::set_socket_reuseaddr(&fd, true)?;
    net::bind(&fd, &at)?;
    net::listen(&fd, 64)?;
    Ok(fd)
}

/// Opens a connection that the library does not know.
pub fn connect(to: SocketAddr, limit: Duration) -> io::Result<OwnedFd> {
    let fd = socket(to.ip())?;
    net::sockopt::set_socket_timeout(&fd, net::sockopt::Timeout::Send, Some(limit))?;
    net::connect(&fd, &to)?;
    net::sockopt::set_socket_timeout(&fd, net::sockopt::Timeout::Send, None)?;
    Ok(fd)
}

fn own(fd: &OwnedFd) -> io::Result<SocketAddr> {
    SocketAddr::try_from(net::getsockname(fd)?).map_err(|_| io::ErrorKind::InvalidData.into())
}

fn accepting(ip: IpAddr) -> io::Result<TcpListener> {
    let listener = TcpListener::bind((ip, 0))?;
    listener.set_nonblocking(true)?;
    // By calling accept, this process becomes a worker of the listener.
    while listener.accept().is_ok() {}
    Ok(listener)
}

/// One request and one answer, as the library sees a program exchange them. They have no contents.
fn turn(near: &OwnedFd) {
    let _ = hooked::recv(near.as_fd(), &mut [0], false);
    let _ = hooked::send(near.as_fd(), &[]);
}

impl Maker {
    /// `ip`: an address of this host that is not a loopback address, because connections to
    /// loopback do not move.
    pub fn new(ip: IpAddr) -> io::Result<Maker> {
        let plain = listen((ip, 0).into())?;
        let plain_at = own(&plain)?;
        Ok(Maker { accepting: accepting(ip)?, plain, plain_at, spare: Vec::new() })
    }

    /// Replaces the listener that the library knows.
    pub fn renew(&mut self) -> io::Result<()> {
        self.spare.clear();
        self.accepting = accepting(self.plain_at.ip())?;
        Ok(())
    }

    pub fn listener(&self) -> &TcpListener {
        &self.accepting
    }

    /// Closes connections of programs that connected to the listener by mistake.
    pub fn turn_away(&self) {
        while self.accepting.accept().is_ok() {}
    }

    /// Makes some accepting stand-ins in advance, for the next connections.
    pub fn prepare(&mut self) -> io::Result<()> {
        const SPARE: usize = 4;
        while self.spare.len() < SPARE {
            let made = self.accepts()?;
            self.spare.push(made);
        }
        Ok(())
    }

    /// A stand-in whose near end was accepted. The monitor knows it.
    pub fn accepting(&mut self) -> io::Result<StandIn> {
        match self.spare.pop() {
            Some(made) => Ok(made),
            None => self.accepts(),
        }
    }

    fn accepts(&self) -> io::Result<StandIn> {
        let far = connect(self.accepting.local_addr()?, PATIENCE)?;
        let mine = own(&far)?;
        let until = Instant::now() + PATIENCE;
        let near = loop {
            match self.accepting.accept() {
                Ok((near, peer)) if peer == mine => break near,
                Ok(_) => {}
                Err(e) if e.kind() == io::ErrorKind::WouldBlock && Instant::now() < until => {
                    std::thread::sleep(Duration::from_micros(20));
                }
                Err(e) => return Err(e),
            }
        };
        let made = StandIn::new(near, far)?;
        for _ in 0..OFFERS {
            turn(&made.near);
        }
        Ok(made)
    }

    /// A stand-in whose near end has connected. It must not be used before the monitor knows its
    /// purpose.
    pub fn opening(&self) -> io::Result<StandIn> {
        let near = TcpStream::connect(self.plain_at)?;
        let mine = near.local_addr()?;
        loop {
            let (far, peer) = net::acceptfrom_with(&self.plain, SocketFlags::CLOEXEC)?;
            if peer.and_then(|p| SocketAddr::try_from(p).ok()) == Some(mine) {
                return StandIn::new(near, far);
            }
        }
    }
}

impl StandIn {
    fn new(near: TcpStream, far: OwnedFd) -> io::Result<StandIn> {
        near.set_nonblocking(true)?;
        rustix::io::ioctl_fionbio(&far, true)?;
        let near = OwnedFd::from(near);
        let cookie = net::sockopt::socket_cookie(&near)?;
        Ok(StandIn { near, far, cookie })
    }

    /// Moves the near end, which has connected, to shared memory.
    pub fn open(&self) -> Option<Place> {
        (0..TRIES).find_map(|_| {
            turn(&self.near);
            hooked::place(self.near.as_fd())
        })
    }

    /// Waits until the near end, which was accepted, has moved.
    pub fn taken(&self) -> Option<Place> {
        let until = Instant::now() + PATIENCE;
        loop {
            let _ = hooked::recv(self.near.as_fd(), &mut [0], true);
            let place = hooked::place(self.near.as_fd());
            if place.is_some() || Instant::now() > until {
                return place;
            }
            std::thread::sleep(Duration::from_micros(20));
        }
    }

    /// Number of bytes that the peer had not read when it left shared memory. The library has sent
    /// them again, to the far end.
    pub fn left_unread(&self) -> u64 {
        let mut n = 0;
        let mut bytes = [0u8; 4096];
        while let Ok(got @ 1..) = rustix::io::read(&self.far, &mut bytes) {
            n += got as u64;
        }
        n
    }

    /// Ends the connection as if it had failed.
    pub fn reset(self) {
        hooked::reset_on_close(self.near.as_fd());
    }
}
