//! Plans the settings of the device itself: queues, interrupts, steering, interrupt moderation.

use super::change::{Change, Options, Plan, RpsPolicy};
use super::spread::Spread;
use crate::cpus::CpuSet;
use crate::device::{Device, Irq, Role, RxQueue, TxQueue};
use crate::ethtool::{ChannelCount, Channels, Coalesce, RssTable, NTUPLE};
use crate::machine::Machine;
use crate::setting::{Group, Setting, Value};

/// With more delay than this, a request waits for the interrupt longer than its processing takes.
const SLOW_USECS: u32 = 50;
/// Interrupt delay for a device that cannot adapt it: at most 33,000 interrupts per second and
/// queue. (nic.sh allowed 3,000 (333 us), for throughput alone.)
const FIXED_USECS: u32 = 30;

pub fn plan(machine: &Machine, found: &Device, options: &Options, cpus: &CpuSet, plan: &mut Plan) {
    describe(found, plan);
    let device = &queues(found, options, cpus, plan);
    rss(found, device, plan);
    match Spreads::new(machine, device, cpus) {
        Some(spreads) => {
            irqs(machine, device, &spreads, plan);
            xps(device, &spreads.tx, plan);
            rps(device, &spreads.rx, options, plan);
        }
        None if cpus.is_empty() => plan.warn("cpus", "no CPU left for this device's packets: nothing is placed"),
        None => plan.lacks("queues", "it shows none"),
    }
    coalesce(device, plan);
    ntuple(device, plan);
}

/// CPUs of receive and transmit queues. Both are the same where channels are combined.
struct Spreads {
    rx: Spread,
    tx: Spread,
}

impl Spreads {
    fn new(machine: &Machine, device: &Device, cpus: &CpuSet) -> Option<Spreads> {
        let spread = |queues| Spread::new(&machine.cpus, cpus, device.node, queues);
        // A device may have more transmit queues than combined channels (for XDP or priorities).
        // The additional ones start again at the CPU of the first channel.
        let combined = device.channels.map_or(0, |c| c.count.combined) as usize;
        let tx = device.tx_queues.len();
        Some(Spreads {
            rx: spread(device.rx_queues.len())?,
            tx: spread(if combined > 0 { combined.min(tx) } else { tx })?,
        })
    }

    /// The CPU to which the interrupt should go.
    fn cpu(&self, irq: &Irq) -> u32 {
        let spread = if irq.role == Role::Tx { &self.tx } else { &self.rx };
        spread.cpu(irq.queue as usize)
    }
}

fn describe(device: &Device, plan: &mut Plan) {
    match &device.driver {
        Some(d) => {
            let bus = if d.bus.is_empty() { String::new() } else { format!(", {}", d.bus) };
            let node = device.node.map_or(String::new(), |n| format!(", NUMA node {n}"));
            let up = if device.up { "up" } else { "down" };
            plan.found("driver", format!("{} {}{bus}{node}, {up}", d.name, d.version));
        }
        None => plan.found("driver", "none that answers; a software device"),
    }
    if device.physical && !device.up {
        plan.warn("link", "the device is down: most drivers have no interrupts then; bring it up and run this again");
    }
}

/// Plans the number of channels. Returns the device as it will be with them.
fn queues(found: &Device, options: &Options, cpus: &CpuSet, plan: &mut Plan) -> Device {
    let shown = format!("{} rx, {} tx", found.rx_queues.len(), found.tx_queues.len());
    let Some(channels) = found.channels.filter(|c| c.max_combined + c.max_rx + c.max_tx > 0) else {
        plan.found("queues", shown);
        plan.lacks("queues", "their number cannot be changed");
        return found.clone();
    };
    plan.found("queues", format!("{shown}; channels: {}, of {}", channels.count, most(&channels)));
    let want = if channels.fixed { channels.count } else { one_per_cpu(&channels, cpus.len() as u32) };
    if channels.fixed && found.rx_queues.len() != cpus.len() {
        plan.lacks("queues", "their number cannot be changed");
    } else if (want.receiving() as usize) < cpus.len() {
        plan.lacks("queues", format!("{} receive queues at most, for {} CPUs", want.receiving(), cpus.len()));
    }
    if want == channels.count || cpus.is_empty() || options.skip.contains(&Group::Queues) {
        return found.clone();
    }
    plan.change(
        Setting::Channels,
        Value::Channels(channels.count),
        Value::Channels(want),
        "one queue per CPU, so that each CPU has packets of its own; \
         many drivers take the link down for a moment",
    );
    plan.found(
        "queues",
        "interrupts, XPS, RPS and RSS below are foreseen; they are looked at again with the new queues",
    );
    resized(found, want)
}

