//! A server and a client that report when they learn that the other side is gone.

use fsocket_sys as sys;
use std::collections::BTreeMap;
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::fd::{AsRawFd, RawFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::time::Duration;

#[derive(clap::Args, Debug)]
pub struct Party {
    /// server-threads, server-fork, server-poll, client
    pub kind: String,
    /// A TCP port, or the path of a Unix socket
    pub at: String,
    /// The client's connections are numbered from here
    #[arg(default_value_t = 0)]
    pub first: u64,
    #[arg(default_value_t = 3)]
    pub count: u64,
}

const MESSAGE: usize = 64;
/// Requests of a connection before it sleeps in `read`: for TCP, and for Unix sockets. (A Unix
/// connection begins in the kernel.)
const BEFORE_SLEEP: [u64; 2] = [1, 100];

trait Stream: Read + Write + AsRawFd + Send {}
impl<T: Read + Write + AsRawFd + Send> Stream for T {}
type Conn = Box<dyn Stream>;

fn connected(at: &str) -> std::io::Result<Conn> {
    Ok(match at.parse::<u16>() {
        Ok(port) => Box::new(TcpStream::connect(("127.0.0.1", port))?),
        Err(_) => Box::new(UnixStream::connect(at)?),
    })
}

enum Listener {
    Tcp(TcpListener),
    Unix(UnixListener),
}

impl Listener {
    fn bind(at: &str) -> std::io::Result<Listener> {
        Ok(match at.parse::<u16>() {
            Ok(port) => Listener::Tcp(TcpListener::bind(("127.0.0.1", port))?),
            Err(_) => Listener::Unix(UnixListener::bind(at)?),
        })
    }
    fn accept(&self) -> std::io::Result<Conn> {
        Ok(match self {
            Listener::Tcp(l) => Box::new(l.accept()?.0),
            Listener::Unix(l) => Box::new(l.accept()?.0),
        })
    }
    fn number(&self) -> RawFd {
        match self {
            Listener::Tcp(l) => l.as_raw_fd(),
            Listener::Unix(l) => l.as_raw_fd(),
        }
    }
}

pub fn run(p: &Party) -> std::io::Result<()> {
    match p.kind.as_str() {
        "client" => client(p),
        kind => {
            let listener = Listener::bind(&p.at)?;
            match kind {
                "server-poll" => poll_server(&listener),
                "server-fork" => fork_server(&listener),
                _ => loop {
                    let s = listener.accept()?;
                    std::thread::spawn(move || serve(s));
                },
            }
        }
    }
}

/// Writes a line with one system call, so that lines of several processes do not mix.
fn say(line: &str) {
    let _ = sys::write(1, format!("{line}\n").as_bytes());
}

fn ended(id: u64, how: &std::io::Result<usize>) {
    let how = match how {
        Ok(_) => "EOF".to_owned(),
        Err(e) => format!("{:?}", e.kind()),
    };
    say(&format!("end {id} {} {how}", sys::now_ns()));
}

/// Reads a whole message. `Err` contains the result of the `read` that ended it.
fn whole(s: &mut impl Read, buf: &mut [u8]) -> Result<(), std::io::Result<usize>> {
    let mut got = 0;
    while got < buf.len() {
        match s.read(&mut buf[got..]) {
            Ok(0) => return Err(Ok(0)),
            Ok(n) => got += n,
            Err(e) => return Err(Err(e)),
        }
    }
    Ok(())
}

fn serve(mut s: Conn) {
    let mut buf = [0u8; MESSAGE];
    let mut id = 0;
    loop {
        if let Err(how) = whole(&mut s, &mut buf) {
            return ended(id, &how);
        }
        id = number(&buf);
        if let Err(e) = s.write_all(&buf) {
            return ended(id, &Err(e));
        }
    }
}

fn fork_server(listener: &Listener) -> std::io::Result<()> {
    // SAFETY: ignoring SIGCHLD only discards the exit statuses of children.
    unsafe { libc::signal(libc::SIGCHLD, libc::SIG_IGN) };
    loop {
        let s = listener.accept()?;
        // SAFETY: this process has one thread.
        if unsafe { libc::fork() } == 0 {
            serve(s);
            // SAFETY: `_exit` runs no exit handlers of the parent.
            unsafe { libc::_exit(0) };
        }
    }
}

fn poll_server(listener: &Listener) -> std::io::Result<()> {
    let mut conns: BTreeMap<i32, (Conn, u64)> = BTreeMap::new();
    loop {
        let all = std::iter::once(listener.number()).chain(conns.keys().copied());
        let mut fds: Vec<_> = all.map(|fd| libc::pollfd { fd, events: libc::POLLIN, revents: 0 }).collect();
        // SAFETY: the array has `fds.len()` entries.
        unsafe { libc::poll(fds.as_mut_ptr(), fds.len() as u64, -1) };
        for p in fds.iter().skip(1).filter(|p| p.revents != 0) {
            let Some((s, id)) = conns.get_mut(&p.fd) else { continue };
            let mut buf = [0u8; MESSAGE];
            let how = match whole(s, &mut buf) {
                Ok(()) => {
                    *id = number(&buf);
                    match s.write_all(&buf) {
                        Ok(()) => continue,
                        Err(e) => Err(e),
                    }
                }
                Err(how) => how,
            };
            ended(*id, &how);
            conns.remove(&p.fd);
        }
        if fds[0].revents != 0 {
            let s = listener.accept()?;
            conns.insert(s.as_raw_fd(), (s, 0));
        }
    }
}

fn number(buf: &[u8]) -> u64 {
    u64::from_le_bytes(std::array::from_fn(|i| buf[i]))
}

fn client(p: &Party) -> std::io::Result<()> {
    let threads: Vec<_> = (p.first..p.first + p.count)
        .map(|id| {
            let at = p.at.clone();
            std::thread::spawn(move || one(id, &at))
        })
        .collect();
    threads.into_iter().for_each(|t| drop(t.join()));
    Ok(())
}

/// One connection. Some connections send requests all the time, some now and then. After its last
/// request, a connection sleeps in `read`.
fn one(id: u64, at: &str) {
    let before_sleep = BEFORE_SLEEP[usize::from(at.parse::<u16>().is_err())];
    let mut s = match connected(at) {
        Ok(s) => s,
        Err(e) => return say(&format!("refused {id} {e}")),
    };
    let mut message = [0u8; MESSAGE];
    for n in 0u64.. {
        message[..8].copy_from_slice(&id.to_le_bytes());
        for (i, b) in message[8..].iter_mut().enumerate() {
            *b = (n.wrapping_mul(0x9E37_79B9_7F4A_7C15) >> (i % 57)) as u8 ^ id as u8;
        }
        let mut echo = [0u8; MESSAGE];
        if let Err(e) = s.write_all(&message) {
            return ended(id, &Err(e));
        }
        if let Err(how) = whole(&mut s, &mut echo) {
            return ended(id, &how);
        }
        if echo != message {
            return say(&format!("wrong {id}"));
        }
        if n == 0 {
            say(&format!("ready {id}"));
        }
        match id % 3 {
            0 if n + 1 == before_sleep => {
                let mut none = [0u8; 1];
                return ended(id, &s.read(&mut none));
            }
            1 => std::thread::sleep(Duration::from_micros(300)),
            _ => {}
        }
    }
}
