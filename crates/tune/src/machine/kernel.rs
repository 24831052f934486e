//! Limits of the kernel and of processes that a busy server may reach.

use crate::root::Root;
use serde::{Deserialize, Serialize};

/// Connection tracking (`nf_conntrack`).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Conntrack {
    /// Number of entries now, and the upper limit.
    pub count: u64,
    pub max: u64,
    /// Seconds for which the entry of a closed connection remains.
    pub time_wait: u64,
}

impl Conntrack {
    pub fn inspect(root: &Root) -> Option<Conntrack> {
        const NF: &str = "proc/sys/net/netfilter/nf_conntrack";
        Some(Conntrack {
            count: root.number(format!("{NF}_count"))?,
            max: root.number(format!("{NF}_max"))?,
            time_wait: root.number(format!("{NF}_tcp_timeout_time_wait")).unwrap_or(120),
        })
    }
}

/// Limits of open files. `None`: unlimited, or unknown.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Limits {
    /// Soft and hard limit that this process inherited (`ulimit -n`).
    pub nofile: Option<u64>,
    pub nofile_hard: Option<u64>,
    /// `fs.nr_open`: upper bound of the limit of any process.
    pub nr_open: Option<u64>,
    /// `fs.file-max`: limit for all processes together.
    pub file_max: Option<u64>,
}

impl Limits {
    pub fn inspect(root: &Root) -> Limits {
        let limits = root.get("proc/self/limits").unwrap_or_default();
        let (nofile, nofile_hard) = open_files(&limits);
        Limits {
            nofile,
            nofile_hard,
            nr_open: root.number("proc/sys/fs/nr_open"),
            file_max: root.number("proc/sys/fs/file-max"),
        }
    }
}

/// Soft and hard limit of open files from /proc/PID/limits.
fn open_files(limits: &str) -> (Option<u64>, Option<u64>) {
    let line = limits.lines().find_map(|l| l.strip_prefix("Max open files")).unwrap_or("");
    let mut numbers = line.split_whitespace().map(|n| n.parse().ok());
    (numbers.next().flatten(), numbers.next().flatten())
}

/// `MemTotal`; 0 if unknown.
pub fn memory_mib(root: &Root) -> u64 {
    let text = root.get("proc/meminfo").unwrap_or_default();
    let kib = text.lines().find_map(|l| l.strip_prefix("MemTotal:")?.split_whitespace().next()?.parse::<u64>().ok());
    kib.unwrap_or(0) / 1024
}

/// Local ports in state LISTEN, sorted, without duplicates.
pub fn listening(root: &Root) -> Vec<u16> {
    let mut ports: Vec<u16> = ["proc/net/tcp", "proc/net/tcp6"]
        .iter()
        .filter_map(|path| root.get(path))
        .flat_map(|text| text.lines().filter_map(listener).collect::<Vec<_>>())
        .collect();
    ports.sort_unstable();
    ports.dedup();
    ports
}

/// The port in a line of /proc/net/tcp, if the socket is a listener (state 0A).
fn listener(line: &str) -> Option<u16> {
    let mut fields = line.split_whitespace().skip(1);
    let (local, _, state) = (fields.next()?, fields.next()?, fields.next()?);
    let port = u16::from_str_radix(local.rsplit_once(':')?.1, 16).ok()?;
    (state == "0A").then_some(port)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn limits_of_a_process() {
        let text = "Limit                     Soft Limit           Hard Limit           Units     \n\
                    Max processes             127401               127401               processes \n\
                    Max open files            1024                 unlimited            files     \n";
        assert_eq!(open_files(text), (Some(1024), None));
        assert_eq!(open_files(""), (None, None));
    }

    #[test]
    fn listeners_of_proc_net_tcp() {
        let line = "   0: 0100007F:1F90 00000000:0000 0A 00000000:00000000 00:00000000 00000000     0 0 15 1";
        assert_eq!(listener(line), Some(8080));
        assert_eq!(listener(&line.replace(" 0A ", " 01 ")), None);
        assert_eq!(listener("  sl  local_address rem_address   st"), None);
    }
}
