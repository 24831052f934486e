//! `close`, `shutdown`, `dup`: ends of descriptors and of connections.
//!
//! Long: the ends of a connection share most of their steps.

use crate::path;
use crate::stage;
use crate::stage::Path;
use crate::table::{self, Desc, Kind};
use crate::{
    asleep, chan, conn, epoll, listen, name, peers, pool, process, route, short_lived, socks, stats, stream, token,
    trim, unhooked, zone, Cause, Outcome,
};
use core::sync::atomic::Ordering;
use fsocket_abi::arena::{Counter, Reason};
use fsocket_abi::channel::status;
use fsocket_abi::flags::FlagSet;
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

/// Before `fd` is no number of a connection any more. Where the other side has gone to the kernel, what it had not read is
/// sent again there; and of a connection that has never left the kernel, only a number of the program's leads there.
fn follow(fd: i32) {
    if let Some(d) = table::lookup(fd).filter(|d| d.is_conn() && stage::of(d) == Path::Pending) {
        path::still_ours(d);
    }
}

/// [`close`] of most descriptors, with nothing that could go wrong. False: it is not one of
/// them, and nothing is done.
#[inline]
pub fn is_kernel_only(fd: i32) -> bool {
    if table::lookup(fd).is_some() || process::owns(fd) || pool::holds(fd) || table::has_ends() {
        return false;
    }
    frees(fd);
    true
}

/// The kernel is about to have a number again that was its own.
#[inline]
fn frees(fd: i32) {
    crate::rings::closed(fd);
    unhooked::closed(fd);
    table::fds_gone(fd..=fd);
    pool::kernel_freed(fd);
}

/// `fd` left the table. `really`: its placeholder is to be closed too.
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

/// The last number of this process that refers to `d` is gone.
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
    if stage::of(d) == Path::Pending {
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
    // Wait until no other thread is inside an operation on it: the slot may be
    // used again right after. Busy: we are in a signal handler on top of one;
    // its operation finds the descriptor gone.
    let tokens = (token::enter(&s.tx), token::enter(&s.rx));
    crate::upgrade::ended(d);
    d.disconnect();
    s.tx.withdraw();
    s.rx.withdraw();
    stream::wake_late(d);
    let channel = place.and_then(|i| chan::CHANS.get(i));
    if let Some(c) = channel {
        // Before the peer can see that we are done: from then on the slot may
        // belong to its next connection, which another thread of ours accepts.
        c.set_desc(slot, None);
    }
    peers::leave(d);
    // The state decides which of two that let go at once ends the connection.
    let last = socks::let_go(s) && s.begin_close();
    match last {
        // While we were on our way here another process of the fork group has switched the path, and is through.
        true if stage::of(d) == Path::Pending && s.flags.look().has_left() => path::gone(d),
        true => {
            let beside = path::Beside::of(d);
            let unread = finish(d, tokens.0.is_ok() && tokens.1.is_ok());
            beside.closed(d, !unread);
        }
        false => path::close_draining(d, false, false),
    }
    // Another process of the fork group that goes on with it, as the child that serves what its parent has
    // accepted, owns it from its first use on: to take over from us would cost it two `membarrier` for each
    // direction.
    [tokens.0, tokens.1].into_iter().flatten().for_each(token::give_back);
    if let Some(c) = channel {
        if last {
            socks::free_sock(s);
        }
        c.retire_slot(slot);
        c.unmap_if_unused();
    }
}

/// The program goes on with the socket as an unconnected one: the connection
/// ends, and the placeholder is all that is left.
pub fn dissolve(d: &'static Desc) {
    if stage::of(d) == Path::Shm {
        part(d, false);
    }
}

/// The program disconnects the socket (`connect` to AF_UNSPEC): the other side is reset. False: only the kernel can
/// do that, once the connection is its.
pub fn disconnect(d: &'static Desc) -> bool {
    let alone = stage::of(d) == Path::Shm && !d.sock().is_shared();
    let Some(fd) = table::fd_of(d).filter(|_| alone) else { return false };
    let bound_to = listener_of(d).filter(|l| !name::is_any(&l.ip));
    let over = crate::ready::over(d);
    part(d, !over);
    as_disconnected(fd, bound_to);
    true
}

/// The address of the listener that has accepted a connection, if it is still there.
fn listener_of(d: &Desc) -> Option<Addr> {
    let chan = chan::of(d)?;
    let accepted = d.is_server();
    route::address_of(chan.listener.load(Ordering::Relaxed)).filter(|_| accepted)
}

/// Gives an unused socket the addresses of one that was connected. Such a socket still names a port, without having it.
/// An accepted one keeps the address of its listener.
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
    // The `connect` that follows ends it, and gives back a port that the kernel has chosen.
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

