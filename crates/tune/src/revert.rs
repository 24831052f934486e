//! Puts the recorded values back. A value that another program has set since is left alone.

use crate::apply::explain;
use crate::device::check_name;
use crate::error::Error;
use crate::ethtool::{Ioctl, Nic, Recorded, RssTable};
use crate::root::Root;
use crate::setting::{Setting, System, Value};
use crate::state::{boot, Record, State, Store};
use serde::Serialize;
use std::io;

/// The result for one setting.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(rename_all = "snake_case", tag = "what")]
pub enum Undone {
    /// The old value was put back.
    Restored {
        value: Value,
    },
    /// The setting had its old value already.
    AsBefore,
    /// The setting, its queue or its device no longer exists.
    Gone,
    /// A restart has undone the change, so the present value is not Fastsocket's.
    Restarted {
        now: Value,
        old: Value,
    },
    /// Another program has set the value since, so it was left alone.
    Left {
        now: Value,
        old: Option<Value>,
    },
    Failed {
        why: String,
    },
}

#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Reverted {
    /// Whether there was a state file.
    pub recorded: bool,
    /// Whether the machine was restarted after the changes.
    pub restarted: bool,
    /// Whether the run that made the changes reached its end.
    pub settled: bool,
    /// The device is gone, or another device has its name.
    pub replaced: bool,
    /// The device's present name, if the device was renamed.
    pub renamed: Option<String>,
    pub undone: Vec<(Setting, Undone)>,
}

impl Reverted {
    /// Whether every setting has its old value.
    pub fn is_complete(&self) -> bool {
        !self.undone.iter().any(|(_, u)| matches!(u, Undone::Left { .. } | Undone::Failed { .. }))
    }
}

/// Opens a device, on this machine or in a recording.
pub fn system(root: &Root, name: &str) -> Result<System, Error> {
    check_name(name)?;
    let nic: Box<dyn Nic> = match root.is_live() {
        true => Box::new(Ioctl::new(name).map_err(|e| Error::Device(name.to_owned(), e))?),
        false => Box::new(Recorded::new(root, name)),
    };
    Ok(System::new(root.clone(), nic, name))
}

/// Undoes the changes in the state file, then removes the file. Values that another program has
/// changed since are left alone and stay in the file, unless `force`.
pub fn revert(system: System, store: &Store, force: bool) -> Result<Reverted, Error> {
    let Some(mut state) = store.load()? else { return Ok(Reverted::default()) };
    let mut reverted = Reverted { recorded: true, ..Reverted::default() };
    reverted.settled = state.settled;
    reverted.restarted = state.boot != boot(&system.root);
    let system = match whereabouts(&system, &state) {
        Whereabouts::Here => system,
        Whereabouts::Renamed(name) => {
            let renamed = crate::revert::system(&system.root, &name)?;
            reverted.renamed = Some(name);
            renamed
        }
        Whereabouts::Gone => {
            reverted.replaced = true;
            system
        }
    };
    let mut steps: Vec<Step> = state.records.drain(..).map(|r| Step::new(&system, r, &reverted, force)).collect();
    steps.sort_by_key(|step| order(&step.record.setting));
    let resize = steps.iter().any(|s| s.record.setting == Setting::Channels && s.writes());
    if resize {
        make_room(&system, &steps);
    }
    for step in &mut steps {
        step.take(&system, resize);
    }
    for step in steps {
        if step.stays() {
            state.records.push(step.record.clone());
        }
        // Do not report a setting that was only recorded because the channels would change, and
        // that needed no action.
        let silent = matches!(step.fate, Undone::AsBefore | Undone::Gone | Undone::Restarted { .. });
        if !step.record.new.is_empty() || !silent {
            reverted.undone.push((step.record.setting, step.fate));
        }
    }
    match state.records.is_empty() {
        true => store.remove()?,
        false => store.save(&state)?,
    }
    Ok(reverted)
}

enum Whereabouts {
    Here,
    Renamed(String),
    Gone,
}

/// Finds the device by its index. Within one boot and network namespace, the kernel does not use
/// an index twice.
fn whereabouts(system: &System, state: &State) -> Whereabouts {
    if system.nic.identity().is_ok_and(|(index, _)| index == state.ifindex) {
        return Whereabouts::Here;
    }
    let index = |name: &String| system.root.number(format!("sys/class/net/{name}/ifindex"));
    match system.root.names("sys/class/net").into_iter().find(|n| index(n) == Some(state.ifindex.into())) {
        Some(name) => Whereabouts::Renamed(name),
        None => Whereabouts::Gone,
    }
}

