//! What to change, from what was found. Pure: looks at descriptions only.

mod advice;
mod device;
mod spread;

pub use spread::Spread;

use crate::cpus::CpuSet;
use crate::device::Device;
use crate::machine::Machine;
use crate::setting::{Group, Setting, Value};
use crate::sysctl;
use serde::{Deserialize, Serialize};

/// What the caller wants otherwise than by default.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Options {
    /// Use these CPUs only, whatever the machine says of them.
    pub cpus: Option<CpuSet>,
    /// Leave these alone.
    pub skip: Vec<Group>,
    pub rps: RpsPolicy,
}

/// When RPS is to pass packets on to further CPUs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum RpsPolicy {
    /// From a queue to CPUs that have none. Off on devices without
    /// interrupts: their packets are handled where they were sent.
    #[default]
    Auto,
    Off,
    /// As `Auto`, on any device.
    Spread,
}

/// One change. `old` is what was found.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Change {
    pub setting: Setting,
    pub old: Value,
    pub new: Value,
    /// Tried in turn if the device refuses `new`.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub or: Vec<Value>,
    pub why: String,
}

/// What kind of remark.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Kind {
    Found,
    Lacks,
    Warning,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Note {
    pub kind: Kind,
    pub topic: String,
    pub text: String,
}

/// Notes, and changes in the order in which they have to be made.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Plan {
    pub notes: Vec<Note>,
    pub changes: Vec<Change>,
}

impl Plan {
    fn note(&mut self, kind: Kind, topic: &str, text: impl Into<String>) {
        self.notes.push(Note { kind, topic: topic.to_owned(), text: text.into() });
    }

    fn found(&mut self, topic: &str, text: impl Into<String>) {
        self.note(Kind::Found, topic, text);
    }

    fn lacks(&mut self, topic: &str, text: impl Into<String>) {
        self.note(Kind::Lacks, topic, text);
    }

    fn warn(&mut self, topic: &str, text: impl Into<String>) {
        self.note(Kind::Warning, topic, text);
    }

    /// A change, if it is one.
    fn change(&mut self, setting: Setting, old: Value, new: Value, why: &str) {
        if old != new {
            self.changes.push(Change { setting, old, new, or: Vec::new(), why: why.to_owned() });
        }
    }

    /// Notes of one kind.
    pub fn notes(&self, kind: Kind) -> impl Iterator<Item = &Note> {
        self.notes.iter().filter(move |n| n.kind == kind)
    }

    pub fn find(&self, setting: &Setting) -> Option<&Change> {
        self.changes.iter().find(|c| c.setting == *setting)
    }
}

/// The plan for `device` on `machine`.
pub fn plan(machine: &Machine, device: &Device, options: &Options) -> Plan {
    let mut plan = Plan::default();
    let cpus = usable(machine, options, &mut plan);
    device::plan(machine, device, options, &cpus, &mut plan);
    for s in sysctl::ALL {
        let Some(now) = machine.sysctls.get(s.name) else {
            plan.lacks("sysctl", format!("{}: not in this kernel or network namespace", s.name));
            continue;
        };
        if let Some(new) = s.wanted(now, machine.memory_mib) {
            plan.change(Setting::Sysctl(s.name.to_owned()), Value::Text(now.clone()), Value::Text(new), s.why);
        }
    }
    advice::add(machine, device, &mut plan);
    plan.changes.retain(|change| !options.skip.contains(&change.setting.group()));
    plan
}

/// CPUs for packets; says what was left out, and why.
fn usable(machine: &Machine, options: &Options, plan: &mut Plan) -> CpuSet {
    let cpus = &machine.cpus;
    let mut text = format!("{} online ({})", cpus.online.len(), cpus.online);
    if cpus.nodes.len() > 1 {
        text.push_str(&format!(", {} NUMA nodes", cpus.nodes.len()));
    }
    if let Some(chosen) = &options.cpus {
        let usable = chosen.and(&cpus.online);
        plan.found("cpus", format!("{text}; used as told: {usable}"));
        let off = chosen.minus(&cpus.online);
        if !off.is_empty() {
            plan.warn("cpus", format!("{off} not online, left out"));
        }
        return usable;
    }
    let usable = cpus.usable();
    let reasons = [
        ("isolated", cpus.online.and(&cpus.isolated)),
        ("outside our cpuset", cpus.online.minus(&cpus.allowed)),
        ("not in the default IRQ affinity", cpus.online.minus(&cpus.irq_default)),
    ];
    for (reason, set) in reasons {
        let set = set.minus(&usable);
        if !set.is_empty() {
            text.push_str(&format!("; {reason}: {set}"));
        }
    }
    plan.found("cpus", format!("{text}; used: {usable}"));
    usable
}
