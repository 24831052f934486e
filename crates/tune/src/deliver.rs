//! Brings packets to the CPU of their application without an XDP program: by rules in the card, its
//! RSS indirection table, or the kernel's RPS with RFS. Changes are a list of [`Step`]s, from which
//! this or another process can undo them.

use crate::cpus::CpuSet;
use crate::device::{check_name, interrupts, Role};
use crate::error::Error;
use crate::ethtool::{Nic, RssTable, Rule, GRO_HW, LRO, NTUPLE};
use crate::root::Root;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::io;

/// Smallest size of the kernel's flow table for RFS (Documentation/networking/scaling.rst: "a
/// value of 32768 ... has been found to work fairly well on a moderately loaded server").
pub const FLOWS: u64 = 32768;
/// The setting with the size of the flow table. It exists only in the machine's first network
/// namespace.
pub const FLOW_TABLE: &str = "proc/sys/net/core/rps_sock_flow_entries";

/// One change, with what is needed to undo it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Step {
    /// A file of the device below /sys, or a kernel setting.
    File { path: String, before: String, after: String },
    /// Filters (ntuple rules) were switched on.
    Filters,
    /// A rule was added to the card.
    Rule { location: u32 },
    /// The indirection table was changed; its entries now name these rings only.
    Table { before: RssTable, rings: Vec<u32> },
    /// The kernel switched this one of [`OFFLOADS`] off for an XDP program, and does not switch it
    /// on again.
    Offload { name: String },
}

/// Offloads that merge packets. The kernel (`dev_xdp_install`) or a driver switches them off when
/// an XDP program is attached, because the program must see packets as they were on the wire.
pub const OFFLOADS: [&str; 2] = [LRO, GRO_HW];

/// The [`OFFLOADS`] that are on. Empty if the device does not report them.
pub fn offloads(nic: &dyn Nic) -> Vec<String> {
    let features = nic.features().unwrap_or_default();
    OFFLOADS.iter().filter(|name| features.get(**name).is_some_and(|f| f.on)).map(|name| name.to_string()).collect()
}

/// The offloads of `before` that are off now.
pub fn switched_off(nic: &dyn Nic, before: Vec<String>) -> Vec<Step> {
    let now = offloads(nic);
    before.into_iter().filter(|name| !now.contains(name)).map(|name| Step::Offload { name }).collect()
}

/// The ports of one CPU: an aligned block whose size is a power of two.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ports {
    pub cpu: u32,
    pub first: u16,
    pub count: u32,
}

/// For each CPU, the receive queue whose interrupt goes to this CPU alone.
pub fn queues_by_cpu(root: &Root, device: &str) -> BTreeMap<u32, u32> {
    let mut queues = BTreeMap::new();
    // A driver may have interrupts for queues that are not in use.
    let used = root.numbered(format!("sys/class/net/{device}/queues"), "rx-").len() as u32;
    let receives = |irq: &&interrupts::Irq| matches!(irq.role, Role::Both | Role::Rx) && irq.queue < used;
    for irq in interrupts::of_device(root, device).iter().filter(receives) {
        let at = if irq.effective.is_empty() { &irq.affinity } else { &irq.effective };
        // An interrupt that may go to several CPUs does not tell which one will handle it.
        if let (1, Some(cpu)) = (at.len(), at.first()) {
            queues.entry(cpu).or_insert(irq.queue);
        }
    }
    queues
}

/// Rules (for IPv4 and IPv6) that steer answers to a CPU's ports into the queue of this CPU.
///
/// # Errors
/// A CPU has no queue.
pub fn rules(slices: &[Ports], queues: &BTreeMap<u32, u32>) -> Result<Vec<Rule>, String> {
    let mut rules = Vec::new();
    for s in slices {
        let queue = queues.get(&s.cpu).ok_or(format!("no queue's interrupt goes to CPU {} alone", s.cpu))?;
        debug_assert!(s.count.is_power_of_two() && u32::from(s.first) % s.count == 0);
        let mask = !(s.count.wrapping_sub(1)) as u16;
        rules.extend([false, true].map(|v6| Rule { v6, port: s.first, mask, queue: *queue }));
    }
    Ok(rules)
}

