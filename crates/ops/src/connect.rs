//! `connect`: a slot in a channel instead of a handshake.

use crate::chan::Taken;
use crate::establish::{establish, prepare_slot, sharing_of, End};
use crate::table::{Desc, Kind};
use crate::{
    ctl, epoll, inspect, kept, name, options, ready, route, slice, socks, stats, table, unhooked, upgrade, user,
    values, Cause, Outcome,
};
use core::sync::atomic::Ordering;
use fsocket_abi::arena::{Counter, Reason};
use fsocket_abi::channel::{slot_state, status, CLIENT};
use fsocket_abi::flags::FlagSet;
use fsocket_proto::Addr;
use fsocket_sys::{self as sys, Errno, Result};

/// # Safety
/// `addr` is the program's for `len` bytes.
pub unsafe fn connect(fd: i32, d: &'static Desc, addr: *const libc::sockaddr, len: u32) -> Outcome<Result<()>> {
    if len as usize <= size_of::<libc::sockaddr_storage>() && !user::readable(addr as *const u8, len as usize) {
        return Outcome::Kernel(Cause::Invalid); // EFAULT
    }
    // SAFETY: the program says that this is its memory; the copy returns EFAULT where nothing is.
    if len >= 2 && unsafe { user::get(addr as *const u16) } == Ok(libc::AF_UNSPEC as u16) {
        return disconnect(fd, d);
    }
    let bound = match d.kind() {
        Kind::Shm if !(2..=size_of::<libc::sockaddr_storage>() as u32).contains(&len) => {
            return Outcome::Done(Err(Errno::EINVAL))
        }
        Kind::Shm => return Outcome::Done(again(d)),
        Kind::Fresh => false,
        Kind::Bound if d.unconnected().was_forked() => return to_kernel(fd, d, Reason::Option),
        Kind::Bound => true,
        _ => return Outcome::Kernel(Cause::NotOurs),
    };
    // SAFETY: the program says that `len` bytes are at `addr`; they were found readable, or are too many for an
    // address.
    let Some(dst) = (unsafe { name::parse(addr, len) }) else { return to_kernel(fd, d, Reason::Option) };
    let family = d.family();
    if d.unconnected().is_for_kernel() {
        return to_kernel(fd, d, Reason::Option);
    }
    if (0..=table::STDIO).any(|n| table::lookup(n).is_some_and(|x| core::ptr::eq(x, d))) {
        return to_kernel(fd, d, Reason::Option);
    }
    // With an address of its own a socket that connects to 0.0.0.0 gets there.
    let dst = if bound { dst } else { Addr { ip: name::destination(dst.ip), ..dst } };
    if dst.family as u32 != family {
        // SAFETY: `parse` has read an address there; only the kernel reads what may be behind.
        return Outcome::Done(other_family(fd, d, unsafe {
            core::slice::from_raw_parts(addr as *const u8, len as usize)
        }));
    }
    if dst.port == 0 || name::is_any(&dst.ip) {
        return to_kernel(fd, d, Reason::Option);
    }
    if family as i32 == libc::AF_INET6 {
        if bound {
            // `bind` to an address makes a socket IPv6-only.
            values::learn(d, fd, options::V6ONLY);
        }
        if d.options().value(options::V6ONLY) != 0 && name::is_v4(&dst.ip) {
            return to_kernel(fd, d, Reason::Option); // ENETUNREACH
        }
    }
    let own_port = match bound.then(|| bound_port(fd, d, &dst)) {
        Some(None) => {
            if let Err(e) = crate::in_use::before_connect(fd, &dst) {
                return Outcome::Done(Err(e));
            }
            slice::choose(fd, d, &dst);
            return over_kernel(fd, d, &dst, Reason::Bound);
        }
        port => port.flatten(),
    };
    match open(fd, d, &dst, own_port) {
        Ok(()) => {
            stats::count(Counter::ConnectShm);
            // A handshake takes longer than no time at all.
            let at_once = d.options().send_timeout() == options::AT_ONCE;
            if at_once || d.sock().flags.get().has(FlagSet::NONBLOCK) {
                d.sock().flags.set(FlagSet::CONNECTING);
                return Outcome::Done(Err(Errno::EINPROGRESS));
            }
            Outcome::Done(Ok(()))
        }
        Err(why) => {
            if why == Reason::KernelFirst {
                kept::renew(d, fd);
            }
            slice::choose(fd, d, &dst);
            over_kernel(fd, d, &dst, why)
        }
    }
}

/// `connect` to AF_UNSPEC: the connection is reset, the listener listens no more; the kernel knows what is left of a
/// socket after that.
fn disconnect(fd: i32, d: &'static Desc) -> Outcome<Result<()>> {
    // (Now: it gets an address here, and would not be taken for a new one afterwards.)
    fsocket_fdtable::pristine::settle(fd, d);
    match d.kind() {
        Kind::Shm => {
            if !crate::close::disconnect(d) {
                crate::path::materialize_one(d, Reason::Option);
            }
        }
        Kind::Listener | Kind::KernelListener => crate::close::listener_shut(d),
        _ => return to_kernel(fd, d, Reason::Option),
    }
    Outcome::Kernel(Cause::NotOurs)
}

/// To an address that the socket is not made for. The kernel refuses, and the socket is what it was.
fn other_family(fd: i32, d: &'static Desc, there: &[u8]) -> Result<()> {
    let r = sys::connect(fd, there);
    if !matches!(r, Err(e) if matches!(e.raw(), libc::EAFNOSUPPORT | libc::EINVAL)) {
        let _ = to_kernel::<()>(fd, d, Reason::Option);
    }
    r
}

