//! Another host: what there is to its agent.

use crate::carrier::{Carrier, Head};
use crate::link::{Control, Frame};
use std::net::SocketAddr;
use std::sync::mpsc::Sender;
use std::time::{Duration, Instant};

/// A carrier that has had no room for so long has failed: the other agent does not look.
const STUCK: Duration = Duration::from_secs(5);
/// How long connections wait for the other agent to come back, so that they can go back to TCP.
const LOST: Duration = Duration::from_secs(60);

pub struct Peer {
    pub at: SocketAddr,
    pub control: Option<Control>,
    pub carrier: Option<Box<dyn Carrier>>,
    /// Which agent it was last; 0: none so far.
    pub instance: u64,
    /// Both have said that they are there.
    pub greeted: bool,
    /// The monitor has been told that connections may go over.
    pub shown: bool,
    full_since: Option<Instant>,
    /// Since when there is no control connection.
    pub lost: Option<Instant>,
    /// Since when there is this one.
    pub since: Instant,
    /// A call has failed; the loop sees to it.
    pub control_failed: bool,
    pub carrier_failed: bool,
    /// To the thread that connects, where this side does.
    pub again: Option<Sender<()>>,
}

impl Peer {
    pub fn new(at: SocketAddr, again: Option<Sender<()>>) -> Peer {
        Peer {
            at,
            control: None,
            carrier: None,
            instance: 0,
            greeted: false,
            shown: false,
            full_since: None,
            lost: None,
            since: Instant::now(),
            control_failed: false,
            carrier_failed: false,
            again,
        }
    }

    pub fn is_up(&self) -> bool {
        let carries = self.carrier.as_ref().is_some_and(|c| c.is_ready());
        self.greeted && self.control.is_some() && carries && !self.control_failed && !self.carrier_failed
    }

    pub fn say(&mut self, frame: Frame) {
        if let Some(control) = &mut self.control {
            self.control_failed |= control.send(&frame).is_err();
        }
    }

    /// False: not now, or never any more.
    pub fn carry(&mut self, head: Head, bytes: &[u8]) -> bool {
        let Some(carrier) = self.carrier.as_mut().filter(|_| !self.carrier_failed) else { return false };
        match carrier.send(&head, bytes) {
            Ok(true) => {
                self.full_since = None;
                true
            }
            Ok(false) => {
                self.full_since.get_or_insert_with(Instant::now);
                false
            }
            Err(_) => {
                self.carrier_failed = true;
                false
            }
        }
    }

    /// There is room again.
    pub fn has_room(&mut self) {
        self.full_since = None;
    }

    pub fn is_full(&self) -> bool {
        self.full_since.is_some()
    }

    /// It should be there, and this side connects.
    pub fn has_no_carrier(&self) -> bool {
        let is_there = self.control.is_none() || self.carrier.is_some();
        !is_there && self.again.is_some() && self.since.elapsed() > Duration::from_secs(2)
    }

    pub fn is_lost(&self) -> bool {
        self.lost.is_some_and(|since| since.elapsed() > LOST)
    }

    pub fn look(&mut self) {
        self.carrier_failed |= self.full_since.is_some_and(|since| since.elapsed() > STUCK);
    }

    pub fn drop_carrier(&mut self) {
        (self.carrier, self.carrier_failed, self.full_since) = (None, false, None);
    }
}
