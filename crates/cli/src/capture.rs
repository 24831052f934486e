//! `fastsocket capture`: writes the bytes of a running program to a file that Wireshark reads.
//!
//! The bytes are in shared memory, where there are no packets. So the program uses the kernel for that time
//! ([`crate::operate`]), and the kernel's own capture on the loopback device sees its connections. However the command
//! ends, it first returns the program to shared memory.

mod filter;
mod pcapng;
mod socket;

use crate::{operate, place};
use anyhow::{bail, Context, Result};
use clap::Args;
use filter::Filter;
use fsocket_client::control;
use fsocket_proto::operate::Target;
use fsocket_proto::report::Connection;
use pcapng::Writer;
use rustix::event::{poll, PollFd, PollFlags, Timespec};
use rustix::io::Errno;
use socket::{Loopback, Stop};
use std::collections::BTreeSet;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// Number of packets between two looks at the time.
const AT_ONCE: usize = 1000;

/// The file could not be written, or the connections are not back in shared memory.
const EXIT_FAILED: i32 = 1;
/// There is no such process or unit, or this user may not capture.
const EXIT_NOTHING: i32 = 2;

/// Write a running program's connections inside this host to a file that Wireshark and tcpdump read
///
/// For that time the program uses the kernel (fastsocket off), and the loopback device is captured; afterwards it is as
/// before (fastsocket on). Until SIGINT or SIGTERM, or for --seconds. Needs CAP_NET_RAW. Connections to other
/// hosts do not pass that device: tcpdump sees them in any case. Unix connections have no packets.
///
/// Exit status: 0 done; 1 the file could not be written; 2 there is no such process or unit with the library, or
/// this user may not capture.
#[derive(Debug, Args)]
pub struct Capture {
    /// A process, or a systemd unit
    #[arg(value_name = "PID|UNIT", value_parser = operate::parse)]
    target: Target,
    /// File to write, in the format pcapng; replaced if there is one
    #[arg(short, long, value_name = "FILE.pcapng")]
    write: PathBuf,
    /// Only connections with this port, at either end; may be repeated
    #[arg(long, value_name = "PORT", value_parser = clap::value_parser!(u16).range(1..))]
    port: Vec<u16>,
    /// How long
    #[arg(long, value_name = "SECONDS", value_parser = clap::value_parser!(u64).range(1..))]
    seconds: Option<u64>,
}

/// `fastsocket capture`.
pub fn run(args: &Capture) -> i32 {
    let prepared = Loopback::open()
        .map_err(|e| match e {
            Errno::PERM | Errno::ACCESS => anyhow::anyhow!("capturing needs CAP_NET_RAW: run it as root"),
            e => anyhow::anyhow!("cannot capture on the loopback device: {e}"),
        })
        .and_then(|loopback| Ok((loopback, Stop::on_signals()?)))
        .and_then(|(loopback, stop)| Ok((loopback, stop, Switched::off(&args.target)?)));
    let (loopback, stop, switched) = match prepared {
        Ok(prepared) => prepared,
        Err(e) => {
            eprintln!("fastsocket: {e:#}");
            return EXIT_NOTHING;
        }
    };
    let captured = capture(args, &loopback, &stop, &switched.pids);
    let back = switched.on();
    match captured.and_then(|packets| back.map(|()| packets)) {
        Ok(packets) => {
            let lost = loopback.lost();
            let lost = if lost == 0 { String::new() } else { format!(", {lost} of this device were lost") };
            eprintln!("fastsocket: {packets} packets in {}{lost}", args.write.display());
            0
        }
        Err(e) => {
            eprintln!("fastsocket: {e:#}");
            EXIT_FAILED
        }
    }
}

/// The programs use the kernel until this is dropped.
struct Switched {
    socket: PathBuf,
    target: Target,
    pids: BTreeSet<i32>,
    /// An operator had already moved them to the kernel.
    were_off: bool,
}