/// The RSS indirection table, seen as flow groups. Each entry is a group, and the CPU of its ring
/// handles the group (Affinity-Accept, 3.3.2: "the NIC's flow group table").
#[derive(Clone, Debug)]
pub struct Table {
    table: Vec<u32>,
    /// Ring of each CPU.
    rings: BTreeMap<u32, u32>,
}

/// Reads the table of a card that has a ring for each of `cpus`; changes nothing. Also returns the
/// CPU of each entry, and the record that undoes [`Table::set`].
///
/// # Errors
/// The device has no table, or an entry leads to a CPU that does not take part.
pub fn table(nic: &dyn Nic, queues: &BTreeMap<u32, u32>, cpus: &[u32]) -> Result<(Table, Vec<u32>, Step), String> {
    let rss = nic.rss().map_err(|e| e.to_string())?;
    if rss.table.is_empty() {
        return Err("it has no entries".to_owned());
    }
    let ring =
        |cpu: &u32| queues.get(cpu).map(|q| (*cpu, *q)).ok_or(format!("no queue's interrupt goes to CPU {cpu} alone"));
    let rings = cpus.iter().map(ring).collect::<Result<BTreeMap<u32, u32>, String>>()?;
    let cpu_of = |(i, ring): (usize, &u32)| {
        let cpu = rings.iter().find(|(_, r)| *r == ring).map(|(cpu, _)| *cpu);
        cpu.ok_or(format!("entry {i} is ring {ring}, whose CPU does not take part"))
    };
    let home = rss.table.iter().enumerate().map(cpu_of).collect::<Result<Vec<u32>, String>>()?;
    let before = if rss.is_default() { RssTable::Default } else { RssTable::Explicit(rss.table.clone()) };
    let step = Step::Table { before, rings: rings.values().copied().collect() };
    Ok((Table { table: rss.table, rings }, home, step))
}

impl Table {
    /// Moves a group to a CPU. Returns false if the card refuses.
    pub fn set(&mut self, nic: &dyn Nic, group: u32, cpu: u32) -> bool {
        let (Some(ring), Some(entry)) = (self.rings.get(&cpu), self.table.get_mut(group as usize)) else {
            return false;
        };
        let was = std::mem::replace(entry, *ring);
        let done = nic.set_rss(&RssTable::Explicit(self.table.clone())).is_ok();
        if !done {
            self.table[group as usize] = was;
        }
        done
    }
}

/// Restores the old table if the present one names only Fastsocket's rings. Otherwise another
/// program has set the table since, and it stays.
fn undo_table(nic: &dyn Nic, before: &RssTable, rings: &[u32]) -> io::Result<()> {
    let now = nic.rss()?;
    let size = match before {
        RssTable::Default => now.table.len(),
        RssTable::Explicit(table) => table.len(),
    };
    if now.table.len() != size || now.table.iter().any(|ring| !rings.contains(ring)) {
        return Ok(());
    }
    nic.set_rss(before)
}

/// Whether filters are on.
///
/// # Errors
/// The device has no filters.
pub fn filters(nic: &dyn Nic) -> Result<bool, String> {
    let features = nic.features().map_err(|e| format!("features: {e}"))?;
    let filters = features.get(NTUPLE).filter(|f| f.on || f.changeable);
    filters.map(|f| f.on).ok_or_else(|| "the device has no filters".to_owned())
}

