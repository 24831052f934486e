//! What a hostile process does in the control run: as many connections as in the attack, as fast, and as much of the
//! CPUs, by kernel TCP. On a small machine most of what victims notice comes from that, and a user may do that anywhere.

use crate::lives::{Cost, Life, A_CONNECTION_NS};
use fsocket_abi::channel::SLOTS;
use fsocket_sys as sys;
use std::collections::VecDeque;
use std::io::Write;
use std::net::TcpStream;

/// Connections of a life that is about words in shared memory, and writes to each before its channel would be retired.
const FEW: usize = 8;

pub fn life(l: &mut Life, cost: Cost) -> Option<()> {
    let port = *l.random.one(l.ports);
    match cost {
        Cost::Connections => connections(l, port),
        Cost::Words => {
            write(port, FEW);
            busy()
        }
        Cost::Wakes => write(port, usize::MAX),
        Cost::Messages => busy(),
    }
}

/// Few connections, and so many writes to each, one in a tenth of a millisecond.
fn write(port: u16, times: usize) -> Option<()> {
    let mut open: Vec<TcpStream> = (0..FEW).map_while(|_| connected(port)).collect();
    for _ in 0..times {
        for c in &mut open {
            let _ = c.write(b"\0\0\0\0\0\0\r\n");
            sys::nanosleep(100_000);
        }
    }
    Some(())
}

fn connected(port: u16) -> Option<TcpStream> {
    let c = TcpStream::connect(("127.0.0.1", port)).ok()?;
    c.set_nonblocking(true).ok()?;
    Some(c)
}

fn connections(l: &mut Life, port: u16) -> Option<()> {
    let mut open = VecDeque::new();
    loop {
        let mut c = connected(port)?;
        let asks: &[u8] = if port.is_multiple_of(2) { b"GET /1000 HTTP/1.1\r\nHost: x\r\n\r\n" } else { b"PING\r\n" };
        if l.random.chance(80) {
            let _ = c.write(asks);
        }
        sys::nanosleep(l.random.below(2 * A_CONNECTION_NS) as u64);
        let _ = c.write(b"\0\0\0\0\0\0\r\n");
        open.push_back(c);
        if open.len() == SLOTS {
            open.pop_front();
        }
    }
}

/// Calls, one after the other, until it is killed.
fn busy() -> ! {
    loop {
        // SAFETY: no argument.
        unsafe { libc::getppid() };
    }
}
