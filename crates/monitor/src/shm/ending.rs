//! Removes processes that have ended, in pieces; and limits slow work.
//!
//! A process can have 65,536 sockets in shared memory. The monitor handles them in pieces, in the
//! turns of the process's user. So the end of a large process delays others no more than a flood
//! of requests does.

use crate::arenas::{Arena, ArenaMem};
use crate::clients::Client;
use crate::{ChannelId, ConnId};
use fsocket_abi::sock::Place;
use std::collections::{HashSet, VecDeque};
use std::rc::Rc;
use std::time::{Duration, Instant};

/// A process that has ended and is being removed.
pub struct Ending {
    pub id: ConnId,
    pub client: Client,
    pub steps: VecDeque<Step>,
    /// The socket at which the first step goes on.
    pub at: usize,
    /// `steps` includes those for arenas that no other process uses.
    pub has_left: bool,
    /// The first channel that the process has not left yet.
    pub channel: ChannelId,
    /// The process gets no more offers and accepts for no listener.
    pub has_stopped: bool,
    /// Ends of connections that are open in such an arena although no process holds them.
    pub loose: HashSet<Place>,
}

/// One pass over the sockets of an arena.
pub enum Step {
    /// Notes for each socket that the process does not hold it any more.
    Leave(Rc<ArenaMem>),
    /// No process uses this arena any more: closes the sockets that were held, and notes the
    /// others as loose.
    Close(Rc<Arena>),
    /// An end that another arena's socket also names is not loose.
    Compare(Rc<ArenaMem>),
    /// Closes the sockets that are still loose.
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

/// Limits slow work: after each time, the work rests for twenty times as long as it took.
#[derive(Default)]
pub struct Seldom(Option<Instant>);

impl Seldom {
    const LONG: Duration = Duration::from_millis(5);
    const TIMES: u32 = 20;

    /// When the work may be done next, if not now.
    pub fn not_before(&self) -> Option<Instant> {
        self.0.filter(|at| *at > Instant::now())
    }
    /// Notes that the work, begun at this time, is done.
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
        // The pause is twenty times the duration, which was between one second and `took`.
        assert!(until >= began + Duration::from_secs(21) && until <= began + took * 21, "{:?}", until - began);
    }
}
