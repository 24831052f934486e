//! The two TCP connections between a pair of agents. By the first one (control) they negotiate
//! about connections; the second one is for their carrier. The second one is made after the first,
//! and again whenever only the second one fails.

use crate::stand_in::{connect, listen};
use fsocket_proto::agent::Ends;
use fsocket_rdma::agree::{self, Endpoint, Key, Role};
use rustix::fd::OwnedFd;
use std::io::{self, Read, Write};
use std::net::{IpAddr, SocketAddr, TcpStream};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{channel, Sender};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// A message between two agents.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Frame {
    pub what: u64,
    /// Number that the receiver gave the connection; 0: none yet.
    pub to: u64,
    /// Number that the sender gave the connection.
    pub from: u64,
    pub a: u64,
    pub b: u64,
    pub ends: Ends,
}

pub mod what {
    /// The first message: it identifies this agent.
    pub const HELLO: u64 = 1;
    /// A program has opened a connection with these ends. It has sent `a` bytes and received `b`.
    pub const OPEN: u64 = 2;
    /// Answers to OPEN: the end of the other program has moved to shared memory (OPENED), or stays
    /// in the kernel (REFUSED).
    pub const OPENED: u64 = 3;
    pub const REFUSED: u64 = 4;
    /// The first program's end has not moved after all. Or: the connection is not known here.
    pub const CANCEL: u64 = 5;
    /// The connection returns to its kernel connection. The sender has put `a` bytes of the
    /// receiver's stream into the ring of its own program.
    pub const BACK: u64 = 6;
    /// The answer to BACK. If `a` is 1, bytes that were not put into the ring are lost.
    pub const CONFIRM: u64 = 7;
    /// The sender's program has moved to its kernel connection, and has read `a` bytes of the
    /// receiver's stream. The next `b` bytes of its own stream still come through the agents.
    pub const LEFT: u64 = 8;
    /// The sender's program has moved back to the kernel. The sender forgets the connection when
    /// the receiver has sent DONE, too.
    pub const DONE: u64 = 9;
    /// The sender's carrier has failed.
    pub const DOWN: u64 = 10;
}

const FRAME: usize = 5 * 8 + 2 * 18;

impl Frame {
    fn encode(&self) -> [u8; FRAME] {
        let mut to = [0; FRAME];
        for (i, word) in [self.what, self.to, self.from, self.a, self.b].into_iter().enumerate() {
            to[8 * i..8 * i + 8].copy_from_slice(&word.to_le_bytes());
        }
        for (i, (ip, port)) in self.ends.iter().enumerate() {
            to[40 + 18 * i..56 + 18 * i].copy_from_slice(ip);
            to[56 + 18 * i..58 + 18 * i].copy_from_slice(&port.to_le_bytes());
        }
        to
    }

    fn decode(from: &[u8; FRAME]) -> Frame {
        let word = |i: usize| u64::from_le_bytes(std::array::from_fn(|k| from[8 * i + k]));
        let end = |i: usize| {
            let port = u16::from_le_bytes([from[56 + 18 * i], from[57 + 18 * i]]);
            (std::array::from_fn(|k| from[40 + 18 * i + k]), port)
        };
        Frame { what: word(0), to: word(1), from: word(2), a: word(3), b: word(4), ends: [end(0), end(1)] }
    }
}

/// Writes as much as fits now. Returns the number of bytes.
pub fn write_some(stream: &mut TcpStream, bytes: &[u8]) -> io::Result<usize> {
    let mut sent = 0;
    while sent < bytes.len() {
        match stream.write(&bytes[sent..]) {
            Ok(n) => sent += n,
            Err(e) if e.kind() == io::ErrorKind::WouldBlock => break,
            Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
            Err(e) => return Err(e),
        }
    }
    Ok(sent)
}

/// Reads once. `None`: there is nothing to read now.
///
/// # Errors
/// The stream has ended or failed.
pub fn read_some(stream: &mut TcpStream, to: &mut [u8]) -> io::Result<Option<usize>> {
    loop {
        return match stream.read(to) {
            Ok(0) => Err(io::ErrorKind::UnexpectedEof.into()),
            Ok(n) => Ok(Some(n)),
            Err(e) if e.kind() == io::ErrorKind::WouldBlock => Ok(None),
            Err(e) if e.kind() == io::ErrorKind::Interrupted => continue,
            Err(e) => Err(e),
        };
    }
}

/// The connection that carries frames, with its buffers.
pub struct Control {
    pub stream: TcpStream,
    out: Vec<u8>,
    input: Vec<u8>,
}

