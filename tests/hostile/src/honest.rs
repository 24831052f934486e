//! An honest client. It sends requests, compares the answers with the expected ones, and measures
//! the time.

use serde::{Deserialize, Serialize};
use std::io::{Read, Write};
use std::net::TcpStream;
use std::time::{Duration, Instant};

#[derive(clap::Args, Debug)]
pub struct Honest {
    /// echo, http, or redis
    #[arg(long)]
    pub kind: String,
    #[arg(long)]
    pub port: u16,
    /// Seconds
    #[arg(long)]
    pub time: u64,
    /// Microseconds between two requests
    #[arg(long, default_value_t = 2000)]
    pub pace: u64,
}

/// The results of the client.
#[derive(Debug, Default, Serialize, Deserialize)]
pub struct Seen {
    pub kind: String,
    pub requests: u64,
    pub wrong: u64,
    pub hung: u64,
    pub failed: u64,
    pub why: String,
    /// Times of requests in microseconds, sorted.
    pub times: Vec<u32>,
}

/// A request without an answer after this time hangs.
const HUNG: Duration = Duration::from_secs(5);
/// Requests on one connection before the next connection.
pub const KEPT: u64 = 50;

pub fn run(h: &Honest) {
    let mut seen = Seen { kind: h.kind.clone(), ..Seen::default() };
    let end = Instant::now() + Duration::from_secs(h.time);
    let mut next = Instant::now();
    while Instant::now() < end {
        if let Err(e) = connection(h, &mut seen, end, &mut next) {
            match e.kind() {
                std::io::ErrorKind::WouldBlock | std::io::ErrorKind::TimedOut => seen.hung += 1,
                std::io::ErrorKind::InvalidData => seen.wrong += 1,
                _ => seen.failed += 1,
            }
            seen.why = e.to_string();
            std::thread::sleep(Duration::from_millis(1));
        }
    }
    seen.times.sort_unstable();
    println!("{}", serde_json::to_string(&seen).unwrap_or_default());
}

fn connection(h: &Honest, seen: &mut Seen, end: Instant, next: &mut Instant) -> std::io::Result<()> {
    let mut began = Instant::now();
    let mut s = TcpStream::connect(("127.0.0.1", h.port))?;
    s.set_read_timeout(Some(HUNG))?;
    s.set_write_timeout(Some(HUNG))?;
    for _ in 0..KEPT {
        if Instant::now() >= end {
            break;
        }
        one(h, &mut s, seen.requests)?;
        seen.requests += 1;
        seen.times.push(began.elapsed().as_micros().min(u32::MAX.into()) as u32);
        *next = (*next + Duration::from_micros(h.pace)).max(Instant::now() - Duration::from_millis(20));
        std::thread::sleep(next.saturating_duration_since(Instant::now()));
        began = Instant::now();
    }
    Ok(())
}

fn one(h: &Honest, s: &mut TcpStream, n: u64) -> std::io::Result<()> {
    let tag = format!("{}-{n}-{}", std::process::id(), n.wrapping_mul(0x9E37_79B9_7F4A_7C15));
    match h.kind.as_str() {
        "redis" => {
            s.write_all(format!("ECHO {tag}\r\n").as_bytes())?;
            expect(s, format!("${}\r\n{tag}\r\n", tag.len()).as_bytes())
        }
        "http" => {
            s.write_all(b"GET /1000 HTTP/1.1\r\nHost: x\r\n\r\n")?;
            let mut head = Vec::new();
            let mut byte = [0u8; 1];
            while !head.ends_with(b"\r\n\r\n") {
                s.read_exact(&mut byte)?;
                head.push(byte[0]);
            }
            expect(s, &page())
        }
        _ => {
            let text = tag.repeat(1 + n as usize % 64);
            s.write_all(text.as_bytes())?;
            expect(s, text.as_bytes())
        }
    }
}

/// The page that nginx serves at /1000.
pub fn page() -> Vec<u8> {
    (0..1000u32).map(|i| (i.wrapping_mul(2_654_435_761) >> 13) as u8).collect()
}

fn expect(s: &mut TcpStream, what: &[u8]) -> std::io::Result<()> {
    let mut got = vec![0; what.len()];
    s.read_exact(&mut got)?;
    match got == what {
        true => Ok(()),
        false => Err(std::io::Error::new(std::io::ErrorKind::InvalidData, "other bytes than must come")),
    }
}
