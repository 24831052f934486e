//! Tests of the planner on described machines and devices.

mod common;

use common::{card, irq, list, machine};
use fsocket_tune::ethtool::{ChannelCount, Channels, Coalesce, Feature, Rss, RssTable, NTUPLE};
use fsocket_tune::*;

/// The new value of a setting in a plan.
fn to(plan: &Plan, setting: Setting) -> Option<Value> {
    plan.find(&setting).map(|c| c.new.clone())
}

fn cpus(plan: &Plan, setting: Setting) -> CpuSet {
    match to(plan, setting.clone()) {
        Some(Value::Cpus(cpus)) => cpus,
        other => panic!("{setting} is planned to be {other:?}"),
    }
}

fn txrx(q: u32) -> String {
    format!("eth0-TxRx-{q}")
}

fn mlx5(q: u32) -> String {
    format!("mlx5_comp{q}@pci:0000:3b:00.0")
}

fn says(plan: &Plan, kind: Kind, topic: &str, text: &str) -> bool {
    plan.notes(kind).any(|n| n.topic == topic && n.text.contains(text))
}

/// Applies the plan to a description of the device.
fn carried_out(device: &Device, plan: &Plan) -> Device {
    let mut device = device.clone();
    for change in &plan.changes {
        match (&change.setting, &change.new) {
            (Setting::Xps(q), Value::Cpus(c)) => device.tx_queues[*q as usize].xps = Some(c.clone()),
            (Setting::Rps(q), Value::Cpus(c)) => device.rx_queues[*q as usize].rps = Some(c.clone()),
            (Setting::Irq(name), Value::Cpus(c)) => {
                device.irqs.iter_mut().find(|i| i.name == *name).unwrap().affinity = c.clone()
            }
            (Setting::Coalesce, Value::Coalesce(c)) => device.coalesce = Some(*c),
            (Setting::Ntuple, Value::On(on)) => device.features.get_mut(NTUPLE).unwrap().on = *on,
            (Setting::Rss, Value::Rss(RssTable::Default)) => {
                let rss = device.rss.as_mut().unwrap();
                rss.table = (0..rss.table.len() as u32).map(|i| i % rss.rings).collect();
            }
            other => panic!("{other:?}"),
        }
    }
    device
}

#[test]
fn one_cpu() {
    let device = card(1, 8, None, txrx);
    let plan = plan(&machine(1, 1, 1), &device, &Options::default());
    assert_eq!(to(&plan, Setting::Channels), None);
    assert_eq!(cpus(&plan, Setting::Irq(txrx(0))), list("0"));
    assert_eq!(to(&plan, Setting::Rps(0)), None);
    assert_eq!(to(&plan, Setting::Xps(0)), None, "there is nothing to choose from");
}

#[test]
fn eight_cpus_eight_queues() {
    let plan = plan(&machine(8, 1, 2), &card(8, 16, None, txrx), &Options::default());
    for q in 0..8 {
        assert_eq!(cpus(&plan, Setting::Irq(txrx(q))), CpuSet::one(q));
        assert_eq!(cpus(&plan, Setting::Xps(q)), CpuSet::one(q));
        assert_eq!(to(&plan, Setting::Rps(q)), None, "a queue for each CPU: RPS stays off");
    }
    assert_eq!(to(&plan, Setting::Channels), None);
    assert_eq!(to(&plan, Setting::Rss), None);
    assert_eq!(to(&plan, Setting::Ntuple), Some(Value::On(true)));
}

#[test]
fn rps_that_is_on_is_switched_off_when_each_cpu_has_a_queue() {
    let mut device = card(8, 8, None, txrx);
    device.rx_queues[3].rps = Some(list("0-7"));
    let plan = plan(&machine(8, 1, 1), &device, &Options::default());
    assert_eq!(cpus(&plan, Setting::Rps(3)), CpuSet::new());
    assert_eq!(to(&plan, Setting::Rps(2)), None);
}

#[test]
fn a_plan_carried_out_leaves_nothing_to_plan() {
    for (n, nodes, threads, queues, node) in [
        (1, 1, 1, 1, None),
        (8, 2, 2, 4, Some(1)),
        (96, 4, 2, 63, Some(2)),
        (256, 8, 2, 64, Some(7)),
        (256, 2, 1, 256, Some(0)),
    ] {
        let machine = machine(n, nodes, threads);
        let mut device = card(queues, queues, node, mlx5);
        device.coalesce = Some(Coalesce { rx_usecs: 333, ..Coalesce::default() });
        device.rss.as_mut().unwrap().table[5] = 0;
        let first = plan(&machine, &device, &Options::default());
        assert!(!first.changes.is_empty());
        let again = plan(&machine, &carried_out(&device, &first), &Options::default());
        assert_eq!(again.changes, [], "{n} CPUs, {nodes} nodes, {queues} queues");
    }
}