/// Puts the rules into the card. If the card refuses one, nothing stays changed, and the error
/// says why.
pub fn install(nic: &dyn Nic, rules: &[Rule]) -> Result<Vec<Step>, String> {
    let mut steps = Vec::new();
    if !filters(nic)? {
        nic.set_feature(NTUPLE, true).map_err(|e| format!("switching filters on: {e}"))?;
        steps.push(Step::Filters);
    }
    for rule in rules {
        match nic.add_rule(rule) {
            Ok(location) => steps.push(Step::Rule { location }),
            Err(e) => {
                let n = steps.iter().filter(|s| matches!(s, Step::Rule { .. })).count();
                undo_in_card(nic, &steps);
                return Err(format!("rule {} of {}: {e}", n + 1, rules.len()));
            }
        }
    }
    Ok(steps)
}

/// Switches RPS to `cpus` on for every queue, and RFS where the kernel has a flow table. Packets
/// then go to the CPU where the application last read or wrote. `first` has the /proc of the
/// machine's first network namespace.
///
/// If RPS is impossible, nothing stays changed, and the error says why.
pub fn follow(root: &Root, first: &Root, device: &str, cpus: &CpuSet) -> Result<Vec<Step>, String> {
    check_name(device).map_err(|e: Error| e.to_string())?;
    let queues = format!("sys/class/net/{device}/queues");
    let numbers = root.numbered(&queues, "rx-");
    if numbers.is_empty() {
        return Err("no receive queues".to_owned());
    }
    let mut steps = Vec::new();
    let undone = |steps: &[Step], why: String| {
        undo_files(root, first, steps);
        why
    };
    match first.number(FLOW_TABLE) {
        Some(n) if n < FLOWS => {
            if let Err(e) = set(first, FLOW_TABLE, &FLOWS.to_string(), &mut steps) {
                return Err(undone(&steps, format!("RFS: {e}")));
            }
        }
        _ => {}
    }
    let each = (FLOWS / (numbers.len() as u64).next_power_of_two()).max(256).to_string();
    for q in numbers {
        let done = set(root, &format!("{queues}/rx-{q}/rps_flow_cnt"), &each, &mut steps)
            .and_then(|()| set(root, &format!("{queues}/rx-{q}/rps_cpus"), &cpus.mask(), &mut steps));
        if let Err(e) = done {
            return Err(undone(&steps, format!("RPS of queue {q}: {e}")));
        }
    }
    Ok(steps)
}

fn set(root: &Root, path: &str, to: &str, steps: &mut Vec<Step>) -> io::Result<()> {
    let before = root.read(path)?;
    root.write(path, to)?;
    // Read the value back, because the kernel writes it in its own format.
    let after = root.read(path)?;
    if before != after {
        steps.push(Step::File { path: path.to_owned(), before, after });
    }
    Ok(())
}

/// Undoes [`install`], [`Table::set`] and the effects of an XDP program. It is not an error if a
/// rule is missing.
pub fn undo_in_card(nic: &dyn Nic, steps: &[Step]) {
    for step in steps.iter().rev() {
        let _ = match step {
            Step::Rule { location } => nic.remove_rule(*location),
            Step::Filters => nic.set_feature(NTUPLE, false),
            Step::Table { before, rings } => undo_table(nic, before, rings),
            // Only known names are accepted, because the record may come from a file that another
            // program has changed.
            Step::Offload { name } if OFFLOADS.contains(&name.as_str()) => nic.set_feature(name, true),
            Step::Offload { .. } | Step::File { .. } => Ok(()),
        };
    }
}

/// Undoes [`follow`], except where another program has changed a setting since.
pub fn undo_files(root: &Root, first: &Root, steps: &[Step]) {
    for step in steps.iter().rev() {
        let Step::File { path, before, after } = step else { continue };
        // Only known paths are accepted, because the record may come from a file that another
        // program has changed.
        let root = match path.as_str() {
            FLOW_TABLE => first,
            path if path.starts_with("sys/class/net/") && !path.contains("..") => root,
            _ => continue,
        };
        if root.get(path).as_ref() == Some(after) {
            let _ = root.write(path, before);
        }
    }
}
