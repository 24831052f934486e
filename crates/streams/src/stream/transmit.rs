//! Sending: a ring's common case, and everything else.

use super::below::zerocopy;
use super::news::{News, SHARED_CPU};
use super::refuse::{only_shut_both, rather, refused};
use super::restart;
use super::wait::{interruptible, wait_space, Wait};
use super::{left_rings, notify, path_taken, poison, publish_cpu, turn, Hold};
use crate::path;
use crate::stage;
use crate::stage::Path;
use crate::table::Desc;
use crate::upcalls::watcher;
use crate::{idle, lengths, ready, stuck, token, user, values};
use core::sync::atomic::Ordering;
use fsocket_abi::arena::Reason;
use fsocket_abi::channel::{status, POS_START};
use fsocket_abi::flags::FlagSet;
use fsocket_abi::half::Half;
use fsocket_ring::{self as ring, Failed};
use fsocket_sync::token::Words as _;
use fsocket_sys::{self as sys, cpu, Errno, Result};

/// The peer's state in which a send is not the ring's alone.
const NOT_NOW: u32 = status::RST | status::CLOSED | status::SHUT_BOTH | status::MIGRATING;
/// Flags that change nothing for us.
const SEND_PLAIN: i32 =
    libc::MSG_NOSIGNAL | libc::MSG_DONTWAIT | libc::MSG_MORE | libc::MSG_DONTROUTE | libc::MSG_CONFIRM;

/// Do these flags leave a send as it is?
#[inline(always)]
pub fn plain_send(flags: i32) -> bool {
    flags & !SEND_PLAIN == 0
}

/// # Safety
/// `buf` is the program's for `len` bytes; it need not be there.
#[inline(always)]
pub unsafe fn send(d: &'static Desc, buf: *const u8, len: usize, flags: i32) -> Result<usize> {
    // SAFETY: the program says that `len` bytes are at `buf`; only copies that return EFAULT, and the kernel, reach
    // them.
    if plain_send(flags) && unsafe { send_fast(d, buf, len) } {
        return Ok(len);
    }
    // SAFETY: the program says that `len` bytes are at `buf`; only copies that return EFAULT, and the kernel, reach
    // them.
    unsafe { send_slow(d, buf, len, flags) }
}

/// The common case of [`send`]: it needs neither the kernel nor a look at the
/// peer. False: nothing was done.
///
/// # Safety
/// As [`send`].
#[inline(always)]
pub unsafe fn send_fast(d: &'static Desc, buf: *const u8, len: usize) -> bool {
    if !token::is_here(d.sender()) {
        // SAFETY: the program says that `len` bytes are at `buf`; only copies that return EFAULT, and the kernel,
        // reach them.
        return unsafe { send_after_another(d, buf, len) };
    }
    // SAFETY: the program says that `len` bytes are at `buf`; only copies that return EFAULT, and the kernel, reach
    // them.
    unsafe { send_on(d, buf, len, || 0) }
}

/// The same by a thread that has sent on another connection last, or is not the only one here.
#[inline(never)]
unsafe fn send_after_another(d: &'static Desc, buf: *const u8, len: usize) -> bool {
    // SAFETY: the program says that `len` bytes are at `buf`; only copies that return EFAULT, and the kernel, reach
    // them.
    unsafe { send_on(d, buf, len, || turn::to(d)) }
}

/// `when`: see [`turn::to`].
///
/// # Safety
/// As [`send`].
#[inline(always)]
unsafe fn send_on(d: &'static Desc, buf: *const u8, len: usize, when: impl FnOnce() -> u64) -> bool {
    let s = d.sock();
    let (r, tx, h) = d.tx();
    let (_, rx, _) = d.rx();
    // A path switch leaves no room to `send_small` while it has the
    // token: these may be looked at before.
    if !s.flags.get().sends_plainly() || rx.prod.status.load(Ordering::Relaxed) & NOT_NOW != 0 {
        return false;
    }
    let Ok(t) = token::enter(h) else { return false };
    let when = when();
    // SAFETY: the program says that `len` bytes are at `buf`, and only copies that return EFAULT, and the kernel,
    // reach them. The token is held until the ring has them.
    let sent = d.is_conn() && unsafe { ring::send_small(r, tx, h, buf, len, when) };
    if when != 0 {
        turned(d, h, sent);
    }
    drop(t);
    if sent {
        notify(d, &tx.want_data);
        publish_cpu(h, &tx.prod.cpu);
    }
    sent
}

