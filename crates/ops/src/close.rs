//! `close`, `shutdown` and `dup`: the ends of descriptors and of connections.
//!
//! Long: the ends of a connection share most of their steps.

use crate::path;
use crate::table::{self, Desc, Kind};
use crate::{
    asleep, chan, conn, epoll, listen, name, peers, pool, process, route, short_lived, socks, stats, stream, token,
    trim, unhooked, zone, Cause, Outcome,
};
use core::sync::atomic::Ordering;
use fsocket_abi::arena::{Counter, Reason};
use fsocket_abi::channel::status;
use fsocket_abi::flags::FlagSet;
use fsocket_abi::path_switch::{Event, Next, Party, PathState};
use fsocket_proto::Addr;
use fsocket_ring as ring;
use fsocket_sync::token::Words as _;
use fsocket_sys::{self as sys, Errno, Result};

/// The application closes `fd`.
pub fn close(fd: i32) -> Outcome<Result<()>> {
    if process::owns(fd) {
        return Outcome::Done(Err(Errno::EBADF));
    }
    follow(fd);
    match table::remove(fd) {
        None => {
            if pool::holds(fd) {
                return Outcome::Done(Err(Errno::EBADF));
            }
            frees(fd);
            Outcome::Kernel(Cause::NotOurs)
        }
        Some(d) => Outcome::Done(drop_fd(fd, d, true)),
    }
}

/// Called while `fd` still is a number of a connection. If the other side has moved to the kernel, this side sends
/// there the bytes that the other side had not read. If a connection has never left the kernel, only the program's
/// descriptor leads there.
fn follow(fd: i32) {
    if let Some(d) = table::lookup(fd).filter(|d| d.path_state().is_pending()) {
        path::still_ours(d);
    }
}

/// [`close`] of most descriptors, where no step can fail. False: `fd` is of another kind, and
/// nothing was done.
#[inline]
pub fn is_kernel_only(fd: i32) -> bool {
    if table::lookup(fd).is_some() || process::owns(fd) || pool::holds(fd) || table::has_ends() {
        return false;
    }
    frees(fd);
    true
}

/// The kernel is about to get back a number that was its own before.
#[inline]
fn frees(fd: i32) {
    crate::rings::closed(fd);
    unhooked::closed(fd);
    table::fds_gone(fd..=fd);
    pool::kernel_freed(fd);
}

/// `fd` has left the table. `really`: its placeholder has to be closed, too.
fn drop_fd(fd: i32, d: &'static Desc, really: bool) -> Result<()> {
    asleep::reap();
    table::detach(d, fd, !really);
    let last = d.drop_ref();
    epoll::fd_closed(fd, d, last);
    if !last {
        stream::fd_detached(d);
        pool::kernel_freed(fd);
        return if really { sys::close(fd) } else { Ok(()) };
    }
    short_lived::closes(fd, d);
    let conn = d.is_conn();
    if !really {
        epoll::overwritten(d);
    }
    last_reference(d);
    let r = match really {
        true if conn => pool::recycle(fd, d),
        true => {
            pool::kernel_freed(fd);
            sys::close(fd)
        }
        false => Ok(()),
    };
    table::done_with(d);
    r
}

/// The last number of this process that referred to `d` is gone.
pub fn last_reference(d: &'static Desc) {
    match d.kind() {
        Kind::Shm => release_conn(d),
        Kind::Listener => {
            if d.listening().is_held_elsewhere() {
                path::leave_to_kernel(d);
            }
            zone::closed(d);
            listen::closed(d);
        }
        Kind::KernelListener => zone::closed(d),
        Kind::Kernel => {
            crate::upgrade::ended(d);
            crate::upgrade::let_go(d);
        }
        Kind::Epoll => epoll::destroy(d),
        _ => {}
    }
}

