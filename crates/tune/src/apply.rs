//! Carries a plan out. The state file has the old values before the first change, so that a run
//! can be undone wherever it was interrupted.

use crate::device::{still_there, Device};
use crate::error::Error;
use crate::machine::Machine;
use crate::plan::{plan, Change, Kind, Options, Plan};
use crate::setting::{Group, Setting, System, Value};
use crate::state::{boot, Record, State, Store};
use serde::Serialize;
use std::io;

/// The result for one setting.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Done {
    pub setting: Setting,
    pub fate: Fate,
}

#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(rename_all = "snake_case", tag = "what")]
pub enum Fate {
    /// The setting has the value now.
    Set { value: Value },
    /// The device accepted the setting but changed it to this value.
    Adjusted { value: Value },
    /// The setting still has its old value.
    Failed { why: String },
}

#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Outcome {
    pub done: Vec<Done>,
    /// The device disappeared during the run.
    pub gone: bool,
    /// Warnings of the plan that was carried out.
    pub notes: Vec<crate::plan::Note>,
}

impl Outcome {
    pub fn failed(&self) -> usize {
        self.done.iter().filter(|d| matches!(d.fate, Fate::Failed { .. })).count()
    }

    /// Whether every change succeeded.
    pub fn is_complete(&self) -> bool {
        !self.gone && self.failed() == 0
    }
}

/// Inspects the device, plans, writes the state file, and makes the changes. A later run changes
/// only settings that lost their new values since.
pub fn apply(system: &System, store: &Store, options: &Options) -> Result<Outcome, Error> {
    let device = inspect(system)?;
    let first = plan(&Machine::inspect(&system.root), &device, options);
    let mut state = current(system, store, &device)?;
    let mut outcome = Outcome::default();
    if first.changes.is_empty() {
        outcome.notes = warnings(first);
        return Ok(outcome);
    }
    let mut run = Run { system, store, state: &mut state, outcome: &mut outcome, ifindex: device.ifindex };
    let mut rest = first;
    if let Some(at) = rest.changes.iter().position(|c| c.setting == Setting::Channels) {
        run.snapshot(&device);
        let channels: Vec<Change> = rest.changes.drain(..=at).collect();
        if !run.carry_out(&channels)? {
            return run.end(rest);
        }
        // The driver has new queues and interrupts now, so the device is inspected again.
        let mut options = options.clone();
        options.skip.push(Group::Queues);
        let device = match inspect(system) {
            Ok(device) => device,
            Err(Error::NoDevice(_)) => {
                run.outcome.gone = true;
                return run.end(rest);
            }
            Err(e) => return Err(e),
        };
        rest = plan(&Machine::inspect(&system.root), &device, &options);
    }
    run.carry_out(&rest.changes)?;
    run.end(rest)
}

fn inspect(system: &System) -> Result<Device, Error> {
    Device::inspect(&system.root, &*system.nic, &system.device)
}

fn warnings(plan: Plan) -> Vec<crate::plan::Note> {
    plan.notes.into_iter().filter(|n| n.kind == Kind::Warning).collect()
}

/// The state to continue from: the records of settings that still exist. After a restart the
/// state begins empty, because a restart undoes every change. If the device was removed and made
/// again, its settings are dropped.
fn current(system: &System, store: &Store, device: &Device) -> Result<State, Error> {
    let fresh = State::new(&system.root, &device.name, device.ifindex);
    let Some(mut state) = store.load()? else { return Ok(fresh) };
    if state.boot != boot(&system.root) {
        return Ok(fresh);
    }
    if state.ifindex != device.ifindex {
        state.records.retain(|r| !r.setting.is_devices());
        state.ifindex = device.ifindex;
    }
    Ok(state)
}

struct Run<'a> {
    system: &'a System,
    store: &'a Store,
    state: &'a mut State,
    outcome: &'a mut Outcome,
    ifindex: u32,
}