/// Order of the settings. Channels come first, because their change resets the others.
fn order(setting: &Setting) -> u32 {
    match setting {
        Setting::Channels => 0,
        Setting::Rss => 1,
        Setting::Irq(_) => 2,
        Setting::Xps(q) => 3 + 2 * q,
        Setting::Rps(q) => 4 + 2 * q,
        Setting::Coalesce => u32::MAX - 2,
        Setting::Ntuple => u32::MAX - 1,
        Setting::Sysctl(_) => u32::MAX,
    }
}

/// Sets the default table before the channels change, because the kernel refuses to remove queues
/// that a table names. Fastsocket's own table never names them. A table of another program is
/// restored or kept in its turn.
fn make_room(system: &System, steps: &[Step]) {
    let table = steps.iter().find(|s| s.record.setting == Setting::Rss);
    if table.is_some() && !matches!(system.read(&Setting::Rss), Ok(Value::Rss(RssTable::Default)) | Err(_)) {
        // If this fails, the change of channels fails, too, and reports why.
        let _ = system.write(&Setting::Rss, &Value::Rss(RssTable::Default));
    }
}

/// A record, and what happens to it.
struct Step {
    record: Record,
    fate: Undone,
}

impl Step {
    fn new(system: &System, record: Record, about: &Reverted, force: bool) -> Step {
        let devices = record.setting.is_devices();
        if devices && about.replaced {
            return Step { record, fate: Undone::Gone };
        }
        let now = match system.read(&record.setting) {
            Ok(now) => now,
            Err(e) if is_absent(&e) => return Step { record, fate: Undone::Gone },
            Err(e) => {
                let fate = Undone::Failed { why: explain(&record.setting, &e) };
                return Step { record, fate };
            }
        };
        let ours = record.new.iter().any(|new| now.same(new)) || record.new.is_empty() && !about.settled;
        let fate = match &record.old {
            // Fastsocket's channels created the setting, and their end removes it (see `take`).
            None => Undone::Left { now: now.clone(), old: None },
            Some(old) if now.same(old) => Undone::AsBefore,
            Some(old) if force => Undone::Restored { value: old.clone() },
            Some(old) if about.restarted => Undone::Restarted { now: now.clone(), old: old.clone() },
            Some(old) if ours => Undone::Restored { value: old.clone() },
            Some(old) => Undone::Left { now: now.clone(), old: Some(old.clone()) },
        };
        Step { record, fate }
    }

    fn writes(&self) -> bool {
        matches!(self.fate, Undone::Restored { .. })
    }

    /// Whether the record must stay in the state file.
    fn stays(&self) -> bool {
        matches!(self.fate, Undone::Left { .. } | Undone::Failed { .. })
    }

    /// Carries out the step. `resized`: this run also changes the channels back, which resets all
    /// settings of the queues.
    fn take(&mut self, system: &System, resized: bool) {
        let resized = resized && self.record.setting.is_queues();
        if self.record.old.is_none() {
            // Check whether the change of channels has removed the setting.
            if system.read(&self.record.setting).is_err_and(|e| is_absent(&e)) {
                self.fate = Undone::Gone;
            }
            return;
        }
        let value = match &self.fate {
            Undone::Restored { value } => value.clone(),
            Undone::Left { now, .. } if resized => now.clone(),
            Undone::AsBefore | Undone::Gone if resized => match &self.record.old {
                Some(old) => old.clone(),
                None => return,
            },
            _ => return,
        };
        // Skip the write if the setting has its old value.
        if system.read(&self.record.setting).is_ok_and(|now| now == value) {
            return;
        }
        match system.write(&self.record.setting, &value) {
            Ok(()) => {}
            Err(e) if is_absent(&e) => self.fate = Undone::Gone,
            Err(e) => self.fate = Undone::Failed { why: explain(&self.record.setting, &e) },
        }
        if matches!(self.fate, Undone::Restored { .. }) {
            match system.read(&self.record.setting) {
                Ok(now) if now.same(&value) => {}
                Ok(now) => self.fate = Undone::Failed { why: format!("it is {now} after writing {value}") },
                Err(e) => self.fate = Undone::Failed { why: explain(&self.record.setting, &e) },
            }
        }
    }
}

/// Whether the error says that the queue, interrupt or device does not exist.
fn is_absent(error: &io::Error) -> bool {
    error.kind() == io::ErrorKind::NotFound || error.raw_os_error() == Some(libc::ENODEV)
}