fn release_conn(d: &'static Desc) {
    if d.path_state().next(Event::Close) == Next::Follow {
        // Bytes that were sent too late for the other side to take along. This thread releases the connection,
        // once; a thread that holds it meanwhile does not.
        d.add_ref();
        let _ = path::follow(d);
        d.drop_ref();
        if !d.is_conn() {
            return;
        }
    }
    let s = d.sock();
    let (slot, place) = (d.conn().slot_index(), d.conn().channel());
    // Waits until no other thread is inside an operation on it, because the slot may be used again
    // right afterwards. Busy: a signal handler has interrupted an operation; the operation finds
    // the descriptor gone.
    let tokens = (token::enter(&s.tx), token::enter(&s.rx));
    crate::upgrade::ended(d);
    d.disconnect();
    s.tx.withdraw();
    s.rx.withdraw();
    stream::wake_late(d);
    let channel = place.and_then(|i| chan::CHANS.get(i));
    if let Some(c) = channel {
        // This comes before the peer can see the close. From then on the slot may belong to its
        // next connection, which another thread of this process may accept.
        c.set_desc(slot, None);
    }
    peers::leave(d);
    // If two sides let go at the same time, the state decides which one ends the connection.
    let last = socks::let_go(s) && s.begin_close();
    match last {
        // While we were on our way here another process of the fork group has switched the path, and is through.
        true if matches!(
            d.path_state_in_release(),
            PathState::Moving(Party::Group) | PathState::Moved(Party::Group)
        ) =>
        {
            path::gone(d);
        }
        true => {
            let beside = path::Beside::of(d);
            let unread = finish(d, tokens.0.is_ok() && tokens.1.is_ok());
            beside.closed(d, !unread);
        }
        false => path::close_draining(d, false, false),
    }
    // Another process of the fork group may go on with the connection, for example a child that serves
    // what its parent has accepted. It owns the token from its first use on. If it took the token over
    // from this process, that would cost two `membarrier` for each direction.
    [tokens.0, tokens.1].into_iter().flatten().for_each(token::give_back);
    if let Some(c) = channel {
        if last {
            socks::free_sock(s);
        }
        c.retire_slot(slot);
        c.unmap_if_unused();
    }
}

/// The program goes on with an unconnected socket: the connection ends, and only the placeholder
/// remains.
pub fn dissolve(d: &'static Desc) {
    if d.is_in_rings() {
        part(d, false);
    }
}

/// The program disconnects the socket (`connect` to AF_UNSPEC): the other side is reset. False: the connection is
/// in the kernel, so only the kernel can do it.
pub fn disconnect(d: &'static Desc) -> bool {
    let alone = d.is_in_rings() && !d.sock().is_shared();
    let Some(fd) = table::fd_of(d).filter(|_| alone) else { return false };
    let bound_to = listener_of(d).filter(|l| !name::is_any(&l.ip));
    let over = crate::ready::over(d);
    part(d, !over);
    as_disconnected(fd, bound_to);
    true
}

/// The address of the listener that has accepted a connection, if the listener still exists.
fn listener_of(d: &Desc) -> Option<Addr> {
    let chan = chan::of(d)?;
    let accepted = d.is_server();
    route::address_of(chan.listener.load(Ordering::Relaxed)).filter(|_| accepted)
}

/// Gives an unused socket the addresses that a disconnected socket has. Such a socket still names a port, but does not
/// hold it. An accepted socket keeps its listener's address.
fn as_disconnected(fd: i32, bound_to: Option<Addr>) {
    let mut here = [0u8; 28];
    let Ok(n) = sys::getsockname(fd, &mut here) else { return };
    let is_bound = n >= 4 && here[2..4] != [0; 2];
    if let Some(addr) = bound_to.filter(|_| !is_bound) {
        const NO_PORT: i32 = libc::IP_BIND_ADDRESS_NO_PORT;
        let (name, len) = name::sockaddr(u16::from_ne_bytes([here[0], here[1]]).into(), &addr.ip, 0);
        let _ = sys::setsockopt(fd, libc::IPPROTO_IP, NO_PORT, &1i32.to_ne_bytes());
        let _ = sys::bind(fd, &name[..len]);
        let _ = sys::setsockopt(fd, libc::IPPROTO_IP, NO_PORT, &0i32.to_ne_bytes());
    }
    // The `connect` that follows ends the listening, and gives back a port that the kernel has
    // chosen.
    let _ = sys::listen(fd, 0);
}

fn part(d: &'static Desc, reset: bool) {
    let s = d.sock();
    let _hold = conn::Hold::on(d);
    if s.is_shared() {
        return path::restart(d);
    }
    if let Some(fd) = table::fd_of(d) {
        path::apply_options(d, fd);
        if !s.flags.get().has(FlagSet::NONBLOCK) {
            let _ = sys::fcntl(fd, libc::F_SETFL, 0);
        }
    }
    if reset {
        s.set_option(fsocket_abi::sock::LINGER_ON, 1);
        s.set_option(fsocket_abi::sock::LINGER_SECS, 0);
    }
    release_conn(d);
    epoll::migrated_to_kernel(d, None);
    let mut n = 0;
    table::each_fd(d, |_| n += 1);
    table::remove_fds(d);
    d.drop_refs(n);
}

