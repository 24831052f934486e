//! The stages of a pipeline of processes, over connections or from standard input to standard output.

use super::args::{Outcome, Worker};
use super::link::{Link, Listener, Socket};
use std::io;
use std::time::Instant;

/// Number of messages between two readings of the clock.
const BURST: u64 = 256;

/// Standard input and output, through read and write.
pub struct Standard;

impl Link for Standard {
    #[inline]
    fn send(&mut self, message: &[u8]) -> io::Result<()> {
        let mut done = 0;
        while done < message.len() {
            let rest = &message[done..];
            // SAFETY: `rest` is readable for its length.
            let n = unsafe { libc::write(1, rest.as_ptr().cast(), rest.len()) };
            if n < 0 {
                return Err(io::Error::last_os_error());
            }
            done += n as usize;
        }
        Ok(())
    }

    #[inline]
    fn recv(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        // SAFETY: `buffer` is writable for its length.
        let n = unsafe { libc::read(0, buffer.as_mut_ptr().cast(), buffer.len()) };
        if n < 0 {
            return Err(io::Error::last_os_error());
        }
        Ok(n as usize)
    }

    fn finish(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Takes messages one by one, counts them by their first byte, and sends each one on. Returns the number of
/// messages.
pub fn pass(from: &mut impl Link, to: &mut impl Link, args: &Worker) -> io::Result<u64> {
    let mut message = vec![0; args.size];
    let mut counters = [0u64; 256];
    while from.recv_all(&mut message)? {
        counters[usize::from(message[0])] += 1;
        to.send(&message)?;
    }
    Ok(counters.iter().sum())
}

/// A stage between the connection that it accepts and the next stage. At the end, the last stage's total goes back.
pub fn stage(listener: &Listener, args: &Worker) -> io::Result<()> {
    let mut from = listener.accept()?;
    let next = args.next.as_deref().ok_or(io::ErrorKind::InvalidInput)?;
    let mut to = Socket::connect(false, next)?;
    let count = if args.stdio {
        from.place(0)?;
        to.place(1)?;
        pass(&mut Standard, &mut Standard, args)?
    } else {
        pass(&mut from, &mut to, args)?
    };
    to.finish()?;
    let mut total = [0; 8];
    to.recv_all(&mut total)?;
    if u64::from_ne_bytes(total) != count * args.size as u64 {
        return Err(io::Error::other("not all messages arrived"));
    }
    from.send(&total)?;
    // The earlier stage closes first.
    from.recv(&mut total).map(drop)
}

/// The source of a pipeline over standard input and output.
pub fn pump(args: &Worker) -> io::Result<()> {
    let message = vec![b'x'; args.size];
    let started = Instant::now();
    while started.elapsed().as_secs_f64() < args.secs {
        for _ in 0..BURST {
            Standard.send(&message)?;
        }
    }
    Ok(())
}

/// The sink of a pipeline. The time starts with the first message.
pub fn drain(args: &Worker) -> io::Result<Outcome> {
    let mut message = vec![0; args.size];
    let mut ops = 0;
    Standard.recv_all(&mut message)?;
    let started = Instant::now();
    while Standard.recv_all(&mut message)? {
        ops += 1;
    }
    let seconds = started.elapsed().as_secs_f64();
    Ok(Outcome { ops, bytes: ops * args.size as u64, seconds, ..Default::default() })
}
