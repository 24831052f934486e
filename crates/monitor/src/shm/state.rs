//! The state of everything about connections over shared memory.

use crate::by_user::ByUser;
use crate::shm::channels::Channels;
use crate::shm::closings::Closings;
use crate::shm::dispatch::Dispatch;
use crate::shm::distrust::Distrust;
use crate::shm::ending::{Ending, Seldom};
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
use std::collections::HashMap;
use std::time::{Duration, Instant};

pub struct Shm {
    pub listeners: Listeners,
    /// Listeners have come or gone since steering was last refreshed.
    pub listeners_changed: bool,
    pub channels: Channels,
    pub offers: Local,
    pub touches: Touches,
    pub pairs: Pairs,
    pub unix: Unix,
    /// Ends of Unix connections that processes have shown but that may not be paired.
    pub unix_refused: u64,
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
    /// Port leases of ended processes that their fork groups still use.
    pub family_leases: HashMap<FamilyId, Vec<u16>>,
    /// The channel at which the next search for ports of ended processes begins.
    pub reclaimed: ChannelId,
    /// When to sweep again for channels that still have to become empty, and how long the last
    /// pause was.
    pub look_again: Option<(Instant, Duration)>,
    /// Processes whose removal takes several turns, by user.
    pub endings: ByUser<Ending>,
    /// Limits how often channels are swept, because a sweep may take long.
    pub sweeps: Seldom,
    /// The sweep that is in progress.
    pub sweeping: Option<Box<Sweep>>,
    /// Channels whose listener has ended, by the listener's user. The clients of their waiting
    /// connections have not been told yet.
    pub ended: ByUser<ChannelId>,
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
            unix_refused: 0,
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
            endings: ByUser::default(),
            sweeps: Seldom::default(),
            sweeping: None,
            ended: ByUser::default(),
            memory: Resident::default(),
        }
    }

    /// Makes libraries ask again where their connections lead, after an action of this user.
    /// `alone`: no other user has processes here, or the user is root.
    pub fn have_ask_again(&mut self, uid: u32, alone: bool) {
        if alone || self.touches.hears(uid, Instant::now()) {
            self.registry.touch();
        }
    }
}
