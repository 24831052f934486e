//! Descriptors in the monitor that are slow to close (rows 1 and 7).

use super::means::{drain, lingering, own};
use crate::descriptors::Descriptors;
use crate::lives::Life;
use crate::peer::Peer;
use fsocket_proto::raw::Packet;
use fsocket_proto::{request, Payload};
use fsocket_sys as sys;

const MANY: usize = 300;

/// Makes switched connections whose ends linger in the monitor, marks their slots as free, and
/// sends one message.
pub fn broken(l: &mut Life) -> Option<()> {
    let mut own = own(l)?;
    own.lingering_ends(MANY, true);
    own.client.tell(Packet { id: own.channel.id.into(), ..Packet::new(request::Broken::KIND) }, None);
    sys::nanosleep(500_000_000);
    Some(())
}

/// Makes the same ends, and the user's process ends.
pub fn killed(l: &mut Life) -> Option<()> {
    let mut own = own(l)?;
    own.lingering_ends(MANY, false);
    Some(())
}

/// Makes the same ends, releases them one by one, and closes the listener.
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

/// Sends sockets in messages that need none. This process has no other copy of them.
pub fn messages(l: &mut Life) -> Option<()> {
    let peer = l.peer()?;
    // (The other ends stay open, with bytes that no process reads.)
    for [slow, _] in lingering(MANY) {
        let with = *l.random.one(&[
            request::Unlisten::KIND,
            request::Offer::KIND,
            request::Ports::KIND,
            request::Connect::KIND,
            request::Options::KIND,
            request::Renew::KIND,
        ]);
        // (RENEW takes sockets of another kind, and the monitor throws out its sender.)
        let with = if l.random.chance(98) && with == request::Renew::KIND { request::Meet::KIND } else { with };
        if peer.tell(Packet { id: 1, seq: 1, ..Packet::new(with) }, Some(slow)) {
            let _ = sys::close(slow);
        }
        drain(&peer);
    }
    Some(())
}

/// Leaves sockets in a control socket that the monitor has given up.
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

/// Keeps as many switched connections as possible.
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

/// Sends descriptors of every kind with every message that takes one.
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

/// Announces processes without number, which send nothing.
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

/// The equivalent over kernel TCP.
pub fn kernel(_: &mut Life) -> Option<()> {
    (!lingering(MANY).is_empty()).then_some(())
}

/// Sends sockets in messages that no process receives, until the kernel allows no more of them in
/// flight.
pub fn kernel_flight(_: &mut Life) -> Option<()> {
    let [a, b] = sys::socketpair(libc::AF_UNIX, libc::SOCK_STREAM).ok()?;
    for ends in lingering(MANY) {
        for fd in ends {
            let _ = sys::send_with_fd(a, b"x", Some(fd), libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL);
        }
    }
    sys::nanosleep(200_000_000);
    // (When the process ends, the kernel closes them all.)
    (b >= 0).then_some(())
}
