//! Another host, and the state of its agent.

use crate::carrier::{Carrier, Head};
use crate::link::{what, Control, Dial, Frame};
use std::net::SocketAddr;
use std::time::{Duration, Instant};

/// If a carrier has no room for this long, the other agent does not read. The carrier then counts
/// as failed.
const STUCK: Duration = Duration::from_secs(5);
/// Pause before the next carrier is made.
const PAUSE: Duration = Duration::from_secs(2);
/// How long connections wait for the other agent to return, so that they can move back to TCP.
pub const LOST: Duration = Duration::from_secs(60);

pub struct Peer {
    pub at: SocketAddr,
    pub control: Option<Control>,
    pub carrier: Option<Box<dyn Carrier>>,
    /// Number of the last agent that ran there; 0: none so far.
    pub instance: u64,
    /// Whether both sides have sent their first message.
    pub greeted: bool,
    /// Whether the monitor knows that connections to this peer may move.
    pub shown: bool,
    full_since: Option<Instant>,
    /// When the control connection ended, if there is none now.
    pub lost: Option<Instant>,
    /// The time when the last carrier failed.
    failed_at: Option<Instant>,
    /// A call on the connection has failed; the event loop will handle that.
    pub control_failed: bool,
    pub carrier_failed: bool,
    /// The threads that connect to the peer; `None`: the peer connects to this side.
    pub dial: Option<Dial>,
}

impl Peer {
    pub fn new(at: SocketAddr, dial: Option<Dial>) -> Peer {
        Peer {
            at,
            control: None,
            carrier: None,
            instance: 0,
            greeted: false,
            shown: false,
            full_since: None,
            lost: None,
            failed_at: None,
            control_failed: false,
            carrier_failed: false,
            dial,
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

    /// Sends a message by the carrier. Returns false if there is no room now, or if the carrier
    /// has failed.
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

    /// The carrier has room again.
    pub fn has_room(&mut self) {
        self.full_since = None;
    }

    pub fn is_full(&self) -> bool {
        self.full_since.is_some()
    }

    /// Whether this side has to make a carrier, now or after a pause.
    pub fn lacks_carrier(&self) -> bool {
        let may = self.greeted && self.control.is_some() && self.carrier.is_none();
        may && self.dial.as_ref().is_some_and(|d| !d.awaits_data)
    }

    /// Makes a carrier. Call it when no connection uses the old carrier any more.
    pub fn make_carrier(&mut self) {
        let has_waited = self.failed_at.is_none_or(|at| at.elapsed() > PAUSE);
        if let Some(dial) = self.dial.as_mut().filter(|_| has_waited) {
            dial.data();
        }
    }

    pub fn is_lost(&self) -> bool {
        self.lost.is_some_and(|since| since.elapsed() > LOST)
    }

    pub fn look(&mut self) {
        self.carrier_failed |= self.full_since.is_some_and(|since| since.elapsed() > STUCK);
    }

    /// Marks the carrier as failed, and tells the other agent, which may not have noticed.
    pub fn fail_carrier(&mut self) {
        self.drop_carrier();
        self.failed_at = Some(Instant::now());
        self.say(Frame { what: what::DOWN, ..Frame::default() });
    }

    pub fn drop_carrier(&mut self) {
        (self.carrier, self.carrier_failed, self.full_since) = (None, false, None);
    }
}