impl Control {
    pub fn new(stream: TcpStream) -> io::Result<Control> {
        use rustix::net::sockopt;
        let second = Duration::from_secs(1);
        stream.set_nonblocking(true)?;
        stream.set_nodelay(true)?;
        sockopt::set_socket_keepalive(&stream, true)?;
        sockopt::set_tcp_keepidle(&stream, second)?;
        sockopt::set_tcp_keepintvl(&stream, second)?;
        sockopt::set_tcp_keepcnt(&stream, 3)?;
        sockopt::set_tcp_user_timeout(&stream, 4000)?;
        Ok(Control { stream, out: Vec::new(), input: Vec::new() })
    }

    pub fn send(&mut self, frame: &Frame) -> io::Result<()> {
        self.out.extend(frame.encode());
        self.flush()
    }

    fn flush(&mut self) -> io::Result<()> {
        let sent = write_some(&mut self.stream, &self.out)?;
        self.out.drain(..sent);
        Ok(())
    }

    /// Returns the frames that have arrived, and whether the peer still exists. The last frames
    /// before its end are returned, too.
    pub fn poll(&mut self) -> (Vec<Frame>, io::Result<()>) {
        let flushed = self.flush();
        let mut chunk = [0u8; 16 * FRAME];
        let end = loop {
            match read_some(&mut self.stream, &mut chunk) {
                Ok(Some(n)) => self.input.extend(&chunk[..n]),
                Ok(None) => break flushed,
                Err(e) => break Err(e),
            }
        };
        let whole = self.input.len() / FRAME * FRAME;
        let frames = self.input[..whole].as_chunks::<FRAME>().0.iter().map(Frame::decode).collect();
        self.input.drain(..whole);
        (frames, end)
    }
}

/// A connection to another agent that has proved to have the key, or another result of the
/// threads.
pub enum Made {
    Control(usize, TcpStream),
    /// A connection for the carrier.
    Data(usize, TcpStream),
    /// The other host can be reached, but has no agent.
    Nobody(usize),
    /// The agent must end.
    Stop,
}

/// By this, the threads tell the event loop what they have made.
#[derive(Clone)]
pub struct Out {
    pub made: Sender<Made>,
    pub waker: Arc<OwnedFd>,
}

impl Out {
    /// Waits for SIGTERM and SIGINT in a thread. Call it before any other thread exists, so that
    /// all threads block these signals.
    pub fn hear_of_signals(self) {
        let mut signals = std::mem::MaybeUninit::<libc::sigset_t>::uninit();
        // SAFETY: `signals` is live during the calls, and `sigemptyset` initialises it.
        let signals = unsafe {
            libc::sigemptyset(signals.as_mut_ptr());
            libc::sigaddset(signals.as_mut_ptr(), libc::SIGTERM);
            libc::sigaddset(signals.as_mut_ptr(), libc::SIGINT);
            libc::pthread_sigmask(libc::SIG_BLOCK, signals.as_ptr(), std::ptr::null_mut());
            signals.assume_init()
        };
        std::thread::spawn(move || {
            let mut signal = 0;
            // SAFETY: `signals` and `signal` are live during the call.
            while unsafe { libc::sigwait(&raw const signals, &raw mut signal) } == 0 && self.give(Made::Stop) {}
        });
    }

    fn give(&self, made: Made) -> bool {
        let given = self.made.send(made).is_ok();
        let _ = rustix::io::write(&*self.waker, &1u64.to_ne_bytes());
        given
    }
}

/// Checks that the other agent has the key. (The RDMA carrier makes such an exchange once more.)
fn prove(stream: &TcpStream, role: Role, key: &Key) -> bool {
    let nothing = Endpoint { gid: [0; 16], qpn: 0, psn: 0, inbox: 0, rkey: 0, depth: 0, mtu: 0 };
    match agree::exchange(stream, role, key, &nothing) {
        Ok(_) => true,
        Err(e) => {
            tracing::warn!(error = %e, "an agent is refused");
            false
        }
    }
}

/// Address for the carrier's connections: the same host, the next port.
pub fn beside(at: SocketAddr) -> SocketAddr {
    SocketAddr::new(at.ip(), at.port().wrapping_add(1))
}

/// Whether the agent at `own` is the one that opens connections to the other.
pub fn connects(own: IpAddr, peer: IpAddr) -> bool {
    own < peer
}

/// Most connections that may prove themselves at the same time. The number is limited because one
/// exchange may take ten seconds.
const PROVING: usize = 64;

