//! State that every part of the monitor uses: its configuration, the processes, and access to
//! privileged operations.

use crate::arenas::{Arenas, Ended};
use crate::broker::Broker;
use crate::clients::Clients;
use crate::endpoint::Config;
use crate::lifeline::Lifelines;
use crate::policy::state::Policy;
use crate::FamilyId;
use rustix::fd::{BorrowedFd, OwnedFd};
use std::collections::BTreeSet;
use std::rc::Rc;
use std::time::Instant;

pub struct Context {
    pub config: Config,
    /// Access to privileged operations.
    pub broker: Rc<Broker>,
    pub epoll: Rc<OwnedFd>,
    pub started: Instant,
    /// The monitor's own network namespace, for which `locals` is valid.
    pub netns: u64,
    pub locals: BTreeSet<[u8; 16]>,
    /// Descriptors that all users together may hold.
    pub descriptors: u64,
    pub clients: Clients,
    pub arenas: Arenas,
    /// Counters of processes that ended.
    pub ended: Ended,
    /// The lifelines of the thread that runs the event loop.
    pub lifelines: Option<Lifelines>,
    pub policy: Policy,
    /// The known other hosts.
    pub hosts: crate::hosts::State,
    /// Units whose processes an operator wants to use the kernel.
    pub off: BTreeSet<String>,
    /// Users that the broker knows.
    users: BTreeSet<u32>,
    last_family: FamilyId,
}

impl Context {
    pub fn new(config: Config, broker: Broker, epoll: Rc<OwnedFd>, netns: u64, descriptors: u64) -> Context {
        Context {
            config,
            broker: Rc::new(broker),
            clients: Clients::new(epoll.clone(), crate::event::FIRST_CLIENT),
            epoll,
            started: Instant::now(),
            netns,
            locals: BTreeSet::new(),
            descriptors,
            arenas: Arenas::default(),
            ended: Ended::default(),
            lifelines: None,
            policy: Policy::default(),
            hosts: crate::hosts::State::Off,
            off: BTreeSet::new(),
            users: BTreeSet::new(),
            last_family: 0,
        }
    }

    /// Tells the broker once that a process of this user has connected over this socket.
    pub fn vouch(&mut self, uid: u32, control: BorrowedFd<'_>) {
        if self.users.insert(uid) {
            self.broker.user(control);
        }
    }

    pub fn new_family(&mut self) -> FamilyId {
        self.last_family += 1;
        self.last_family
    }
}
