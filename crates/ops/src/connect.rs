//! `connect` over shared memory: takes a slot in a channel instead of a handshake.

use crate::chan::{Chan, Client, Taken};
use crate::establish::{establish, prepare_slot, sharing_of, End};
use crate::lock::Guard;
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
/// `addr` points to `len` bytes, as the program passed it.
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
    // SAFETY: the program says that `len` bytes are at `addr`. They were found readable, or there
    // are too many for an address.
    let Some(dst) = (unsafe { name::parse(addr, len) }) else { return to_kernel(fd, d, Reason::Option) };
    let family = d.family();
    if d.unconnected().is_for_kernel() || is_standard(d) {
        return to_kernel(fd, d, Reason::Option);
    }
    // A connect to 0.0.0.0 goes to the socket's own address, if the socket is bound to one.
    let dst = if bound { dst } else { Addr { ip: name::destination(dst.ip), ..dst } };
    if dst.family as u32 != family {
        // SAFETY: `parse` has read an address there; only the kernel reads the bytes after it.
        return Outcome::Done(other_family(fd, d, unsafe {
            core::slice::from_raw_parts(addr as *const u8, len as usize)
        }));
    }
    if is_below(fd, d, &dst, bound) {
        return to_kernel(fd, d, Reason::Option);
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
        Ok(()) => Outcome::Done(connected(d)),
        Err(why) => {
            if why == Reason::KernelFirst {
                kept::renew(d, fd);
            }
            slice::choose(fd, d, &dst);
            over_kernel(fd, d, &dst, why)
        }
    }
}

/// Must the kernel handle this destination?
fn is_below(fd: i32, d: &'static Desc, dst: &Addr, bound: bool) -> bool {
    if dst.port == 0 || name::is_any(&dst.ip) {
        return true;
    }
    if d.family() as i32 != libc::AF_INET6 {
        return false;
    }
    if bound {
        // A socket that was bound to a specific address is IPv6-only, so the option is read back.
        values::learn(d, fd, options::V6ONLY);
    }
    d.options().value(options::V6ONLY) != 0 && name::is_v4(&dst.ip) // ENETUNREACH
}

/// Is the socket behind a descriptor of standard input, output or error?
fn is_standard(d: &Desc) -> bool {
    (0..=table::STDIO).any(|n| table::is_stdio(n) && table::lookup(n).is_some_and(|x| core::ptr::eq(x, d)))
}

/// The result of a `connect` over shared memory.
fn connected(d: &Desc) -> Result<()> {
    stats::count(Counter::ConnectShm);
    // With the shortest send timeout the call must not wait, and a TCP handshake would take
    // longer.
    let at_once = d.options().send_timeout() == options::AT_ONCE;
    if at_once || d.sock().flags.get().has(FlagSet::NONBLOCK) {
        d.sock().flags.set(FlagSet::CONNECTING);
        return Err(Errno::EINPROGRESS);
    }
    Ok(())
}

/// `connect` to AF_UNSPEC: resets a connection, or ends the listening of a listener. Afterwards
/// only the kernel knows the state of the socket.
fn disconnect(fd: i32, d: &'static Desc) -> Outcome<Result<()>> {
    // (This comes first, because the socket has an address afterwards, and would not look like a
    // new one.)
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

/// `connect` to an address of another family than the socket's. The kernel refuses it, and the
/// socket stays as it was.
fn other_family(fd: i32, d: &'static Desc, there: &[u8]) -> Result<()> {
    let r = sys::connect(fd, there);
    if !matches!(r, Err(e) if matches!(e.raw(), libc::EAFNOSUPPORT | libc::EINVAL)) {
        let _ = to_kernel::<()>(fd, d, Reason::Option);
    }
    r
}

/// The kernel connects the socket; the connection may move to shared memory later.
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
    // The counters must be right before the monitor can learn of the connection.
    let why = Cause::fallback(why);
    stats::kernel_connection(Counter::ConnectKernel, ctl::alive(), || socks::arena().is_some());
    Outcome::Kernel(why)
}