impl Run<'_> {
    /// A change of channels resets other settings. Records them before the change.
    fn snapshot(&mut self, device: &Device) {
        let irqs = device.irqs.iter().map(|irq| Setting::Irq(irq.name.clone()));
        let xps = (0..device.tx_queues.len() as u32).map(Setting::Xps);
        let rps = (0..device.rx_queues.len() as u32).map(Setting::Rps);
        for setting in irqs.chain(xps).chain(rps).chain([Setting::Rss, Setting::Coalesce]) {
            if let Ok(old) = self.system.read(&setting) {
                self.state.intend(&setting, Some(old), []);
            }
        }
    }

    /// Records each change, then makes it. Returns false if the device is gone.
    fn carry_out(&mut self, changes: &[Change]) -> Result<bool, Error> {
        let resized = self.state.find(&Setting::Channels).is_some();
        for change in changes {
            // After a change of channels, the driver has set new values for the queues. These are
            // not the user's old values; the values of queues that existed before are recorded
            // already.
            let theirs = resized && change.setting.is_queues();
            let old = (!theirs).then(|| change.old.clone());
            self.state.intend(&change.setting, old, [&change.new].into_iter().chain(&change.or).cloned());
        }
        self.state.settled = false;
        self.store.save(self.state)?;
        for change in changes {
            let fate = self.set(change);
            if matches!(fate, Fate::Failed { .. }) && change.setting.is_devices() && self.is_gone() {
                self.outcome.gone = true;
                return Ok(false);
            }
            self.outcome.done.push(Done { setting: change.setting.clone(), fate });
        }
        Ok(true)
    }

    fn is_gone(&self) -> bool {
        !still_there(&*self.system.nic, self.ifindex).unwrap_or(true)
    }

    fn set(&mut self, change: &Change) -> Fate {
        let mut why = String::new();
        for value in [&change.new].into_iter().chain(&change.or) {
            if let Err(e) = self.system.write(&change.setting, value) {
                why = explain(&change.setting, &e);
                continue;
            }
            match self.system.read(&change.setting) {
                Ok(now) if now.same(value) => return Fate::Set { value: now },
                Ok(now) if now.same(&change.old) => why = "the device took it and did nothing".to_owned(),
                Ok(now) => {
                    self.state.intend(&change.setting, None, [now.clone()]);
                    return Fate::Adjusted { value: now };
                }
                Err(e) => why = e.to_string(),
            }
        }
        Fate::Failed { why }
    }

    /// Writes the final state file, and ends the run.
    fn end(mut self, plan: Plan) -> Result<Outcome, Error> {
        if !self.outcome.gone {
            self.settle();
        }
        match self.state.records.is_empty() {
            true => self.store.remove()?,
            false => self.store.save(self.state)?,
        }
        self.outcome.notes = warnings(plan);
        Ok(std::mem::take(self.outcome))
    }

    /// Drops records of unchanged settings. After a change of channels, adds the values that the
    /// driver has set to the others.
    fn settle(&mut self) {
        let failed: Vec<&Setting> =
            self.outcome.done.iter().filter(|d| matches!(d.fate, Fate::Failed { .. })).map(|d| &d.setting).collect();
        let system = self.system;
        let is_old = |r: &Record| r.old.is_some() && system.read(&r.setting).ok() == r.old;
        self.state.records.retain(|r| !failed.contains(&&r.setting) || !is_old(r));
        if self.state.find(&Setting::Channels).is_some() {
            for record in self.state.records.iter_mut().filter(|r| r.new.is_empty()) {
                let now = system.read(&record.setting).ok();
                record.new.extend(now.filter(|now| record.old.as_ref() != Some(now)));
            }
        } else {
            self.state.records.retain(|r| !r.new.is_empty());
        }
        self.state.settled = true;
    }
}

/// Explains an error of the kernel in terms of the setting.
pub fn explain(setting: &Setting, error: &io::Error) -> String {
    match (setting, error.raw_os_error()) {
        (Setting::Irq(_), Some(libc::EIO | libc::EPERM)) => {
            "the kernel manages this interrupt itself and does not let it be moved".to_owned()
        }
        (_, Some(libc::EOPNOTSUPP)) => "the device does not support it".to_owned(),
        (_, Some(libc::EPERM | libc::EACCES | libc::EROFS)) => format!("not allowed here ({error})"),
        _ if error.kind() == io::ErrorKind::NotFound => "not there any more".to_owned(),
        _ => error.to_string(),
    }
}
