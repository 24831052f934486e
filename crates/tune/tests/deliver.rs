//! Tests of filter rules in network cards and of RPS masks, on recorded devices.

#[path = "common/fake.rs"]
mod fake;

use fake::{Fake, FIRST_IRQ};
use fsocket_tune::deliver::{self, Ports, Step};
use fsocket_tune::ethtool::{Feature, Ioctl, Nic, Recorded, RssTable, Rule, LRO, NTUPLE};
use fsocket_tune::{CpuSet, Root};

fn root(fake: &Fake) -> Root {
    Root::new(fake.dir.path())
}

#[test]
fn a_rule_matches_a_slice_by_its_mask() {
    let queues = [(0, 7), (1, 8)].into();
    let slices = [Ports { cpu: 0, first: 32768, count: 8192 }, Ports { cpu: 1, first: 40960, count: 8192 }];
    let rules = deliver::rules(&slices, &queues).unwrap();
    let expected = |v6, port, queue| Rule { v6, port, mask: 0xe000, queue };
    assert_eq!(
        rules,
        [expected(false, 32768, 7), expected(true, 32768, 7), expected(false, 40960, 8), expected(true, 40960, 8)]
    );
    for (port, queue) in
        [(32768, Some(7)), (40959, Some(7)), (40960, Some(8)), (49151, Some(8)), (49152, None), (80, None)]
    {
        let hit = rules.iter().filter(|r| !r.v6).find(|r| port & r.mask == r.port).map(|r| r.queue);
        assert_eq!(hit, queue, "port {port}");
    }
    let all = Ports { cpu: 0, first: 0, count: 65536 };
    assert_eq!(deliver::rules(&[all], &queues).unwrap()[0].mask, 0);
    assert!(deliver::rules(&[Ports { cpu: 2, ..all }], &queues).unwrap_err().contains("CPU 2"));
}

#[test]
fn queues_of_interrupts() {
    let fake = Fake::new(4);
    for (i, at) in ["24", "25", "26-27", "28"].iter().enumerate() {
        let irq = FIRST_IRQ + i as u32;
        for file in ["smp_affinity_list", "effective_affinity_list"] {
            fake.put(format!("proc/irq/{irq}/{file}"), at);
        }
    }
    let queues = deliver::queues_by_cpu(&root(&fake), "eth0");
    assert_eq!(queues, [(24, 0), (25, 1), (28, 3)].into(), "one that goes to two CPUs serves neither alone");
}

#[test]
fn rules_go_in_and_out_of_a_card() {
    let fake = Fake::new(4);
    let nic = Recorded::new(&root(&fake), "eth0");
    let before = nic.features().unwrap()[NTUPLE];
    let rule = Rule { v6: false, port: 32768, mask: 0xe000, queue: 1 };
    let steps = deliver::install(&nic, &[rule, Rule { v6: true, ..rule }]).unwrap();
    assert_eq!(nic.load().unwrap().rules.values().filter(|r| !r.v6).collect::<Vec<_>>(), [&rule]);
    assert_eq!(nic.ntuple_rules().unwrap(), 2);
    assert!(nic.features().unwrap()[NTUPLE].on);
    deliver::undo_in_card(&nic, &steps);
    assert_eq!((nic.ntuple_rules().unwrap(), nic.features().unwrap()[NTUPLE]), (0, before));
    // If a queue does not exist, everything must be undone, and the error must name the rule.
    let error = deliver::install(&nic, &[rule, Rule { queue: 99, ..rule }]).unwrap_err();
    assert!(error.contains("rule 2 of 2"), "{error}");
    assert_eq!((nic.ntuple_rules().unwrap(), nic.features().unwrap()[NTUPLE]), (0, before));
}

#[test]
fn what_was_switched_off_for_xdp_is_on_again() {
    let fake = Fake::new(4);
    let nic = Recorded::new(&root(&fake), "eth0");
    let mut recording = nic.load().unwrap();
    recording.features.insert(LRO.to_owned(), Feature { on: true, changeable: true });
    nic.store(&recording).unwrap();
    let before = deliver::offloads(&nic);
    assert_eq!(before, [LRO]);
    assert_eq!(deliver::switched_off(&nic, before.clone()), [], "it is still on");
    nic.set_feature(LRO, false).unwrap();
    let mut steps = deliver::switched_off(&nic, before);
    assert_eq!(steps, [Step::Offload { name: LRO.to_owned() }]);
    // A record that another program has put into the file must have no effect.
    steps.push(Step::Offload { name: NTUPLE.to_owned() });
    let other = nic.features().unwrap()[NTUPLE];
    deliver::undo_in_card(&nic, &steps);
    assert_eq!((nic.features().unwrap()[LRO].on, nic.features().unwrap()[NTUPLE]), (true, other));
}

#[test]
fn a_device_without_filters_says_so() {
    let lo = Ioctl::new("lo").unwrap();
    let rule = Rule { v6: false, port: 32768, mask: 0xe000, queue: 0 };
    assert_eq!(deliver::install(&lo, &[rule]).unwrap_err(), "the device has no filters");
    assert!(lo.add_rule(&rule).is_err() && lo.remove_rule(0).is_err());
}

