//! The measured operations, over any [`Link`].

use super::args::{Op, Outcome, Worker, OPEN};
use super::link::{Link, Listener, Socket};
use super::samples::Samples;
use std::io::{self, Read};
use std::time::{Duration, Instant};

/// Bytes each way on a short connection, and on one that then idles.
const SHORT: usize = 64;
/// Buffer size of a receiver that takes all available bytes.
const BUFFER: usize = 64 * 1024;
/// First byte of a short message that ends the server.
const QUIT: u8 = b'Q';

/// The server's side of all operations that use one connection.
pub fn serve(link: &mut impl Link, args: &Worker) -> io::Result<()> {
    match args.op {
        Op::Rtt | Op::Turns => {
            let mut message = vec![0; args.size];
            while link.recv_all(&mut message)? {
                link.send(&message)?;
            }
        }
        _ => {
            let mut buffer = vec![0; if args.op == Op::RateExact { args.size } else { BUFFER }];
            let mut total = 0u64;
            loop {
                match link.recv(&mut buffer)? {
                    0 => break,
                    n => total += n as u64,
                }
            }
            link.send(&total.to_ne_bytes())?;
            // The client closes first.
            link.recv(&mut buffer)?;
        }
    }
    Ok(())
}

/// The client's side of `rtt`, `rate` and `rate-exact`.
pub fn measure<L: Link + Quick>(link: &mut L, args: &Worker) -> io::Result<Outcome> {
    if args.op == Op::Rtt {
        round_trips(link, args)
    } else {
        one_way(link, args)
    }
}

/// Asks for small messages to be sent at once.
pub trait Quick {
    fn quick(&self) {}
}
impl Quick for Socket {
    fn quick(&self) {
        self.no_delay();
    }
}
impl Quick for crate::queue::Queue {}

fn round_trips<L: Link + Quick>(link: &mut L, args: &Worker) -> io::Result<Outcome> {
    link.quick();
    let message: Vec<u8> = (0..args.size).map(|i| (i * 7 + 1) as u8).collect();
    let mut echo = vec![0; args.size];
    let warm_up = Instant::now();
    let mut warm = 0;
    while warm_up.elapsed().as_secs_f64() < args.secs / 5.0 {
        link.send(&message)?;
        if !link.recv_all(&mut echo)? || echo != message {
            return Err(io::Error::other("echo differs"));
        }
        warm += 1;
    }
    let mut samples = Samples::new(args.secs);
    let limit = Duration::from_secs_f64(args.secs);
    while samples.has_room() {
        link.send(&message)?;
        if !link.recv_all(&mut echo)? {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        let ops = samples.lap();
        // Read the clock after every 64 round trips, or after each if they are long.
        if (ops.is_multiple_of(64) || args.size >= 4096) && samples.elapsed() >= limit {
            break;
        }
    }
    let mut outcome = samples.outcome();
    link.finish()?;
    (outcome.warm, outcome.bytes) = (warm, outcome.ops * args.size as u64 * 2);
    Ok(outcome)
}

fn one_way<L: Link>(link: &mut L, args: &Worker) -> io::Result<Outcome> {
    let message = vec![b'x'; args.size];
    // Number of messages between two readings of the clock.
    let burst = (BUFFER / args.size.max(1)).clamp(1, 256);
    let mut ops = 0u64;
    let started = Instant::now();
    while started.elapsed().as_secs_f64() < args.secs {
        for _ in 0..burst {
            link.send(&message)?;
        }
        ops += burst as u64;
    }
    link.finish()?;
    let mut total = [0; 8];
    if !link.recv_all(&mut total)? {
        return Err(io::ErrorKind::UnexpectedEof.into());
    }
    // The time ends when the last byte has been received, not when it was sent.
    let seconds = started.elapsed().as_secs_f64();
    let bytes = u64::from_ne_bytes(total);
    if bytes != ops * args.size as u64 {
        return Err(io::Error::other(format!("{} bytes sent, {bytes} received", ops * args.size as u64)));
    }
    Ok(Outcome { ops, bytes, seconds, ..Default::default() })
}

/// Server of `conn`: one connection after the other.
pub fn serve_connections(listener: &Listener) -> io::Result<()> {
    let mut message = [0; SHORT];
    loop {
        let mut socket = listener.accept()?;
        if !socket.recv_all(&mut message)? || message[0] == QUIT {
            return Ok(());
        }
        socket.send(&message)?;
        // Wait for the client's close, so that the order of the closes is the same on every path.
        if socket.recv(&mut message)? != 0 {
            return Err(io::Error::other("more than expected"));
        }
    }
}

/// Client of `conn`.
pub fn connections(unix: bool, args: &Worker) -> io::Result<Outcome> {
    let connect = || Socket::connect(unix, &args.addr);
    let mut message = [b'x'; SHORT];
    let mut samples = Samples::new(args.secs);
    let mut once = |samples: &mut Samples| -> io::Result<()> {
        samples.start();
        let mut socket = connect()?;
        samples.lap();
        socket.send(&message)?;
        if !socket.recv_all(&mut message)? {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        Ok(())
    };
    let warm = 100;
    for _ in 0..warm {
        once(&mut samples)?;
    }
    samples.clear();
    let mut ops = 0;
    let started = Instant::now();
    while started.elapsed().as_secs_f64() < args.secs && ops < args.max_ops && samples.has_room() {
        for _ in 0..10 {
            once(&mut samples)?;
        }
        ops += 10;
    }
    let seconds = started.elapsed().as_secs_f64();
    connect()?.send(&[QUIT; SHORT])?;
    let connect = samples.outcome();
    Ok(Outcome { ops, warm, bytes: ops * 2 * SHORT as u64, seconds, ..connect })
}

/// Server of `idle`: `count` connections, one exchange on each, all kept.
pub fn serve_idle(listener: &Listener, count: u64) -> io::Result<()> {
    let mut open = Vec::with_capacity(count as usize);
    let mut message = [0; SHORT];
    for _ in 0..count {
        let mut socket = listener.accept()?;
        if socket.recv_all(&mut message)? {
            socket.send(&message)?;
        }
        open.push(socket);
    }
    // Idle until the client closes its connections.
    open.last_mut().map_or(Ok(0), |socket| socket.recv(&mut message)).map(drop)
}

/// Client of `idle`: prints [`OPEN`] and waits for input, once before the first connection and once after the last.
pub fn idle(unix: bool, args: &Worker) -> io::Result<()> {
    let wait = || {
        println!("{OPEN}");
        io::stdin().read(&mut [0]).map(drop)
    };
    wait()?;
    let mut open = Vec::with_capacity(args.max_ops as usize);
    let mut message = [b'x'; SHORT];
    for _ in 0..args.max_ops {
        let mut socket = Socket::connect(unix, &args.addr)?;
        socket.send(&message)?;
        socket.recv_all(&mut message)?;
        open.push(socket);
    }
    wait()
}
