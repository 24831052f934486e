//! One worker: an epoll loop over its listen sockets and connections.

mod conn;

use crate::stats::{add, Counters};
use crate::sys::{self, Epoll};
use conn::{Conn, Next};
use std::io::Result;
use std::net::SocketAddr;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, Ordering};

/// Answers of our own.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Answer {
    /// The body, and the connection is closed.
    Closed,
    /// The body, and the connection is kept.
    Kept,
    BadGateway,
}

/// The configuration of all workers.
pub struct Config {
    /// Heads and bodies of [`Answer`], in its order.
    pub answers: [Vec<u8>; 3],
    pub backends: Vec<SocketAddr>,
    pub keepalive: bool,
    /// Seconds.
    pub timeout: u32,
    pub locality: bool,
    pub verbose: bool,
    /// The listen sockets are shared: wake one worker, not all.
    pub exclusive: bool,
}

/// Connections accepted from one listen socket before others are served.
const BATCH: usize = 32;

/// A descriptor's token in epoll: generation, place, side. The generation
/// tells a connection from the one that had its place a moment ago, of which an
/// event may still be in the same batch.
#[derive(Clone, Copy)]
struct Token(u64);

/// Tokens from here on are listen sockets.
const LISTENER: u64 = 1 << 63;

impl Token {
    fn new(generation: u32, place: usize, backend: bool) -> Token {
        Token(u64::from(generation & 0x7fff_ffff) << 32 | (place as u64) << 1 | u64::from(backend))
    }

    fn generation(self) -> u32 {
        (self.0 >> 32) as u32
    }

    fn place(self) -> usize {
        (self.0 as u32 >> 1) as usize
    }

    fn is_backend(self) -> bool {
        self.0 & 1 == 1
    }
}

/// The state of a worker that its connections use.
pub struct Context<'a> {
    config: &'a Config,
    counters: &'static Counters,
    epoll: Epoll,
    /// For bytes on their way from a backend to a client.
    buffer: Vec<u8>,
    next_backend: usize,
    now: u32,
}

struct Place {
    generation: u32,
    conn: Option<Conn>,
}

struct Worker<'a> {
    context: Context<'a>,
    listeners: &'a [OwnedFd],
    listening: bool,
    places: Vec<Place>,
    free: Vec<usize>,
    open: usize,
}

/// Serves until told to drain, and then until the last connection is closed.
pub fn run(config: &Config, listeners: &[OwnedFd], counters: &'static Counters, drain: &AtomicBool) -> Result<()> {
    let context = Context {
        config,
        counters,
        epoll: Epoll::new()?,
        buffer: vec![0; 64 << 10],
        next_backend: 0,
        now: sys::seconds(),
    };
    let mut worker = Worker { context, listeners, listening: false, places: Vec::new(), free: Vec::new(), open: 0 };
    worker.listen(true)?;
    let mut events = vec![libc::epoll_event { events: 0, u64: 0 }; 512];
    let mut swept = worker.context.now;
    loop {
        let draining = drain.load(Ordering::Relaxed);
        if draining {
            worker.listen(false)?;
            if worker.open == 0 {
                return Ok(());
            }
        }
        // A second is also the longest that a drain or a timeout may be noticed late.
        let count = worker.context.epoll.wait(&mut events, 1000)?;
        worker.context.now = sys::seconds();
        for event in &events[..count] {
            if event.u64 >= LISTENER {
                worker.accept((event.u64 - LISTENER) as usize);
            } else {
                worker.ready(Token(event.u64));
            }
        }
        if worker.context.now != swept {
            swept = worker.context.now;
            worker.sweep();
            if !draining {
                worker.listen(true)?;
            }
        }
    }
}

impl Worker<'_> {
    /// Wants new connections, or not.
    fn listen(&mut self, wanted: bool) -> Result<()> {
        if wanted == self.listening {
            return Ok(());
        }
        for (i, listener) in self.listeners.iter().enumerate() {
            if wanted {
                let exclusive = if self.context.config.exclusive { libc::EPOLLEXCLUSIVE } else { 0 };
                self.context.epoll.add(listener, libc::EPOLLIN | exclusive, LISTENER + i as u64)?;
            } else {
                self.context.epoll.remove(listener)?;
            }
        }
        self.listening = wanted;
        Ok(())
    }

    fn accept(&mut self, listener: usize) {
        for _ in 0..BATCH {
            match sys::accept(&self.listeners[listener]) {
                Ok(client) => {
                    add(&self.context.counters.accepted, 1);
                    self.open(client);
                }
                Err(e) => {
                    // Out of descriptors: others' turn, and look again in a second.
                    if matches!(e.raw_os_error(), Some(libc::EMFILE | libc::ENFILE | libc::ENOBUFS | libc::ENOMEM)) {
                        self.context.complain("accept", &e);
                        let _ = self.listen(false);
                    }
                    return;
                }
            }
        }
    }

    fn open(&mut self, client: OwnedFd) {
        let place = self.free.pop().unwrap_or_else(|| {
            self.places.push(Place { generation: 0, conn: None });
            self.places.len() - 1
        });
        let generation = self.places[place].generation;
        let token = |backend| Token::new(generation, place, backend).0;
        let conn = Conn::new(client, [token(false), token(true)], self.context.now);
        let added = self.context.epoll.add(&conn.client, conn::INPUT, token(false));
        self.open += 1;
        self.places[place].conn = Some(conn);
        if let Err(e) = added {
            self.context.complain("epoll", &e);
            self.close(place);
        }
    }

    fn ready(&mut self, token: Token) {
        let Some(place) = self.places.get_mut(token.place()) else { return };
        if place.generation & 0x7fff_ffff != token.generation() {
            return;
        }
        let Some(conn) = &mut place.conn else { return };
        conn.last = self.context.now;
        if conn.advance(&mut self.context, token.is_backend()) == Next::Close {
            self.close(token.place());
        }
    }

    fn close(&mut self, index: usize) {
        let place = &mut self.places[index];
        if let Some(mut conn) = place.conn.take() {
            conn.account(&self.context);
            place.generation = place.generation.wrapping_add(1);
            add(&self.context.counters.closed, 1);
            self.free.push(index);
            self.open -= 1;
        }
    }

    /// Closes what has done nothing for too long.
    fn sweep(&mut self) {
        let (now, timeout) = (self.context.now, self.context.config.timeout);
        for index in 0..self.places.len() {
            if self.places[index].conn.as_ref().is_some_and(|conn| now.wrapping_sub(conn.last) > timeout) {
                add(&self.context.counters.timeouts, 1);
                self.close(index);
            }
        }
    }
}

impl Context<'_> {
    fn complain(&self, what: &str, error: &std::io::Error) {
        if self.config.verbose {
            eprintln!("fastsocket-demo: {what}: {error}");
        }
    }

    /// The next backend in turn. Only called in proxy mode.
    fn backend(&mut self) -> SocketAddr {
        self.next_backend = (self.next_backend + 1) % self.config.backends.len();
        self.config.backends[self.next_backend]
    }
}
