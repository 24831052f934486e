//! Receiving: a ring's common case, looks ahead, ends, and what is behind the ring.

use super::below::{at_mark, in_kernel, something_behind};
use super::restart;
use super::wait::{ended, interruptible, wait_any, wait_data, wait_more, Wait};
use super::{is_nonsense, left_rings, low_water, notify, path_taken, poison, publish_cpu, ring_has, Hold};
use crate::stage::{self, Path};
use crate::table::Desc;
use crate::values;
use crate::{lengths, ready, stuck, token};
use core::sync::atomic::Ordering;
use fsocket_abi::channel::Dir;
use fsocket_abi::flags::FlagSet;
use fsocket_abi::half::Half;
use fsocket_ring::{self as ring, Failed};
use fsocket_sys::{self as sys, Errno, Result};

/// Of a receive that has room for what comes beside the bytes: where the path has been switched it returns [`ELSEWHERE`],
/// and the caller asks the kernel for all of it. (What this flag says to the kernel, nothing in a ring needs.)
pub const WITH_CONTROL: i32 = libc::MSG_CMSG_CLOEXEC;
/// See [`WITH_CONTROL`].
pub const ELSEWHERE: Errno = Errno::new(libc::EREMOTE);
/// Flags that change nothing for who finds something.
const PLAIN: i32 = libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL | WITH_CONTROL;

/// # Safety
/// `buf` is the program's for `len` bytes; it need not be there.
#[inline(always)]
pub unsafe fn recv(d: &'static Desc, buf: *mut u8, len: usize, flags: i32) -> Result<usize> {
    // SAFETY: `len` bytes at `buf` are the program's: only the kernel, and copies that return EFAULT, reach them.
    match unsafe { recv_fast(d, buf, len, flags) } {
        // SAFETY: `len` bytes at `buf` are the program's: only the kernel, and copies that return EFAULT, reach them.
        0 => unsafe { recv_slow(d, buf, len, flags) },
        // SAFETY: the `len - n` bytes behind those that are filled belong to the program's buffer.
        n if n < len && left_rings(d) => Ok(n + unsafe { rest(d, buf.wrapping_add(n), len - n, flags) }),
        n => Ok(n),
    }
}

/// What a receive that has taken the ring's last bytes finds behind them in the
/// kernel, where the path was switched: how many bytes more.
///
/// # Safety
/// As [`recv`].
#[cold]
pub unsafe fn rest(d: &'static Desc, buf: *mut u8, len: usize, flags: i32) -> usize {
    let _hold = Hold::on(d);
    // (What comes behind in a Unix socket may come with descriptors, for which this call has no room.)
    if ring_has(d) || d.is_unix() {
        return 0;
    }
    match path_taken(d, flags) {
        // A receive ends before urgent data; begun there it would go over them. And one that
        // has something to return leaves an error to the next.
        Some(Ok(fd)) if at_mark(fd) || in_kernel(fd) == 0 => 0,
        // SAFETY: `len` bytes at `buf` are the program's: only the kernel, and copies that return EFAULT, reach them.
        Some(Ok(fd)) => unsafe { sys::recv(fd, buf, len, flags | libc::MSG_DONTWAIT) }.unwrap_or(0),
        _ => 0,
    }
}

/// Does urgent data come next? A receive that has something ends there.
pub fn before_urgent(d: &Desc) -> bool {
    let fd = || stage::went_to(d).or_else(|| stage::kernel_part(d));
    left_rings(d) && !ring_has(d) && fd().is_some_and(at_mark)
}

/// The same for a look ahead: the ring's bytes stay where they are.
///
/// # Safety
/// As [`recv`].
#[cold]
unsafe fn peek_rest(d: &'static Desc, buf: *mut u8, len: usize, flags: i32) -> usize {
    let _hold = Hold::on(d);
    match path_taken(d, flags) {
        Some(Ok(fd)) if d.is_conn() && !d.is_unix() && in_kernel(fd) > 0 => {
            // SAFETY: `len` bytes at `buf` are the program's: only the kernel, and copies that return EFAULT, reach them.
            unsafe { sys::recv(fd, buf, len, flags | libc::MSG_DONTWAIT) }.unwrap_or(0)
        }
        _ => 0,
    }
}

