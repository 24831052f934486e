//! The interrupts of a device, and the queue that each one serves.

use crate::cpus::CpuSet;
use crate::root::Root;
use serde::{Deserialize, Serialize};

/// The event that an interrupt announces: packets received, packets sent, both, or something else.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Role {
    Both,
    Rx,
    Tx,
    /// An interrupt that belongs to no queue: link changes, management, mailboxes.
    Other,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Irq {
    pub number: u32,
    /// The name that the driver gave, unique within the device. If a driver allocates its
    /// interrupts again, they keep their names but not their numbers.
    pub name: String,
    pub role: Role,
    /// Number of the queue: the rank among the device's interrupts of this role.
    pub queue: u32,
    /// CPUs to which the interrupt may go.
    pub affinity: CpuSet,
    /// CPUs to which the interrupt goes now.
    pub effective: CpuSet,
}

/// All interrupts of a device. Those of queues come first, ordered by queue.
pub fn of_device(root: &Root, device: &str) -> Vec<Irq> {
    let mut found: Vec<(u32, String)> =
        numbers(root, device).into_iter().filter_map(|number| Some((number, name_of(root, number)?))).collect();
    // Two ports can share one PCI function (mlx4). Then the names tell which interrupt belongs to
    // which port.
    let ports = root.names(format!("sys/class/net/{device}/device/net"));
    if ports.len() > 1 && found.iter().any(|(_, name)| mentions(name, device)) {
        found.retain(|(_, name)| mentions(name, device));
    }
    let mut seen = std::collections::BTreeMap::new();
    let mut irqs: Vec<(Role, u32, u32, String)> = Vec::new();
    for (number, name) in found {
        let times = seen.entry(name.clone()).and_modify(|n| *n += 1).or_insert(1);
        let name = if *times > 1 { format!("{name}#{times}") } else { name };
        let (role, index) = classify(&name, device);
        irqs.push((role, index, number, name));
    }
    // mlx4 names its interrupts `mlx4-3@0000:06:00.0`, without a role.
    if irqs.iter().all(|irq| irq.0 == Role::Other) {
        for irq in &mut irqs {
            if let Some(index) = plain(&irq.3, device) {
                (irq.0, irq.1) = (Role::Both, index);
            }
        }
    }
    irqs.sort();
    let mut ranks = [0u32; 4];
    irqs.into_iter()
        .map(|(role, _, number, name)| {
            let rank = &mut ranks[role as usize];
            let queue = *rank;
            *rank += 1;
            let list = |file: &str| {
                root.get(format!("proc/irq/{number}/{file}"))
                    .and_then(|t| CpuSet::parse_list(&t).ok())
                    .unwrap_or_default()
            };
            let (affinity, effective) = (list("smp_affinity_list"), list("effective_affinity_list"));
            Irq { number, name, role, queue, affinity, effective }
        })
        .collect()
}

/// Numbers of the MSI vectors of the PCI function. If there are none: of interrupts whose name
/// contains the device's name.
fn numbers(root: &Root, device: &str) -> Vec<u32> {
    let base = format!("sys/class/net/{device}/device");
    let own = root.numbered(format!("{base}/msi_irqs"), "");
    if !own.is_empty() {
        return own;
    }
    // For a virtio device, look at the PCI function above it. For other devices do not look at the
    // parent, because it may be a bridge with interrupts of its own.
    let subsystem = root.path(format!("{base}/subsystem")).canonicalize().unwrap_or_default();
    if subsystem.file_name().is_some_and(|n| n == "virtio") {
        let parent = root.numbered(format!("{base}/../msi_irqs"), "");
        if !parent.is_empty() {
            return parent;
        }
    }
    let table = root.get("proc/interrupts").unwrap_or_default();
    parse_interrupts(&table).into_iter().filter(|(_, name)| mentions(name, device)).map(|(n, _)| n).collect()
}

