//! All that belongs to connections over shared memory.

use crate::shm::channels::Channels;
use crate::shm::closings::Closings;
use crate::shm::dispatch::Dispatch;
use crate::shm::distrust::Distrust;
use crate::shm::ending::{Endings, Seldom};
use crate::shm::listeners::Listeners;
use crate::shm::offers::{Local, Unix};
use crate::shm::pairs::Pairs;
use crate::shm::passed::Passed;
use crate::shm::ports::Ports;
use crate::shm::registry::Registry;
use crate::shm::resident::Resident;
use crate::shm::stand_ins::Remote;
use crate::shm::sweeping::Sweep;
use crate::shm::touches::Touches;
use crate::shm::transfers::Transfers;
use crate::shm::waiting::{Moving, Waiting};
use crate::{ChannelId, FamilyId};
use std::collections::{BTreeMap, HashMap, VecDeque};
use std::time::{Duration, Instant};

pub struct Shm {
    pub listeners: Listeners,
    /// Some have come or gone, and steering does not know it yet.
    pub listeners_changed: bool,
    pub channels: Channels,
    pub offers: Local,
    pub touches: Touches,
    pub pairs: Pairs,
    pub unix: Unix,
    pub remote: Remote,
    pub passed: Passed,
    pub transfers: Transfers,
    pub ports: Ports,
    pub registry: Registry,
    pub closings: Closings,
    pub dispatch: Dispatch,
    pub waiting: Waiting,
    pub moving: Moving,
    pub distrust: Distrust,
    /// Port leases of ended processes whose fork group still use them.
    pub family_leases: HashMap<FamilyId, Vec<u16>>,
    /// The channel at which the search for ports of ended processes goes on.
    pub reclaimed: ChannelId,
    /// When to look again for channels that wait to be emptied, and how long
    /// the wait before that was.
    pub look_again: Option<(Instant, Duration)>,
    /// Of processes with much in shared memory.
    pub endings: Endings,
    /// Of looks that took long.
    pub sweeps: Seldom,
    /// The look that is under way.
    pub sweeping: Option<Box<Sweep>>,
    /// Channels whose listener has ended, by its user: it is still to be said to those that wait there.
    pub ended: BTreeMap<u32, VecDeque<ChannelId>>,
    pub memory: Resident,
}

impl Shm {
    pub fn new(registry: Registry, ports: Ports, closings: Closings) -> Shm {
        Shm {
            listeners: Listeners::default(),
            listeners_changed: false,
            channels: Channels::default(),
            offers: Local::default(),
            touches: Touches::default(),
            pairs: Pairs::default(),
            unix: Unix::default(),
            remote: Remote::default(),
            passed: Passed::default(),
            transfers: Transfers::default(),
            ports,
            registry,
            closings,
            dispatch: Dispatch::default(),
            waiting: Waiting::default(),
            moving: Moving::default(),
            distrust: Distrust::default(),
            family_leases: HashMap::new(),
            reclaimed: 0,
            look_again: None,
            endings: Endings::default(),
            sweeps: Seldom::default(),
            sweeping: None,
            ended: BTreeMap::new(),
            memory: Resident::default(),
        }
    }

    /// A user gives libraries cause to ask again where their connections lead. `alone`: of others' there are none, or
    /// it is root.
    pub fn have_ask_again(&mut self, uid: u32, alone: bool) {
        if alone || self.touches.hears(uid, Instant::now()) {
            self.registry.touch();
        }
    }
}
