//! Channels begin and end: the effects on listeners, routes and connections. This side unmaps a
//! channel when its last connection there is closed.

use crate::chan::{
    all, broken_elsewhere, by_id, is_time_to_give_up, map, Chan, ANNOUNCED, ANY_BROKEN, CHANS, ENDED, TO_BE_ENDED,
};
use crate::conn::{self, Hold};
use crate::{ctl, listen, route, waker};
use core::sync::atomic::Ordering;
use fsocket_abi::channel::{CLIENT, SERVER, SLOTS};
use fsocket_proto::{notice, request};

/// The monitor hands over a channel of a listener for which this process is a worker.
pub fn serve(id: u32, listener: u64, fd: i32) {
    let c = by_id(id, SERVER).or_else(|| map(id, listener, SERVER, fd));
    match c {
        Some(c) if c.is_broken() => {}
        Some(c) => {
            c.retired.store(false, Ordering::Relaxed);
            listen::add_channel(listener, c);
            waker::ring_all(listener);
        }
        None => listen::cannot_serve(listener),
    }
}

/// The other side of a channel has ended, and the monitor has closed the open connections there.
/// The channel stays mapped until this side closes its last connection. `broken`: the other side
/// has broken the protocol, so it may undo the monitor's changes.
pub fn gone(id: u32, broken: bool) {
    for c in [CLIENT, SERVER].into_iter().filter_map(|side| by_id(id, side)) {
        if broken {
            broken_elsewhere(c);
        }
        c.retired.store(true, Ordering::Release);
        listen::drop_channel(c);
        c.unmap_if_unused();
    }
}

/// Gives up unused channels whose other side the new monitor does not know after some time.
pub fn give_up_halves() {
    if !ctl::any_half() || !is_time_to_give_up() {
        return;
    }
    for c in all().filter(|c| c.is_half() && !c.is_used()) {
        c.retired.store(true, Ordering::Release);
        listen::drop_channel(c);
        c.unmap_if_unused();
    }
}

/// Unmaps all channels. The caller makes sure that nothing uses their connections any more.
pub fn forget_all() {
    route::clear();
    for c in all() {
        c.retired.store(true, Ordering::Release);
        for d in &c.desc_of {
            d.store(0, Ordering::Release);
        }
        c.unmap_if_unused();
    }
}

/// The monitor passes on a ring of a peer. If the peer rings a sleeping thread several times, this
/// process asks for a pipe between the two.
pub fn woken(notice::Woken { waker, channel, waiter, ringer }: notice::Woken) {
    let Some(b) = waker::at(waker.into()) else { return };
    b.note_rung(channel.unwrap_or(0));
    b.ring_self();
    let (Some(channel), Some(ringer)) = (channel, ringer) else { return };
    if by_id(channel, waiter.side).is_some() && b.wants_pipe(ringer) {
        let _ = ctl::tell(request::Waker { waker, channel, waiter, ringer }, None);
    }
}

/// Ends the channels whose peer has broken the protocol. The caller holds no lock of the library.
#[inline]
pub fn end_broken() {
    if ANY_BROKEN.load(Ordering::Relaxed) && ANY_BROKEN.swap(false, Ordering::AcqRel) {
        all().for_each(end);
    }
}

#[cold]
fn end(c: &'static Chan) {
    let how = c.broken.load(Ordering::Acquire);
    if !matches!(how, TO_BE_ENDED | ANNOUNCED)
        || c.broken.compare_exchange(how, ENDED, Ordering::AcqRel, Ordering::Relaxed).is_err()
    {
        return;
    }
    listen::drop_channel(c);
    route::clear();
    for slot in 0..SLOTS {
        let Some(d) = c.desc(slot) else { continue };
        let Some(_hold) = Hold::unless_gone(d) else { continue };
        let here = d.conn().channel() == Some(CHANS.index(c)) && d.conn().slot_index() == slot;
        if d.is_conn() && here {
            conn::reset(d);
            conn::wake_own(d);
        }
    }
    if how == TO_BE_ENDED {
        let _ = ctl::tell(request::Broken { channel: c.id.load(Ordering::Relaxed) }, None);
    }
    c.unmap_if_unused();
}
