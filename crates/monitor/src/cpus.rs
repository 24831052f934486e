//! CPUs of this machine.

use fsocket_tune::CpuSet;

/// One more than the highest possible CPU number of this machine.
pub fn possible_cpus() -> usize {
    static CPUS: std::sync::OnceLock<usize> = std::sync::OnceLock::new();
    *CPUS.get_or_init(read_possible_cpus)
}

fn read_possible_cpus() -> usize {
    let text = std::fs::read_to_string("/sys/devices/system/cpu/possible").unwrap_or_default();
    let last = CpuSet::parse_list(&text).ok().and_then(|cpus| cpus.iter().last());
    last.map_or_else(|| std::thread::available_parallelism().map_or(1, usize::from), |cpu| cpu as usize + 1)
}

/// The CPUs on which this process may run (a cpuset may exclude some).
pub fn allowed_cpus() -> Vec<u32> {
    match rustix::thread::sched_getaffinity(None) {
        Ok(set) => (0..rustix::thread::CpuSet::MAX_CPU).filter(|cpu| set.is_set(*cpu)).map(|cpu| cpu as u32).collect(),
        Err(_) => vec![0],
    }
}
