//! A kernel connection that a process has accepted, and has forked a child for, goes over in the child.

use super::calls::{restart, wanted};
use crate::cow::Sparing;
use crate::table::{Desc, Kind, DESCS};
use crate::{ctl, process};
use core::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use fsocket_proto::request;
use fsocket_runtime::brief;

/// The description (index plus one) that was handed down by the fork that is under way; 0: none.
#[link_section = ".data.fsocket_start"]
static HANDED: AtomicU32 = AtomicU32::new(0);

/// May the child have it over, if the parent closes it and it is not forked for once more?
pub fn can_be_handed_down(d: &Desc) -> bool {
    d.kind() == Kind::Kernel
        && d.is_server()
        && d.refs() == 1
        && d.kernel().ticket() == 0
        && d.kernel().passed_as() == 0
        && !d.kernel().stays()
        && wanted()
}

/// Before a fork, when everything has been given up: `d` is the child's. As long as the parent has not closed it
/// both could use it, so the child waits for a word of the parent's ([`closed`]), which never comes if it keeps
/// the connection or passes it on.
pub fn hand_down(d: &Desc) {
    if let Some(ticket) = brief::ticket() {
        d.kernel().set_ticket(ticket);
        HANDED.store(d.index() + 1, Ordering::Relaxed);
    }
}

/// After the fork, in the parent.
pub fn handed_down() {
    HANDED.put(0);
}

/// The process has closed its last number of `d`.
#[inline]
pub fn closed(d: &Desc) {
    let ticket = d.kernel().ticket();
    if ticket != 0 {
        brief::closed(ticket);
    }
}

pub(super) fn take_up() {
    let Some(d) = DESCS.get(HANDED.swap(0, Ordering::Relaxed).wrapping_sub(1)) else { return };
    restart(d);
}

/// Has the parent closed its own? The monitor learns then whose child this is.
pub(super) fn is_mine_alone(d: &Desc) -> bool {
    #[link_section = ".data.fsocket_start"]
    static JOINED: AtomicU64 = AtomicU64::new(0);
    let ticket = d.kernel().ticket();
    if ticket == 0 {
        return true;
    }
    if !brief::is_closed(ticket) {
        return false;
    }
    if JOINED.swap(process::nonce(), Ordering::Relaxed) != process::nonce() {
        if let Some(secret) = brief::secret() {
            ctl::tell(request::Join { secret }, None);
        }
    }
    true
}
