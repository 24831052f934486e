//! A server that does nothing but read and write sockets, so that what is
//! measured is the network stack. After the demo server of Fastsocket
//! (ASPLOS'16): direct and proxy mode, a worker a CPU, several addresses.
//!
//! It is an ordinary program over libc's sockets and epoll and knows nothing of
//! the library that may be preloaded into it.

mod http;
mod server;
mod stats;
mod sys;
mod worker;

use clap::Parser;
use std::net::{SocketAddr, ToSocketAddrs};
use std::path::PathBuf;

/// HTTP server (direct mode) or proxy (with --proxy) for measuring network stacks.
///
/// Direct mode answers every GET with the same body. Proxy mode passes every
/// GET to a backend, chosen in turn, and its answer back. One worker a CPU,
/// each with its own epoll; they share the listen sockets, unless --reuseport
/// gives each its own.
///
/// SIGTERM and SIGINT end it. SIGHUP starts new workers and lets the old ones
/// finish (not with --threads). A worker that dies is replaced.
#[derive(Debug, Parser)]
#[command(name = "fastsocket-demo", version, max_term_width = 100)]
pub struct Args {
    /// Workers [default: one for each CPU this process may use]
    #[arg(short, long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=1024))]
    pub workers: Option<u16>,
    /// Address to listen on; may be given several times
    #[arg(short, long = "address", value_name = "ADDR:PORT", required = true, value_parser = address)]
    pub addresses: Vec<SocketAddr>,
    /// Be a proxy for this backend; may be given several times
    #[arg(short = 'x', long = "proxy", value_name = "ADDR:PORT", value_parser = address)]
    pub backends: Vec<SocketAddr>,
    /// Keep connections open for more requests, if the client wants it
    #[arg(short, long)]
    pub keepalive: bool,
    /// Bytes in the body of an answer (direct mode)
    #[arg(short, long, value_name = "BYTES", default_value_t = 64, value_parser = clap::value_parser!(u32).range(..=1 << 26))]
    pub size: u32,
    /// A listen socket of its own for each worker (SO_REUSEPORT)
    #[arg(short, long)]
    pub reuseport: bool,
    /// Backlog of each listen socket
    #[arg(short, long, value_name = "N", default_value_t = 4096, value_parser = clap::value_parser!(i32).range(1..))]
    pub backlog: i32,
    /// Workers are threads of one process
    #[arg(short, long)]
    pub threads: bool,
    /// Do not pin worker N to the Nth CPU
    #[arg(long)]
    pub no_pin: bool,
    /// Seconds after which a connection that does nothing is closed
    #[arg(long, value_name = "SECONDS", default_value_t = 30, value_parser = clap::value_parser!(u32).range(1..))]
    pub timeout: u32,
    /// Count connections whose latest packet was received on the worker's CPU (a system call more for each)
    #[arg(short = 'L', long)]
    pub locality: bool,
    /// Append statistics to this file instead of standard output
    #[arg(short, long, value_name = "FILE")]
    pub output: Option<PathBuf>,
    /// Statistics as a JSON object a line
    #[arg(long)]
    pub json: bool,
    /// No statistics every second, only the totals at the end
    #[arg(short, long)]
    pub quiet: bool,
    /// Say why connections failed, on standard error
    #[arg(short, long)]
    pub verbose: bool,
    /// Go to the background once it listens
    #[arg(short, long)]
    pub daemon: bool,
}

/// An address, or a name that stands for one.
fn address(text: &str) -> Result<SocketAddr, String> {
    let mut found = text.to_socket_addrs().map_err(|e| format!("{e} (ADDR:PORT or [ADDR6]:PORT)"))?;
    found.next().ok_or_else(|| "no address".to_owned())
}

fn main() -> std::process::ExitCode {
    let args = Args::parse();
    match server::run(&args) {
        Ok(()) => std::process::ExitCode::SUCCESS,
        Err(e) => {
            eprintln!("fastsocket-demo: {e}");
            std::process::ExitCode::FAILURE
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_command_line_is_consistent() {
        <Args as clap::CommandFactory>::command().debug_assert();
    }

    #[test]
    fn addresses() {
        assert!(address("127.0.0.1:80").is_ok());
        assert!(address("[::1]:80").is_ok());
        assert!(address("127.0.0.1").is_err());
        assert!(address("127.0.0.1:99999").is_err());
    }
}
