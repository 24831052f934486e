//! Parts of a plan: changes and remarks.

use crate::cpus::CpuSet;
use crate::setting::{Group, Setting, Value};
use serde::{Deserialize, Serialize};

/// The user's choices that differ from the default.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Options {
    /// Use exactly these CPUs, even isolated ones.
    pub cpus: Option<CpuSet>,
    /// Do not touch these groups of settings.
    pub skip: Vec<Group>,
    pub rps: RpsPolicy,
}

/// When RPS may pass packets on to further CPUs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum RpsPolicy {
    /// A queue may pass packets to CPUs that have no queue. Off on devices without interrupts,
    /// because their packets are handled where they were sent.
    #[default]
    Auto,
    Off,
    /// As `Auto`, but on any device.
    Spread,
}

/// One change. `old` is the value that was found.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Change {
    pub setting: Setting,
    pub old: Value,
    pub new: Value,
    /// Values to try in this order if the device refuses `new`.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub or: Vec<Value>,
    pub why: String,
}

/// The kind of a remark.
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

/// Notes, and changes in the order in which they must be made.
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

    /// Adds a change, unless old and new value are equal.
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
