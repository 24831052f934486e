//! Measurements of single calls, and a redis client.

use super::args::{Op, Outcome, Worker};
use super::link::{Link, Socket};
use super::samples::Samples;
use std::io;
use std::time::{Duration, Instant};

/// Number of calls between two readings of the clock.
const BURST: u64 = 256;

/// `fcntl` on the connected socket, or `socket` and `close` beside it.
pub fn calls(mut socket: Socket, args: &Worker) -> io::Result<Outcome> {
    // The connection carries bytes before the first call.
    socket.send(&[1; 8])?;
    let mut ops = 0;
    let started = Instant::now();
    while started.elapsed().as_secs_f64() < args.secs {
        for _ in 0..BURST {
            match args.op {
                Op::Fcntl => std::hint::black_box(socket.flags()?),
                _ => Socket::open().map(|()| 0)?,
            };
        }
        ops += BURST;
    }
    let seconds = started.elapsed().as_secs_f64();
    socket.finish()?;
    let mut total = [0; 8];
    if !socket.recv_all(&mut total)? || u64::from_ne_bytes(total) != 8 {
        return Err(io::Error::other("not all bytes arrived"));
    }
    Ok(Outcome { ops, seconds, mean: seconds * 1e9 / ops as f64, ..Default::default() })
}

/// Asks a redis for a value of 8 bytes, one request at a time.
pub fn redis(socket: &mut Socket, args: &Worker) -> io::Result<Outcome> {
    const SET: &[u8] = b"*3\r\n$3\r\nSET\r\n$3\r\nkey\r\n$8\r\n12345678\r\n";
    const GET: &[u8] = b"*2\r\n$3\r\nGET\r\n$3\r\nkey\r\n";
    const VALUE: &[u8] = b"$8\r\n12345678\r\n";
    socket.no_delay();
    let mut done = [0; 5];
    socket.send(SET)?;
    socket.recv_all(&mut done)?;
    let mut ask = || -> io::Result<()> {
        let mut answer = [0; VALUE.len()];
        socket.send(GET)?;
        if !socket.recv_all(&mut answer)? || answer != *VALUE {
            return Err(io::Error::other("the answer is not the value"));
        }
        Ok(())
    };
    let limit = Duration::from_secs_f64(args.secs);
    let warm_up = Instant::now();
    while warm_up.elapsed() < limit / 5 {
        ask()?;
    }
    let mut samples = Samples::new(args.secs);
    while samples.has_room() && samples.elapsed() < limit {
        samples.start();
        ask()?;
        samples.lap();
    }
    Ok(samples.outcome())
}