/// After [`turn::to`], with the token.
fn turned(d: &Desc, h: &Half, sent: bool) {
    if !sent {
        turn::back(d);
    } else if token::owned(h) {
        d.set_sender(token::here());
    }
}

/// What [`send_tiny`] and [`send_small`] have done.
pub enum Tiny {
    /// All of it.
    Sent,
    /// The bytes are on their way; [`sent_tiny`] does the rest.
    Tell,
    /// Nothing.
    No,
    /// Nothing: EFAULT. (The caller needs none of the arguments any more.)
    Fault,
}

/// [`send_fast`] for a few bytes by the only thread that has ever sent: the case in which
/// a call costs as much as the work. Nothing in it calls a function, so that it needs no
/// stack (see docs/performance.md). Any descriptor may be asked. `SPARE`: the caller has so few
/// arguments that a register is left over.
///
/// # Safety
/// As [`send`].
#[inline(always)]
pub unsafe fn send_tiny<const SPARE: bool>(d: &'static Desc, buf: *const u8, len: usize) -> Tiny {
    if !ring::tiny(len) {
        return Tiny::No;
    }
    let me = if SPARE { token::if_here(d.sender()) } else { None };
    if me.is_none() && (SPARE || !token::is_here(d.sender())) {
        return Tiny::No;
    }
    let Some((h, slot)) = on_credit(d, len) else { return Tiny::No };
    // SAFETY: the program says that `len` bytes are at `buf`, and only copies that return EFAULT, and the kernel,
    // reach them. The token is held until the ring has them.
    if !unsafe { ring::send_tiny(d.tx_ring(), h, slot, buf, len) } {
        return not_there(h);
    }
    published(d, h, || me.map_or_else(cpu::mark, token::Here::cpu_mark))
}

/// The same for up to [`ring::SMALL`] bytes.
///
/// # Safety
/// As [`send`].
#[inline(always)]
pub unsafe fn send_small(d: &'static Desc, buf: *const u8, len: usize) -> Tiny {
    if !ring::small(len) || !token::is_here(d.sender()) {
        return Tiny::No;
    }
    let Some((h, slot)) = on_credit(d, len) else { return Tiny::No };
    // SAFETY: the program says that `len` bytes are at `buf`, and only copies that return EFAULT, and the kernel,
    // reach them. The token is held until the ring has them.
    if !unsafe { ring::send_on_credit(d.tx_ring(), h, slot, buf, len) } {
        return not_there(h);
    }
    published(d, h, cpu::mark)
}

/// The message is not there. (Without a call, for which [`send_tiny`] would need a stack.)
#[inline(always)]
fn not_there(h: &Half) -> Tiny {
    fsocket_sync::token::not_done(h);
    Tiny::Fault
}

/// By [`Desc::sender`], which the caller is: what `len` bytes are sent on, and where they go. The
/// caller is inside until they have gone.
#[inline(always)]
fn on_credit(d: &'static Desc, len: usize) -> Option<(&'static Half, ring::Slot)> {
    if d.rx_dir().prod.status.load(Ordering::Relaxed) & NOT_NOW != 0 {
        return None;
    }
    let h = &d.sock().tx;
    let slot = ring::slot(h, len);
    let t = token::on_credit(h, slot.pos, slot.end)?;
    // There is no credit on a direction that was shut down, closed, switched or shared. Closed or reset
    // connections are caught by the next credit check. Until then the sender may write a few bytes that
    // nobody reads, as it may with TCP.
    ring::on_credit(h, slot).then(|| {
        t.begin();
        (h, slot)
    })
}