/// Accepts connections from the other agents. Each connection has a thread of its own until it has
/// proved that it has the key.
pub fn accept(own: SocketAddr, peers: &[SocketAddr], key: &Arc<Key>, out: impl Fn() -> Out) -> io::Result<()> {
    type Make = fn(usize, TcpStream) -> Made;
    let makes: [(SocketAddr, Make); 2] = [(own, Made::Control), (beside(own), Made::Data)];
    for (at, make) in makes {
        let listener = listen(at)?;
        let (peers, key, out) = (peers.to_vec(), key.clone(), out());
        let (out, proving) = (Arc::new(out), Arc::new(AtomicUsize::new(0)));
        std::thread::spawn(move || loop {
            let flags = rustix::net::SocketFlags::CLOEXEC;
            let Ok((fd, Some(peer))) = rustix::net::acceptfrom_with(&listener, flags) else {
                std::thread::sleep(Duration::from_millis(100));
                continue;
            };
            let ip = SocketAddr::try_from(peer).map(|p| p.ip().to_canonical()).ok();
            let Some(peer) = peers.iter().position(|p| Some(p.ip()) == ip) else { continue };
            // Any program of the other host can connect, so refuse more than the limit.
            if proving.fetch_add(1, Ordering::Relaxed) >= PROVING {
                proving.fetch_sub(1, Ordering::Relaxed);
                continue;
            }
            let (key, out, proving) = (key.clone(), out.clone(), proving.clone());
            std::thread::spawn(move || {
                let stream = TcpStream::from(fd);
                let has_key = prove(&stream, Role::Accepting, &key);
                proving.fetch_sub(1, Ordering::Relaxed);
                if has_key {
                    out.give(make(peer, stream));
                }
            });
        });
    }
    Ok(())
}

/// Time limit for a connection attempt, and the pause between two attempts.
const LIMIT: Duration = Duration::from_secs(3);
const PAUSE: Duration = Duration::from_millis(500);

/// Starts a thread that connects to another agent whenever [`Dial`] asks for it.
fn dialler(to: SocketAddr, key: Arc<Key>, out: Out, make: impl Fn(TcpStream) -> Made + Send + 'static) -> Sender<()> {
    let (ask, asked) = channel();
    let one = move || {
        let stream = TcpStream::from(connect(to, LIMIT).ok()?);
        prove(&stream, Role::Connecting, &key).then_some(stream)
    };
    std::thread::spawn(move || {
        while asked.recv().is_ok() {
            let stream = loop {
                match one() {
                    Some(stream) => break stream,
                    None => std::thread::sleep(PAUSE),
                }
            };
            if !out.give(make(stream)) {
                return;
            }
        }
    });
    ask
}

/// Finds out whether there is still an agent at `to`. A host that refuses the connection has none.
/// The thread repeats the question as long as the answer is useful.
pub fn ask_after(number: usize, to: SocketAddr, out: Out, limit: Duration) {
    let until = Instant::now() + limit;
    std::thread::spawn(move || loop {
        match connect(to, LIMIT) {
            Err(e) if e.kind() == io::ErrorKind::ConnectionRefused => {
                out.give(Made::Nobody(number));
                return;
            }
            Err(_) if Instant::now() < until => std::thread::sleep(PAUSE),
            _ => return,
        }
    });
}

/// The two threads that connect to another agent.
pub struct Dial {
    control: Sender<()>,
    data: Sender<()>,
    /// The data thread has been asked to connect, and has not answered yet.
    pub awaits_data: bool,
}

impl Dial {
    /// Starts both threads. The control thread connects at once.
    pub fn new(number: usize, to: SocketAddr, key: &Arc<Key>, out: impl Fn() -> Out) -> Dial {
        let control = dialler(to, key.clone(), out(), move |stream| Made::Control(number, stream));
        let data = dialler(beside(to), key.clone(), out(), move |stream| Made::Data(number, stream));
        let dial = Dial { control, data, awaits_data: false };
        dial.control();
        dial
    }

    pub fn control(&self) {
        let _ = self.control.send(());
    }

    pub fn data(&mut self) {
        if !std::mem::replace(&mut self.awaits_data, true) {
            let _ = self.data.send(());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_frame_comes_back() {
        let ends = [([3; 16], 80), (std::array::from_fn(|i| i as u8), 65535)];
        let frame = Frame { what: what::OPEN, to: 1, from: u64::MAX, a: 3, b: 4, ends };
        assert_eq!(Frame::decode(&frame.encode()), frame);
    }

    #[test]
    fn frames_before_an_end_are_heard() {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").expect("a listener");
        let mut sender = TcpStream::connect(listener.local_addr().expect("its address")).expect("a connection");
        let mut control = Control::new(listener.accept().expect("it").0).expect("control");
        let frames = [1, 2].map(|from| Frame { what: what::CONFIRM, from, ..Frame::default() });
        frames.iter().for_each(|f| sender.write_all(&f.encode()).expect("sent"));
        drop(sender);
        let (mut heard, mut end) = (Vec::new(), Ok(()));
        while end.is_ok() {
            let (more, e) = control.poll();
            heard.extend(more);
            end = e;
        }
        assert_eq!(heard, frames);
    }
}
