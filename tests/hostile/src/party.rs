//! A server and a client that say when they learn that the other side is gone.

use fsocket_sys as sys;
use std::collections::BTreeMap;
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::fd::AsRawFd;
use std::time::Duration;

#[derive(clap::Args, Debug)]
pub struct Party {
    /// server-threads, server-fork, server-poll, client
    pub kind: String,
    pub port: u16,
    /// The client's connections are numbered from here
    #[arg(default_value_t = 0)]
    pub first: u64,
    #[arg(default_value_t = 3)]
    pub count: u64,
}

const MESSAGE: usize = 64;

pub fn run(p: &Party) -> std::io::Result<()> {
    match p.kind.as_str() {
        "client" => client(p),
        kind => {
            let listener = TcpListener::bind(("127.0.0.1", p.port))?;
            match kind {
                "server-poll" => poll_server(&listener),
                "server-fork" => fork_server(&listener),
                _ => loop {
                    let (s, _) = listener.accept()?;
                    std::thread::spawn(move || serve(s));
                },
            }
        }
    }
}

/// In one write, so that lines of several processes do not mix.
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

/// Reads until a whole message is there; `Err` has what `read` said instead.
fn whole(s: &mut TcpStream, buf: &mut [u8]) -> Result<(), std::io::Result<usize>> {
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

fn serve(mut s: TcpStream) {
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

fn fork_server(listener: &TcpListener) -> std::io::Result<()> {
    // SAFETY: children that have ended are of no interest.
    unsafe { libc::signal(libc::SIGCHLD, libc::SIG_IGN) };
    loop {
        let (s, _) = listener.accept()?;
        // SAFETY: one thread.
        if unsafe { libc::fork() } == 0 {
            serve(s);
            // SAFETY: nothing of the parent's is to be run.
            unsafe { libc::_exit(0) };
        }
    }
}

fn poll_server(listener: &TcpListener) -> std::io::Result<()> {
    let mut conns: BTreeMap<i32, (TcpStream, u64)> = BTreeMap::new();
    loop {
        let all = std::iter::once(listener.as_raw_fd()).chain(conns.keys().copied());
        let mut fds: Vec<_> = all.map(|fd| libc::pollfd { fd, events: libc::POLLIN, revents: 0 }).collect();
        // SAFETY: as many as there are.
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
            let (s, _) = listener.accept()?;
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
            let port = p.port;
            std::thread::spawn(move || one(id, port))
        })
        .collect();
    threads.into_iter().for_each(|t| drop(t.join()));
    Ok(())
}

/// Some ask all the time, some now and then; the last request is followed by a sleep in `read`.
fn one(id: u64, port: u16) {
    let mut s = match TcpStream::connect(("127.0.0.1", port)) {
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
            0 if n == 0 => {
                let mut none = [0u8; 1];
                return ended(id, &s.read(&mut none));
            }
            1 => std::thread::sleep(Duration::from_micros(300)),
            _ => {}
        }
    }
}
