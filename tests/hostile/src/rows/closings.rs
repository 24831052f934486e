//! Descriptors that are slow to close, in the monitor's hands (rows 1 and 7).

use super::means::{drain, lingering, own};
use crate::descriptors::Descriptors;
use crate::lives::Life;
use crate::peer::Peer;
use fsocket_proto::{kind, Msg};
use fsocket_sys as sys;

const MANY: usize = 300;

/// Switched connections whose ends linger in the monitor, slots that are said to be free, one message.
pub fn broken(l: &mut Life) -> Option<()> {
    let mut own = own(l)?;
    own.lingering_ends(MANY, true);
    own.client.tell(Msg { id: own.channel.id.into(), ..Msg::new(kind::BROKEN) }, None);
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
        own.server
            .tell(Msg { id: own.channel.id.into(), arg0: slot | 1 << 32, arg1: 9, ..Msg::new(kind::RELEASE) }, None);
        own.client.tell(Msg { id: own.channel.id.into(), arg0: slot, arg1: 9, ..Msg::new(kind::RELEASE) }, None);
    }
    own.server.tell(Msg { id: own.id, ..Msg::new(kind::UNLISTEN) }, None);
    sys::nanosleep(200_000_000);
    Some(())
}

/// Sockets that come with messages for which nobody needs them, and of which this process has no other copy.
pub fn messages(l: &mut Life) -> Option<()> {
    let peer = l.peer()?;
    // (The other ends stay open, with what nobody reads.)
    for [slow, _] in lingering(MANY) {
        let with =
            *l.random.one(&[kind::UNLISTEN, kind::OFFER, kind::PORTS, kind::CONNECT, kind::OPTIONS, kind::RENEW]);
        // (RENEW takes sockets of another kind: it is thrown out for it.)
        let with = if l.random.chance(98) && with == kind::RENEW { kind::MEET } else { with };
        if peer.tell(Msg { id: 1, seq: 1, ..Msg::new(with) }, Some(slow)) {
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
        peer.tell(Msg { version: 77, ..Msg::new(kind::PORTS) }, None);
        for [slow, _] in some {
            if peer.tell(Msg::new(kind::UNLISTEN), Some(*slow)) {
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
                kind::OFFER,
                kind::PASSED,
                kind::PORTS,
                kind::ATTACH,
                kind::ARENA,
                kind::TRANSFER,
                kind::INHERITED_ARENA,
                kind::LOCAL,
                kind::GROUP,
                kind::CLONE,
            ]);
            let fd = *l.random.one(fds.all());
            let id = l.random.below(64) as u64;
            peer.tell(Msg { id, seq: 1, ..Msg::new(with) }, (fd != peer.fd).then_some(fd));
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
        parent.tell(Msg { id: (n + 1) << 16 | 1, ..Msg::new(kind::ADOPT) }, Some(theirs));
        let _ = sys::close(theirs);
        kept.push(ours);
        if n % 50 == 0 {
            parent.request(Msg { id: u64::MAX, ..Msg::new(kind::CLAIM) }, None)?;
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