#[test]
fn fewer_queues_than_cpus_prefer_the_devices_node() {
    // 96 CPUs: node 1 has 24-47 and their second threads 72-95.
    let device = card(32, 32, Some(1), mlx5);
    let plan = plan(&machine(96, 2, 2), &device, &Options::default());
    let used: CpuSet = (0..32).flat_map(|q| cpus(&plan, Setting::Irq(mlx5(q))).iter().collect::<Vec<_>>()).collect();
    assert_eq!(used, list("24-47,72-79"), "first threads of the node, then second ones, no other node");
    assert!(says(&plan, Kind::Lacks, "queues", "32 receive queues at most, for 96 CPUs"));
    // RPS and XPS must both serve each CPU exactly once.
    let mut served = CpuSet::new();
    for q in 0..32 {
        let group = cpus(&plan, Setting::Xps(q));
        assert!(group.contains(cpus(&plan, Setting::Irq(mlx5(q))).first().unwrap()));
        assert!(served.and(&group).is_empty());
        if group.len() > 1 {
            assert_eq!(cpus(&plan, Setting::Rps(q)), group);
        } else {
            assert_eq!(to(&plan, Setting::Rps(q)), None);
        }
        served = served.or(&group);
    }
    assert_eq!(served, list("0-95"));
}

#[test]
fn a_cpu_without_queue_goes_to_its_sibling_then_to_its_node() {
    // 8 CPUs, 2 nodes, 2 threads: node 0 has 0,1,4,5 (cores 0/4, 1/5).
    let machine = machine(8, 2, 2);
    let s = Spread::new(&machine.cpus, &list("0-7"), Some(0), 2).unwrap();
    assert_eq!(s.serving(), list("0-1"));
    assert!(s.group(0).contains(4) && s.group(1).contains(5), "{s:?}");
    assert_eq!(s.group(0).len(), 4, "the other node is shared out evenly: {s:?}");
    let s = Spread::new(&machine.cpus, &list("0-7"), None, 2).unwrap();
    assert_eq!(s.serving(), list("0-1"), "without a node, first threads by number");
    assert!(Spread::new(&machine.cpus, &CpuSet::new(), None, 2).is_none());
    assert!(Spread::new(&machine.cpus, &list("0-7"), None, 0).is_none());
}

#[test]
fn one_queue_for_many_cpus() {
    let plan = plan(&machine(8, 1, 1), &card(1, 1, None, |_| "eth0-rxtx-0".into()), &Options::default());
    assert_eq!(cpus(&plan, Setting::Rps(0)), list("0-7"));
    assert_eq!(cpus(&plan, Setting::Irq("eth0-rxtx-0".into())), list("0"));
}

#[test]
fn more_queues_than_cpus_that_cannot_be_reduced() {
    let mut device = card(16, 16, None, txrx);
    device.channels = None;
    let plan = plan(&machine(4, 1, 1), &device, &Options::default());
    for q in 0..16 {
        assert_eq!(cpus(&plan, Setting::Irq(txrx(q))), CpuSet::one(q % 4));
        assert_eq!(cpus(&plan, Setting::Xps(q)), CpuSet::one(q % 4));
    }
    assert!(says(&plan, Kind::Lacks, "queues", "cannot be changed"));
}

#[test]
fn channels_follow_the_cpus_first_and_foresee_the_rest() {
    let plan_up = plan(&machine(24, 2, 1), &card(8, 63, Some(0), txrx), &Options::default());
    assert_eq!(plan_up.changes[0].setting, Setting::Channels);
    assert_eq!(plan_up.changes[0].new, Value::Channels(ChannelCount { combined: 24, ..ChannelCount::default() }));
    assert_eq!(cpus(&plan_up, Setting::Xps(23)), list("23"));
    let plan_down = plan(&machine(8, 1, 1), &card(63, 63, Some(0), txrx), &Options::default());
    assert_eq!(
        to(&plan_down, Setting::Channels),
        Some(Value::Channels(ChannelCount { combined: 8, ..Default::default() }))
    );
    assert_eq!(to(&plan_down, Setting::Irq(txrx(8))), None);
}

#[test]
fn a_table_that_names_queues_to_be_removed_goes_first() {
    let mut device = card(8, 8, None, txrx);
    device.rss = Some(Rss { rings: 8, table: vec![7; 128], key_bytes: 40 });
    let plan = plan(&machine(4, 1, 1), &device, &Options::default());
    let order: Vec<_> = plan.changes.iter().map(|c| c.setting.clone()).take(2).collect();
    assert_eq!(order, [Setting::Rss, Setting::Channels]);
    assert_eq!(plan.changes[0].old, Value::Rss(RssTable::Explicit(vec![7; 128])));
}