/// The kernel connects it, for the time being.
fn over_kernel<T>(fd: i32, d: &'static Desc, dst: &Addr, why: Reason) -> Outcome<T> {
    if !upgrade::connecting(d, dst) {
        return to_kernel(fd, d, why);
    }
    left(why)
}

fn to_kernel<T>(fd: i32, d: &'static Desc, why: Reason) -> Outcome<T> {
    epoll::leave_to_kernel(d);
    table::forget_fd(fd, d);
    left(why)
}

fn left<T>(why: Reason) -> Outcome<T> {
    // (Before the monitor is told of the connection, with all that was counted.)
    let why = Cause::fallback(why);
    stats::kernel_connection(Counter::ConnectKernel, ctl::alive(), || socks::arena().is_some());
    Outcome::Kernel(why)
}

/// `connect` on a socket that is connected: 0 once after EINPROGRESS, as the
/// kernel does, then EISCONN.
fn again(d: &'static Desc) -> Result<()> {
    let s = d.sock();
    if s.flags.get().has(FlagSet::DISCONNECTING) {
        return Err(Errno::EINVAL);
    }
    if s.flags.clear(FlagSet::CONNECTING).has(FlagSet::CONNECTING) {
        if !ready::over(d) {
            return Ok(());
        }
        let e = match ready::take_error(d) {
            0 => Errno::ECONNABORTED,
            e => Errno::new(e),
        };
        // The kernel takes it for a connect that has failed.
        crate::close::dissolve(d);
        return Err(e);
    }
    Err(Errno::EISCONN)
}

/// The port that the program has bound, if the connection can have it: the
/// placeholder keeps it from others as long as the connection lives. A port of
/// the program's choice that may be shared has rules of its own (the
/// second one that connects to one place gets EADDRNOTAVAIL), and an address other than the one
/// that follows from the destination is the kernel's business.
fn bound_port(fd: i32, d: &Desc, dst: &Addr) -> Option<u16> {
    let here = inspect::bound_address(fd)?;
    let set = |name| {
        let mut v = [0u8; 4];
        sys::getsockopt(fd, libc::SOL_SOCKET, name, &mut v).is_err() || v != [0; 4]
    };
    let usual = name::is_any(&here.ip) && name::same_version(&here.ip, &dst.ip) || here.ip == name::source_for(&dst.ip);
    let sole = d.unconnected().has_any_port() || !set(libc::SO_REUSEADDR);
    // (It may be a listener that is the kernel's alone.)
    let free = usual && here.port >= 1024 && sole && !set(libc::SO_REUSEPORT) && !set(libc::SO_ACCEPTCONN);
    free.then_some(here.port)
}

/// `own_port`: the client's port; else one of the monitor's.
fn open(fd: i32, d: &'static Desc, dst: &Addr, own_port: Option<u16>) -> core::result::Result<(), Reason> {
    let mut chan = route::find(dst, fd, route::For::New)?;
    // Only where it would become ours: most servers connect to other hosts, and a look is some
    // fifty system calls.
    if unhooked::noticed() {
        return Err(Reason::Disabled);
    }
    for attempt in 0..3 {
        if own_port.is_some() && !chan.has_bound(fd) {
            return Err(Reason::Bound);
        }
        let mut cl = chan.client().ok_or(Reason::Reentry)?;
        if !route::usable(chan) {
            // It has just been given back, or its listener has ended.
            drop(cl);
            chan.unmap_if_unused();
            chan = route::find(dst, fd, route::For::New)?;
            continue;
        }
        let Taken { slot, port, rings } = match chan.take_slot(&mut cl) {
            Ok(taken) => taken,
            Err(Reason::Full) if attempt < 2 => {
                drop(cl);
                chan = route::another(dst, fd, chan)?;
                continue;
            }
            Err(why) => return Err(why),
        };
        let port = own_port.unwrap_or(port);
        let Some(sock) = socks::alloc_sock() else {
            chan.give_back(&mut cl, slot);
            return Err(Reason::Resource);
        };
        prepare_slot(chan, slot, &rings, dst, port, sharing_of(d, fd));
        // Release: all of the above; also ordered by the queue's tail.
        chan.slot(slot).state.store(slot_state::SYN, Ordering::Release);
        let me = End::usual(chan, (slot, rings), CLIENT, dst, port);
        establish(d, sock, &me);
        let pushed = chan.push_syn(&mut cl, slot);
        if !pushed {
            d.disconnect();
            chan.set_desc(slot, None);
            socks::free_sock(sock);
            chan.give_back(&mut cl, slot);
            return Err(Reason::Full);
        }
        drop(cl);
        chan.arrived();
        let syn = (slot_state::SYN, slot_state::ESTABLISHED);
        let state = &chan.slot(slot).state;
        if chan.header().listener_closed.load(Ordering::Acquire) != 0
            && state.compare_exchange(syn.0, syn.1, Ordering::AcqRel, Ordering::Relaxed).is_ok()
        {
            // Nobody has accepted it, and nobody will: the queues were looked
            // through for the last time before our entry could be seen. Taken
            // back; the kernel knows who listens there now.
            for dir in &chan.slot(slot).dir {
                dir.prod.status.fetch_or(status::RST | status::CLOSED, Ordering::Release);
            }
            d.disconnect();
            chan.set_desc(slot, None);
            socks::free_sock(sock);
            chan.retire_slot(slot);
            chan.unmap_if_unused();
            return Err(Reason::NoListener);
        }
        epoll::became_conn(d);
        return Ok(());
    }
    Err(Reason::Full)
}
