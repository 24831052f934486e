//! `recvmsg`, `sendmsg`, and several of their messages in one call.

use super::super::answer::{ended, failed, gone, guarded, Answer};
use super::behind::{below, came_with, receive_behind, receive_below};
use super::beside::Beside;
use super::{conn, gathers, named, names_sender};
use fsocket_abi::path_switch::{Event, Next};
use fsocket_fdtable::table::{self, Desc};
use fsocket_lifecycle::passing;
use fsocket_migrate::path;
use fsocket_migrate::upgrade::{self, Call, Entered};
use fsocket_ops::{names, opts};
use fsocket_readiness::ready;
use fsocket_runtime::{lengths, musl, user};
use fsocket_streams::msg as ops_msg;
use fsocket_streams::stream::{self, Part};
use fsocket_sys::Errno;
use libc::*;

unsafe fn message(msg: *const msghdr, flags: c_int) -> Call {
    // SAFETY: any bytes are a `msghdr`; where nothing is, the copy says so.
    match unsafe { user::get(msg) } {
        // SAFETY: the vectors that the program names, which `gathers` checks.
        Ok(m) => unsafe { gathers(m.msg_iov, musl::length(m.msg_iovlen), flags) },
        Err(_) => Call::Look,
    }
}

pub unsafe fn recvmsg(fd: c_int, msg: *mut msghdr, flags: c_int) -> ssize_t {
    match conn(fd) {
        // Only the kernel can set the flag that comes with urgent data.
        Some(d) if flags & MSG_OOB != 0 && (!path::still_ours(d) || below(d).is_some()) => {
            real!(recvmsg(below(d).unwrap_or(fd), msg, flags))
        }
        Some(d) => {
            // SAFETY: any bytes are a `msghdr`; where nothing is, the copy says so.
            let asked = if d.is_unix() { unsafe { user::get(msg) }.ok() } else { None };
            // SAFETY: `msg` comes from the program, for a function that copies it.
            let r = guarded(|| unsafe { receive_message(fd, d, msg, flags, Part::First) });
            match asked {
                // SAFETY: `msg` comes from the program, for a function that copies it.
                Some(_) if r < 0 && Errno::last() == stream::ELSEWHERE => unsafe { receive_below(fd, msg, flags) },
                // SAFETY: the same; `asked` was there before the call.
                Some(asked) if r > 0 && stream::left_rings(d) => unsafe { receive_behind(d, msg, &asked, r, flags) },
                _ => r,
            }
        }
        None => {
            let r = in_kernel!(recvmsg(fd: c_int, msg: *mut msghdr, flags: c_int), {
                // SAFETY: `msg` comes from the program, for a function that copies it.
                unsafe { message(msg, flags) }
            });
            // SAFETY: the kernel has just written there.
            if r >= 0 && unsafe { (*msg).msg_controllen } != 0 {
                came_with(msg, flags);
            }
            r
        }
    }
}

/// Checks of a message's header that the kernel makes before all others.
unsafe fn header(msg: *const msghdr) -> Result<msghdr, Errno> {
    // SAFETY: any bytes are a `msghdr`; where nothing is, the copy says so.
    let m = musl::header(unsafe { user::get(msg) }?);
    match m.msg_name.is_null() || m.msg_namelen as c_int >= 0 {
        true => Ok(m),
        false => Err(Errno::EINVAL),
    }
}

unsafe fn receive_message(fd: c_int, d: &'static Desc, msg: *mut msghdr, flags: c_int, part: Part) -> ssize_t {
    let is_unix = d.is_unix();
    // SAFETY: `m` is a copy of the program's header; what it points to, and the header, are reached by copies that
    // return EFAULT.
    let receive = || unsafe {
        let m = header(msg)?;
        let with = if is_unix && m.msg_controllen != 0 { stream::WITH_CONTROL } else { 0 };
        let n = ops_msg::recvv(d, m.msg_iov, m.msg_iovlen, flags & !MSG_CMSG_CLOEXEC | with, part)?;
        if is_unix && names_sender(d, n as ssize_t) && !m.msg_name.is_null() {
            names::sender(fd, m.msg_name.cast(), &raw mut (*msg).msg_namelen)?;
        } else if !m.msg_name.is_null() {
            user::put(&raw mut (*msg).msg_namelen, 0)?;
        }
        let beside = opts::inquired(d).map_or(Beside::default(), |left| Beside::unread(&m, left));
        user::put(&raw mut (*msg).msg_flags, flags & MSG_CMSG_CLOEXEC | beside.flags)?;
        user::put(&raw mut (*msg).msg_controllen, beside.len)?;
        Ok(n)
    };
    receive().answer()
}

