//! A process of the control run. By kernel TCP it opens as many connections as the attack, as fast,
//! and uses as much CPU time. On a small machine this causes most of what victims notice, and every
//! user may do it anywhere.

use crate::lives::{Cost, Life, A_CONNECTION_NS};
use fsocket_abi::channel::SLOTS;
use fsocket_sys as sys;
use std::collections::VecDeque;
use std::io::Write;
use std::net::TcpStream;

/// Connections of a script that works on words in shared memory, and writes to each of them before
/// its channel would be retired.
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

/// Opens few connections and writes `times` times to each, with one write in a tenth of a
/// millisecond.
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

/// Makes system calls, one after the other, until it is killed.
fn busy() -> ! {
    loop {
        // SAFETY: the call takes no argument.
        unsafe { libc::getppid() };
    }
}