impl Switched {
    fn off(target: &Target) -> Result<Switched> {
        let socket = operate::socket(target)?;
        let before = control::report(&socket)?;
        let outcome = operate::ask(&socket, target, true).map_err(|e| anyhow::anyhow!(operate::why(target, &e)))?;
        let pids: BTreeSet<i32> = outcome.processes.keys().filter_map(|pid| i32::try_from(*pid).ok()).collect();
        let was_off = |pid: &u32| before.processes.iter().any(|p| p.pid == *pid && p.off);
        let were_off = outcome.processes.keys().all(was_off);
        let switched = Switched { socket, target: target.clone(), pids, were_off };
        let is_unix = |c: &&Connection| c.local.parse::<SocketAddr>().is_err();
        let is_theirs = |c: &&Connection| c.pids.iter().any(|pid| outcome.processes.contains_key(pid));
        match before.connections.iter().filter(is_theirs).filter(is_unix).count() {
            0 => {}
            n => eprintln!("fastsocket: {n} Unix connections are not in the file: the kernel makes no packets of them"),
        }
        if outcome.left > 0 {
            eprintln!("fastsocket: {} connections are seen from the program's next call on", outcome.left);
        }
        let here = place::namespace(std::process::id() as i32, "net");
        if let Some(pid) = switched.pids.iter().find(|pid| place::namespace(**pid, "net") != here) {
            let pid = *pid;
            switched.on()?;
            bail!("process {pid} is in another network namespace: nsenter --net -t {pid} fastsocket capture …");
        }
        Ok(switched)
    }

    fn on(self) -> Result<()> {
        if self.were_off {
            return Ok(());
        }
        match operate::ask(&self.socket, &self.target, false) {
            Ok(_) => Ok(()),
            // The process has ended.
            Err(e) if operate::errno(&e) == Some(libc::ENOENT) => Ok(()),
            Err(e) => bail!("{}; it stays with the kernel", operate::why(&self.target, &e)),
        }
    }
}

/// The file gets its name only when it is complete. Returns the number of packets.
fn capture(args: &Capture, loopback: &Loopback, stop: &Stop, pids: &BTreeSet<i32>) -> Result<u64> {
    let failed = || args.write.display().to_string();
    let directory = args.write.parent().filter(|d| !d.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let file = tempfile::NamedTempFile::new_in(directory).with_context(failed)?;
    let mut writer = Writer::new(std::io::BufWriter::new(file)).with_context(failed)?;
    let mut filter = Filter::new(pids.clone(), args.port.clone());
    let until = args.seconds.map(|s| Instant::now() + Duration::from_secs(s));
    let mut packets = 0;
    let mut buffer = vec![0; socket::LONGEST];
    loop {
        let left = until.map(|at| at.saturating_duration_since(Instant::now()));
        if left == Some(Duration::ZERO) {
            break;
        }
        let left = left.map(|l| Timespec { tv_sec: l.as_secs() as i64, tv_nsec: i64::from(l.subsec_nanos()) });
        let mut fds = [PollFd::new(&loopback.fd, PollFlags::IN), PollFd::new(&stop.fd, PollFlags::IN)];
        match poll(&mut fds, left.as_ref()) {
            Ok(_) | Err(Errno::INTR) => {}
            Err(e) => bail!("poll: {e}"),
        }
        if !fds[1].revents().is_empty() {
            break;
        }
        for _ in 0..AT_ONCE {
            let Some(packet) = loopback.next(&mut buffer)? else { break };
            if filter.wants(packet.bytes) {
                writer.packet(&packet).with_context(failed)?;
                packets += 1;
            }
        }
    }
    let file = writer.end().with_context(failed)?.into_inner().map_err(|e| e.into_error()).with_context(failed)?;
    file.persist(&args.write).map_err(|e| e.error).with_context(failed)?;
    Ok(packets)
}
