//! Tests of apply and revert on a recorded server. The run is also interrupted, the device
//! disappears, comes back as another one or is renamed, and the machine restarts.

#[path = "common/fake.rs"]
mod fake;

use fake::{Fake, FIRST_IRQ};
use fsocket_tune::ethtool::*;
use fsocket_tune::*;
use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::panic::{catch_unwind, AssertUnwindSafe};

fn root(fake: &Fake) -> Root {
    Root::new(fake.dir.path())
}

fn store(fake: &Fake) -> Store {
    Store::lock(&root(fake), None, "eth0").unwrap()
}

fn live(fake: &Fake) -> System {
    system(&root(fake), "eth0").unwrap()
}

fn tune(fake: &Fake) -> Outcome {
    apply(&live(fake), &store(fake), &Options::default()).unwrap()
}

fn undo(fake: &Fake, force: bool) -> Reverted {
    revert(live(fake), &store(fake), force).unwrap()
}

fn fate(reverted: &Reverted, setting: Setting) -> &Undone {
    &reverted.undone.iter().find(|(s, _)| *s == setting).unwrap_or_else(|| panic!("nothing said of {setting}")).1
}

fn somaxconn() -> Setting {
    Setting::Sysctl("net.core.somaxconn".into())
}

fn state_file(fake: &Fake) -> std::path::PathBuf {
    fake.path("var/lib/fastsocket/tune/eth0.json")
}

#[test]
fn a_big_card_there_and_back() {
    let fake = Fake::new(32);
    let before = fake.snapshot();
    let outcome = tune(&fake);
    assert!(outcome.is_complete(), "{outcome:#?}");

    // The 64 queues first get the CPUs of the card's node (24-45 and 72-95), then 18 CPUs of the
    // other node.
    let cpu = |q| fake.affinity(q).parse::<u32>().unwrap();
    let used: CpuSet = (0..64).map(cpu).collect();
    assert_eq!(used.list(), "0-17,24-45,72-95");
    assert_eq!(fake.get(format!("proc/irq/{}/smp_affinity_list", FIRST_IRQ - 1)), "0-95", "not a queue's");
    let mut served = CpuSet::new();
    for q in 0..64 {
        let xps = CpuSet::parse_mask(&fake.queue(&format!("tx-{q}/xps_cpus"))).unwrap();
        let rps = CpuSet::parse_mask(&fake.queue(&format!("rx-{q}/rps_cpus"))).unwrap();
        assert!(xps.contains(cpu(q)) && served.and(&xps).is_empty());
        assert!(if xps.len() > 1 { rps == xps } else { rps.is_empty() }, "queue {q}: {xps} {rps}");
        served = served.or(&xps);
    }
    assert_eq!(served.list(), "0-45,48-95", "every CPU but the isolated ones");
    let nic = live(&fake).nic;
    let coalesce = nic.coalesce().unwrap();
    assert_eq!((coalesce.adaptive_rx, coalesce.rx_usecs), (false, 30), "it cannot adapt: the other choice");
    assert!(nic.features().unwrap()[NTUPLE].on && nic.rss().unwrap().is_even());
    assert_eq!(fake.get("proc/sys/net/ipv4/ip_local_port_range"), "16384 65535");
    assert_ne!(fake.snapshot(), before);

    let tuned = fake.snapshot();
    let again = tune(&fake);
    assert_eq!(again.done, [], "a second time there is nothing to do");
    assert_eq!(fake.snapshot(), tuned);

    let reverted = undo(&fake, false);
    assert!(reverted.is_complete() && reverted.recorded, "{reverted:#?}");
    assert_eq!(fake.snapshot(), before);
    assert!(!state_file(&fake).exists());
    assert!(!undo(&fake, false).recorded);
}