/// The protocol part: FIN, or RST if data was not read or the application
/// asked for it. True: it was that. `alone`: no other thread is inside an operation on it.
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
        // It has ended already, and the peer knows how.
        true if before & (status::FIN | status::RST) != 0 => 0,
        false if linger0 || unread => status::RST,
        _ => status::FIN,
    };
    if st == status::RST {
        stats::count(Counter::ResetShm);
    }
    stats::count(Counter::CloseShm);
    if alone && stage::of(d) == Path::Shm {
        trim::closing(d);
    }
    stats::add(Counter::TxBytes, s.tx.bytes.swap(0, Ordering::Relaxed));
    stats::add(Counter::RxBytes, s.rx.bytes.swap(0, Ordering::Relaxed));
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
            // It fails, and yet the kernel's socket remembers it.
            d.unconnected().leave_to_kernel();
        }
        return Outcome::Kernel(Cause::NotOurs);
    }
    match stage::of(d) {
        Path::Shm => {}
        Path::Draining(k) => {
            // What is left in the ring can be read as before.
            let r = sys::shutdown(k, how);
            if let Some(which) = SHUT.get(how as usize) {
                d.sock().flags.set(*which);
            }
            epoll::changed(d);
            crate::waker::ring_sleepers();
            return Outcome::Done(r);
        }
        // The mover may get no CPU for long, and this call does not need it: `path::follow` repeats in the kernel what is
        // noted here.
        Path::Pending if stage::is_moving(d) => {}
        Path::Pending => {
            return match path::follow(d) {
                Ok(n) if !d.is_conn() => Outcome::Done(sys::shutdown(n, how)),
                _ => shutdown(d, how),
            }
        }
    }
    let r = shut_in_rings(d, how);
    // Another thread may have followed just before the note. (A second shutdown does no harm.)
    if r.is_ok() && d.sock().flags.look().has_left() {
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
        // An event for whoever waits on it all the same.
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
            // Behind the last byte of a send that another thread is in.
            let _t = token::enter(&s.tx);
            s.tx.withdraw();
            conn::end(d, status::FIN);
        }
    }
    // A connect that had not been asked about again has succeeded now.
    s.flags.clear(FlagSet::CONNECTING);
    if how != libc::SHUT_WR {
        s.flags.set(FlagSet::SHUT_RD);
    }
    // A Unix socket's peer cannot send any more to one that only does not receive.
    let ends_sends = if d.is_unix() { FlagSet::SHUT_RD } else { SHUT[libc::SHUT_RDWR as usize] };
    if s.flags.get().has_all(ends_sends) {
        d.tx().1.prod.status.fetch_or(status::SHUT_BOTH, Ordering::Release);
    }
    stream::notify_all(d);
    // Threads and processes of the fork group of ours that sleep on it must look again as well.
    conn::wake_own(d);
    Ok(())
}

/// What `shutdown` with this argument sets.
const SHUT: [FlagSet; 3] = [FlagSet::SHUT_RD, FlagSet::SHUT_WR, FlagSet::SHUT_RD.or(FlagSet::SHUT_WR)];

/// shutdown() of a listener: the kernel stops listening, so do we.
pub fn listener_shut(d: &Desc) {
    zone::shut(d);
    listen::shut(d);
    d.unlisten(false);
}

/// Before `old` gets the number `new` as well. False: that is one of the numbers 0 to 2, which libc and the next program
/// use past the library, the path cannot be switched, and to them it would be an unconnected socket.
pub fn may_duplicate(old: i32, new: i32) -> bool {
    if new != old {
        follow(new);
    }
    let Some(d) = table::lookup(old).filter(|_| (0..=table::STDIO).contains(&new)) else { return true };
    crate::upgrade::give_up(d);
    short_lived::leaves(d, true);
    !d.is_conn() || path::materialize_one(d, Reason::Option)
}

/// The kernel has duplicated `old` to `new`. False: as [`may_duplicate`].
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
        // Two numbers, one kernel socket: not a placeholder for anybody else.
        d.placeholder().mark_changed();
        d.listening().prepare_exec();
    }
    may_duplicate(old, new)
}

/// `fd` now is something else in the kernel (dup2, or closed behind us).
pub fn overwritten(fd: i32) {
    crate::rings::closed(fd);
    unhooked::closed(fd);
    table::fds_gone(fd..=fd);
    pool::forget(fd);
    if let Some(d) = table::remove(fd) {
        let _ = drop_fd(fd, d, false);
    }
}

/// Numbers `first..=last` are about to be closed by the application: ours go
/// through `close`. Returns the ranges around our own descriptors that the
/// kernel may close.
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