fn most(channels: &Channels) -> ChannelCount {
    ChannelCount { rx: channels.max_rx, tx: channels.max_tx, combined: channels.max_combined }
}

/// One channel per CPU, as far as the device allows. If the device can have combined channels, the
/// number of separate channels stays.
fn one_per_cpu(channels: &Channels, cpus: u32) -> ChannelCount {
    let now = channels.count;
    let fit = |max: u32| cpus.min(max).max(1);
    if channels.max_combined > 0 {
        return ChannelCount { combined: fit(channels.max_combined), ..now };
    }
    let side = |max: u32, now: u32| if max > 0 { fit(max) } else { now };
    ChannelCount { rx: side(channels.max_rx, now.rx), tx: side(channels.max_tx, now.tx), combined: now.combined }
}

/// Predicts how the device looks with another number of channels.
fn resized(found: &Device, count: ChannelCount) -> Device {
    let mut device = found.clone();
    let before = found.channels.map(|c| c.count).unwrap_or_default();
    let receiving = count.receiving() as usize;
    // Some devices show more transmit queues than channels (for XDP or priorities). The difference
    // stays the same.
    let extra = found.tx_queues.len().saturating_sub((before.tx + before.combined) as usize);
    device.rx_queues.resize_with(receiving, || RxQueue { rps: Some(CpuSet::new()), flows: Some(0) });
    device.tx_queues.resize_with((count.tx + count.combined) as usize + extra, || TxQueue {
        xps: Some(CpuSet::new()),
        xps_rxqs: None,
    });
    device.irqs.retain(|irq| match irq.role {
        Role::Both | Role::Rx => (irq.queue as usize) < receiving,
        Role::Tx => irq.queue < count.tx + count.combined,
        Role::Other => true,
    });
    if let Some(rss) = &mut device.rss {
        // The kernel spreads its default table over the new number of rings.
        if rss.is_default() {
            rss.table = (0..rss.table.len() as u32).map(|i| i % count.receiving().max(1)).collect();
        }
        rss.rings = count.receiving();
    }
    if let Some(channels) = &mut device.channels {
        channels.count = count;
    }
    device
}

fn rss(found: &Device, device: &Device, plan: &mut Plan) {
    let (Some(now), Some(then)) = (&found.rss, &device.rss) else {
        if found.rx_queues.len() > 1 {
            plan.lacks("rss", "no indirection table that can be read: how packets are spread is the device's affair");
        }
        return;
    };
    let kind = if now.is_even() { "even" } else { "uneven" };
    plan.found(
        "rss",
        format!("{} entries over {} rings, {kind}; key of {} bytes", now.table.len(), now.rings, now.key_bytes),
    );
    if !then.is_even() {
        let old = if now.is_default() { RssTable::Default } else { RssTable::Explicit(now.table.clone()) };
        let change = Change {
            setting: Setting::Rss,
            old: Value::Rss(old),
            new: Value::Rss(RssTable::Default),
            or: Vec::new(),
            why: "each queue, so each CPU, gets its share of new connections".to_owned(),
        };
        // The table must change before the channels: the kernel refuses to remove channels that
        // the table names.
        let first = plan.changes.iter().position(|c| c.setting == Setting::Channels).unwrap_or(plan.changes.len());
        plan.changes.insert(first, change);
    }
}

fn irqs(machine: &Machine, device: &Device, spreads: &Spreads, plan: &mut Plan) {
    let queue_irqs: Vec<_> = device.queue_irqs().collect();
    if queue_irqs.is_empty() {
        if device.physical {
            plan.lacks("irq", "no interrupt can be told to belong to a queue of it");
        } else {
            plan.lacks("irq", "a software device: no interrupts; its packets are handled on the CPU that sends them");
        }
        return;
    }
    let serving = spreads.rx.serving();
    let stray = queue_irqs.iter().filter(|irq| irq.affinity != CpuSet::one(spreads.cpu(irq))).count();
    plan.found("irq", format!("{} for queues, {stray} of them not on the CPU of their queue", queue_irqs.len()));
    if device.node.is_some() && machine.cpus.nodes.len() > 1 {
        let far = serving.iter().filter(|cpu| machine.cpus.node_of(*cpu) != device.node).count();
        plan.found("irq", format!("queues on CPUs {serving}, {far} of them not on the device's node"));
    }
    for irq in &queue_irqs {
        plan.change(
            Setting::Irq(irq.name.clone()),
            Value::Cpus(irq.affinity.clone()),
            Value::Cpus(CpuSet::one(spreads.cpu(irq))),
            "queue i on CPU i: a connection's packets arrive where it lives",
        );
    }
    if let Some(balance) = &machine.irqbalance {
        let moved: Vec<String> =
            queue_irqs.iter().filter(|irq| !balance.leaves(irq.number)).map(|irq| irq.number.to_string()).collect();
        if !moved.is_empty() {
            plan.warn(
                "irqbalance",
                format!(
                    "it runs (process {}) and will move {} of these interrupts within seconds: stop it, or give it {}",
                    balance.pid,
                    moved.len(),
                    moved.iter().map(|n| format!("--banirq={n}")).collect::<Vec<_>>().join(" ")
                ),
            );
        }
    }
}

