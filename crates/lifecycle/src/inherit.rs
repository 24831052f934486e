//! Takes over state that this program has inherited through `exec`: connections, if the program
//! before it had the library ([`crate::exec`]), and listeners of any program.

use crate::table::{self, Desc, Kind};
use crate::values;
use crate::{arena, chan, close, ctl, inspect, listen, path, peers, process, unhooked, zone};
use core::sync::atomic::Ordering;
use fsocket_abi::arena::{Header, Reason, ARENA_SIZE, MAGIC, SOCKS, SOCK_OFF};
use fsocket_abi::channel::{CLIENT, SERVER, SLOTS};
use fsocket_abi::sock::{Place, Sock};
use fsocket_proto::values::{Side, Unpublishing};
use fsocket_proto::{answer, request};
use fsocket_sys as sys;

mod descriptors;
pub use descriptors::any_of_concern;
use descriptors::{each_descriptor, few_descriptors, FEW};

/// The most arenas that a program can inherit.
const ARENAS: usize = 64;

/// Called at the start, when there is a monitor: takes over everything inherited. `successor`: the
/// former program has left state.
#[link_section = ".text.fsocket_start"]
pub fn take_over(successor: bool) {
    // Most programs have inherited only files. This check is separate, so that they do not load
    // the rest of the code.
    let is_file = |fd: &i32| sys::getsockname(*fd, &mut [0u8; 28]).is_err() && !is_epoll(*fd);
    let all_files = |numbers: u32| (0..FEW).filter(|fd| numbers & 1 << fd != 0).all(|fd| is_file(&fd));
    if successor || !few_descriptors().is_some_and(all_files) {
        take_over_all(successor);
    }
}

#[inline(never)]
fn take_over_all(successor: bool) {
    let mut inherited = [None; ARENAS];
    if successor {
        for (i, e) in inherited.iter_mut().enumerate() {
            *e = arena(i);
            if e.is_none() {
                break;
            }
        }
    }
    let conns = || inherited.iter().flatten().flat_map(socks).filter(|s| is_mine(s));
    let (mut listens, mut unhooked_epoll, mut undecided) = (false, false, false);
    each_descriptor(|fd| match what(fd) {
        What::Unix if successor => {
            let is_it = |c| conns().find(|s| s.placeholder() == c);
            if let Some(s) = crate::successor::cookie(fd).and_then(is_it) {
                conn(fd, libc::AF_UNIX as u32, s);
            }
        }
        What::Listener(_) => listens = true,
        What::Other if is_epoll(fd) => {
            unhooked_epoll = true;
            unhooked::found(fd);
        }
        What::Unconnected(family) => {
            let left = |c| conns().find(|s| s.placeholder() == c);
            match successor.then(|| crate::successor::cookie(fd)).flatten().and_then(left) {
                Some(s) => conn(fd, family, s),
                None => undecided = true,
            }
        }
        _ => {}
    });
    if undecided && !unhooked_epoll {
        each_descriptor(|fd| {
            if let What::Unconnected(family) = what(fd) {
                let _ = bound(fd, family);
            }
        });
    }
    // An epoll instance that was made before this program started does not know the library's
    // queues. So listeners then stay with the kernel.
    let worked = listens && !unhooked_epoll && take_listeners(!successor);
    if listens && unhooked_epoll {
        each_descriptor(|fd| {
            if matches!(what(fd), What::Listener(_)) {
                leave_listener(fd);
            }
        });
    }
    if !successor {
        return;
    }
    // Closes connections whose descriptors were closed during `exec`.
    for s in conns().filter(|s| descs().all(|d| !core::ptr::eq(d.sock(), *s))) {
        if let Some(d) = attach(s, libc::AF_INET as u32) {
            d.forget_refs();
            close::last_reference(d);
            table::done_with(d);
        }
    }
    let _ = ctl::request(request::Settled {}, None);
    if worked {
        // After this, the monitor hands over the connections in their old order.
        listen::join_all();
    }
    for fd in 0..=table::STDIO {
        if let Some(d) = table::lookup(fd).filter(|d| table::is_stdio(fd) && d.is_conn()) {
            path::materialize_one(d, Reason::Option);
        }
    }
}

/// Makes new connections of this listener go to the kernel's queue, from which this program
/// accepts, whichever other process holds the listener. In shared memory a holder that does not
/// accept would keep them waiting.
fn leave_listener(fd: i32) {
    let shown = request::Listen { held_elsewhere: false };
    let Ok((answer::Listen { listener, .. }, _)) = ctl::request(shown, Some(fd)) else { return };
    let _ = ctl::request(request::Unpublish { listener, how: Unpublishing::ForGood }, None);
    let _ = ctl::request(request::Unlisten { listener, for_all: false }, None);
}