/// The protocol's part: FIN, or RST if data was not read or the program asked for it. True: it was
/// RST. `alone`: no other thread is inside an operation on it.
fn finish(d: &'static Desc, alone: bool) -> bool {
    let s = d.sock();
    let (r, rx, h) = d.rx();
    // (A Unix socket never lingers.)
    let linger0 =
        !d.is_unix() && s.option(fsocket_abi::sock::LINGER_ON) != 0 && s.option(fsocket_abi::sock::LINGER_SECS) == 0;
    let unread = ring::readable(r, rx, h) && !s.flags.get().is_poisoned();
    path::close_draining(d, true, unread || linger0);
    let before = d.tx().1.prod.status.load(Ordering::Relaxed);
    let st = match crate::ready::over(d) {
        // It has ended already, and the peer knows in which way.
        true if before & (status::FIN | status::RST) != 0 => 0,
        false if linger0 || unread => status::RST,
        _ => status::FIN,
    };
    if st == status::RST {
        stats::count(Counter::ResetShm);
    }
    stats::count(Counter::CloseShm);
    if alone && d.path_state_in_release().in_rings() {
        trim::closing(d);
    }
    stats::add(Counter::TxBytes, s.tx.take_bytes());
    stats::add(Counter::RxBytes, s.rx.take_bytes());
    conn::end(d, st | status::CLOSED);
    stream::notify_all(d);
    unread || linger0
}

pub fn shutdown(d: &'static Desc, how: i32) -> Outcome<Result<()>> {
    if !d.is_conn() {
        crate::upgrade::give_up(d);
        if d.is_conn() {
            return shutdown(d, how);
        }
        if matches!(d.kind(), Kind::Listener | Kind::KernelListener) && matches!(how, libc::SHUT_RD | libc::SHUT_RDWR) {
            listener_shut(d);
        } else if d.kind() == Kind::Listener && how == libc::SHUT_WR {
            epoll::stirred(d);
        } else if d.is_unconnected() {
            // The call fails, and yet the kernel's socket remembers it.
            d.unconnected().leave_to_kernel();
        }
        return Outcome::Kernel(Cause::NotOurs);
    }
    match d.path_state().next(Event::Shutdown) {
        // While the peer moves, too: the mover may get no CPU for long, and this call does not need it. `path::follow`
        // repeats in the kernel what is noted here.
        Next::Stay | Next::Later | Next::Move => {}
        Next::Both(k) => {
            // What is left in the ring can be read as before.
            let r = sys::shutdown(k, how);
            if let Some(which) = SHUT.get(how as usize) {
                d.sock().flags.set(*which);
            }
            epoll::changed(d);
            crate::waker::ring_sleepers();
            return Outcome::Done(r);
        }
        Next::Kernel(n) => return Outcome::Done(sys::shutdown(n, how)),
        Next::Follow => match path::follow(d) {
            Ok(n) if !d.is_conn() => return Outcome::Done(sys::shutdown(n, how)),
            // A signal handler on top of an operation, which keeps the connection where it is: it follows later, and repeats
            // what is noted here.
            Err(Errno::EAGAIN) => {}
            _ => return shutdown(d, how),
        },
    }
    let r = shut_in_rings(d, how);
    // Another thread may have followed just before the note. (A second shutdown does no harm.)
    if r.is_ok() && d.path_state().group_has_left() {
        if let Ok(fd) = path::follow(d) {
            let _ = sys::shutdown(fd, how);
        }
    }
    Outcome::Done(r)
}

