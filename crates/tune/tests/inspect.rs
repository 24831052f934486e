//! Tests that read a recorded server.

#[path = "common/fake.rs"]
mod fake;

use fake::{Fake, FIRST_IRQ};
use fsocket_tune::ethtool::Recorded;
use fsocket_tune::*;

fn device(fake: &Fake, name: &str) -> Result<Device, Error> {
    let root = Root::new(fake.dir.path());
    Device::inspect(&root, &Recorded::new(&root, name), name)
}

#[test]
fn the_machine() {
    let fake = Fake::new(8);
    fake.put("proc/77/comm", "irqbalance");
    fake.put("proc/77/cmdline", "/usr/sbin/irqbalance\0--foreground\0--banirq=131\0");
    fake.put("proc/12/comm", "kthreadd");
    fake.put("etc/default/irqbalance", "IRQBALANCE_BANNED_CPULIST=4-5");
    fake.put("proc/irq/default_smp_affinity", "0000ffff,ffffffff,ffffffff");
    fake.put("sys/fs/cgroup/cpuset.cpus.isolated", "90-91");
    fake.put(
        "proc/net/tcp",
        "  sl  local_address rem_address   st\n   0: 00000000:0050 00000000:0000 0A 0\n   1: 0100007F:1F90 00000000:0000 01 0",
    );
    fake.put("proc/self/limits", "Max open files            1024                 524288               files");
    let machine = Machine::inspect(&Root::new(fake.dir.path()));
    assert_eq!(machine.cpus.online.len(), 96);
    assert_eq!(machine.cpus.usable().list(), "0-45,48-79", "default affinity 0-79, isolated 46-47 and 90-91");
    assert_eq!(machine.cpus.nodes.len(), 2);
    assert_eq!(machine.cpus.cores.len(), 48);
    assert!(machine.cpus.same_core(3, 51) && !machine.cpus.same_core(3, 4));
    assert_eq!((machine.cpus.thread(3), machine.cpus.thread(51)), (0, 1));
    assert_eq!((machine.cpus.distance(3, Some(1)), machine.cpus.distance(30, Some(1))), (21, 10));
    let balance = machine.irqbalance.unwrap();
    assert_eq!((balance.pid, balance.banned_irqs, balance.banned_cpus.list().as_str()), (77, vec![131], "4-5"));
    assert_eq!(machine.conntrack.unwrap().max, 262144);
    assert_eq!(machine.listening, [80]);
    assert_eq!((machine.limits.nofile, machine.limits.nofile_hard), (Some(1024), Some(524288)));
    assert_eq!(machine.sysctls["net.ipv4.ip_local_port_range"], "32768 60999", "one space, as people write it");
    assert!(!machine.sysctls.contains_key("net.ipv4.tcp_fin_timeout"), "not on this machine");
    assert_eq!(machine.memory_mib, 527988840 / 1024);
}

#[test]
fn an_empty_machine_is_no_accident() {
    let dir = tempfile::tempdir().unwrap();
    let machine = Machine::inspect(&Root::new(dir.path()));
    assert!(machine.cpus.usable().is_empty() && machine.irqbalance.is_none() && machine.conntrack.is_none());
}

#[test]
fn the_card() {
    let fake = Fake::new(8);
    let eth0 = device(&fake, "eth0").unwrap();
    assert!(eth0.up && eth0.physical);
    assert_eq!((eth0.ifindex, eth0.node), (4, Some(1)));
    assert_eq!((eth0.rx_queues.len(), eth0.tx_queues.len()), (8, 8));
    let queues: Vec<_> = eth0.queue_irqs().map(|irq| (irq.number, irq.queue)).collect();
    assert_eq!(queues.len(), 64);
    assert_eq!(queues[10], (FIRST_IRQ + 10, 10), "in the order of numbers in names, not of letters");
    assert_eq!(eth0.irqs.iter().filter(|irq| irq.role == Role::Other).count(), 1);
    assert_eq!(eth0.irqs[0].affinity.len(), 96);
}

#[test]
fn a_virtio_device_has_its_interrupts_one_level_up() {
    let fake = Fake::new(1);
    let pci = "sys/devices/pci0000:00/0000:00:04.0";
    fake.put(format!("{pci}/msi_irqs/40"), "msix");
    fake.put(format!("{pci}/msi_irqs/41"), "msix");
    fake.put(format!("{pci}/msi_irqs/42"), "msix");
    fake.put(format!("{pci}/numa_node"), "0");
    for (irq, name) in [(40, "virtio3-config"), (41, "virtio3-input.0"), (42, "virtio3-output.0")] {
        fake.put(format!("sys/kernel/irq/{irq}/actions"), name);
        fake.put(format!("proc/irq/{irq}/smp_affinity_list"), "0-3");
    }
    let net = format!("{pci}/virtio3/net/ens4");
    fake.put(format!("{net}/ifindex"), "7");
    fake.put(format!("{net}/queues/rx-0/rps_cpus"), "0");
    fake.put("sys/bus/virtio/uevent", "");
    let link = |to: &str, from: String| std::os::unix::fs::symlink(to, fake.path(from)).unwrap();
    link("../..", format!("{net}/device"));
    link("../../../../bus/virtio", format!("{pci}/virtio3/subsystem"));
    link("../../devices/pci0000:00/0000:00:04.0/virtio3/net/ens4", "sys/class/net/ens4".into());
    let ens4 = device(&fake, "ens4").unwrap();
    let names: Vec<_> = ens4.irqs.iter().map(|irq| (irq.name.as_str(), irq.role)).collect();
    assert_eq!(names, [("virtio3-input.0", Role::Rx), ("virtio3-output.0", Role::Tx), ("virtio3-config", Role::Other)]);
    assert_eq!(ens4.node, Some(0));
    // If the device is not a virtio device, the parent may be a bridge, and its interrupts must
    // not be taken.
    std::fs::remove_file(fake.path(format!("{pci}/virtio3/subsystem"))).unwrap();
    link("../../../../bus", format!("{pci}/virtio3/subsystem"));
    assert_eq!(device(&fake, "ens4").unwrap().irqs, []);
}

#[test]
fn two_ports_of_one_function() {
    let fake = Fake::new(1);
    let pci = "sys/devices/pci0000:3a/0000:3b:00.0";
    fake.put(format!("{pci}/net/eth10/ifindex"), "5");
    for (irq, name) in [(200, "eth0-rx-0"), (201, "eth10-rx-0")] {
        fake.put(format!("{pci}/msi_irqs/{irq}"), "msix");
        fake.put(format!("sys/kernel/irq/{irq}/actions"), name);
    }
    let names: Vec<_> = device(&fake, "eth0").unwrap().irqs.into_iter().map(|irq| irq.name).collect();
    assert_eq!(names, ["eth0-rx-0"]);
}

#[test]
fn what_cannot_be_inspected() {
    let fake = Fake::new(1);
    assert!(matches!(device(&fake, "eth9"), Err(Error::NoDevice(_))));
    assert!(matches!(device(&fake, "../eth0"), Err(Error::BadName(_))));
}