/// `elsewhere`: the listener comes from a program without the library, which may still have it.
/// True: the program before this one was a worker of a listener.
fn take_listeners(elsewhere: bool) -> bool {
    let mut worked = false;
    each_descriptor(|fd| {
        if let What::Listener(family) = what(fd) {
            worked |= listener(fd, family, elsewhere);
        }
    });
    worked
}

fn descs() -> impl Iterator<Item = &'static Desc> {
    (0..table::DESCS.len()).filter_map(|i| table::DESCS.get(i)).filter(|d| d.is_conn())
}

/// Maps the `i`-th inherited arena, for the life of the process.
fn arena(i: usize) -> Option<*mut u8> {
    let (_, fd) = ctl::request(request::InheritedArena { index: i as u64 }, None).ok()?;
    let fd = fd?;
    let base = sys::mmap(ARENA_SIZE, libc::PROT_READ | libc::PROT_WRITE, libc::MAP_SHARED, fd, 0);
    let keep = |kept: &crate::memory_fd::Kept| kept.keep(process::high(), || process::high_copy(fd));
    let noted = base.is_ok_and(|base| arena::note(base, keep));
    let _ = sys::close(fd);
    let base = base.ok()?;
    if !noted {
        // SAFETY: the memory was just mapped with this size, and no other code knows the address.
        let _ = unsafe { sys::munmap(base, ARENA_SIZE) };
        return None;
    }
    // SAFETY: the mapping is larger than a Header, whose plain field is read once.
    (unsafe { (*(base as *const Header)).magic } == MAGIC).then_some(base)
}

/// The sockets of an arena that were ever used.
fn socks(base: &*mut u8) -> impl Iterator<Item = &'static Sock> {
    let base = *base;
    // SAFETY: `arena` has mapped the memory for the life of the process, and it begins with a
    // Header.
    let high = unsafe { &*(base as *const Header) }.high_water.load(Ordering::Acquire) as usize;
    // SAFETY: the index is below SOCKS, so the entry is inside the mapping, which is never
    // removed.
    (0..high.min(SOCKS)).map(move |i| unsafe { &*(base.add(SOCK_OFF) as *const Sock).add(i) })
}

fn is_mine(s: &Sock) -> bool {
    s.is_open() && s.is_held_by(process::nonce())
}

/// Enters `fd`, the placeholder of a connection, into the tables.
fn conn(fd: i32, family: u32, s: &'static Sock) {
    let known = descs().find(|d| core::ptr::eq(d.sock(), s));
    let d = match known {
        Some(d) => {
            d.add_ref();
            d
        }
        None => match attach(s, family) {
            Some(d) => d,
            None => return,
        },
    };
    if !table::install(fd, d) {
        d.drop_ref();
    }
}

/// Makes a description for a connection, and maps its channel if necessary.
fn attach(s: &'static Sock, family: u32) -> Option<&'static Desc> {
    let Place { channel: id, slot, side } = s.place();
    if slot >= SLOTS || !matches!(side, CLIENT | SERVER) {
        return None;
    }
    let c = chan::by_id(id, side).or_else(|| {
        let (a, fd) = ctl::request(request::ChannelHandle { channel: id, side: Side(side) }, None).ok()?;
        let fd = fd?;
        let c = chan::map(id, a.listener, side, fd);
        let _ = sys::close(fd);
        // Other processes use this channel for new connections. If this process is a worker, the
        // channel is used again when the monitor hands it over.
        c.inspect(|c| c.retired.store(true, Ordering::Relaxed))
    })?;
    let rings = c.rings(slot).ok()?;
    let d = table::alloc(Kind::Fresh)?;
    d.set_family(s.family() as u32);
    d.placeholder().set_family(family);
    d.placeholder().mark_changed();
    let (tx, rx) = (rings.get(side), rings.get(1 - side));
    // SAFETY: channel and arena stay mapped while the description uses them, and the rings have
    // RING_CAP bytes.
    unsafe { d.attach(s, c.slot(slot), side, tx, rx) };
    d.conn().set_place(c.index(), slot);
    c.set_desc(slot, Some(d));
    d.connect();
    peers::join(d);
    Some(d)
}

/// Enters a socket that the former program has bound, and on which this program will listen.
/// (uvicorn and hypercorn give sockets to their workers this way.)
fn bound(fd: i32, family: u32) -> Option<&'static Desc> {
    let mut peer = [0u8; 28];
    let bound = inspect::bound_address(fd).is_some_and(|a| a.port != 0);
    if !bound || table::lookup(fd).is_some() || sys::getpeername(fd, &mut peer) != Err(sys::Errno::ENOTCONN) {
        return None;
    }
    let d = described(fd, family)?;
    listen::keep_for_fork_group(d);
    Some(d)
}