#[test]
fn fewer_channels_and_a_table_of_somebodys() {
    let fake = Fake::new(64);
    fake.put("proc/self/status", "Cpus_allowed_list:\t24-31\n");
    live(&fake).nic.set_rss(&RssTable::Explicit(vec![63; 128])).unwrap();
    fake.put("sys/class/net/eth0/queues/rx-60/rps_cpus", "0000000f,00000000,00000000");
    fake.put("sys/class/net/eth0/queues/rx-0/rps_cpus", "0000000f,00000000,00000000");
    let before = fake.snapshot();
    let outcome = tune(&fake);
    assert!(outcome.is_complete(), "{outcome:#?}");
    assert_eq!(live(&fake).nic.channels().unwrap().count.combined, 8);
    assert_eq!(fake.queue("rx-0/rps_cpus"), "0");
    assert!(!fake.path("sys/class/net/eth0/queues/rx-60").exists());
    // Whether the table was set by `tune` or by another program, it must not prevent the revert.
    live(&fake).nic.set_rss(&RssTable::Default).unwrap();
    let reverted = undo(&fake, false);
    assert!(reverted.is_complete(), "{reverted:#?}");
    assert_eq!(fake.snapshot(), before, "also of queues that had gone in between");
}

#[test]
fn a_table_that_names_queues_of_ours_does_not_hold_them() {
    let fake = Fake::new(32);
    let before = fake.snapshot();
    tune(&fake);
    live(&fake).nic.set_rss(&RssTable::Explicit(vec![63; 128])).unwrap();
    let reverted = undo(&fake, false);
    assert_eq!(live(&fake).nic.channels().unwrap().count.combined, 32);
    assert!(matches!(fate(&reverted, Setting::Rss), Undone::Failed { .. }), "{reverted:#?}");
    assert!(!reverted.is_complete(), "somebody's table could not be kept: that is said");
    assert_eq!(fake.snapshot(), before);
    // A table of another program that names only remaining queues is kept.
    let fake = Fake::new(32);
    tune(&fake);
    live(&fake).nic.set_rss(&RssTable::Explicit(vec![5; 128])).unwrap();
    let reverted = undo(&fake, false);
    assert!(matches!(fate(&reverted, Setting::Rss), Undone::Left { .. }), "{reverted:#?}");
    assert_eq!(live(&fake).nic.rss().unwrap().table, [5; 128]);
}

#[test]
fn what_somebody_else_set_is_left_unless_forced() {
    let fake = Fake::new(32);
    let before = fake.snapshot();
    tune(&fake);
    fake.put("proc/sys/net/core/somaxconn", "777");
    fake.put("sys/class/net/eth0/queues/tx-3/xps_cpus", "f0");
    let reverted = undo(&fake, false);
    assert!(!reverted.is_complete());
    let left = |r: &Reverted| r.undone.iter().filter(|(_, u)| matches!(u, Undone::Left { .. })).count();
    assert_eq!(left(&reverted), 2, "{reverted:#?}");
    assert_eq!(fake.get("proc/sys/net/core/somaxconn"), "777");
    // The changed value stays, although the revert of the channels made all queues anew.
    assert_eq!(fake.queue("tx-3/xps_cpus"), "f0");
    assert_eq!(live(&fake).nic.channels().unwrap().count.combined, 32);
    let forced = undo(&fake, true);
    assert!(forced.is_complete() && forced.undone.len() == 2, "{forced:#?}");
    assert_eq!(fake.snapshot(), before);
    assert!(!state_file(&fake).exists());
}

#[test]
fn applied_again_after_a_change_it_still_goes_back_to_the_first() {
    let fake = Fake::new(64);
    let before = fake.snapshot();
    tune(&fake);
    fake.put("proc/sys/net/core/somaxconn", "777");
    let again = tune(&fake);
    assert_eq!(again.done.len(), 1);
    assert_eq!(fake.get("proc/sys/net/core/somaxconn"), "16384");
    assert!(undo(&fake, false).is_complete());
    assert_eq!(fake.snapshot(), before);
}

/// A recorded device that calls a function around some of the changes, with the name of the moment.
struct Eventful<F: Fn(&str) -> io::Result<()>>(Recorded, F);

