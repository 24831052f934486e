//! Multi-queue veth pairs, and the CPUs that receive on them.
//!
//! On a plain veth pair, the CPU that sends a packet also receives it: a client on CPU 0 makes CPU
//! 0 receive, however many queues there are. A network card is different: it spreads flows over
//! its queues by a hash, and each queue interrupts one CPU. [`Receive`] says how a pair behaves:
//!
//! - [`Receive::Threads`] is the card. The sender's kernel picks a transmit queue by the socket's
//!   hash (no XPS), which is constant for a connection. Transmit queue *n* is the peer's receive
//!   queue *n*. A NAPI thread for each receive queue polls it, pinned to one CPU, with a priority
//!   above all programs. An XDP program runs there, as it would in that CPU's interrupt. NAPI needs
//!   GRO on.
//! - [`Receive::Rps`] spreads by software. The packet arrives on the sender's CPU, and RPS moves it
//!   by the same hash to one of the CPUs, before TCP sees it. XDP would still run on the sender's
//!   CPU.
//! - [`Receive::Inline`] is an unchanged veth pair.
//!
//! TX checksum, TSO and GSO are off on both ends. A packet that is redirected to a cpumap would
//! lose a partial checksum, and cards do not receive packets of 64 KiB.

use std::process::Command;
use std::time::{Duration, Instant};

/// The CPUs that receive on a link.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Receive {
    /// A thread that is pinned to `cpus[n % cpus.len()]` polls queue *n*.
    Threads(Vec<usize>),
    /// RPS spreads the packets of every queue over these CPUs.
    Rps(Vec<usize>),
    /// The CPU that sends also receives.
    Inline,
}

/// One end of a pair.
pub(super) struct End {
    pub namespace: String,
    pub device: String,
    /// `ADDRESS/LENGTH`; the same format for `v6`.
    pub v4: String,
    pub v6: String,
}

/// Creates and configures a pair.
pub(super) fn create(a: &End, b: &End, queues: usize, receive: &Receive) -> Result<(), String> {
    let count = queues.to_string();
    let shape = ["numtxqueues", &count, "numrxqueues", &count];
    let first = ["link", "add", &a.device, "netns", &a.namespace];
    let second = ["type", "veth", "peer", "name", &b.device, "netns", &b.namespace];
    ip(&[&first[..], &shape, &second, &shape].concat())?;
    let gro = if *receive == Receive::Inline { "off" } else { "on" };
    for End { namespace, device, v4, v6 } in [a, b] {
        inside(namespace, "ethtool", &["-K", device, "tx", "off", "tso", "off", "gso", "off", "gro", gro])?;
        ip(&["-n", namespace, "addr", "add", v4, "dev", device])?;
        ip(&["-n", namespace, "addr", "add", v6, "dev", device, "nodad"])?;
        ip(&["-n", namespace, "link", "set", device, "up"])?;
    }
    for end in [a, b] {
        match receive {
            Receive::Inline => {}
            Receive::Rps(cpus) => rps(end, cpus)?,
            Receive::Threads(cpus) => threads(end, cpus, queues)?,
        }
    }
    Ok(())
}

/// Runs a program in a namespace, with the /sys of that namespace.
pub(super) fn inside(namespace: &str, program: &str, args: &[&str]) -> Result<(), String> {
    ip(&[&["netns", "exec", namespace, program], args].concat())
}

/// Runs `ip`; an error contains its output.
pub(super) fn ip(args: &[&str]) -> Result<(), String> {
    let output = Command::new("ip").args(args).env_remove("LD_PRELOAD").output().map_err(|e| format!("ip: {e}"))?;
    if output.status.success() {
        return Ok(());
    }
    let said = String::from_utf8_lossy(&output.stderr);
    Err(format!("ip {}: {} {}", args.join(" "), output.status, said.trim()))
}

/// A bit mask in the format of the kernel's cpumask files: words of 32 bits, the highest word
/// first.
fn mask(cpus: &[usize]) -> String {
    let groups = cpus.iter().max().map_or(1, |top| top / 32 + 1);
    let mut words = vec![0u32; groups];
    for cpu in cpus {
        words[groups - 1 - cpu / 32] |= 1 << (cpu % 32);
    }
    words.iter().map(|word| format!("{word:08x}")).collect::<Vec<_>>().join(",")
}

fn rps(end: &End, cpus: &[usize]) -> Result<(), String> {
    let script = format!(
        "for q in /sys/class/net/{}/queues/rx-*; do echo {} > $q/rps_cpus || exit 1; done",
        end.device,
        mask(cpus)
    );
    inside(&end.namespace, "sh", &["-c", &script])
}

fn threads(end: &End, cpus: &[usize], queues: usize) -> Result<(), String> {
    let script = format!("echo 1 > /sys/class/net/{}/threaded", end.device);
    inside(&end.namespace, "sh", &["-c", &script])?;
    let limit = Instant::now() + Duration::from_secs(5);
    let pids = loop {
        let pids = napi_threads(&end.device);
        if pids.len() == queues {
            break pids;
        }
        if Instant::now() > limit {
            return Err(format!("{}: {} NAPI threads instead of {queues}", end.device, pids.len()));
        }
        std::thread::sleep(Duration::from_millis(5));
    };
    for (queue, pid) in pids.iter().enumerate() {
        let failed = |e| format!("NAPI thread {pid} of {}: {e}", end.device);
        crate::process::set_affinity(*pid, &[cpus[queue % cpus.len()]]).map_err(failed)?;
        // An interrupt would not wait for programs, so these threads must not, either. A thread
        // that waits for a busy CPU would lose packets, because the ring of a veth queue holds
        // only 256.
        crate::process::set_realtime(*pid).map_err(failed)?;
    }
    Ok(())
}

/// The threads that poll a device, ordered by queue. The driver adds NAPI instances in the order
/// of the queues, and the kernel numbers them in this order.
pub fn napi_threads(device: &str) -> Vec<i32> {
    let prefix = format!("napi/{device}-");
    let mut found: Vec<(u32, i32)> = Vec::new();
    for entry in std::fs::read_dir("/proc").into_iter().flatten().flatten() {
        let Some(pid) = entry.file_name().to_str().and_then(|name| name.parse().ok()) else { continue };
        let comm = std::fs::read_to_string(entry.path().join("comm")).unwrap_or_default();
        if let Some(id) = comm.trim().strip_prefix(&prefix).and_then(|id| id.parse().ok()) {
            found.push((id, pid));
        }
    }
    found.sort_unstable();
    found.into_iter().map(|(_, pid)| pid).collect()
}

#[cfg(test)]
mod tests {
    #[test]
    fn masks() {
        assert_eq!(super::mask(&[0, 1]), "00000003");
        assert_eq!(super::mask(&[33, 0]), "00000002,00000001");
    }
}
