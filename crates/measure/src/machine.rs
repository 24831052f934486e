//! The machine's shape: a number without it says nothing.

use rustix::thread::{sched_getaffinity, CpuSet};
use serde::Serialize;
use std::fs;

#[derive(Debug, Serialize)]
pub struct Machine {
    pub kernel: String,
    pub architecture: String,
    pub cpu: String,
    /// CPUs that this process may use.
    pub cpus: usize,
    /// The CPUs that measurements use, the client's first.
    pub used: Vec<usize>,
    /// CPUs that share a core with the client's.
    pub siblings: String,
    pub memory_kib: u64,
    pub load: String,
    pub virtual_machine: bool,
    pub command: Vec<String>,
    pub version: &'static str,
    /// Seconds since 1970.
    pub time: u64,
}

/// CPUs that this process may use.
pub fn allowed_cpus() -> std::io::Result<Vec<usize>> {
    let set = sched_getaffinity(None)?;
    Ok((0..CpuSet::MAX_CPU).filter(|cpu| set.is_set(*cpu)).collect())
}

/// The machine as it is now; `used`: CPUs that are measured on.
pub fn shape(used: &[usize]) -> Machine {
    let read = |file: &str| fs::read_to_string(file).unwrap_or_default();
    let info = read("/proc/cpuinfo");
    let field = |text: &str, name: &str| {
        let line = text.lines().find(|l| l.starts_with(name))?;
        line.split_once(':').map(|(_, v)| v.trim().to_owned())
    };
    let memory = field(&read("/proc/meminfo"), "MemTotal").unwrap_or_default();
    let uname = rustix::system::uname();
    Machine {
        kernel: uname.release().to_string_lossy().into_owned(),
        architecture: uname.machine().to_string_lossy().into_owned(),
        cpu: field(&info, "model name").unwrap_or_else(|| "unknown".to_owned()),
        cpus: allowed_cpus().map_or(0, |c| c.len()),
        used: used.to_vec(),
        siblings: read(&format!(
            "/sys/devices/system/cpu/cpu{}/topology/thread_siblings_list",
            used.first().unwrap_or(&0)
        ))
        .trim()
        .to_owned(),
        memory_kib: memory.trim_end_matches(" kB").parse().unwrap_or(0),
        load: read("/proc/loadavg").trim().to_owned(),
        virtual_machine: field(&info, "flags").is_some_and(|f| f.split(' ').any(|flag| flag == "hypervisor")),
        command: std::env::args().collect(),
        version: env!("CARGO_PKG_VERSION"),
        time: std::time::SystemTime::UNIX_EPOCH.elapsed().map_or(0, |d| d.as_secs()),
    }
}
