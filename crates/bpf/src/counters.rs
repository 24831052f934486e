//! Reads the per-CPU counters of a BPF program (`counters.h`).

use crate::{Error, Result};
use libbpf_rs::{libbpf_sys as libbpf, MapCore, MapFlags};
use std::os::fd::{AsRawFd, BorrowedFd};

/// One counter, for each CPU.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Count {
    /// The event; its name is that of the reason in the BPF program, in lower case.
    pub name: &'static str,
    /// Values by CPU number. A CPU that never existed has 0.
    pub by_cpu: Vec<u64>,
}

impl Count {
    /// The sum over all CPUs.
    pub fn total(&self) -> u64 {
        self.by_cpu.iter().sum()
    }
}

/// All counters of `map`; `names` in the order of the program's enum.
pub(crate) fn read(map: &impl MapCore, names: &[&'static str]) -> Result<Vec<Count>> {
    let failed = |e| Error::map(&map.name().to_string_lossy(), e);
    let mut counts = Vec::with_capacity(names.len());
    for (key, name) in names.iter().enumerate() {
        let values = map.lookup_percpu(&(key as u32).to_ne_bytes(), MapFlags::ANY).map_err(failed)?.unwrap_or_default();
        let by_cpu = values.iter().map(|v| v.first_chunk().map_or(0, |v| u64::from_ne_bytes(*v))).collect();
        counts.push(Count { name, by_cpu });
    }
    Ok(counts)
}

/// The sum of one counter over all CPUs, in a map that may belong to another process. 0 if it
/// cannot be read.
pub(crate) fn sum(map: BorrowedFd<'_>, key: u32) -> u64 {
    /// Maximum number of CPUs of a kernel (NR_CPUS): the kernel writes a value for each of its
    /// own.
    const CPUS: usize = 8192;
    let mut by_cpu = vec![0u64; CPUS];
    let (key, value) = ((&raw const key).cast(), by_cpu.as_mut_ptr().cast());
    // SAFETY: the key is as large as the map's; the value has room for all CPUs; both live during the call.
    unsafe { libbpf::bpf_map_lookup_elem(map.as_raw_fd(), key, value) };
    by_cpu.iter().sum()
}
