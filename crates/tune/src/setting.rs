//! A setting that can be read, changed and restored.

use crate::cpus::CpuSet;
use crate::device::interrupts;
use crate::ethtool::{ChannelCount, Coalesce, Nic, RssTable, NTUPLE};
use crate::root::Root;
use crate::sysctl;
use serde::{Deserialize, Serialize};
use std::cell::RefCell;
use std::collections::BTreeMap;
use std::fmt;
use std::io;

/// Identifies a setting. Settings of a device do not name the device: its name is in the state
/// file, and may have changed since.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Setting {
    Sysctl(String),
    Channels,
    /// The indirection table.
    Rss,
    /// Interrupt affinity, by the interrupt's name.
    Irq(String),
    /// `xps_cpus` of a transmit queue.
    Xps(u32),
    /// `rps_cpus` of a receive queue.
    Rps(u32),
    Coalesce,
    Ntuple,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Value {
    Text(String),
    Cpus(CpuSet),
    Channels(ChannelCount),
    Rss(RssTable),
    Coalesce(Coalesce),
    On(bool),
}

/// A group that `--only` and `--skip` switch on or off.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Group {
    Queues,
    Rss,
    Irq,
    Xps,
    Rps,
    Coalesce,
    Ntuple,
    Sysctl,
}

impl Group {
    pub const ALL: &[Group] =
        &[Group::Queues, Group::Rss, Group::Irq, Group::Xps, Group::Rps, Group::Coalesce, Group::Ntuple, Group::Sysctl];

    pub fn name(self) -> &'static str {
        match self {
            Group::Queues => "queues",
            Group::Rss => "rss",
            Group::Irq => "irq",
            Group::Xps => "xps",
            Group::Rps => "rps",
            Group::Coalesce => "coalesce",
            Group::Ntuple => "ntuple",
            Group::Sysctl => "sysctl",
        }
    }
}

impl Setting {
    pub fn group(&self) -> Group {
        match self {
            Setting::Sysctl(_) => Group::Sysctl,
            Setting::Channels => Group::Queues,
            Setting::Rss => Group::Rss,
            Setting::Irq(_) => Group::Irq,
            Setting::Xps(_) => Group::Xps,
            Setting::Rps(_) => Group::Rps,
            Setting::Coalesce => Group::Coalesce,
            Setting::Ntuple => Group::Ntuple,
        }
    }

    /// Whether the setting belongs to the device, so that it vanishes with the device.
    pub fn is_devices(&self) -> bool {
        !matches!(self, Setting::Sysctl(_))
    }

    /// Whether a change of the number of channels resets the setting.
    pub fn is_queues(&self) -> bool {
        matches!(self, Setting::Rss | Setting::Irq(_) | Setting::Xps(_) | Setting::Rps(_) | Setting::Coalesce)
    }
}

impl fmt::Display for Setting {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Setting::Sysctl(name) => f.write_str(name),
            Setting::Channels => f.write_str("queues"),
            Setting::Rss => f.write_str("RSS table"),
            Setting::Irq(name) => write!(f, "IRQ {name}"),
            Setting::Xps(queue) => write!(f, "tx-{queue} xps_cpus"),
            Setting::Rps(queue) => write!(f, "rx-{queue} rps_cpus"),
            Setting::Coalesce => f.write_str("coalescing"),
            Setting::Ntuple => f.write_str("ntuple filters"),
        }
    }
}

impl Value {
    /// Compares in order to find out whether another program has changed the value.
    pub fn same(&self, other: &Value) -> bool {
        match (self, other) {
            (Value::Coalesce(a), Value::Coalesce(b)) => a.same(b),
            _ => self == other,
        }
    }
}

impl fmt::Display for Value {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Value::Text(text) => f.write_str(text),
            Value::Cpus(cpus) if cpus.is_empty() => f.write_str("none"),
            Value::Cpus(cpus) => cpus.fmt(f),
            Value::Channels(count) => count.fmt(f),
            Value::Rss(RssTable::Default) => f.write_str("even"),
            Value::Rss(RssTable::Explicit(table)) => write!(f, "{} entries of its own", table.len()),
            Value::Coalesce(c) => c.fmt(f),
            Value::On(on) => f.write_str(if *on { "on" } else { "off" }),
        }
    }
}

