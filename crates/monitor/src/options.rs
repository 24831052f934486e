//! Options of `fastsocketd`. They have a file of their own because the manual page is generated
//! from it.

use clap::Parser;
use std::path::PathBuf;

/// Monitor of the shared-memory path of Fastsocket.
#[derive(Parser)]
#[command(name = "fastsocketd", version)]
pub struct Options {
    /// Path of the socket where clients find the monitor
    #[arg(long, value_name = "PATH", default_value = fsocket_proto::paths::SYSTEM_SOCKET)]
    pub socket: PathBuf,
    /// Serve only this user and root, and exit when nobody needs it
    #[arg(long)]
    pub private: bool,
    /// With --private: exit this long after the last process went
    #[arg(long, value_name = "SECONDS", default_value_t = 5.0)]
    pub linger: f64,
    /// Go on for the programs of a monitor that has ended, whose socket is descriptor 3
    #[arg(long, hide = true)]
    pub retired: bool,
    /// Print the number of the ABI, and exit
    #[arg(long, hide = true)]
    pub abi: bool,
    /// End monitors of other versions that have stayed for their programs, and exit. New connections of these programs
    /// use the kernel
    #[arg(long)]
    pub end_retired: bool,
    /// Two processes with --private, too
    #[arg(long, hide = true)]
    pub split: bool,
    /// Permissions of the socket, octal [default: 0666; with --private 0600]
    #[arg(long, value_parser = parse_mode)]
    pub mode: Option<u32>,
    /// Directory for what a restarted monitor takes over, with pins in /sys/fs/bpf
    /// [default: that of the socket; with --private nothing is kept]
    #[arg(long, value_name = "DIR")]
    pub keep: Option<PathBuf>,
    /// Serve metrics for Prometheus at http://ADDR/metrics. Anybody who reaches the address may read
    /// the sums of all users
    #[arg(long, value_name = "ADDR", value_parser = parse_address)]
    pub metrics: Option<std::net::SocketAddr>,
    /// Configuration file; it need not exist if it is not named here
    #[arg(long, value_name = "FILE", env = "FASTSOCKET_CONFIG")]
    pub config: Option<PathBuf>,
    /// Read the configuration file, say what is wrong with it, and exit
    #[arg(long)]
    pub check: bool,
    /// Log more than warnings to standard error, or to the journal; up to three times. FASTSOCKET_LOG sets a filter
    #[arg(short, long, action = clap::ArgAction::Count)]
    pub verbose: u8,
}

fn parse_mode(text: &str) -> Result<u32, String> {
    match u32::from_str_radix(text, 8) {
        Ok(mode) if mode <= 0o777 => Ok(mode),
        _ => Err("not an octal mode up to 0777".into()),
    }
}

/// `127.0.0.1:9777`, `[::1]:9777`, `localhost:9777`.
fn parse_address(text: &str) -> Result<std::net::SocketAddr, String> {
    let mut found = std::net::ToSocketAddrs::to_socket_addrs(text).map_err(|e| e.to_string())?;
    found.next().ok_or_else(|| "no address".into())
}