/// The common case of [`recv`]: something is there. 0: nothing was done.
///
/// # Safety
/// As [`recv`].
#[inline(always)]
pub unsafe fn recv_fast(d: &'static Desc, buf: *mut u8, len: usize, flags: i32) -> usize {
    if flags & !PLAIN != 0 || !lengths::is_plain(buf, len) {
        return 0;
    }
    let (r, rx, h) = d.rx();
    let Ok(t) = token::enter(h) else { return 0 };
    if !d.is_conn() || !d.sock().flags.get().receives_plainly() {
        return 0;
    }
    // SAFETY: `len` bytes at `buf` are the program's: only the kernel, and copies that return EFAULT, reach them. The token is held.
    // What is wrong with the peer is found again, and dealt with, by the slow path.
    let got = unsafe { ring::recv(r, rx, h, Some(buf), len, false) };
    if token::owned(h) {
        d.set_receiver(token::here());
        h.credit.store(1, Ordering::Relaxed);
    }
    drop(t);
    received(d, rx, h, got)
}

/// [`recv_fast`] by the only thread that has ever received, and has done so before. Any descriptor
/// may be asked.
///
/// # Safety
/// As [`recv`].
#[inline(always)]
pub unsafe fn recv_on_credit(d: &'static Desc, buf: *mut u8, len: usize, flags: i32) -> usize {
    if flags & !PLAIN != 0 || !lengths::is_plain(buf, len) || !token::is_here(d.receiver()) {
        return 0;
    }
    let (r, rx, h) = d.rx();
    let Some(t) = token::enter_on_credit(h) else { return 0 };
    if h.credit.load(Ordering::Relaxed) == 0 || !d.sock().flags.get().receives_plainly() {
        return 0;
    }
    // SAFETY: as in `recv_fast`.
    let got = unsafe { ring::recv(r, rx, h, Some(buf), len, false) };
    drop(t);
    received(d, rx, h, got)
}

/// After a [`recv_on_credit`] that has returned 0: is that because nothing is there? Then to look once more
/// would only take the line at which the sender writes away from it. A guess, for who waits next.
#[inline(always)]
pub fn found_nothing(d: &Desc) -> bool {
    token::is_here(d.receiver()) && d.sock().rx.credit.load(Ordering::Relaxed) != 0
}

/// What a receive that is out of the ring has got; 0: nothing, or a hostile peer.
#[inline(always)]
fn received(d: &'static Desc, rx: &Dir, h: &Half, got: core::result::Result<usize, Failed>) -> usize {
    match got {
        Ok(n @ 1..) => {
            consumed(d, rx, h);
            n
        }
        _ => 0,
    }
}

/// After a read: wake a sender that sleeps for space, once there is enough.
#[inline(always)]
fn consumed(d: &'static Desc, rx: &Dir, h: &Half) {
    if !rx.want_space.is_silent() {
        freed(d, rx, h);
    }
    publish_cpu(h, &rx.cons.cpu);
}

/// Somebody sleeps for space, or did lately.
#[cold]
#[inline(never)]
fn freed(d: &'static Desc, rx: &Dir, h: &Half) {
    if rx.want_space.waiting() != 0 && h.pos.load(Ordering::Relaxed) >= rx.prod.space_at.load(Ordering::Relaxed) {
        notify(d, &rx.want_space);
    }
}

