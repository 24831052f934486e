//! Takes or refuses connections in a listener's SYN queue.

use crate::chan::{self, Chan};
use crate::listen::Listener;
use crate::{ctl, name, registry};
use core::sync::atomic::Ordering;
use fsocket_abi::channel::{slot_state, status, CLIENT, SERVER};

/// Takes one entry of a queue for this process. Returns the address to which the client has
/// connected, and the client's port. None: the entry was invalid, or another process has taken it.
pub fn claim(l: &Listener, c: &'static Chan, slot: usize) -> Option<([u8; 16], u16)> {
    let s = c.slot(slot);
    // A client may queue anything. Only a fresh SYN is accepted, and only once.
    if s.state.compare_exchange(slot_state::SYN, slot_state::ESTABLISHED, Ordering::AcqRel, Ordering::Relaxed).is_err()
        || c.desc(slot).is_some()
    {
        if s.dir[CLIENT].prod.status.load(Ordering::Acquire) & status::CLOSED == 0 {
            c.violated();
        } // otherwise the client has taken the connection back
        return None;
    }
    let bound = l.addr();
    let claimed = name::load(&s.dst);
    let port = s.client_port.load(Ordering::Relaxed);
    // Access rules of the program must not depend on data that the client wrote. So the
    // destination must be an address of this listener, and the port must be leased to the client.
    // The client's own address follows from the destination.
    let dst = if !name::is_any(&bound.ip) {
        bound.ip
    } else if name::is_loopback(&claimed) || ctl::registry().is_some_and(|r| r.has_local(&claimed)) {
        claimed
    } else {
        c.violated();
        refuse(c, slot);
        return None;
    };
    if !registry::is_leased(port, c.id.load(Ordering::Relaxed)) {
        c.violated();
        refuse(c, slot);
        return None;
    }
    Some((dst, port))
}

/// Refuses a connection that is already in a queue.
pub fn refuse(c: &Chan, slot: usize) {
    let dir = &c.slot(slot).dir;
    dir[SERVER].prod.status.fetch_or(status::RST | status::CLOSED, Ordering::Release);
    for w in [&dir[SERVER].want_data, &dir[1 - SERVER].want_space] {
        let mask = w.take();
        if mask != 0 {
            chan::wake(c, slot, w, mask);
        }
    }
}