fn xps(device: &Device, spread: &Spread, plan: &mut Plan) {
    if device.tx_queues.len() < 2 || device.tx_queues.iter().all(|q| q.xps.is_none()) {
        plan.lacks("xps", "one transmit queue: nothing to choose from");
        return;
    }
    if device.tx_queues.iter().any(|q| q.xps_rxqs.as_ref().is_some_and(|set| !set.is_empty())) {
        plan.warn("xps", "xps_rxqs is set and comes before xps_cpus: packets leave by the queue they came in by");
    }
    for (i, queue) in device.tx_queues.iter().enumerate() {
        let Some(now) = &queue.xps else { continue };
        plan.change(
            Setting::Xps(i as u32),
            Value::Cpus(now.clone()),
            Value::Cpus(spread.group(i).clone()),
            "a CPU sends by its own queue: no lock shared, completions come back to it",
        );
    }
}

fn rps(device: &Device, spread: &Spread, options: &Options, plan: &mut Plan) {
    let interrupts = device.queue_irqs().next().is_some() || device.physical;
    let share = !spread.is_complete()
        && match options.rps {
            RpsPolicy::Auto => interrupts,
            RpsPolicy::Off => false,
            RpsPolicy::Spread => true,
        };
    let why = match share {
        true => "CPUs without a queue get the packets of one near them",
        false if interrupts => "each CPU has a queue: passing packets on would only move them away",
        false => "packets are handled on the CPU that sends them: passing them on would only move them away",
    };
    for (i, queue) in device.rx_queues.iter().enumerate() {
        let Some(now) = &queue.rps else { continue };
        let group = spread.group(i);
        let new = if share && group.len() > 1 { group.clone() } else { CpuSet::new() };
        plan.change(Setting::Rps(i as u32), Value::Cpus(now.clone()), Value::Cpus(new), why);
    }
    let flows = device.rx_queues.iter().filter(|q| q.flows.unwrap_or(0) > 0).count();
    if flows > 0 {
        plan.found("rfs", format!("on for {flows} receive queues (rps_flow_cnt); left as it is"));
    }
}

fn coalesce(device: &Device, plan: &mut Plan) {
    let Some(now) = device.coalesce else {
        plan.lacks("coalesce", "interrupt moderation cannot be set");
        return;
    };
    plan.found("coalesce", now.to_string());
    if now.adaptive_rx || now.rx_usecs <= SLOW_USECS {
        return;
    }
    let fixed = Value::Coalesce(Coalesce { rx_usecs: FIXED_USECS, ..now });
    let adaptive = Value::Coalesce(Coalesce { adaptive_rx: true, ..now });
    plan.changes.push(Change {
        setting: Setting::Coalesce,
        old: Value::Coalesce(now),
        new: adaptive,
        or: vec![fixed],
        why: "interrupts at once when idle, moderated under load; where the device cannot adapt, a short delay"
            .to_owned(),
    });
}

fn ntuple(device: &Device, plan: &mut Plan) {
    match device.feature(NTUPLE) {
        Some(f) if f.changeable || f.on => {
            let rules = device.ntuple_rules.map_or(String::new(), |n| format!(", {n} rules"));
            plan.found("ntuple", format!("{}{rules}", if f.on { "on" } else { "off" }));
            if !f.on {
                plan.change(
                    Setting::Ntuple,
                    Value::On(false),
                    Value::On(true),
                    "the device can deliver active connections to the zone their source port names (RFD in hardware)",
                );
            }
        }
        _ => plan.lacks("ntuple", "no steering rules in hardware: RFD uses XDP or RPS"),
    }
}