impl<F: Fn(&str) -> io::Result<()>> Nic for Eventful<F> {
    fn identity(&self) -> io::Result<(u32, String)> {
        self.0.identity()
    }
    fn driver(&self) -> io::Result<Driver> {
        self.0.driver()
    }
    fn channels(&self) -> io::Result<Channels> {
        self.0.channels()
    }
    fn set_channels(&self, count: ChannelCount) -> io::Result<()> {
        (self.1)("before channels")?;
        self.0.set_channels(count)?;
        (self.1)("after channels")
    }
    fn coalesce(&self) -> io::Result<Coalesce> {
        self.0.coalesce()
    }
    fn set_coalesce(&self, to: &Coalesce) -> io::Result<()> {
        (self.1)("coalesce")?;
        self.0.set_coalesce(to)
    }
    fn rings(&self) -> io::Result<Rings> {
        self.0.rings()
    }
    fn features(&self) -> io::Result<BTreeMap<String, Feature>> {
        self.0.features()
    }
    fn set_feature(&self, name: &str, on: bool) -> io::Result<()> {
        (self.1)("feature")?;
        self.0.set_feature(name, on)
    }
    fn rss(&self) -> io::Result<Rss> {
        self.0.rss()
    }
    fn set_rss(&self, table: &RssTable) -> io::Result<()> {
        self.0.set_rss(table)
    }
    fn ntuple_rules(&self) -> io::Result<u32> {
        self.0.ntuple_rules()
    }
    fn add_rule(&self, rule: &Rule) -> io::Result<u32> {
        self.0.add_rule(rule)
    }
    fn remove_rule(&self, location: u32) -> io::Result<()> {
        self.0.remove_rule(location)
    }
}

/// Applies the settings; `event` is called at each moment that [`Eventful`] names.
fn eventful(fake: &Fake, event: impl Fn(&str) -> io::Result<()> + 'static) -> Result<Outcome, Error> {
    let nic = Eventful(Recorded::new(&root(fake), "eth0"), event);
    apply(&System::new(root(fake), Box::new(nic), "eth0"), &store(fake), &Options::default())
}

#[test]
fn stopped_anywhere_it_can_be_undone() {
    for moment in ["before channels", "after channels", "coalesce", "feature"] {
        let fake = Fake::new(32);
        let before = fake.snapshot();
        let stopped = catch_unwind(AssertUnwindSafe(|| {
            eventful(&fake, move |now| {
                // Like a kill: the run executes no further code.
                assert!(now != moment, "stopped");
                Ok(())
            })
        }));
        assert!(stopped.is_err(), "{moment} never came");
        if moment == "after channels" {
            // Simulate a driver that resets the values of its queues.
            fake.put("sys/class/net/eth0/queues/tx-0/xps_cpus", "ff");
            fake.put(format!("proc/irq/{FIRST_IRQ}/smp_affinity_list"), "5");
        }
        assert!(state_file(&fake).exists(), "{moment}");
        let reverted = undo(&fake, false);
        assert!(reverted.is_complete(), "{moment}: {reverted:#?}");
        assert_eq!(fake.snapshot(), before, "{moment}");
    }
}

#[test]
fn a_setting_that_fails_is_named_and_the_rest_is_done() {
    let fake = Fake::new(32);
    let before = fake.snapshot();
    let refused = |now: &str| match now {
        "before channels" => Err(io::Error::from_raw_os_error(libc::EBUSY)),
        "coalesce" => Err(io::Error::from_raw_os_error(libc::EOPNOTSUPP)),
        _ => Ok(()),
    };
    let outcome = eventful(&fake, refused).unwrap();
    assert!(!outcome.is_complete());
    assert_eq!(outcome.failed(), 2, "{outcome:#?}");
    assert_eq!(fake.get("proc/sys/net/core/somaxconn"), "16384");
    assert_eq!(live(&fake).nic.channels().unwrap().count.combined, 32);
    let text = fs::read_to_string(state_file(&fake)).unwrap();
    assert!(!text.contains("\"channels\"") && !text.contains("\"coalesce\""), "what failed is not recorded");
    let reverted = undo(&fake, false);
    assert!(reverted.is_complete(), "{reverted:#?}");
    assert_eq!(fake.snapshot(), before);
}