#[test]
fn separate_channels() {
    let mut device = card(4, 4, None, txrx);
    let count = ChannelCount { rx: 2, tx: 4, combined: 0 };
    device.channels = Some(Channels { max_rx: 4, max_tx: 4, max_combined: 0, count, fixed: false });
    device.rx_queues.truncate(2);
    device.irqs = (0..2).map(|q| irq(50 + q, &format!("eth0-rx-{q}"), Role::Rx, q)).collect();
    device.irqs.extend((0..4).map(|q| irq(60 + q, &format!("eth0-tx-{q}"), Role::Tx, q)));
    let plan = plan(&machine(4, 1, 1), &device, &Options { skip: vec![Group::Queues], ..Options::default() });
    assert_eq!(to(&plan, Setting::Channels), None);
    assert_eq!(cpus(&plan, Setting::Irq("eth0-rx-1".into())), list("1"));
    assert_eq!(cpus(&plan, Setting::Irq("eth0-tx-3".into())), list("3"));
    assert_eq!(cpus(&plan, Setting::Rps(1)), list("1,3"));
    assert_eq!(cpus(&plan, Setting::Xps(3)), list("3"));
}

#[test]
fn a_number_of_queues_that_cannot_be_changed() {
    let mut device = card(4, 4, None, txrx);
    device.channels.as_mut().unwrap().fixed = true;
    let lacks = |plan: &Plan| plan.notes.iter().any(|n| n.topic == "queues" && n.text.contains("cannot be changed"));
    let half = plan(&machine(4, 1, 1), &device, &Options { cpus: Some(list("2-3")), ..Options::default() });
    assert_eq!(to(&half, Setting::Channels), None);
    assert!(lacks(&half), "{:?}", half.notes);
    assert_eq!(cpus(&half, Setting::Irq(txrx(3))), list("3"));
    assert!(!lacks(&plan(&machine(4, 1, 1), &device, &Options::default())), "a queue for each CPU: nothing to want");
}

#[test]
fn transmit_queues_beyond_the_channels_start_again() {
    let mut device = card(4, 4, None, mlx5);
    device.tx_queues.resize(8, TxQueue { xps: Some(CpuSet::new()), xps_rxqs: None });
    let plan = plan(&machine(4, 1, 1), &device, &Options::default());
    assert_eq!(cpus(&plan, Setting::Xps(5)), list("1"));
}

#[test]
fn isolated_cpus_cpusets_and_the_default_affinity_are_respected() {
    let mut machine = machine(16, 2, 1);
    machine.cpus.isolated = list("2-3");
    machine.cpus.allowed = list("0-11");
    machine.cpus.irq_default = list("0-3,8-15");
    let one = plan(&machine, &card(16, 16, Some(0), txrx), &Options::default());
    assert_eq!(to(&one, Setting::Channels), Some(Value::Channels(ChannelCount { combined: 6, ..Default::default() })));
    let used: Vec<_> = (0..6).map(|q| cpus(&one, Setting::Irq(txrx(q))).first().unwrap()).collect();
    assert_eq!(used, [0, 1, 8, 9, 10, 11]);
    for reason in ["isolated: 2-3", "outside the cpuset: 12-15", "not in the default IRQ affinity: 4-7"] {
        assert!(says(&one, Kind::Found, "cpus", reason), "{reason}: {:?}", one.notes);
    }
    // CPUs that the user names are used even if they are isolated.
    let options = Options { cpus: Some(list("2-3,99")), ..Options::default() };
    let told = plan(&machine, &card(16, 16, Some(0), txrx), &options);
    assert_eq!(cpus(&told, Setting::Irq(txrx(1))), list("3"));
    assert!(says(&told, Kind::Warning, "cpus", "99 not online"));
    // If no CPU is left, the plan changes nothing on the queues.
    machine.cpus.isolated = list("0-15");
    let none = plan(&machine, &card(16, 16, Some(0), txrx), &Options::default());
    assert!(says(&none, Kind::Warning, "cpus", "no CPU left"));
    assert!(none.changes.iter().all(|c| !c.setting.is_queues()), "{:?}", none.changes);
}

#[test]
fn moderation() {
    let plan_for = |c: Coalesce| {
        let mut device = card(8, 8, None, txrx);
        device.coalesce = Some(c);
        plan(&machine(8, 1, 1), &device, &Options::default()).find(&Setting::Coalesce).cloned()
    };
    let slow = Coalesce { rx_usecs: 333, tx_usecs: 100, ..Coalesce::default() };
    let change = plan_for(slow).unwrap();
    assert_eq!(change.new, Value::Coalesce(Coalesce { adaptive_rx: true, ..slow }));
    assert_eq!(change.or, [Value::Coalesce(Coalesce { rx_usecs: 30, ..slow })]);
    assert_eq!(plan_for(Coalesce { adaptive_rx: true, ..slow }), None);
    assert_eq!(plan_for(Coalesce::default()), None, "an interrupt at once is not slow");
}