/// After a send on credit.
#[inline(always)]
fn published(d: &'static Desc, h: &Half, cpu_mark: impl FnOnce() -> u32) -> Tiny {
    if !d.tx_dir().want_data.is_silent() || h.cpu.load(Ordering::Relaxed) != cpu_mark() {
        return Tiny::Tell;
    }
    Tiny::Sent
}

/// Credit for [`send_tiny`]. The caller has the token.
fn give_credit(d: &Desc, h: &Half) {
    if !token::owned(h) {
        return;
    }
    d.set_sender(token::here());
    ring::give_credit(h);
    fsocket_sync::light_fence();
    if !d.sock().flags.get().sends_plainly() {
        // A signal handler on top of us: it could not enter, and there was no credit to withdraw.
        h.withdraw();
    }
}

/// After [`Tiny::Tell`].
pub fn sent_tiny(d: &'static Desc) {
    let (_, tx, h) = d.tx();
    notify(d, &tx.want_data);
    publish_cpu(h, &tx.prod.cpu);
}

/// Does a send with these flags wait for room? A call of several parts asks once: what the flag of the
/// socket is changed to meanwhile is for the next.
pub fn blocks(d: &Desc, flags: i32) -> bool {
    !d.sock().flags.get().has(FlagSet::NONBLOCK) && flags & libc::MSG_DONTWAIT == 0
}

/// [`send`] of a part; `block`: see [`blocks`].
///
/// # Safety
/// As [`send`].
pub unsafe fn send_part(d: &'static Desc, buf: *const u8, len: usize, flags: i32, block: bool) -> Result<usize> {
    // SAFETY: the program says that `len` bytes are at `buf`; only copies that return EFAULT, and the kernel, reach
    // them.
    if plain_send(flags) && unsafe { send_fast(d, buf, len) } {
        return Ok(len);
    }
    // SAFETY: the program says that `len` bytes are at `buf`; only copies that return EFAULT, and the kernel, reach
    // them.
    unsafe { send_until(d, buf, len, flags, block) }
}

/// # Safety
/// As [`send`].
#[cold]
#[inline(never)]
pub unsafe fn send_slow(d: &'static Desc, buf: *const u8, len: usize, flags: i32) -> Result<usize> {
    // SAFETY: the program says that `len` bytes are at `buf`; only copies that return EFAULT, and the kernel, reach
    // them.
    unsafe { send_until(d, buf, len, flags, blocks(d, flags)) }
}

