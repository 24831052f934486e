//! Two threads that use one socket. They take strict turns, so that each message comes from the other thread, or
//! they run at once.

use super::args::{Op, Outcome, Worker};
use super::link::{Link, Socket};
use std::io;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::Instant;

/// Number of turns between two readings of the clock.
const BURST: u32 = 64;

/// The thread whose turn it is: 0 or 1. Both threads are on the client's CPU, because a worker is pinned. The
/// waiting thread yields to the other one at once, so a turn costs a thread switch on either path.
struct Baton {
    /// Both may send at any time.
    is_free: bool,
    turn: AtomicU32,
    stop: AtomicBool,
}

impl Baton {
    /// Waits for the thread's turn. False: there are no more turns.
    fn wait(&self, me: u32) -> bool {
        while !self.is_free && self.turn.load(Ordering::Acquire) != me {
            std::thread::yield_now();
        }
        !self.stop.load(Ordering::Relaxed)
    }

    fn pass(&self, me: u32) {
        self.turn.store(1 - me, Ordering::Release);
    }
}

/// The client's side of `turns`, `turns-rate` and `both-rate`.
pub fn measure(socket: Socket, args: &Worker) -> io::Result<Outcome> {
    socket.no_delay();
    let is_free = args.op == Op::BothRate;
    let baton = Baton { is_free, turn: AtomicU32::new(0), stop: AtomicBool::new(false) };
    let started = Instant::now();
    let mine = |me: u32| -> io::Result<u64> {
        // SAFETY: `socket` outlives both threads, and only `socket` closes the descriptor.
        let mut link = unsafe { socket.again() };
        let done = take_turns(&mut link, me, &baton, args, started);
        // After an error, too: otherwise the other thread would wait for ever.
        baton.stop.store(true, Ordering::Relaxed);
        baton.pass(me);
        done
    };
    let (a, b) = std::thread::scope(|s| {
        let other = s.spawn(|| mine(1));
        (mine(0), other.join())
    });
    let ops = a? + b.map_err(|_| io::Error::other("a thread panicked"))??;
    let mut socket = socket;
    socket.finish()?;
    if args.op != Op::Turns {
        let mut total = [0; 8];
        if !socket.recv_all(&mut total)? || u64::from_ne_bytes(total) != ops * args.size as u64 {
            return Err(io::Error::other("not all bytes arrived"));
        }
    }
    let seconds = started.elapsed().as_secs_f64();
    Ok(Outcome { ops, bytes: ops * args.size as u64, seconds, ..Default::default() })
}

fn take_turns(link: &mut Socket, me: u32, baton: &Baton, args: &Worker, started: Instant) -> io::Result<u64> {
    let mut message = vec![0u8; args.size];
    let mut echo = vec![0u8; args.size];
    let mut ops = 0u64;
    while baton.wait(me) {
        message.fill(ops as u8 ^ (me as u8) << 7);
        link.send(&message)?;
        if args.op == Op::Turns && (!link.recv_all(&mut echo)? || echo != message) {
            return Err(io::Error::other("echo differs"));
        }
        ops += 1;
        if ops.is_multiple_of(u64::from(BURST)) && started.elapsed().as_secs_f64() >= args.secs {
            break;
        }
        baton.pass(me);
    }
    Ok(ops)
}
