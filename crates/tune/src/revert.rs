//! The way back.

use crate::apply::explain;
use crate::device::check_name;
use crate::error::Error;
use crate::ethtool::{Ioctl, Nic, Recorded, RssTable};
use crate::root::Root;
use crate::setting::{Setting, System, Value};
use crate::state::{boot, Record, State, Store};
use serde::Serialize;
use std::io;

/// What became of one setting.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(rename_all = "snake_case", tag = "what")]
pub enum Undone {
    /// Put back to this.
    Restored {
        value: Value,
    },
    /// It was as before already.
    AsBefore,
    /// It, or the queue or device it belonged to, does not exist any more.
    Gone,
    /// The restart has undone ours; what is there now is not of our making.
    Restarted {
        now: Value,
        old: Value,
    },
    /// Somebody else has set it since; it was left.
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
    /// Was there anything recorded?
    pub recorded: bool,
    /// The machine has been restarted since.
    pub restarted: bool,
    /// Was the run that changed things carried to its end?
    pub settled: bool,
    /// The device is gone, or another one has its name.
    pub replaced: bool,
    /// The device's name now, if it has another one.
    pub renamed: Option<String>,
    pub undone: Vec<(Setting, Undone)>,
}

impl Reverted {
    /// Is everything as it was?
    pub fn is_complete(&self) -> bool {
        !self.undone.iter().any(|(_, u)| matches!(u, Undone::Left { .. } | Undone::Failed { .. }))
    }
}

/// A handle on a device, live or recorded.
pub fn system(root: &Root, name: &str) -> Result<System, Error> {
    check_name(name)?;
    let nic: Box<dyn Nic> = match root.is_live() {
        true => Box::new(Ioctl::new(name).map_err(|e| Error::Device(name.to_owned(), e))?),
        false => Box::new(Recorded::new(root, name)),
    };
    Ok(System::new(root.clone(), nic, name))
}

/// Undoes what the state file says, and removes it. What somebody else has
/// changed since stays (with its record) unless `force`.
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
        // Only noted in case that the channels would change: nothing to say.
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

/// Finds the device by its index: no other device of this boot and network
/// namespace ever has the same.
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

/// Channels first, as they reset the others.
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

/// The kernel refuses to take queues away that a table of somebody's names.
/// Ours never does; another's is put back (or not) in its turn.
fn make_room(system: &System, steps: &[Step]) {
    let table = steps.iter().find(|s| s.record.setting == Setting::Rss);
    if table.is_some() && !matches!(system.read(&Setting::Rss), Ok(Value::Rss(RssTable::Default)) | Err(_)) {
        // If it fails, so will the channels, and they say why.
        let _ = system.write(&Setting::Rss, &Value::Rss(RssTable::Default));
    }
}

/// One record, with what is to be done about it.
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
            // It only came with our channels, and goes with them (see `take`).
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

    /// Does the record have to stay?
    fn stays(&self) -> bool {
        matches!(self.fate, Undone::Left { .. } | Undone::Failed { .. })
    }

    /// Does it. `resized`: the channels change back in this run, and with them
    /// everything of the queues is reset, whoever had set it.
    fn take(&mut self, system: &System, resized: bool) {
        let resized = resized && self.record.setting.is_queues();
        if self.record.old.is_none() {
            // Did it go with the channels?
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
        // Still, or again, as it should be?
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

/// The queue, interrupt or device is not there.
fn is_absent(error: &io::Error) -> bool {
    error.kind() == io::ErrorKind::NotFound || error.raw_os_error() == Some(libc::ENODEV)
}
