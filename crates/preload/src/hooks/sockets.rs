//! Making, naming and configuring sockets. A socket belongs to the kernel until `connect` or
//! `accept` chooses its path; these hooks make the choice.

use super::answer::{either, gone, guarded, Answer};
use fsocket_fdtable::table::{self, Desc, Kind};
use fsocket_fdtable::{pool, pristine};
use fsocket_listeners::{in_use, listen as ops_listen, route};
use fsocket_migrate::{path, upgrade};
use fsocket_ops::{accept as ops_accept, close, connect as ops_connect, names, opts, slice};
use fsocket_runtime::{identity, process, user};
use fsocket_shm::chan;
use fsocket_zones as zone;
use libc::*;

pub unsafe fn socket(domain: c_int, ty: c_int, protocol: c_int) -> c_int {
    let tcp = matches!(domain, AF_INET | AF_INET6)
        && ty & !(SOCK_NONBLOCK | SOCK_CLOEXEC) == SOCK_STREAM
        && matches!(protocol, 0 | IPPROTO_TCP)
        && process::enabled();
    let (nonblock, cloexec) = (ty & SOCK_NONBLOCK != 0, ty & SOCK_CLOEXEC != 0);
    let identity = if tcp && identity::is_policed() { identity::now() } else { identity::UNKNOWN };
    let pooled = if tcp { pool::socket(domain as u32, nonblock, cloexec, identity) } else { None };
    let fd = match pooled {
        Some(fd) => fd,
        None => {
            let mut fd = real!(socket(domain, ty, protocol));
            if fd < 0 && fsocket_sys::Errno::last().raw() == EMFILE && (pool::drain() || chan::spare_descriptors()) {
                fd = real!(socket(domain, ty, protocol));
            }
            if fd < 0 {
                return fd;
            }
            pool::kernel_allocated(fd);
            close::overwritten(fd);
            fd
        }
    };
    if tcp {
        if let Some(d) = table::alloc(Kind::Fresh) {
            d.set_families(domain as u32);
            d.placeholder().set_recycled(pooled.is_some());
            d.placeholder().set_close_on_exec(Some(cloexec));
            d.unconnected().set_nonblock(nonblock);
            d.placeholder().set_nonblock(nonblock);
            let unknown = identity == identity::UNKNOWN && pooled.is_some();
            d.placeholder().set_identity(if unknown { identity::RECYCLED } else { identity });
            if !table::install(fd, d) {
                table::release(d);
            }
        }
    } else if domain == AF_UNIX {
        upgrade::unix::made(fd);
    }
    fd
}

/// Resets a recycled socket that has no path yet, because the kernel is about to look at it: it
/// must look like a new one.
fn settle_fresh(fd: c_int) {
    if let Some(d) = table::lookup(fd).filter(|d| d.kind() == Kind::Fresh) {
        pristine::settle(fd, d);
    }
}

pub unsafe fn bind(fd: c_int, addr: *const sockaddr, len: socklen_t) -> c_int {
    if table::lookup(fd).is_some_and(Desc::is_unix) {
        return real!(bind(fd, addr, len));
    }
    if let Some(r) = connected(fd).filter(|_| user::readable(addr as *const u8, len as usize)) {
        return r;
    }
    if gone(fd) {
        return -1;
    }
    settle_fresh(fd);
    let fresh = table::lookup(fd).filter(|d| d.kind() == Kind::Fresh);
    // SAFETY: the program passes `len` bytes at `addr`; they are copied with a check.
    let asked = if fresh.is_some() { unsafe { fsocket_runtime::name::parse(addr, len) } } else { None };
    let family = fresh.map_or(0, |d| d.family());
    if let Some(Err(e)) = asked.filter(|a| u32::from(a.family) == family).map(|a| in_use::before_bind(fd, &a)) {
        e.set();
        return -1;
    }
    let r = real!(bind(fd, addr, len));
    if let Some(d) = table::lookup(fd) {
        if r == 0 && d.kind() == Kind::Fresh {
            d.bind(asked.is_some_and(|a| a.port == 0));
        }
    }
    r
}

pub unsafe fn listen(fd: c_int, backlog: c_int) -> c_int {
    if let Some(r) = connected(fd) {
        return r;
    }
    if gone(fd) {
        return -1;
    }
    settle_fresh(fd);
    let r = real!(listen(fd, backlog));
    if r == 0 {
        upgrade::unix::forget(fd);
        if let Some(d) = table::lookup(fd) {
            if matches!(d.kind(), Kind::Fresh | Kind::Bound | Kind::Listener) {
                let _errno = fsocket_sys::errno::Saved::errno();
                d.placeholder().mark_changed();
                ops_listen::registered(fd, d);
            }
        }
        let _errno = fsocket_sys::errno::Saved::errno();
        if table::lookup(fd).is_none_or(|d| d.kind() != Kind::Listener) {
            ops_listen::came_beside(fd);
        }
        zone::listened(fd);
    }
    r
}