/// Name of an interrupt. `None`: no driver has requested the vector (yet).
fn name_of(root: &Root, irq: u32) -> Option<String> {
    if let Some(actions) = root.get(format!("sys/kernel/irq/{irq}/actions")) {
        return (!actions.is_empty() && actions != "(null)").then_some(actions);
    }
    let table = root.get("proc/interrupts")?;
    parse_interrupts(&table).into_iter().find(|(n, _)| *n == irq).map(|(_, name)| name)
}

/// Number and name of each numbered line of /proc/interrupts. A line has a count for each CPU,
/// then the chip, the number in hardware with its trigger (one word on x86, two on Arm), and the
/// name.
pub fn parse_interrupts(table: &str) -> Vec<(u32, String)> {
    let mut lines = table.lines();
    let cpus = lines.next().map_or(0, |header| header.split_whitespace().filter(|w| w.starts_with("CPU")).count());
    lines
        .filter_map(|line| {
            let (number, rest) = line.split_once(':')?;
            let number = number.trim().parse().ok()?;
            let words: Vec<&str> = rest.split_whitespace().skip(cpus).collect();
            let is_trigger = |w: &str| ["edge", "level", "fasteoi"].contains(&w.to_ascii_lowercase().as_str());
            let skip = match words.get(2) {
                Some(word) if is_trigger(word) => 3,
                _ => 2,
            };
            let name = words.get(skip..)?.join(" ");
            (!name.is_empty()).then_some((number, name))
        })
        .collect()
}

/// Whether the name contains the device's name as a whole word: `i40e-eth1-TxRx-0` contains
/// `eth1`, but `eth10-rx-0` does not.
fn mentions(name: &str, device: &str) -> bool {
    let word = |c: Option<char>| c.is_none_or(|c| !c.is_ascii_alphanumeric());
    name.match_indices(device)
        .any(|(at, _)| word(name[..at].chars().next_back()) && word(name[at + device.len()..].chars().next()))
}

/// Parts that occur only in names of interrupts without a queue, even if the name ends in a
/// number.
const OTHER: &[&str] = &[
    "fdir", "config", "mgmnt", "mgmt", "async", "misc", "cmd", "ctrl", "event", "link", "mbx", "adminq", "aeq", "ceq",
    "fwevtq",
];
/// Parts of names of interrupts that serve both directions: Intel, ENA and
/// Broadcom; mlx5 and ionic completion vectors; bnx2x and qede fast paths;
/// gve notification blocks; cxgb4.
const BOTH: &[&str] = &["txrx", "rxtx", "tx-rx", "rx-tx", "comp", "fp", "ntfy", "queue", "cq", "qp"];

/// Role of an interrupt, and the number at the end of its name.
fn classify(name: &str, device: &str) -> (Role, u32) {
    // In `mlx5_comp3@pci:0000:3b:00.0`, the part after `@` is the PCI function.
    let name = name.split('@').next().unwrap_or(name).trim_end_matches(')');
    let Some((stem, index)) = numbered(name) else { return (Role::Other, 0) };
    // Remove the device's name first: it may contain `rx` itself, or be the whole name of the
    // interrupt.
    let kind = stem.replace(device, "").to_ascii_lowercase();
    let has = |parts: &[&str]| parts.iter().any(|part| kind.contains(part));
    let role = match () {
        () if name == device || has(OTHER) => Role::Other,
        () if has(BOTH) => Role::Both,
        () if has(&["rx", "input"]) => Role::Rx,
        () if has(&["tx", "output"]) => Role::Tx,
        // Names such as `eth0-0`: some drivers only number their vectors.
        () if name.contains(device) && kind.trim_matches(['-', '_', '.', ' ']).is_empty() => Role::Both,
        () => Role::Other,
    };
    (role, index)
}

/// Number of a vector that may belong to a queue, judged by its name alone.
fn plain(name: &str, device: &str) -> Option<u32> {
    let name = name.split('@').next().unwrap_or(name);
    let (stem, index) = numbered(name).filter(|_| name != device)?;
    let stem = stem.to_ascii_lowercase();
    (stem.ends_with('-') && !OTHER.iter().any(|part| stem.contains(part))).then_some(index)
}