unsafe fn send_message(d: &'static Desc, msg: *const msghdr, flags: c_int) -> ssize_t {
    // SAFETY: `m` is a copy of the program's header; what it points to is reached by copies that return EFAULT.
    let send = || unsafe {
        let m = header(msg)?;
        if d.is_unix() && m.msg_namelen != 0 {
            return Err(Errno::EISCONN);
        }
        if !m.msg_name.is_null() && m.msg_namelen != 0 {
            let len = (m.msg_namelen as usize).min(size_of::<sockaddr_storage>()) as socklen_t;
            named(m.msg_name.cast(), len, flags)?;
        }
        if m.msg_controllen != 0 {
            // The vectors come first; `sendv` looks at them again.
            lengths::Vectors::of(m.msg_iov, m.msg_iovlen, Errno::new(EMSGSIZE))?;
            if m.msg_controllen > c_int::MAX as size_t {
                return Err(Errno::new(ENOBUFS));
            }
            if !user::readable(m.msg_control as *const u8, m.msg_controllen) {
                return Err(Errno::EFAULT);
            }
        }
        if m.msg_controllen >= size_of::<cmsghdr>() as size_t {
            let first = musl::length(user::get(m.msg_control as *const cmsghdr)?.cmsg_len);
            if !(size_of::<cmsghdr>() as size_t..=m.msg_controllen).contains(&first) {
                return Err(stream::rather(d, flags, Errno::EINVAL));
            }
        }
        ops_msg::sendv(d, m.msg_iov, m.msg_iovlen, flags)
    };
    send().answer()
}

/// The kernel is about to send `msg`. True: with a control message. None: the send must fail, and errno says why.
fn goes_with(msg: *const msghdr) -> Option<bool> {
    let control = |m: &msghdr| m.msg_controllen != 0 && user::readable(m.msg_control as *const u8, m.msg_controllen);
    // SAFETY: any bytes are a `msghdr`; where nothing is, the copy says so.
    let with = unsafe { user::get(msg) }.is_ok_and(|m| control(&musl::header(m)));
    // SAFETY: the header is there, and its control part is readable.
    if with && guarded::<c_int>(|| unsafe { passing::passing(msg) }.answer()) < 0 {
        stays_with(msg);
        return None;
    }
    Some(with)
}

/// Ancillary data of a Unix connection (descriptors, credentials) is bound to a byte, so the message goes through the
/// kernel. A program that sends such data once sends it again, so the connection stays there.
unsafe fn leaves_with(d: &'static Desc, msg: *const msghdr) {
    // SAFETY: any bytes are a `msghdr`; where nothing is, the copy says so.
    let with = unsafe { user::get(msg) }.is_ok_and(|m| musl::header(m).msg_controllen != 0);
    // (A message that cannot be sent changes no path. But another process of the fork group may have moved the
    // connection.)
    let stays = d.is_conn() && d.path_state().next(Event::Look) != Next::Follow;
    let ends = stays && (d.sock().flags.get().ends_sends() || ready::state(d).closed);
    if with && !ends {
        opts::extra::leave(d);
    }
}

/// The kernel has not sent the message after [`goes_with`].
#[cold]
fn stays_with(msg: *const msghdr) {
    let _errno = fsocket_sys::errno::Saved::errno();
    // SAFETY: `goes_with` has found the header and the control part.
    guarded(|| unsafe { passing::kept(msg) });
}

pub unsafe fn sendmsg(fd: c_int, msg: *const msghdr, flags: c_int) -> ssize_t {
    if flags & MSG_ZEROCOPY != 0 {
        // One completion for all vectors: before the first of them.
        if let Some(d) = conn(fd) {
            guarded(|| fsocket_streams::stream::zerocopy(d));
        }
    }
    if let Some(d) = table::lookup(fd).filter(|d| d.is_unix()) {
        // SAFETY: `msg` comes from the program; the copy reports a bad one.
        guarded(|| unsafe { leaves_with(d, msg) });
    }
    match conn(fd) {
        // SAFETY: `msg` comes from the program, for a function that copies it.
        Some(d) => guarded(|| unsafe { send_message(d, msg, flags) }),
        None => {
            let Some(with) = goes_with(msg) else { return -1 };
            opts::sends(fd, flags);
            let r = in_kernel!(sendmsg(fd: c_int, msg: *const msghdr, flags: c_int), Call::Send);
            if with && r < 0 {
                stays_with(msg);
            }
            r
        }
    }
}