/// `connect` on a connected socket. As in the kernel, it returns 0 once after EINPROGRESS, and
/// EISCONN afterwards.
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
        // The kernel treats the socket as after a failed connect.
        crate::close::dissolve(d);
        return Err(e);
    }
    Err(Errno::EISCONN)
}

/// The port that the program has bound, if a connection over shared memory can have it. The
/// placeholder keeps the port from others as long as the connection lives. None for a shareable
/// port that the program has chosen, because the kernel has rules for it (the second connect to
/// the same place gets EADDRNOTAVAIL). None also for an address that does not follow from the
/// destination.
fn bound_port(fd: i32, d: &Desc, dst: &Addr) -> Option<u16> {
    let here = inspect::bound_address(fd)?;
    let set = |name| {
        let mut v = [0u8; 4];
        sys::getsockopt(fd, libc::SOL_SOCKET, name, &mut v).is_err() || v != [0; 4]
    };
    let usual = name::is_any(&here.ip) && name::same_version(&here.ip, &dst.ip) || here.ip == name::source_for(&dst.ip);
    let sole = d.unconnected().has_any_port() || !set(libc::SO_REUSEADDR);
    // (A listener that only the kernel knows may use the port.)
    let free = usual && here.port >= 1024 && sole && !set(libc::SO_REUSEPORT) && !set(libc::SO_ACCEPTCONN);
    free.then_some(here.port)
}

/// Opens a connection over shared memory. `own_port`: the client's port; None: the channel's next
/// port is taken.
fn open(fd: i32, d: &'static Desc, dst: &Addr, own_port: Option<u16>) -> core::result::Result<(), Reason> {
    let mut chan = route::find(dst, fd, route::For::New)?;
    // Checked only if the connection would use shared memory: most servers connect to other
    // hosts, and the check takes some fifty system calls.
    if unhooked::noticed() {
        return Err(Reason::Disabled);
    }
    for attempt in 0..3 {
        if own_port.is_some() && !chan.has_bound(fd) {
            return Err(Reason::Bound);
        }
        let mut cl = chan.client().ok_or(Reason::Reentry)?;
        if !route::usable(chan) {
            // The channel was just returned to the monitor, or its listener has ended.
            drop(cl);
            chan.unmap_if_unused();
            chan = route::find(dst, fd, route::For::New)?;
            continue;
        }
        match chan.take_slot(&mut cl) {
            Ok(taken) => return request(fd, d, dst, own_port, (chan, cl), taken),
            Err(Reason::Full) if attempt < 2 => {
                drop(cl);
                chan = route::another(dst, fd, chan)?;
            }
            Err(why) => return Err(why),
        }
    }
    Err(Reason::Full)
}

/// Sends the connection request to the listener, in a slot that was taken.
fn request(
    fd: i32,
    d: &'static Desc,
    dst: &Addr,
    own_port: Option<u16>,
    (chan, mut cl): (&'static Chan, Guard<'static, Client>),
    Taken { slot, port, rings }: Taken,
) -> core::result::Result<(), Reason> {
    let port = own_port.unwrap_or(port);
    let Some(sock) = socks::alloc_sock() else {
        chan.give_back(&mut cl, slot);
        return Err(Reason::Resource);
    };
    prepare_slot(chan, slot, &rings, dst, port, sharing_of(d, fd));
    // Release: publishes all of the above. (The queue's tail publishes it as well.)
    chan.slot(slot).state.store(slot_state::SYN, Ordering::Release);
    let me = End::usual(chan, (slot, rings), CLIENT, dst, port);
    establish(d, sock, &me);
    let undo = || {
        d.disconnect();
        chan.set_desc(slot, None);
        socks::free_sock(sock);
    };
    if !chan.push_syn(&mut cl, slot) {
        undo();
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
        // No worker will accept this connection: the last look at the queues came before the
        // entry was visible. The request is withdrawn, and the kernel finds out who listens there
        // now.
        for dir in &chan.slot(slot).dir {
            dir.prod.status.fetch_or(status::RST | status::CLOSED, Ordering::Release);
        }
        undo();
        chan.retire_slot(slot);
        chan.unmap_if_unused();
        return Err(Reason::NoListener);
    }
    epoll::became_conn(d);
    Ok(())
}