/// # Safety
/// As [`recv`].
// Long: one loop over what another thread, the peer and a path switch may do between two looks. What makes it right
// is the order of the looks, which parts of it in functions of their own would hide.
#[cold]
#[inline(never)]
pub unsafe fn recv_slow(d: &'static Desc, buf: *mut u8, len: usize, flags: i32) -> Result<usize> {
    let len = lengths::buffer(buf, len)?;
    if flags & libc::MSG_OOB != 0 {
        return match path_taken(d, flags) {
            // SAFETY: `len` bytes at `buf` are the program's: only the kernel, and copies that return EFAULT, reach them.
            Some(fd) => fd.and_then(|fd| unsafe { sys::recv(fd, buf, len, flags) }),
            // Nobody has sent any, or the path would have been switched.
            None => Err(Errno::EINVAL),
        };
    }
    let is_unix = d.is_unix();
    if flags & libc::MSG_ERRQUEUE != 0 && !is_unix {
        return Err(Errno::EAGAIN);
    }
    let s = d.sock();
    let (r, rx, h) = d.rx();
    let peek = flags & libc::MSG_PEEK != 0;
    let mut block = !s.flags.get().has(FlagSet::NONBLOCK) && flags & libc::MSG_DONTWAIT == 0;
    // MSG_TRUNC on TCP: the bytes are discarded.
    let dst = (is_unix || flags & libc::MSG_TRUNC == 0).then_some(buf);
    // As many bytes end a sleep.
    let mut target = match block {
        // A look at a Unix socket waits for the first byte alone.
        _ if is_unix && peek => 1,
        // (A Unix socket looks for an error behind less than that, also where it does not wait.)
        _ if flags & libc::MSG_WAITALL != 0 && (block || is_unix) => len,
        true if s.flags.get().has(FlagSet::LOWAT) => values::lowat(d).min(len),
        _ => 1,
    };
    let (mut waits, mut hold) = (Wait::default(), None);
    // SAFETY: `len` bytes at `buf` are the program's: only the kernel, and copies that return EFAULT, reach them.
    let again = |fd| unsafe { restart_on_fd(fd, buf, len, flags) };
    let mut done = 0;
    loop {
        let mut looked = false;
        if peek && stage::of(d) == Path::Pending {
            // All that it can see is in one place then, and it starts over.
            hold.get_or_insert_with(|| Hold::on(d));
            let _ = path_taken(d, flags);
            done = 0;
        }
        if !ring_has(d) || s.flags.get().is_switching() {
            looked = true;
            if left_rings(d) {
                hold.get_or_insert_with(|| Hold::on(d));
            }
            if let Some(fd) = path_taken(d, flags) {
                if flags & WITH_CONTROL != 0 && fd.is_ok() {
                    return if done > 0 { Ok(done) } else { Err(ELSEWHERE) };
                }
                if done > 0 && fd.is_ok_and(|fd| at_mark(fd) || block && !something_behind(d, fd)) {
                    return Ok(done);
                }
                // SAFETY: the rest of the caller's buffer.
                let r = fd.and_then(|fd| unsafe { sys::recv(fd, buf.wrapping_add(done), len - done, flags) });
                return restart::after(done, r);
            }
        }
        if !s.flags.get().is_poisoned() {
            let got = match token::enter(h) {
                Err(fsocket_sync::token::Reentered) => return Err(Errno::EAGAIN),
                Ok(_) if !d.is_conn() => match stage::went_to(d) {
                    Some(_) => continue,
                    None => return restart::stop(d, done, Errno::EBADF, again),
                },
                Ok(_) if s.flags.get().is_drained() => continue,
                Ok(_t) => {
                    if len == 0 {
                        ring::available(r, rx, h, 1).map(|n| if n > 0 { usize::MAX } else { 0 })
                    } else {
                        // A peek always starts over.
                        let from = if peek { 0 } else { done };
                        let (at, n) = (dst.map(|p| p.wrapping_add(from)), len - from);
                        // SAFETY: within the caller's buffer; the token is held.
                        unsafe { ring::recv(r, rx, h, at, n, peek) }
                    }
                }
            };
            match got {
                Err(Failed::Hostile) => {
                    poison(d);
                    continue;
                }
                Err(Failed::Fault) => return restart::after(done, Err(Errno::EFAULT)),
                Ok(usize::MAX) => return Ok(0),
                Ok(n) if peek && n > 0 && n < len && left_rings(d) => {
                    let at = dst.map_or(core::ptr::null_mut(), |p| p.wrapping_add(n));
                    // SAFETY: the rest of the caller's buffer.
                    return Ok(n + unsafe { peek_rest(d, at, len - n, flags) });
                }
                Ok(n) if peek && n > 0 && n >= target => return Ok(n),
                Ok(n) if peek => {
                    done = n;
                }
                Ok(0) => {}
                Ok(n) => {
                    waits.was_not();
                    done += n;
                    consumed(d, rx, h);
                    if done < len && done >= target && left_rings(d) {
                        let at = dst.map_or(core::ptr::null_mut(), |p| p.wrapping_add(done));
                        // SAFETY: the rest of the caller's buffer.
                        return Ok(done + unsafe { rest(d, at, len - done, flags) });
                    }
                    if done >= target {
                        return Ok(done);
                    }
                    continue;
                }
            }
        }
        if ended(d) {
            if !looked && left_rings(d) {
                // The path was switched while we waited for the token: the rest, which was in the
                // ring a moment ago, is in the kernel.
                continue;
            }
            let poisoned = s.flags.get().is_poisoned();
            if ring_has(d) && !poisoned && !(peek && done > 0) {
                continue; // data came before the end that we have just seen
            }
            if done > 0 && is_unix {
                // `unix_stream_read_generic` takes the error, and returns what it has.
                let _ = ready::take_error(d);
            }
            return if done > 0 { Ok(done) } else { end_of_stream(d) };
        }
        if done == 0 && !d.has_items() {
            hold.get_or_insert_with(|| Hold::on(d));
            if crate::unhooked::noticed() {
                continue;
            }
        }
        if !block {
            stuck::look();
            if ended(d) {
                continue;
            }
            return restart::after(done, Err(Errno::EAGAIN));
        }
        hold.get_or_insert_with(|| Hold::on(d));
        waits.begun |= done > 0;
        if done > 0 || len == 0 {
            interruptible(&mut waits, s.receive_timeout());
        }
        if len == 0 {
            if s.receive_timeout() == crate::options::AT_ONCE {
                return Err(Errno::EAGAIN);
            }
            let _ = wait_any(d, &mut waits);
            return Ok(0); // whatever has ended the wait
        }
        if is_nonsense(d) || waits.was_in_vain() {
            // Nothing to read, and no end: the wait would be over at once, each time.
            poison(d);
            continue;
        }
        let r = if peek && done > 0 { wait_more(d, done, &mut waits) } else { wait_data(d, &mut waits) };
        if let Err(e) = r {
            if (done == 0 || !peek) && block && low_water(d) > 1 && ring_has(d) {
                // Less than was waited for is better than nothing, and all that is there better
                // than what was there before.
                (block, target) = (false, 1);
                continue;
            }
            return restart::stop(d, done, e, again);
        }
    }
}

/// [`restart::restart_on_fd`] for a receive.
///
/// # Safety
/// As [`recv`].
#[cold]
unsafe fn restart_on_fd(fd: i32, buf: *mut u8, len: usize, flags: i32) -> Result<usize> {
    // SAFETY: `len` bytes at `buf` are the program's: only the kernel, and copies that return EFAULT, reach them.
    unsafe {
        restart::restart_on_fd(
            fd,
            flags,
            |d| recv(d, buf, len, flags),
            || sys::recv(fd, buf, len, flags),
            || sys::read(fd, buf, len),
        )
    }
}

/// Nothing is left to read: an error once, then the end. After a FIN there is
/// only the end, whatever error is pending.
fn end_of_stream(d: &Desc) -> Result<usize> {
    let st = ready::state(d);
    if st.fin && !d.is_unix() {
        return Ok(0);
    }
    match ready::take_error(d) {
        0 => Ok(0),
        e => Err(Errno::new(e)),
    }
}
