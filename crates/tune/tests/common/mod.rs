//! Descriptions of machines and devices for tests.
#![allow(dead_code)]

use fsocket_tune::ethtool::{ChannelCount, Channels, Coalesce, Driver, Feature, Rings, Rss, NTUPLE};
use fsocket_tune::{CpuSet, Cpus, Device, Irq, Machine, Node, Role, RxQueue, TxQueue};
use std::collections::BTreeMap;

pub fn list(text: &str) -> CpuSet {
    CpuSet::parse_list(text).unwrap()
}

/// A machine with `cpus` CPUs on `nodes` nodes. The numbers are as Linux gives them on PC servers:
/// the first threads of all cores, node by node, then all second threads.
pub fn machine(cpus: u32, nodes: u32, threads: u32) -> Machine {
    let online: CpuSet = (0..cpus).collect();
    let cores = cpus / threads;
    let per_node = cores.div_ceil(nodes);
    let node = |id: u32| Node {
        id,
        cpus: (0..cpus).filter(|cpu| cpu % cores / per_node == id).collect(),
        distances: (0..nodes).map(|to| if to == id { 10 } else { 20 + to.abs_diff(id) }).collect(),
    };
    let core = |c: u32| (0..threads).map(|t| c + t * cores).collect();
    Machine {
        cpus: Cpus {
            isolated: CpuSet::new(),
            allowed: online.clone(),
            irq_default: online.clone(),
            nodes: (0..nodes).map(node).collect(),
            cores: (0..cores).map(core).collect(),
            online,
        },
        memory_mib: 64 << 10,
        ..Machine::default()
    }
}

/// A network card that uses `queues` of `most` combined channels. Each queue has an interrupt with
/// the name that `name` returns; the interrupt may go to any CPU.
pub fn card(queues: u32, most: u32, node: Option<u32>, name: impl Fn(u32) -> String) -> Device {
    Device {
        name: "eth0".to_owned(),
        ifindex: 2,
        up: true,
        physical: true,
        node,
        driver: Some(Driver { name: "made-up".to_owned(), ..Driver::default() }),
        channels: Some(Channels {
            max_combined: most,
            count: ChannelCount { combined: queues, ..ChannelCount::default() },
            ..Channels::default()
        }),
        rss: Some(Rss { rings: queues, table: (0..128).map(|i| i % queues).collect(), key_bytes: 40 }),
        rings: Some(Rings { rx: 1024, max_rx: 4096, tx: 1024, max_tx: 4096 }),
        coalesce: Some(Coalesce { adaptive_rx: true, ..Coalesce::default() }),
        features: BTreeMap::from([(NTUPLE.to_owned(), Feature { on: false, changeable: true })]),
        ntuple_rules: Some(0),
        rx_queues: vec![RxQueue { rps: Some(CpuSet::new()), flows: Some(0) }; queues as usize],
        tx_queues: vec![TxQueue { xps: Some(CpuSet::new()), xps_rxqs: Some(CpuSet::new()) }; queues as usize],
        irqs: (0..queues).map(|q| irq(100 + q, &name(q), Role::Both, q)).collect(),
        ..Device::default()
    }
}

pub fn irq(number: u32, name: &str, role: Role, queue: u32) -> Irq {
    Irq { number, name: name.to_owned(), role, queue, affinity: list("0-65"), effective: list("0") }
}
