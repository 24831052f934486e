//! Arguments and result of one end of a measurement.

use clap::{Args, ValueEnum};
use serde::{Deserialize, Serialize};

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
    /// Two processes that sleep on a futex.
    Futex,
}

/// The exchange between the two ends.
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
    /// One way, by two threads at once.
    BothRate,
    /// Connect, 64 bytes each way, close.
    Conn,
    /// Open connections, 64 bytes each way once, then wait.
    Idle,
    /// `fcntl` on a connected socket.
    Fcntl,
    /// Make a socket and close it.
    Open,
    /// GET of 8 bytes from a redis at `addr`; the client only.
    Redis,
    /// One step of a pipeline: takes messages of `size`, counts them, and sends them to `next`.
    Stage,
    /// Messages to standard output, for a while.
    Pump,
    /// Messages from standard input, counted, to standard output.
    Filter,
    /// Messages from standard input, counted.
    Drain,
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
    /// Port of the next stage
    #[arg(long)]
    pub next: Option<String>,
    /// A stage's connections become standard input and output
    #[arg(long)]
    pub stdio: bool,
    /// Connect, say so, and wait for a line of input
    #[arg(long)]
    pub gate: bool,
}

/// The result of a client: one line of JSON.
#[derive(Debug, Default, Serialize, Deserialize)]
pub struct Outcome {
    pub ops: u64,
    /// Earlier operations (the warm-up), which count for CPU time only.
    pub warm: u64,
    pub bytes: u64,
    pub seconds: f64,
    /// Mean and quantiles of a round trip, of `connect`, or of a call, in nanoseconds.
    pub mean: f64,
    pub p1: f64,
    pub p50: f64,
    pub p99: f64,
}

/// The beginning of the line that says that a server listens. The address follows.
pub const READY: &str = "READY ";
/// The line that an idle client prints when all connections are open.
pub const OPEN: &str = "OPEN";