/// Enters a descriptor that has come from another process.
pub fn received(fd: i32) {
    match what(fd) {
        What::Listener(family) => drop(listener(fd, family, true)),
        What::Unconnected(family) if inspect::is_connected(fd) => crate::upgrade::received(fd, family),
        What::Unconnected(family) => {
            if let Some(d) = bound(fd, family) {
                d.listening().set_held_elsewhere(true);
            }
        }
        What::Unix | What::Other => {}
    }
}

fn may_listen(d: &Desc) -> bool {
    matches!(d.kind(), Kind::Bound | Kind::Listener | Kind::KernelListener)
}

/// Makes a description of a bound socket. None: the socket has one already, or there is no memory.
fn described(fd: i32, family: u32) -> Option<&'static Desc> {
    let cookie = crate::successor::cookie;
    let is_same = |d: &&Desc| may_listen(d) && table::fd_of(d).is_some_and(|n| cookie(n) == cookie(fd));
    if let Some(d) = table::all().find(is_same) {
        d.add_ref();
        if !table::install(fd, d) {
            d.drop_ref();
        }
        return None;
    }
    let d = table::alloc(Kind::Bound)?;
    d.set_families(family);
    d.placeholder().mark_changed();
    if !table::install(fd, d) {
        table::release(d);
        return None;
    }
    Some(d)
}

/// Publishes an inherited listener as if this program had called `listen`. True: the program
/// before this one was a worker of the listener.
fn listener(fd: i32, family: u32, elsewhere: bool) -> bool {
    let Some(d) = described(fd, family) else { return false };
    d.listening().set_held_elsewhere(elsewhere);
    values::adopt(fd, d);
    let worked = listen::registered(fd, d);
    zone::successor::inherited(fd);
    worked
}

/// Takes over zones only, because shared memory is switched off or there is no monitor.
#[link_section = ".text.fsocket_start"]
pub fn take_zones() {
    let mut unhooked_epoll = false;
    each_descriptor(|fd| unhooked_epoll |= ctl::fd() >= 0 && is_epoll(fd));
    if !unhooked_epoll {
        each_descriptor(|fd| {
            if matches!(what(fd), What::Listener(_)) {
                zone::successor::inherited(fd);
            }
        });
    }
}

enum What {
    Other,
    /// A Unix socket.
    Unix,
    /// A TCP listener, by address family.
    Listener(u32),
    /// A TCP socket without an address.
    Unconnected(u32),
}

fn what(fd: i32) -> What {
    let mut b = [0u8; 28];
    if sys::getsockname(fd, &mut b).is_err() {
        return What::Other;
    }
    let family = u16::from_ne_bytes([b[0], b[1]]) as u32;
    let int = |name: i32| {
        let mut v = [0u8; 4];
        sys::getsockopt(fd, libc::SOL_SOCKET, name, &mut v).map_or(-1, |_| i32::from_ne_bytes(v))
    };
    if family as i32 == libc::AF_UNIX {
        return What::Unix;
    }
    let inet = matches!(family as i32, libc::AF_INET | libc::AF_INET6);
    if !inet || int(libc::SO_PROTOCOL) != libc::IPPROTO_TCP {
        return What::Other;
    }
    match int(libc::SO_ACCEPTCONN) {
        1 => What::Listener(family),
        _ => What::Unconnected(family),
    }
}

/// `epoll_ctl` returns ENOENT only for an epoll instance (that does not contain the descriptor).
fn is_epoll(fd: i32) -> bool {
    sys::epoll_ctl(fd, libc::EPOLL_CTL_DEL, ctl::fd(), None) == Err(sys::Errno::ENOENT)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn descriptors_are_seen_for_what_they_are() {
        let s = sys::socket(libc::AF_INET, libc::SOCK_STREAM | libc::SOCK_CLOEXEC, 0).unwrap();
        assert!(matches!(what(s), What::Unconnected(2)));
        sys::listen(s, 1).unwrap();
        assert!(matches!(what(s), What::Listener(2)));
        let u = sys::socket(libc::AF_INET, libc::SOCK_DGRAM | libc::SOCK_CLOEXEC, 0).unwrap();
        assert!(matches!(what(u), What::Other));
        let mut seen = 0;
        each_descriptor(|fd| seen += i32::from(fd == s || fd == u));
        assert_eq!(seen, 2);
        let _ = (sys::close(s), sys::close(u));
    }
}