fn shut_in_rings(d: &'static Desc, how: i32) -> Result<()> {
    let s = d.sock();
    if !(0..=2).contains(&how) {
        return Err(Errno::EINVAL);
    }
    s.note_edge();
    if crate::ready::over(d) {
        // Waiting threads get an event all the same.
        s.flags.set(SHUT[how as usize]);
        if s.flags.clear(FlagSet::CONNECTING).has(FlagSet::CONNECTING) {
            s.flags.set(FlagSet::DISCONNECTING);
        }
        epoll::changed(d);
        return Err(Errno::ENOTCONN);
    }
    if how != libc::SHUT_RD {
        let done = s.flags.set(FlagSet::SHUT_WR).has(FlagSet::SHUT_WR);
        if !done {
            // The FIN goes behind the last byte of a send that another thread is in.
            let _t = token::enter(&s.tx);
            s.tx.withdraw();
            conn::end(d, status::FIN);
        }
    }
    // A connect whose result was not asked for has succeeded now.
    s.flags.clear(FlagSet::CONNECTING);
    if how != libc::SHUT_WR {
        s.flags.set(FlagSet::SHUT_RD);
    }
    // If a Unix socket stops receiving, its peer cannot send to it any more.
    let ends_sends = if d.is_unix() { FlagSet::SHUT_RD } else { SHUT[libc::SHUT_RDWR as usize] };
    if s.flags.get().has_all(ends_sends) {
        d.tx().1.prod.status.fetch_or(status::SHUT_BOTH, Ordering::Release);
    }
    stream::notify_all(d);
    // Sleeping threads and processes of this fork group must look again, too.
    conn::wake_own(d);
    Ok(())
}

/// The flags that `shutdown` sets for each argument.
const SHUT: [FlagSet; 3] = [FlagSet::SHUT_RD, FlagSet::SHUT_WR, FlagSet::SHUT_RD.or(FlagSet::SHUT_WR)];

/// `shutdown` of a listener: it stops listening in the kernel, and here, too.
pub fn listener_shut(d: &Desc) {
    zone::shut(d);
    listen::shut(d);
    d.unlisten(false);
}

/// Before `old` gets the number `new` as well. False: that is one of the numbers 0 to 2, which stdio and the next program
/// use past the library, the path cannot be switched, and to them it would be an unconnected socket.
pub fn may_duplicate(old: i32, new: i32) -> bool {
    if new != old {
        follow(new);
    }
    let Some(d) = table::lookup(old).filter(|_| table::is_stdio(new)) else { return true };
    crate::upgrade::give_up(d);
    short_lived::leaves(d, true);
    !d.is_conn() || path::materialize_one(d, Reason::Option)
}

/// The kernel has duplicated `old` to `new`. False: as in [`may_duplicate`].
pub fn duplicated(old: i32, new: i32) -> bool {
    if new != old {
        overwritten(new);
    }
    pool::kernel_allocated(new);
    if let Some(d) = table::lookup(old) {
        d.add_ref();
        if !table::install(new, d) {
            d.drop_ref();
        }
        // Two numbers refer to one kernel socket, so nobody else gets it as a placeholder.
        d.placeholder().mark_changed();
        d.listening().prepare_exec();
    }
    may_duplicate(old, new)
}

/// `fd` is now something else in the kernel (by `dup2`, or closed without the library).
pub fn overwritten(fd: i32) {
    crate::rings::closed(fd);
    unhooked::closed(fd);
    table::fds_gone(fd..=fd);
    pool::forget(fd);
    if let Some(d) = table::remove(fd) {
        let _ = drop_fd(fd, d, false);
    }
}

/// The program is about to close the numbers `first..=last`. The library's go through `close`.
/// Calls `kernel` for the ranges around the library's own descriptors, which the kernel may close.
pub fn range(first: u32, last: u32, mut kernel: impl FnMut(u32, u32) -> Result<()>) -> Result<()> {
    let end = (last as usize).min(table::scan_limit().max(process::MAX_FD.min(1 << 16)) - 1);
    for fd in first as usize..=end {
        if table::lookup(fd as i32).is_some() {
            let _ = close(fd as i32);
        }
    }
    pool::drain();
    crate::rings::closed_range(first, last);
    table::fds_gone(first as i32..=last.min(i32::MAX as u32) as i32);
    (first..=last.min(unhooked::FDS as u32)).for_each(|fd| unhooked::closed(fd as i32));
    let mut from = first as u64;
    while let Some(own) = process::next_own(from as u32, last).filter(|_| from <= last as u64) {
        if own as u64 > from {
            kernel(from as u32, own - 1)?;
        }
        from = own as u64 + 1;
    }
    if from <= last as u64 {
        kernel(from as u32, last)?;
    }
    Ok(())
}