/// The messages of a `recvmmsg` or `sendmmsg`.
struct Several {
    vec: *mut mmsghdr,
    n: c_uint,
    flags: c_int,
    done: c_uint,
    over: bool,
}

impl Several {
    /// Handles one message after the other by `each`, as long as `d` is in shared memory, then by `number`.
    /// Messages with flags that only the kernel serves also go to `number`. The description stays
    /// meanwhile, whatever another thread does to the number.
    ///
    /// # Safety
    /// `vec` has `n` entries.
    unsafe fn run(
        &mut self,
        d: &'static Desc,
        mut each: impl FnMut(&mut Several, *mut mmsghdr) -> ssize_t,
        mut number: impl FnMut(&mut Several, *mut mmsghdr) -> ssize_t,
    ) -> c_int {
        guarded::<c_int>(|| {
            stream::throughout(d, |call| {
                let ours = self.flags & (MSG_OOB | MSG_ZEROCOPY) == 0;
                // SAFETY: `vec` has `n` entries.
                while ours && d.is_conn() && unsafe { self.step(&mut each) } {
                    call.begun();
                }
            });
            0
        });
        // SAFETY: `vec` has `n` entries.
        while unsafe { self.step(&mut number) } {}
        if self.done == 0 && self.over {
            -1
        } else {
            self.done as c_int
        }
    }

    unsafe fn step(&mut self, f: &mut impl FnMut(&mut Several, *mut mmsghdr) -> ssize_t) -> bool {
        if self.over || self.done == self.n {
            return false;
        }
        let m = self.vec.wrapping_add(self.done as usize);
        match f(self, m) {
            r if r < 0 => self.over = true,
            // SAFETY: `m` is an entry of the program's array; no reference is made, and the copy returns EFAULT.
            r => match unsafe { user::put(&raw mut (*m).msg_len, r as c_uint) } {
                Ok(()) => self.done += 1,
                Err(e) => {
                    self.over = true;
                    e.set();
                }
            },
        }
        !self.over
    }
}

/// Has one of these messages room for control messages?
///
/// # Safety
/// `vec` has `n` entries, or there is nothing.
unsafe fn any_takes_control(vec: *const mmsghdr, n: c_uint) -> bool {
    (0..n.min(UIO_MAXIOV as c_uint) as usize).any(|i| {
        let m = vec.wrapping_add(i);
        // SAFETY: any bytes are a length; where nothing is, the copy says so. No reference is made.
        unsafe { user::get(&raw const (*m).msg_hdr.msg_controllen) }.is_ok_and(|len| len != 0)
    })
}