/// Splits a name into its stem and the queue's number. The number is at the end, or (Xen) in the
/// middle: `eth0-q2-rx`.
fn numbered(name: &str) -> Option<(String, u32)> {
    let stem = name.trim_end_matches(|c: char| c.is_ascii_digit());
    if let Ok(index) = name[stem.len()..].parse() {
        return Some((stem.to_owned(), index));
    }
    let (stem, direction) = name.rsplit_once('-')?;
    let (device, queue) = stem.rsplit_once("-q")?;
    Some((format!("{device}-{direction}"), queue.parse().ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_many_drivers() {
        use Role::*;
        for (name, role, index) in [
            ("eth0-TxRx-11", Both, 11),               // ixgbe, igb, igc
            ("i40e-eth0-TxRx-3", Both, 3),            // i40e
            ("ice-eth0-TxRx-3", Both, 3),             // ice
            ("iavf-eth0-TxRx-0", Both, 0),            // iavf
            ("eth0-fdir-TxRx-0", Other, 0),           // ixgbe's flow director
            ("mlx5_comp7@pci:0000:3b:00.0", Both, 7), // mlx5
            ("mlx5_async0@pci:0000:3b:00.0", Other, 0),
            ("eth0-Tx-Rx-5", Both, 5), // ena
            ("ena-mgmnt@pci:0000:00:05.0", Other, 0),
            ("eth0-rxtx-2", Both, 2), // vmxnet3
            ("eth0-fp-2", Both, 2),   // bnx2x, qede
            ("virtio3-input.1", Rx, 1),
            ("virtio3-output.1", Tx, 1),
            ("virtio3-config", Other, 0),
            ("eth0-tx-0", Tx, 0), // tg3
            ("eth0-rx-1", Rx, 1),
            ("gve-ntfy-blk4@pci:0000:00:04.0", Both, 4),
            ("eth0 (queue 3)", Both, 3), // cxgb4
            ("eth0-q2-rx", Rx, 2),       // xen-netfront
            ("eth0-2", Both, 2),
            ("eth0", Other, 0),
        ] {
            let got = classify(name, "eth0");
            assert_eq!(got.0, role, "{name}");
            if role != Other {
                assert_eq!(got.1, index, "{name}");
            }
        }
    }

    #[test]
    fn vectors_that_only_have_a_number() {
        assert_eq!(classify("mlx4-3@0000:06:00.0", "eth0").0, Role::Other);
        assert_eq!(plain("mlx4-3@0000:06:00.0", "eth0"), Some(3));
        assert_eq!(plain("mlx4-async-0@0000:06:00.0", "eth0"), None);
        assert_eq!(plain("eth0", "eth0"), None);
    }

    #[test]
    fn whole_names_only() {
        assert!(mentions("i40e-eth1-TxRx-0", "eth1") && mentions("eth1", "eth1"));
        assert!(!mentions("eth10-rx-0", "eth1") && !mentions("veth1", "eth1"));
    }

    #[test]
    fn tables_of_x86_and_arm() {
        let x86 = "           CPU0       CPU1       \n\
                   \x20 1:          0          9   IO-APIC   1-edge      i8042\n\
                   \x2042:          0      13966 PCI-MSIX-0000:00:04.0   2-edge      virtio3-input.0\n\
                   \x2043:          0          0  IR-PCI-MSI 524288-edge      eth0-TxRx-0\n\
                   \x2044:          0          0  IR-PCI-MSI 524289-edge    \n\
                   NMI:          0          0   Non-maskable interrupts\nERR:          0\n";
        let names = parse_interrupts(x86);
        assert_eq!(names.len(), 3);
        assert!(names.contains(&(42, "virtio3-input.0".into())) && names.contains(&(43, "eth0-TxRx-0".into())));
        let arm = "           CPU0\n 37:   5   GICv3  27 Level     arch_timer\n 51: 8 ITS-MSI 524290 Edge      ice-eth0-TxRx-1\n";
        assert_eq!(parse_interrupts(arm)[1], (51, "ice-eth0-TxRx-1".into()));
        assert!(parse_interrupts("").is_empty());
    }
}