/// # Safety
/// As [`send`].
// Long: as `recv_slow`, one loop whose order of looks matters.
#[cold]
unsafe fn send_until(d: &'static Desc, buf: *const u8, len: usize, flags: i32, block: bool) -> Result<usize> {
    let len = lengths::buffer(buf, len)?;
    if flags & libc::MSG_FASTOPEN != 0 && d.is_conn() && stage::of(d) == Path::Shm {
        return Err(Errno::EISCONN); // it would connect
    }
    stuck::look();
    // Of nothing there is no urgent byte.
    let urgent = flags & libc::MSG_OOB != 0 && len > 0;
    if urgent {
        if stage::of(d) == Path::Shm && !only_shut_both(d) {
            if let Some(r) = refused(d, len, 0, flags) {
                return r;
            }
        }
        // The kernel has urgent data, the ring has not.
        path::materialize_one(d, Reason::Option);
    }
    if flags & libc::MSG_ZEROCOPY != 0 && len > 0 && stage::of(d) == Path::Shm {
        zerocopy(d);
    }
    let s = d.sock();
    let (r, tx, h) = d.tx();
    let (mut waits, mut hold) = (Wait::default(), None);
    let (mut done, mut news) = (0, News { d, bytes: 0 });
    // SAFETY: the program says that `len` bytes are at `buf`; only copies that return EFAULT, and the kernel, reach
    // them.
    let again = |fd| unsafe { restart_on_fd(fd, buf, len, flags) };
    // A program that only writes, and then waits by a system call of its own, is seen here.
    if h.pos.load(Ordering::Relaxed) == POS_START && !d.has_items() && d.is_conn() {
        hold.get_or_insert_with(|| Hold::on(d));
        crate::unhooked::noticed();
    }
    loop {
        if left_rings(d) {
            hold.get_or_insert_with(|| Hold::on(d));
            news.tell();
        }
        if let Some(fd) = path_taken(d, flags) {
            // SAFETY: the rest of the caller's buffer.
            let r = fd.and_then(|fd| unsafe { sys::send(fd, buf.wrapping_add(done), len - done, flags) });
            return restart::after(done, r);
        }
        if urgent {
            return Err(Errno::EOPNOTSUPP);
        }
        if done == 0 && ready::state(d).closed && !user::readable(buf, len.min(values::send_buffer(d))) {
            return Err(rather(d, flags, Errno::EFAULT)); // what nobody receives is read, too
        }
        if let Some(r) = refused(d, len, done, flags) {
            return r;
        }
        if done == len {
            return Ok(done);
        }
        let step = match token::enter(h) {
            Err(fsocket_sync::token::Reentered) => return restart::after(done, Err(Errno::EAGAIN)),
            Ok(_) if !d.is_conn() => match stage::went_to(d) {
                Some(_) => continue,
                None => return restart::stop(d, done, Errno::EBADF, again),
            },
            Ok(_) if stage::of(d) != Path::Shm || s.flags.get().has(FlagSet::SHUT_WR) => continue,
            Ok(_t) => {
                idle::populate(d, h, len - done);
                // SAFETY: the rest of the caller's buffer; the token is held.
                let sent = unsafe { ring::send(r, tx, h, buf.wrapping_add(done), len - done, turn::to(d)) };
                if !matches!(sent, Ok(1..)) {
                    turn::back(d);
                }
                give_credit(d, h);
                stuck::sent(d);
                sent
            }
        };
        match step {
            Err(Failed::Hostile) => poison(d),
            // As the kernel, which takes a piece whole or not at all.
            Err(Failed::Fault) => return restart::after(done, Err(Errno::EFAULT)),
            Ok(0) => {
                s.note_blocked_send();
                news.tell();
                if !block {
                    // A thread that waits for EPOLLOUT must look at the ring again.
                    (watcher().changed)(d);
                    return restart::after(done, Err(Errno::EAGAIN));
                }
                hold.get_or_insert_with(|| Hold::on(d));
                waits.begun |= done > 0;
                if done > 0 {
                    interruptible(&mut waits, s.send_timeout());
                }
                if waits.was_in_vain() {
                    poison(d);
                    continue;
                }
                if let Err(e) = wait_space(d, &mut waits) {
                    return restart::stop(d, done, e, again);
                }
                // One that has waited is told of a reset, and not only that nobody reads (`sock_alloc_send_pskb`).
                if let e @ 1.. = if d.is_unix() && d.is_conn() { ready::take_error(d) } else { 0 } {
                    return restart::after(done, Err(Errno::new(e)));
                }
            }
            Ok(n) => {
                waits.was_not();
                done += n;
                news.bytes += n;
                if done == len {
                    return Ok(done);
                }
                if news.bytes >= SHARED_CPU || ready::peer_cpu(d) != cpu::current() {
                    news.tell();
                }
            }
        }
    }
}

/// [`restart::restart_on_fd`] for a send.
///
/// # Safety
/// As [`send`].
#[cold]
unsafe fn restart_on_fd(fd: i32, buf: *const u8, len: usize, flags: i32) -> Result<usize> {
    // SAFETY: the program says that `len` bytes are at `buf`; only copies that return EFAULT, and the kernel, reach
    // them.
    unsafe {
        restart::restart_on_fd(
            fd,
            flags,
            |d| send(d, buf, len, flags),
            || sys::send(fd, buf, len, flags),
            || sys::raw(libc::SYS_write, [fd as usize, buf as usize, len, 0, 0, 0]),
        )
    }
}
