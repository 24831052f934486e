//! Ends of processes that take long, and what is done seldom as it does.
//!
//! A process can have 65,536 sockets in shared memory. They are looked at in pieces, in its user's turns:
//! the end of a process with many makes others wait no longer than a flood of requests does.

use crate::arenas::{Arena, ArenaMem};
use crate::clients::Client;
use crate::{ChannelId, ConnId};
use fsocket_abi::sock::Place;
use std::collections::{BTreeMap, HashSet, VecDeque};
use std::rc::Rc;
use std::time::{Duration, Instant};

/// A process that is gone.
pub struct Ending {
    pub id: ConnId,
    pub client: Client,
    pub steps: VecDeque<Step>,
    /// Number of the socket at which the first step goes on.
    pub at: usize,
    /// Those arenas are among the steps that nobody has any more.
    pub has_left: bool,
    /// The first of the channels that it has not left yet.
    pub channel: ChannelId,
    /// Nobody offers it anything, and it works for no listener.
    pub has_stopped: bool,
    /// Ends of connections that open sockets of such an arena name, and that nobody holds.
    pub loose: HashSet<Place>,
}

/// For each socket of an arena.
pub enum Step {
    /// The process no longer holds it.
    Leave(Rc<ArenaMem>),
    /// Nobody has this arena any more: it is closed if it is held, and else loose.
    Close(Rc<Arena>),
    /// Somebody else has what it names: that is not loose.
    Compare(Rc<ArenaMem>),
    /// It is closed if it is loose.
    Loose(Rc<Arena>),
}

impl Step {
    pub fn mem(&self) -> &Rc<ArenaMem> {
        match self {
            Step::Leave(mem) | Step::Compare(mem) => mem,
            Step::Close(arena) | Step::Loose(arena) => &arena.mem,
        }
    }
}

impl Ending {
    pub fn new(id: ConnId, client: Client, mapped: Vec<Rc<ArenaMem>>) -> Ending {
        let steps = mapped.into_iter().map(Step::Leave).collect();
        Ending { id, client, steps, at: 0, has_left: false, channel: 0, has_stopped: false, loose: HashSet::new() }
    }
}

/// What is left of ends, by user.
#[derive(Default)]
pub struct Endings(BTreeMap<u32, VecDeque<Ending>>);

impl Endings {
    pub fn users(&self) -> impl Iterator<Item = u32> + '_ {
        self.0.keys().copied()
    }
    pub fn has(&self, uid: u32) -> bool {
        self.0.contains_key(&uid)
    }
    pub fn take(&mut self, uid: u32) -> Option<Ending> {
        let waiting = self.0.get_mut(&uid)?;
        let first = waiting.pop_front();
        if waiting.is_empty() {
            self.0.remove(&uid);
        }
        first
    }
    /// It goes on with the user's next turn.
    pub fn put_back(&mut self, ending: Ending) {
        self.0.entry(ending.client.uid).or_default().push_front(ending);
    }
    /// Behind the user's others.
    pub fn add(&mut self, ending: Ending) {
        self.0.entry(ending.client.uid).or_default().push_back(ending);
    }
}

/// What takes long is done once for twenty times as long as it took.
#[derive(Default)]
pub struct Seldom(Option<Instant>);

impl Seldom {
    const LONG: Duration = Duration::from_millis(5);
    const TIMES: u32 = 20;

    /// When it may be done again, if not now.
    pub fn not_before(&self) -> Option<Instant> {
        self.0.filter(|at| *at > Instant::now())
    }
    /// It was done; it began then.
    pub fn was_done(&mut self, began: Instant) {
        let took = began.elapsed();
        self.0 = (took > Self::LONG).then(|| Instant::now() + took * Self::TIMES);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_took_long_is_put_off() {
        let mut s = Seldom::default();
        assert!(s.not_before().is_none());
        s.was_done(Instant::now());
        assert!(s.not_before().is_none());
        let began = Instant::now() - Duration::from_secs(1);
        s.was_done(began);
        let (until, took) = (s.not_before().unwrap(), began.elapsed());
        // Twenty times what it took, which was between a second and `took`.
        assert!(until >= began + Duration::from_secs(21) && until <= began + took * 21, "{:?}", until - began);
    }
}
