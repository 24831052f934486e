//! `fastsocket bench-worker`: one end of a measurement. Uses plain blocking
//! libc calls, as the programs do that it stands for; whether they end in the
//! kernel or in the library is decided by `LD_PRELOAD` alone.

pub mod link;
mod ops;
mod turns;

use clap::{Args, ValueEnum};
use link::{Listener, Socket};
use serde::{Deserialize, Serialize};
use std::path::PathBuf;

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Role {
    Server,
    Client,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Transport {
    Tcp,
    Unix,
    Queue,
}

/// What the two ends do.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Op {
    /// Ping-pong.
    Rtt,
    /// One way; the receiver takes up to 64 KiB at once.
    Rate,
    /// One way; the receiver takes one message at a time.
    RateExact,
    /// Ping-pong by two threads in turns.
    Turns,
    /// One way, by two threads in turns.
    TurnsRate,
    /// Connect, 64 bytes each way, close.
    Conn,
    /// Open connections, 64 bytes each way once, then wait.
    Idle,
}

#[derive(Debug, Args)]
pub struct Worker {
    #[arg(long)]
    pub role: Role,
    #[arg(long)]
    pub transport: Transport,
    #[arg(long)]
    pub op: Op,
    /// Port, path of the socket, or file of the queue; a TCP server chooses its port itself
    #[arg(long, default_value = "")]
    pub addr: String,
    #[arg(long, default_value_t = 8)]
    pub size: usize,
    #[arg(long, default_value_t = 0.5)]
    pub secs: f64,
    #[arg(long, default_value_t = u64::MAX)]
    pub max_ops: u64,
    #[arg(long)]
    pub cpu: Option<usize>,
}

/// What a client prints, one line of JSON.
#[derive(Debug, Default, Serialize, Deserialize)]
pub struct Outcome {
    pub ops: u64,
    pub bytes: u64,
    pub seconds: f64,
    /// Nanoseconds per round trip.
    pub p50: f64,
    pub p99: f64,
}

/// The line with which a server says that it listens, before the address.
pub const READY: &str = "READY ";
/// The line of an idle client once everything is open.
pub const OPEN: &str = "OPEN";

/// Runs one end; the exit status.
pub fn run(args: &Worker) -> i32 {
    match work(args) {
        Ok(()) => 0,
        Err(e) => {
            eprintln!("bench-worker ({:?} {:?} {:?}): {e}", args.role, args.transport, args.op);
            1
        }
    }
}

fn work(args: &Worker) -> std::io::Result<()> {
    if let Some(cpu) = args.cpu {
        super::child::pin_self(cpu)?;
    }
    raise_descriptor_limit();
    let path = PathBuf::from(&args.addr);
    match (args.role, args.transport) {
        (Role::Server, Transport::Queue) => {
            let mut queue = super::queue::Queue::open(&path, true)?;
            println!("{READY}{}", args.addr);
            ops::serve(&mut queue, args)
        }
        (Role::Client, Transport::Queue) => {
            let outcome = ops::measure(&mut super::queue::Queue::open(&path, false)?, args)?;
            print_outcome(&outcome)
        }
        (Role::Server, transport) => {
            let listener = if transport == Transport::Tcp { Listener::tcp()? } else { Listener::unix(&path)? };
            println!("{READY}{}", listener.address);
            match args.op {
                Op::Conn => ops::serve_connections(&listener),
                Op::Idle => ops::serve_idle(&listener, args.max_ops),
                _ => ops::serve(&mut listener.accept()?, args),
            }
        }
        (Role::Client, transport) => {
            let unix = transport == Transport::Unix;
            match args.op {
                Op::Conn => print_outcome(&ops::connections(unix, args)?),
                Op::Idle => ops::idle(unix, args),
                Op::Turns | Op::TurnsRate => print_outcome(&turns::measure(Socket::connect(unix, &args.addr)?, args)?),
                _ => print_outcome(&ops::measure(&mut Socket::connect(unix, &args.addr)?, args)?),
            }
        }
    }
}

fn print_outcome(outcome: &Outcome) -> std::io::Result<()> {
    println!("{}", serde_json::to_string(outcome)?);
    Ok(())
}

/// A thousand connections and the usual soft limit of 1024 do not go together.
fn raise_descriptor_limit() {
    use rustix::process::{getrlimit, setrlimit, Resource};
    let mut limit = getrlimit(Resource::Nofile);
    limit.current = limit.maximum;
    let _ = setrlimit(Resource::Nofile, limit);
}