/// Fails a call that is not valid for a connected socket.
fn connected(fd: c_int) -> Option<c_int> {
    table::lookup(fd).filter(|d| d.is_conn())?;
    fsocket_sys::Errno::EINVAL.set();
    Some(-1)
}

pub unsafe fn accept(fd: c_int, addr: *mut sockaddr, len: *mut socklen_t) -> c_int {
    if let Some(r) = connected(fd) {
        return r;
    }
    match table::lookup(fd) {
        Some(d) => {
            // SAFETY: `addr` and `len` are null or pointers of the program; guarded copies report
            // bad ones.
            either(guarded(|| unsafe { ops_accept::accept(fd, d, addr, len, 0) }), || {
                counted(d, real!(accept(fd, addr, len)))
            })
        }
        None if gone(fd) => -1,
        None => accepted(real!(accept(fd, addr, len))),
    }
}

pub unsafe fn accept4(fd: c_int, addr: *mut sockaddr, len: *mut socklen_t, flags: c_int) -> c_int {
    if let Some(r) = connected(fd) {
        return r;
    }
    match table::lookup(fd) {
        // SAFETY: `addr` and `len` are null or pointers of the program; guarded copies report bad
        // ones.
        Some(d) => either(guarded(|| unsafe { ops_accept::accept(fd, d, addr, len, flags) }), || {
            counted(d, real!(accept4(fd, addr, len, flags)))
        }),
        None if gone(fd) => -1,
        None => accepted(real!(accept4(fd, addr, len, flags))),
    }
}

/// Counts a connection from a listener that the library has left to the kernel, for example
/// because its connections are short. `fd` is -1 if there is no connection.
fn counted(listener: &Desc, fd: c_int) -> c_int {
    if fd >= 0 && !listener.is_unix() {
        guarded(ops_accept::from_kernel_alone);
    }
    fd
}

/// Handles a connection from a listener that is unknown to the library. `fd` is -1 if there is no
/// connection.
fn accepted(fd: c_int) -> c_int {
    if fd >= 0 {
        pool::kernel_allocated(fd);
        guarded(|| upgrade::unix::accepted(fd));
    }
    fd
}

pub unsafe fn connect(fd: c_int, addr: *const sockaddr, len: socklen_t) -> c_int {
    match table::lookup(fd) {
        // The socket is connected, so the kernel fails the call; or it is new and an epoll
        // instance watches it.
        Some(d) if d.is_unix() => {
            let r = real!(connect(fd, addr, len));
            if r == 0 {
                // SAFETY: the kernel has just read `len` bytes at `addr`.
                guarded(|| unsafe { upgrade::unix::connected(fd, addr, len) });
            }
            r
        }
        Some(d) => {
            let was_fresh = d.kind() == Kind::Fresh;
            // SAFETY: the program passes `len` bytes at `addr`; they are checked before they are
            // read.
            either(guarded(|| unsafe { ops_connect::connect(fd, d, addr, len) }), || {
                pristine::settle(fd, d);
                // SAFETY: the program passes `len` bytes at `addr`; the kernel checks that.
                let result = unsafe { kernel_connect(fd, addr, len) };
                let errno = fsocket_sys::errno::Saved::errno();
                if result == 0 || errno.is(fsocket_sys::Errno::EINPROGRESS) {
                    // SAFETY: the kernel has just read `len` bytes at `addr`.
                    guarded(|| unsafe { route::connected(fd, addr, len) });
                } else if was_fresh {
                    guarded(|| upgrade::failed(fd, d, &errno));
                }
                result
            })
        }
        None if gone(fd) => -1,
        None => {
            // SAFETY: the program passes `len` bytes at `addr`; they are copied with a check.
            guarded(|| unsafe { slice::choose_unknown(fd, addr, len) });
            // SAFETY: the program passes `len` bytes at `addr`; the kernel checks that.
            let r = unsafe { kernel_connect(fd, addr, len) };
            if r == 0 {
                // SAFETY: the kernel has just read `len` bytes at `addr`.
                guarded(|| unsafe { upgrade::unix::connected(fd, addr, len) });
            }
            r
        }
    }
}