#[test]
fn rps_follows_and_goes_back() {
    let fake = Fake::new(4);
    let root = root(&fake);
    let cpus = CpuSet::parse_list("24-27").unwrap();
    let read = |q: u32, what: &str| root.read(format!("sys/class/net/eth0/queues/rx-{q}/{what}")).unwrap();
    let before: Vec<String> = (0..4).flat_map(|q| [read(q, "rps_cpus"), read(q, "rps_flow_cnt")]).collect();
    let steps = deliver::follow(&root, &root, "eth0", &cpus).unwrap();
    for q in 0..4 {
        assert_eq!(CpuSet::parse_mask(&read(q, "rps_cpus")).unwrap(), cpus);
        assert_eq!(read(q, "rps_flow_cnt"), "8192");
    }
    assert_eq!(root.number(deliver::FLOW_TABLE), Some(deliver::FLOWS));
    // Another program changes one of the settings.
    fake.put("sys/class/net/eth0/queues/rx-1/rps_flow_cnt", "77");
    // A path outside of /sys/class/net, as another program could write it into the file, must have
    // no effect.
    let evil = Step::File { path: "sys/class/net/../../../etc/x".into(), before: "b".into(), after: "a".into() };
    let mut recorded: Vec<Step> = serde_json::from_str(&serde_json::to_string(&steps).unwrap()).unwrap();
    recorded.push(evil);
    deliver::undo_files(&root, &root, &recorded);
    let after: Vec<String> = (0..4).flat_map(|q| [read(q, "rps_cpus"), read(q, "rps_flow_cnt")]).collect();
    for (i, (was, is)) in before.iter().zip(&after).enumerate() {
        assert_eq!(is, if i == 3 { "77" } else { was }, "{i}");
    }
    assert_eq!(root.number(deliver::FLOW_TABLE), Some(0));
    assert!(deliver::follow(&root, &root, "eth9", &cpus).is_err());
    assert!(deliver::follow(&root, &root, "../lo", &cpus).is_err());
}

/// Four rings, whose interrupts go to CPUs 8 to 11.
fn rings() -> std::collections::BTreeMap<u32, u32> {
    (0..4).map(|ring| (8 + ring, ring)).collect()
}

#[test]
fn flow_groups_in_the_table_of_a_card() {
    let fake = Fake::new(4);
    let nic = Recorded::new(&root(&fake), "eth0");
    let before = nic.rss().unwrap();
    assert!(before.is_default() && before.table.len() >= 64, "{before:?}");
    let (mut table, home, step) = deliver::table(&nic, &rings(), &[8, 9, 10, 11]).unwrap();
    assert_eq!(nic.rss().unwrap(), before, "looking changes nothing");
    assert_eq!(home[..6], [8, 9, 10, 11, 8, 9]);
    assert_eq!(home.len(), before.table.len());
    assert!(table.set(&nic, 5, 8) && table.set(&nic, 7, 10));
    let mut expected = before.table.clone();
    (expected[5], expected[7]) = (0, 2);
    assert_eq!(nic.rss().unwrap().table, expected);
    assert!(!table.set(&nic, 5, 12), "no ring has that CPU");
    assert!(!table.set(&nic, 100_000, 8), "no such group");
    assert_eq!(nic.rss().unwrap().table, expected);
    // Another process may read the record after groups have moved, so it goes through JSON.
    let step: Step = serde_json::from_str(&serde_json::to_string(&step).unwrap()).unwrap();
    assert_eq!(step, Step::Table { before: RssTable::Default, rings: vec![0, 1, 2, 3] });
    deliver::undo_in_card(&nic, &[step]);
    assert_eq!(nic.rss().unwrap(), before);
}

#[test]
fn a_table_that_somebody_has_set_goes_back_to_that() {
    let fake = Fake::new(4);
    let nic = Recorded::new(&root(&fake), "eth0");
    let size = nic.rss().unwrap().table.len();
    let own: Vec<u32> = (0..size as u32).map(|i| i / 2 % 2).collect();
    nic.set_rss(&RssTable::Explicit(own.clone())).unwrap();
    // A table that uses two of the CPUs works, too.
    let (mut table, home, step) = deliver::table(&nic, &rings(), &[8, 9]).unwrap();
    assert_eq!(home[..4], [8, 8, 9, 9]);
    assert!(table.set(&nic, 0, 9));
    deliver::undo_in_card(&nic, std::slice::from_ref(&step));
    assert_eq!(nic.rss().unwrap().table, own);
    // Another program sets the table while `tune` uses it. The table must then stay as that
    // program set it.
    assert!(table.set(&nic, 0, 9));
    let his: Vec<u32> = vec![3; size];
    nic.set_rss(&RssTable::Explicit(his.clone())).unwrap();
    deliver::undo_in_card(&nic, &[step]);
    assert_eq!(nic.rss().unwrap().table, his);
}

#[test]
fn a_table_that_cannot_be_had() {
    let fake = Fake::new(4);
    let nic = Recorded::new(&root(&fake), "eth0");
    let refused = |cpus: &[u32]| deliver::table(&nic, &rings(), cpus).unwrap_err();
    assert!(refused(&[8, 9]).contains("entry 2 is ring 2"), "packets would come to CPUs that do not take part");
    assert!(refused(&[8, 9, 10, 11, 12]).contains("CPU 12"));
    let lo = Ioctl::new("lo").unwrap();
    assert!(deliver::table(&lo, &rings(), &[8]).is_err());
}