#[test]
fn a_device_that_goes_away_in_the_middle() {
    for moment in ["after channels", "feature"] {
        let fake = Fake::new(32);
        let link = fake.path("sys/class/net/eth0");
        let outcome = eventful(&fake, move |now| match now == moment {
            true => fs::remove_file(&link).and(Err(io::Error::from_raw_os_error(libc::ENODEV))),
            false => Ok(()),
        })
        .unwrap();
        assert!(outcome.gone && !outcome.is_complete(), "{moment}: {outcome:#?}");
        assert!(state_file(&fake).exists());
        let reverted = undo(&fake, false);
        assert!(reverted.is_complete() && reverted.replaced, "{moment}: {reverted:#?}");
        assert_eq!(fake.get("proc/sys/net/core/somaxconn"), "4096");
        assert!(!state_file(&fake).exists());
    }
}

#[test]
fn gone_after_it_was_tuned_the_rest_is_undone() {
    let fake = Fake::new(64);
    tune(&fake);
    fs::remove_file(fake.path("sys/class/net/eth0")).unwrap();
    let reverted = undo(&fake, false);
    assert!(reverted.replaced && reverted.is_complete());
    assert!(matches!(fate(&reverted, Setting::Xps(1)), Undone::Gone));
    assert_eq!(fake.get("proc/sys/net/core/somaxconn"), "4096");
}

#[test]
fn another_device_of_that_name_is_left_alone() {
    let fake = Fake::new(64);
    tune(&fake);
    fake.put("sys/class/net/eth0/ifindex", "9");
    let reverted = undo(&fake, false);
    assert!(reverted.replaced && reverted.is_complete());
    assert!(matches!(fate(&reverted, somaxconn()), Undone::Restored { .. }));
    assert_eq!(fake.affinity(0), "0", "as the other device has it");
}

#[test]
fn renamed() {
    let fake = Fake::new(64);
    tune(&fake);
    fs::rename(fake.path("sys/class/net/eth0"), fake.path("sys/class/net/lan0")).unwrap();
    fs::rename(fake.path("ethtool/eth0.json"), fake.path("ethtool/lan0.json")).unwrap();
    let reverted = undo(&fake, false);
    assert_eq!(reverted.renamed.as_deref(), Some("lan0"));
    assert!(reverted.is_complete() && !reverted.replaced, "{reverted:#?}");
    assert_eq!(fake.affinity(0), "0-95");
}

#[test]
fn after_a_restart_nothing_of_ours_is_left_to_undo() {
    let fake = Fake::new(64);
    tune(&fake);
    fake.put("proc/sys/kernel/random/boot_id", "99999999-2222-3333-4444-555555555555");
    // One setting has its old value again. The other one kept the new value, because somebody
    // made it permanent in /etc/sysctl.d.
    fake.put("proc/sys/net/core/netdev_max_backlog", "1000");
    let reverted = undo(&fake, false);
    assert!(reverted.restarted && reverted.is_complete(), "{reverted:#?}");
    assert!(matches!(fate(&reverted, Setting::Sysctl("net.core.netdev_max_backlog".into())), Undone::AsBefore));
    assert!(matches!(fate(&reverted, somaxconn()), Undone::Restarted { .. }));
    assert_eq!(fake.get("proc/sys/net/core/somaxconn"), "16384");
    assert!(!state_file(&fake).exists());
}

#[test]
fn a_state_file_cannot_make_us_write_elsewhere() {
    let fake = Fake::new(64);
    tune(&fake);
    let text = fs::read_to_string(state_file(&fake)).unwrap();
    let evil = text.replace("net.core.somaxconn", "kernel.core_pattern").replace("mlx5_comp3@", "../../x");
    fs::write(state_file(&fake), evil).unwrap();
    let reverted = undo(&fake, true);
    assert!(matches!(fate(&reverted, Setting::Sysctl("kernel.core_pattern".into())), Undone::Gone));
    assert_eq!(fake.get("proc/sys/kernel/core_pattern"), "core");
    // A state file that was cut off in the middle: revert must not touch anything.
    let fake = Fake::new(64);
    tune(&fake);
    let tuned = fake.snapshot();
    let text = fs::read_to_string(state_file(&fake)).unwrap();
    fs::write(state_file(&fake), &text[..text.len() / 2]).unwrap();
    assert!(matches!(revert(live(&fake), &store(&fake), true), Err(Error::Damaged(..))));
    assert!(matches!(apply(&live(&fake), &store(&fake), &Options::default()), Err(Error::Damaged(..))));
    assert_eq!(fake.snapshot(), tuned);
}