/// Connects in the kernel. If the socket's slice of source ports has no free port, tries again
/// with any port.
unsafe fn kernel_connect(fd: c_int, addr: *const sockaddr, len: socklen_t) -> c_int {
    let result = real!(connect(fd, addr, len));
    if result < 0 && slice::widen(fd) {
        return real!(connect(fd, addr, len));
    }
    result
}

pub unsafe fn sockatmark(fd: c_int) -> c_int {
    match table::lookup(fd).filter(|d| path::still_ours(d)) {
        Some(_) => 0,
        None if gone(fd) => -1,
        None => real!(sockatmark(fd)),
    }
}

pub unsafe fn shutdown(fd: c_int, how: c_int) -> c_int {
    match table::lookup(fd) {
        Some(d) => either(guarded(|| close::shutdown(d, how)), || {
            settle_fresh(fd);
            real!(shutdown(fd, how))
        }),
        None if gone(fd) => -1,
        None => real!(shutdown(fd, how)),
    }
}

pub unsafe fn getsockname(fd: c_int, addr: *mut sockaddr, len: *mut socklen_t) -> c_int {
    settle_fresh(fd);
    match table::lookup(fd) {
        // SAFETY: `addr` and `len` come from the program; guarded copies report bad ones.
        Some(d) if d.is_conn() && !d.is_unix() => Answer::answer(unsafe { names::local(d, addr, len) }),
        None if gone(fd) => -1,
        _ => real!(getsockname(fd, addr, len)),
    }
}

pub unsafe fn getpeername(fd: c_int, addr: *mut sockaddr, len: *mut socklen_t) -> c_int {
    settle_fresh(fd);
    match table::lookup(fd) {
        // After a reset a connection has no peer; then the kernel returns the right error.
        // SAFETY: `addr` and `len` come from the program; guarded copies report bad ones.
        Some(d) if path::still_ours(d) && !d.is_unix() => Answer::answer(unsafe { names::peer(d, addr, len) }),
        None if gone(fd) => -1,
        _ => real!(getpeername(fd, addr, len)),
    }
}

pub unsafe fn setsockopt(fd: c_int, level: c_int, name: c_int, val: *const c_void, len: socklen_t) -> c_int {
    settle_fresh(fd);
    match table::lookup(fd) {
        // SAFETY: the program passes `len` bytes at `val`; they are copied with a check.
        Some(d) => guarded(|| unsafe { set_known(fd, d, level, name, val, len) }),
        None if gone(fd) => -1,
        None => {
            let r = real!(setsockopt(fd, level, name, val, len));
            if r == 0 && zone::shared::is_selector(level, name) {
                guarded(zone::shared::selects_itself);
            }
            r
        }
    }
}

unsafe fn set_known(
    fd: c_int,
    d: &'static Desc,
    level: c_int,
    name: c_int,
    val: *const c_void,
    len: socklen_t,
) -> c_int {
    if d.kind() == Kind::Epoll {
        return real!(setsockopt(fd, level, name, val, len));
    }
    // SAFETY: the program passes `len` bytes at `val`; they are checked before they are read.
    let r = either(unsafe { opts::set(fd, d, level, name, val as *const u8, len) }, || {
        real!(setsockopt(fd, level, name, val, len))
    });
    if r == 0 {
        zone::option_set(d, level, name);
        if zone::shared::is_selector(level, name) {
            zone::shared::selects_itself();
        }
    }
    r
}

pub unsafe fn getsockopt(fd: c_int, level: c_int, name: c_int, val: *mut c_void, len: *mut socklen_t) -> c_int {
    settle_fresh(fd);
    if (level, name) == (SOL_SOCKET, SO_COOKIE) {
        // The program now knows the cookie, so the placeholder cannot be reused for another
        // socket.
        table::reached_kernel(fd);
    }
    match table::lookup(fd) {
        Some(d) => {
            // SAFETY: `val` and `len` come from the program; guarded copies report bad ones.
            let r = either(unsafe { opts::get(fd, d, level, name, val as *mut u8, len) }, || {
                real!(getsockopt(fd, level, name, val, len))
            });
            // SAFETY: the guarded copy reports a bad pointer. The kernel, or `opts::get`, has just
            // written the number there.
            if r == 0 && zone::hides(d, level, name) && unsafe { user::get(len) }.is_ok_and(|n| n >= 4) {
                // SAFETY: at least four bytes were just written there.
                let _ = unsafe { user::put(val as *mut c_int, 0) };
            }
            r
        }
        None if gone(fd) => -1,
        None => real!(getsockopt(fd, level, name, val, len)),
    }
}
