//! What a plan consists of: changes and remarks.

use crate::cpus::CpuSet;
use crate::setting::{Group, Setting, Value};
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
    pub(crate) fn note(&mut self, kind: Kind, topic: &str, text: impl Into<String>) {
        self.notes.push(Note { kind, topic: topic.to_owned(), text: text.into() });
    }

    pub(crate) fn found(&mut self, topic: &str, text: impl Into<String>) {
        self.note(Kind::Found, topic, text);
    }

    pub(crate) fn lacks(&mut self, topic: &str, text: impl Into<String>) {
        self.note(Kind::Lacks, topic, text);
    }

    pub(crate) fn warn(&mut self, topic: &str, text: impl Into<String>) {
        self.note(Kind::Warning, topic, text);
    }

    /// A change, if it is one.
    pub(crate) fn change(&mut self, setting: Setting, old: Value, new: Value, why: &str) {
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
