//! An honest program during an attack. It measures the time to greet the monitor, to get a channel,
//! to get an answer of the monitor on an existing control socket, and to get an answer on an
//! existing connection. Over kernel TCP it measures the time to connect and to get an answer.

use crate::peer::Peer;
use crate::random::Random;
use fsocket_proto::raw::Packet;
use fsocket_proto::{request, Payload};
use fsocket_sys as sys;
use serde::{Deserialize, Serialize};
use std::io::{Read, Write};
use std::net::TcpStream;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

#[derive(clap::Args, Debug)]
pub struct Probe {
    /// The monitor's socket; none: kernel TCP
    #[arg(long)]
    pub socket: Option<PathBuf>,
    #[arg(long)]
    pub port: u16,
    /// Seconds
    #[arg(long)]
    pub time: f64,
}

/// Times in microseconds, sorted.
#[derive(Debug, Default, Clone, Serialize, Deserialize)]
pub struct Figures {
    pub hello: Vec<u32>,
    pub connect: Vec<u32>,
    pub asked: Vec<u32>,
    pub request: Vec<u32>,
    pub failed: u64,
    pub why: String,
}

/// The figure that shows the cost of an attack.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Figure {
    Hello,
    Connect,
    Asked,
    Request,
}

impl Figures {
    pub fn of(&self, which: Figure) -> &[u32] {
        match which {
            Figure::Hello => &self.hello,
            Figure::Connect => &self.connect,
            Figure::Asked => &self.asked,
            Figure::Request => &self.request,
        }
    }

    /// In milliseconds.
    pub fn p99(&self, which: Figure) -> f64 {
        self.quantile(which, 99)
    }

    pub fn quantile(&self, which: Figure, percent: usize) -> f64 {
        let all = self.of(which);
        let at = (all.len() * percent / 100).min(all.len().saturating_sub(1));
        all.get(at).map_or(f64::NAN, |us| f64::from(*us) / 1000.0)
    }

    fn failed(&mut self, why: impl Into<String>) {
        self.failed += 1;
        self.why = why.into();
    }
}

/// A request that takes longer hangs.
const HUNG: Duration = Duration::from_secs(20);
const PACE: Duration = Duration::from_millis(4);

pub fn run(p: &Probe) {
    let mut f = Figures::default();
    match connected(p.port) {
        Ok(held) => rounds(p, held, &mut f),
        Err(e) => f.failed(format!("first connection: {e}")),
    }
    for all in [&mut f.hello, &mut f.connect, &mut f.asked, &mut f.request] {
        all.sort_unstable();
    }
    println!("{}", serde_json::to_string(&f).unwrap_or_default());
}

fn rounds(p: &Probe, mut held: TcpStream, f: &mut Figures) {
    let mut random = Random::new(sys::now_ns());
    let mut known = p.socket.as_ref().and_then(|at| greeted(at, &mut random).ok());
    let end = Instant::now() + Duration::from_secs_f64(p.time);
    for n in 0u32.. {
        if Instant::now() >= end {
            return;
        }
        if let Err(e) = timed(&mut f.request, || echo(&mut held, n)) {
            return f.failed(format!("its connection: {e}"));
        }
        let done = match &p.socket {
            Some(at) => ours(at, p.port, &mut known, &mut random, f),
            None => stock(p.port, f),
        };
        if let Err(e) = done {
            f.failed(e);
        }
        std::thread::sleep(PACE);
    }
}

fn timed<T, E>(times: &mut Vec<u32>, what: impl FnOnce() -> Result<T, E>) -> Result<T, E> {
    let began = Instant::now();
    let done = what()?;
    times.push(began.elapsed().as_micros().min(u32::MAX.into()) as u32);
    Ok(done)
}

fn greeted(at: &std::path::Path, random: &mut Random) -> Result<Peer, String> {
    let mut peer = Peer::connect(at).map_err(|e| format!("the monitor's socket: {e:?}"))?;
    if peer.hello(random) {
        return Ok(peer);
    }
    let _ = sys::close(peer.fd);
    Err("HELLO is refused".into())
}

fn ours(at: &Path, port: u16, known: &mut Option<Peer>, random: &mut Random, f: &mut Figures) -> Result<(), String> {
    let known = known.as_mut().ok_or("the monitor has not greeted it")?;
    let ask = Packet { id: u64::MAX, ..Packet::new(request::Claim::KIND) };
    timed(&mut f.asked, || known.request(ask, None).ok_or("the monitor does not answer"))?;
    let mut fresh = timed(&mut f.hello, || greeted(at, random))?;
    let channel = timed(&mut f.connect, || fresh.another(port, 0).ok_or("no channel"));
    let _ = sys::close(fresh.fd);
    Ok(channel.map(drop)?)
}

fn stock(port: u16, f: &mut Figures) -> Result<(), String> {
    let mut fresh = timed(&mut f.hello, || {
        let mut c = timed(&mut f.connect, || connected(port))?;
        echo(&mut c, 1)?;
        Ok::<_, std::io::Error>(c)
    })
    .map_err(|e| e.to_string())?;
    timed(&mut f.asked, || echo(&mut fresh, 2)).map_err(|e| e.to_string())
}

fn connected(port: u16) -> std::io::Result<TcpStream> {
    let s = TcpStream::connect(("127.0.0.1", port))?;
    s.set_read_timeout(Some(HUNG))?;
    s.set_write_timeout(Some(HUNG))?;
    s.set_nodelay(true)?;
    Ok(s)
}

fn echo(s: &mut TcpStream, n: u32) -> std::io::Result<()> {
    let text = format!("{n:08x}").repeat(8);
    s.write_all(text.as_bytes())?;
    let mut got = vec![0; text.len()];
    s.read_exact(&mut got)?;
    match got == text.as_bytes() {
        true => Ok(()),
        false => Err(std::io::Error::new(std::io::ErrorKind::InvalidData, "other bytes than must come")),
    }
}