/// Gives access to the settings of one device and of its machine.
pub struct System {
    pub root: Root,
    pub nic: Box<dyn Nic>,
    /// Present name of the device.
    pub device: String,
    /// Numbers of the interrupts by name. `None` after the channels were changed, because the
    /// numbers may be new.
    irqs: RefCell<Option<BTreeMap<String, u32>>>,
}

impl System {
    pub fn new(root: Root, nic: Box<dyn Nic>, device: &str) -> System {
        System { root, nic, device: device.to_owned(), irqs: RefCell::new(None) }
    }

    fn queue(&self, queue: impl fmt::Display) -> String {
        format!("sys/class/net/{}/queues/{queue}", self.device)
    }

    fn irq(&self, name: &str) -> io::Result<String> {
        let mut irqs = self.irqs.borrow_mut();
        let irqs = irqs.get_or_insert_with(|| {
            let all = interrupts::of_device(&self.root, &self.device);
            all.into_iter().map(|irq| (irq.name, irq.number)).collect()
        });
        let number = irqs.get(name).ok_or(io::ErrorKind::NotFound)?;
        Ok(format!("proc/irq/{number}/smp_affinity_list"))
    }

    fn cpus(
        &self,
        text: io::Result<String>,
        parse: fn(&str) -> Result<CpuSet, crate::cpus::BadCpus>,
    ) -> io::Result<Value> {
        parse(&text?).map(Value::Cpus).map_err(|e| io::Error::new(io::ErrorKind::InvalidData, e))
    }

    /// The present value. `NotFound`: there is no such queue, interrupt or setting. EOPNOTSUPP:
    /// the device lacks the feature.
    pub fn read(&self, setting: &Setting) -> io::Result<Value> {
        match setting {
            Setting::Sysctl(name) => {
                let name = sysctl::find(name).ok_or(io::ErrorKind::NotFound)?.name;
                let text = self.root.read(sysctl::path(name))?;
                Ok(Value::Text(text.split_whitespace().collect::<Vec<_>>().join(" ")))
            }
            Setting::Channels => Ok(Value::Channels(self.nic.channels()?.count)),
            Setting::Rss => {
                let rss = self.nic.rss()?;
                let table = if rss.is_default() { RssTable::Default } else { RssTable::Explicit(rss.table) };
                Ok(Value::Rss(table))
            }
            Setting::Irq(name) => self.cpus(self.root.read(self.irq(name)?), CpuSet::parse_list),
            Setting::Xps(q) => self.cpus(self.root.read(self.queue(format!("tx-{q}/xps_cpus"))), CpuSet::parse_mask),
            Setting::Rps(q) => self.cpus(self.root.read(self.queue(format!("rx-{q}/rps_cpus"))), CpuSet::parse_mask),
            Setting::Coalesce => Ok(Value::Coalesce(self.nic.coalesce()?)),
            Setting::Ntuple => {
                let feature = self.nic.features()?.get(NTUPLE).copied();
                Ok(Value::On(feature.ok_or_else(|| io::Error::from_raw_os_error(libc::EOPNOTSUPP))?.on))
            }
        }
    }

    pub fn write(&self, setting: &Setting, value: &Value) -> io::Result<()> {
        match (setting, value) {
            (Setting::Sysctl(name), Value::Text(text)) => {
                let name = sysctl::find(name).ok_or(io::ErrorKind::NotFound)?.name;
                self.root.write(sysctl::path(name), text)
            }
            (Setting::Channels, Value::Channels(count)) => {
                self.irqs.borrow_mut().take();
                self.nic.set_channels(*count)
            }
            (Setting::Rss, Value::Rss(table)) => self.nic.set_rss(table),
            (Setting::Irq(name), Value::Cpus(cpus)) => self.root.write(self.irq(name)?, &cpus.list()),
            (Setting::Xps(q), Value::Cpus(cpus)) => {
                self.root.write(self.queue(format!("tx-{q}/xps_cpus")), &cpus.mask())
            }
            (Setting::Rps(q), Value::Cpus(cpus)) => {
                self.root.write(self.queue(format!("rx-{q}/rps_cpus")), &cpus.mask())
            }
            (Setting::Coalesce, Value::Coalesce(to)) => self.nic.set_coalesce(to),
            (Setting::Ntuple, Value::On(on)) => self.nic.set_feature(NTUPLE, *on),
            _ => Err(io::Error::new(io::ErrorKind::InvalidData, "a value of another kind")),
        }
    }
}
