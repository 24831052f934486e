//! Descriptors that are slow to close, in the monitor's hands (rows 1 and 7).

use super::means::{drain, lingering, own};
use crate::descriptors::Descriptors;
use crate::lives::Life;
use crate::peer::Peer;
use fsocket_proto::raw::Packet;
use fsocket_proto::{request, Payload};
use fsocket_sys as sys;

const MANY: usize = 300;

/// Switched connections whose ends linger in the monitor, slots that are said to be free, one message.
pub fn broken(l: &mut Life) -> Option<()> {
    let mut own = own(l)?;
    own.lingering_ends(MANY, true);
    own.client.tell(Packet { id: own.channel.id.into(), ..Packet::new(request::Broken::KIND) }, None);
    sys::nanosleep(500_000_000);
    Some(())
}

/// The same ends, and the user is gone.
pub fn killed(l: &mut Life) -> Option<()> {
    let mut own = own(l)?;
    own.lingering_ends(MANY, false);
    Some(())
}

/// The same ends, released one by one, and the listener closed.
pub fn released(l: &mut Life) -> Option<()> {
    let mut own = own(l)?;
    own.lingering_ends(MANY, false);
    for slot in 0..MANY as u64 {
        own.server.tell(
            Packet { id: own.channel.id.into(), arg0: slot | 1 << 32, arg1: 9, ..Packet::new(request::Release::KIND) },
            None,
        );
        own.client.tell(
            Packet { id: own.channel.id.into(), arg0: slot, arg1: 9, ..Packet::new(request::Release::KIND) },
            None,
        );
    }
    own.server.tell(Packet { id: own.id, ..Packet::new(request::Unlisten::KIND) }, None);
    sys::nanosleep(200_000_000);
    Some(())
}

/// Sockets that come with messages for which nobody needs them, and of which this process has no other copy.
pub fn messages(l: &mut Life) -> Option<()> {
    let peer = l.peer()?;
    // (The other ends stay open, with what nobody reads.)
    for [slow, _] in lingering(MANY) {
        let with = *l.random.one(&[
            request::Unlisten::KIND,
            request::Offer::KIND,
            request::Ports::KIND,
            request::Connect::KIND,
            request::Options::KIND,
            request::Renew::KIND,
        ]);
        // (RENEW takes sockets of another kind: it is thrown out for it.)
        let with = if l.random.chance(98) && with == request::Renew::KIND { request::Meet::KIND } else { with };
        if peer.tell(Packet { id: 1, seq: 1, ..Packet::new(with) }, Some(slow)) {
            let _ = sys::close(slow);
        }
        drain(&peer);
    }
    Some(())
}

/// Sockets that wait in a control socket which the monitor has given up.
pub fn unread(l: &mut Life) -> Option<()> {
    let all = lingering(MANY);
    for some in all.chunks(30) {
        let peer = Peer::connect(l.socket).ok()?;
        peer.tell(Packet { version: 77, ..Packet::new(request::Ports::KIND) }, None);
        for [slow, _] in some {
            if peer.tell(Packet::new(request::Unlisten::KIND), Some(*slow)) {
                let _ = sys::close(*slow);
            }
        }
        let _ = sys::close(peer.fd);
    }
    Some(())
}

/// As many switched connections as it gets, kept.
pub fn hoards_ends(l: &mut Life) -> Option<()> {
    let mut all = Vec::new();
    loop {
        let mut own = own(l)?;
        for slot in 0..1024 {
            let Some(ends) = own.switched(slot) else { break };
            let _ = ends.map(sys::close);
        }
        all.push(own);
        sys::nanosleep(20_000_000);
    }
}

/// Descriptors of every kind with every message that takes one.
pub fn hoards_kinds(l: &mut Life) -> Option<()> {
    loop {
        let peer = l.peer()?;
        let fds = Descriptors::new(peer.fd);
        for _ in 0..600 {
            let with = *l.random.one(&[
                request::Offer::KIND,
                request::Passed::KIND,
                request::Ports::KIND,
                request::Attach::KIND,
                request::Arena::KIND,
                request::Transfer::KIND,
                request::InheritedArena::KIND,
                request::Local::KIND,
                request::Group::KIND,
                request::Clone::KIND,
            ]);
            let fd = *l.random.one(fds.all());
            let id = l.random.below(64) as u64;
            peer.tell(Packet { id, seq: 1, ..Packet::new(with) }, (fd != peer.fd).then_some(fd));
            drain(&peer);
        }
        fds.close();
        let _ = sys::close(peer.fd);
    }
}

/// Processes without number, which are announced and say nothing.
pub fn hoards_processes(l: &mut Life) -> Option<()> {
    let mut parent = l.peer()?;
    let mut kept = Vec::new();
    for n in 0..600u64 {
        let [ours, theirs] = sys::socketpair(libc::AF_UNIX, libc::SOCK_SEQPACKET).ok()?;
        parent.tell(Packet { id: (n + 1) << 16 | 1, ..Packet::new(request::Adopt::KIND) }, Some(theirs));
        let _ = sys::close(theirs);
        kept.push(ours);
        if n % 50 == 0 {
            parent.request(Packet { id: u64::MAX, ..Packet::new(request::Claim::KIND) }, None)?;
        }
    }
    sys::nanosleep(300_000_000);
    Some(())
}

/// The same by kernel TCP.
pub fn kernel(_: &mut Life) -> Option<()> {
    (!lingering(MANY).is_empty()).then_some(())
}

/// Sockets in flight, as many as there may be.
pub fn kernel_flight(_: &mut Life) -> Option<()> {
    let [a, b] = sys::socketpair(libc::AF_UNIX, libc::SOCK_STREAM).ok()?;
    for ends in lingering(MANY) {
        for fd in ends {
            let _ = sys::send_with_fd(a, b"x", Some(fd), libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL);
        }
    }
    sys::nanosleep(200_000_000);
    // (Its end closes them all.)
    (b >= 0).then_some(())
}
