//! The time at which a call stops waiting.

use fsocket_sys as sys;

/// The time at which a call stops waiting: nanoseconds of the clock, or never.
#[derive(Clone, Copy, Default)]
pub struct Deadline(Option<u64>);

impl Deadline {
    /// A deadline after `ns` nanoseconds from now. None: never.
    pub fn within(ns: Option<u64>) -> Self {
        // (A call that does not wait needs no clock.)
        Deadline(ns.map(|ns| if ns == 0 { 0 } else { sys::now_ns().saturating_add(ns) }))
    }
    /// The deadline for a value of SO_RCVTIMEO or SO_SNDTIMEO, where 0 means never.
    pub fn of_option(ns: u64) -> Self {
        Deadline::within((ns != 0).then_some(ns))
    }
    pub fn left(self) -> Option<u64> {
        self.0.map(|t| if t == 0 { 0 } else { t.saturating_sub(sys::now_ns()) })
    }
    pub fn is_over(self) -> bool {
        self.left() == Some(0)
    }
}