#[test]
fn irqbalance_is_named_with_what_to_tell_it() {
    let mut machine = machine(2, 1, 1);
    let device = card(2, 2, None, txrx);
    machine.irqbalance = Some(Balance { pid: 7, banned_irqs: vec![100], ..Balance::default() });
    let one = plan(&machine, &device, &Options::default());
    assert!(says(&one, Kind::Warning, "irqbalance", "--banirq=101"));
    assert!(!says(&one, Kind::Warning, "irqbalance", "--banirq=100"));
    machine.irqbalance.as_mut().unwrap().banned_irqs.push(101);
    assert_eq!(
        plan(&machine, &device, &Options::default()).notes(Kind::Warning).filter(|n| n.topic == "irqbalance").count(),
        0
    );
}

#[test]
fn software_devices() {
    let lo = Device {
        name: "lo".into(),
        ifindex: 1,
        up: true,
        rx_queues: vec![RxQueue::default()],
        tx_queues: vec![TxQueue::default()],
        ..Device::default()
    };
    let one = plan(&machine(4, 1, 1), &lo, &Options::default());
    assert_eq!(one.changes, []);
    for topic in ["queues", "irq", "xps", "coalesce", "ntuple", "rings"] {
        assert_eq!(one.notes(Kind::Lacks).filter(|n| n.topic == topic).count(), 1, "{topic}");
    }
    // A veth device that uses all four of its queues, on eight CPUs.
    let mut veth = card(4, 4, None, txrx);
    (veth.physical, veth.irqs, veth.rss, veth.coalesce) = (false, vec![], None, None);
    veth.features.insert(NTUPLE.into(), Feature { on: false, changeable: false });
    let auto = plan(&machine(8, 1, 1), &veth, &Options::default());
    assert!(auto.changes.iter().all(|c| matches!(c.setting, Setting::Xps(_))), "{:?}", auto.changes);
    let spread = plan(&machine(8, 1, 1), &veth, &Options { rps: RpsPolicy::Spread, ..Options::default() });
    assert_eq!(cpus(&spread, Setting::Rps(1)).len(), 2);
    let off = plan(&machine(8, 1, 1), &card(4, 4, None, txrx), &Options { rps: RpsPolicy::Off, ..Options::default() });
    assert_eq!(to(&off, Setting::Rps(0)), None);
}

#[test]
fn what_is_only_said() {
    let mut machine = machine(4, 1, 1);
    machine.conntrack = Some(Conntrack { count: 5, max: 120_000, time_wait: 120 });
    machine.limits = Limits { nofile: Some(1024), nofile_hard: Some(4096), nr_open: Some(1 << 20), file_max: None };
    machine.listening = vec![80, 20000, 30000, 40000];
    for (name, value) in [
        ("net.ipv4.ip_local_port_range", "32768 60999"),
        ("net.ipv4.ip_local_reserved_ports", "30000-30010"),
        ("net.ipv4.tcp_timestamps", "0"),
        ("net.ipv4.tcp_abort_on_overflow", "1"),
        ("net.core.somaxconn", "65535"),
    ] {
        machine.sysctls.insert(name.into(), value.into());
    }
    let mut device = card(4, 4, None, txrx);
    device.up = false;
    device.rings.as_mut().unwrap().rx = 256;
    device.tx_queues[0].xps_rxqs = Some(list("0"));
    let plan = plan(&machine, &device, &Options::default());
    for (topic, text) in [
        ("conntrack", "1000 connections a second"),
        ("open files", "1024 open"),
        ("ports", "listens on 20000,"),
        ("sysctl", "tcp_timestamps is 0"),
        ("sysctl", "abort_on_overflow is 1"),
        ("rings", "256"),
        ("link", "down"),
        ("xps", "xps_rxqs"),
    ] {
        assert!(says(&plan, Kind::Warning, topic, text), "{topic} {text}: {:#?}", plan.notes);
    }
    assert!(says(&plan, Kind::Lacks, "sysctl", "net.ipv4.tcp_migrate_req"), "absent from this kernel");
    assert_eq!(to(&plan, Setting::Sysctl("net.core.somaxconn".into())), None);
    assert!(to(&plan, Setting::Sysctl("net.ipv4.ip_local_port_range".into())).is_some());
}

#[test]
fn groups_left_alone() {
    let skip = vec![Group::Irq, Group::Ntuple];
    let plan = plan(&machine(8, 1, 1), &card(8, 8, None, txrx), &Options { skip, ..Options::default() });
    assert!(plan.changes.iter().all(|c| matches!(c.setting, Setting::Xps(_))));
    assert_eq!(plan.changes.len(), 8);
}
