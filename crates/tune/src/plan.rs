//! Makes a plan of changes from the descriptions of machine and device. The planner reads nothing
//! else and changes nothing, so tests can run it on recorded machines.

mod advice;
mod change;
mod device;
mod spread;

pub use change::{Change, Kind, Note, Options, Plan, RpsPolicy};
pub use spread::Spread;

use crate::cpus::CpuSet;
use crate::device::Device;
use crate::machine::Machine;
use crate::setting::{Setting, Value};
use crate::sysctl;

/// Makes the plan for `device` on `machine`.
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

/// The CPUs that are to handle packets. Adds a note for CPUs that are left out.
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
        ("outside the cpuset", cpus.online.minus(&cpus.allowed)),
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