pub unsafe fn recvmmsg(fd: c_int, vec: *mut mmsghdr, n: c_uint, flags: c_int, timeout: *mut timespec) -> c_int {
    upgrade::give_up_fd(fd);
    // SAFETY: the program says that `vec` has `n` entries; they are reached by copies.
    if let Some(d) = conn(fd).filter(|d| d.is_unix() && unsafe { any_takes_control(vec, n) }) {
        // A control message ends the messages of one call.
        guarded(|| opts::extra::leave(d));
    }
    // (The kernel looks for an error first: after a move to kernel TCP the error is in the kernel's socket.)
    let Some(d) = conn(fd).filter(|d| guarded(|| c_int::from(path::still_ours(d))) != 0) else {
        let done = real!(recvmmsg(fd, vec, n, flags, timeout));
        for i in 0..done.max(0) as usize {
            // SAFETY: the kernel has filled `done` entries, of which this is one.
            came_with(unsafe { &raw const (*vec.add(i)).msg_hdr }, flags);
        }
        return done;
    };
    // SAFETY: null or the program's; where nothing is, the copy says so.
    let limit = match unsafe { user::get_if(timeout) } {
        Ok(limit) => limit,
        Err(e) => return failed(e),
    };
    if limit.as_ref().is_some_and(|t| t.tv_sec < 0 || !(0..1_000_000_000).contains(&t.tv_nsec)) {
        fsocket_sys::Errno::EINVAL.set();
        return -1;
    }
    let end = limit.as_ref().map(|t| {
        fsocket_sys::now_ns().saturating_add((t.tv_sec as u64).saturating_mul(1_000_000_000) + t.tv_nsec as u64)
    });
    // Unlike recvmsg(), recvmmsg() looks for an error before it looks for data.
    if let Some(e) = ready::pending_error(d, flags) {
        e.set();
        return -1;
    }
    let left = || end.map_or(0, |t| t.saturating_sub(fsocket_sys::now_ns()));
    let flags_of = |done| if done > 0 && flags & MSG_WAITFORONE != 0 { flags | MSG_DONTWAIT } else { flags };
    let after = |all: &mut Several, m: *const mmsghdr, r: ssize_t| {
        // The kernel compares the limit after each message, so the limit ends no wait. Urgent data end the call.
        all.over |= end.is_some() && left() == 0
            // SAFETY: `m` is the entry that was just filled.
            || r >= 0 && unsafe { user::get(&raw const (*m).msg_hdr.msg_flags) }.is_ok_and(|f| f & MSG_OOB != 0);
        r
    };
    let each = |all: &mut Several, m: *mut mmsghdr| {
        let part = if all.done > 0 { Part::Message } else { Part::First };
        // SAFETY: `m` is an entry of the program's array, for a function that copies it.
        let r = unsafe { receive_message(fd, d, &raw mut (*m).msg_hdr, flags_of(all.done) & !MSG_WAITFORONE, part) };
        if r < 0 && all.done > 0 && !matches!(Errno::last(), Errno::EAGAIN | Errno::EINTR) {
            // As in `do_recvmmsg`, the next call reports the error.
            d.sock().set_error(Errno::last().raw());
        }
        after(all, m, r)
    };
    let number = |all: &mut Several, m: *mut mmsghdr| {
        if all.done > 0 && stream::has_failed(fd) {
            return -1; // the next call says why
        }
        // SAFETY: `m` is an entry of the program's array, and the hook copies it.
        let r = unsafe { recvmsg(fd, &raw mut (*m).msg_hdr, flags_of(all.done) & !MSG_WAITFORONE) };
        after(all, m, r)
    };
    // SAFETY: the program says that `vec` has `n` entries; they are reached by copies.
    let done = unsafe { Several { vec, n, flags, done: 0, over: false }.run(d, each, number) };
    if limit.is_some() && done > 0 {
        let left = left();
        let left = timespec { tv_sec: (left / 1_000_000_000) as time_t, tv_nsec: (left % 1_000_000_000) as c_long };
        // SAFETY: the time was read there.
        if let Err(e) = unsafe { user::put(timeout, left) } {
            return failed(e);
        }
    }
    done
}

pub unsafe fn sendmmsg(fd: c_int, vec: *mut mmsghdr, n: c_uint, flags: c_int) -> c_int {
    upgrade::give_up_fd(fd);
    if let Some(d) = conn(fd).filter(|d| d.is_unix() && n <= UIO_MAXIOV as c_uint && user::readable(vec, n as usize)) {
        // SAFETY: all `n` entries are readable.
        let all = (0..n as usize).map(|i| unsafe { &raw const (*vec.add(i)).msg_hdr });
        // SAFETY: `m` is a readable entry of the program's array, for a function that copies it.
        all.for_each(|m| guarded(|| unsafe { leaves_with(d, m) }));
    }
    let Some(d) = conn(fd) else {
        opts::sends(fd, flags);
        if n <= UIO_MAXIOV as c_uint && user::readable(vec, n as usize) {
            // SAFETY: all `n` entries are readable.
            let all = || (0..n as usize).map(|i| unsafe { &raw const (*vec.add(i)).msg_hdr });
            let mut with = false;
            let can_go = all().map_while(|m| goes_with(m).map(|w| with |= w)).count();
            if can_go == 0 && n > 0 {
                return -1;
            }
            let done = real!(sendmmsg(fd, vec, can_go as c_uint, flags));
            if with {
                all().take(can_go).skip(done.max(0) as usize).for_each(stays_with);
            }
            return done;
        }
        return real!(sendmmsg(fd, vec, n, flags));
    };
    // The rest is for the next call, as in the kernel.
    let n = n.min(UIO_MAXIOV as c_uint);
    // SAFETY: `m` is an entry of the program's array, for a function that copies it.
    let each = |_: &mut Several, m: *mut mmsghdr| unsafe { send_message(d, &raw const (*m).msg_hdr, flags) };
    // SAFETY: `m` is an entry of the program's array, and the hook copies it.
    let number = |_: &mut Several, m: *mut mmsghdr| unsafe { sendmsg(fd, &raw const (*m).msg_hdr, flags) };
    // SAFETY: the program says that `vec` has `n` entries; they are reached by copies.
    unsafe { Several { vec, n, flags, done: 0, over: false }.run(d, each, number) }
}
