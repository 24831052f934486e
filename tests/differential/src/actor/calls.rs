//! Each call of a program, made through libc.

use super::{exec, fork_actor, handle_signals, start_thread};
use crate::call::Call;
use crate::shared::{state, Shared, Slot, GUARD, TRANSFER};
use crate::symbols::OPTIONS;
use fsocket_sys as sys;
use libc::{c_int, c_void, iovec, msghdr, sockaddr, sockaddr_storage, socklen_t};
use std::mem::{size_of, zeroed};
use std::ptr::{null, null_mut};
use std::sync::atomic::Ordering::{Relaxed, Release};

/// What guards a receive buffer: a call that writes more than it says is told.
const CANARY: u8 = 0xEE;
const PIECES: usize = 8;

/// Byte `i` of what step `step` sends.
pub fn pattern(step: u32, i: usize) -> u8 {
    (step.wrapping_mul(151) as usize + i * 7 + (i >> 8) * 13) as u8
}

fn errno() -> i32 {
    std::io::Error::last_os_error().raw_os_error().unwrap_or(0)
}

/// Makes the call that is in the slot: what it returned, and errno.
pub fn make(shared: &'static Shared, slot: &Slot) -> (i64, i32) {
    let Some(call) = Call::by_number(slot.call.load(Relaxed)) else { return (-1, libc::ENOSYS) };
    let ret = match call {
        Call::Fork => fork_actor(shared, slot.arg(0) as usize),
        Call::Thread => start_thread(shared, slot.arg(0) as usize),
        Call::Exec => exec(shared, slot),
        // SAFETY: arguments are numbers; buffers are the slot's, which is ours
        // until the answer is given.
        _ => unsafe { dispatch(call, slot) },
    };
    let error = if ret < 0 { errno() } else { 0 };
    if call.sends() || call == Call::Shutdown {
        slot.state.store(state::SETTLING, Release);
        if call.sends() {
            drain_nagle(slot.arg(0) as c_int);
        } else {
            await_ack(slot.arg(0) as c_int);
        }
    }
    (ret, error)
}

/// The kernel holds back small segments (Nagle) until an acknowledgement, which
/// may take 40 ms. What a send has accepted is on its way when the step ends.
/// By system call: on shared memory the placeholder says 0 at once.
fn drain_nagle(fd: c_int) {
    const SIOCOUTQNSD: usize = 0x894B;
    for _ in 0..120 {
        let mut unsent: c_int = 0;
        // SAFETY: the request writes one int.
        let r = unsafe {
            sys::raw(libc::SYS_ioctl, [fd as usize, SIOCOUTQNSD, &mut unsent as *mut c_int as usize, 0, 0, 0])
        };
        if r.is_err() || unsent == 0 {
            return;
        }
        sys::nanosleep(500_000);
    }
}

/// The acknowledgement of a FIN may be delayed, and wakes whoever waits on the
/// socket. It is there when the step ends. By system call: the placeholder of a
/// connection on shared memory is in state CLOSE.
fn await_ack(fd: c_int) {
    const WAITING: [u8; 3] = [4, 9, 11]; // FIN_WAIT1, LAST_ACK, CLOSING
    for _ in 0..120 {
        let mut info = [0u8; 8];
        let n = sys::getsockopt(fd, libc::IPPROTO_TCP, libc::TCP_INFO, &mut info);
        if n.is_err() || !WAITING.contains(&info[0]) {
            return;
        }
        sys::nanosleep(500_000);
    }
}

/// # Safety
/// The slot is BUSY, and the caller its actor.
unsafe fn dispatch(call: Call, s: &Slot) -> i64 {
    let a = |i: usize| s.arg(i);
    let fd = |i: usize| s.arg(i) as c_int;
    let n = |i: usize| (s.arg(i).max(0) as usize).min(TRANSFER);
    // SAFETY: see above; each call gets what its manual page asks for.
    unsafe {
        match call {
            Call::Socket => libc::socket(fd(0), libc::SOCK_STREAM | fd(1), 0).into(),
            Call::Bind => named(a(1), a(2), |p, len| libc::bind(fd(0), p, len)),
            Call::Connect => connect(s, fd(0), a(1), a(2)),
            Call::ConnectUnspec => {
                let none: sockaddr = zeroed();
                libc::connect(fd(0), &none, size_of::<sockaddr>() as socklen_t).into()
            }
            Call::Listen => listen(s, fd(0), fd(1)),
            Call::Accept => name_out(s, |p, len| libc::accept(fd(0), p, len)),
            Call::AcceptNull => libc::accept(fd(0), null_mut(), null_mut()).into(),
            Call::Accept4 => name_out(s, |p, len| libc::accept4(fd(0), p, len, fd(1))),
            Call::GetSockName => name_out(s, |p, len| libc::getsockname(fd(0), p, len)),
            Call::GetPeerName => name_out(s, |p, len| libc::getpeername(fd(0), p, len)),
            Call::Shutdown => libc::shutdown(fd(0), fd(1)).into(),
            Call::Close => libc::close(fd(0)).into(),
            Call::CloseRange => {
                let r: i64 = libc::syscall(libc::SYS_close_range, fd(0) as u32, fd(1) as u32, 0);
                r
            }
            Call::Send => libc::send(fd(0), source(s, n(1)), n(1), fd(2)) as i64,
            Call::SendTo => libc::sendto(fd(0), source(s, n(1)), n(1), fd(2), null(), 0) as i64,
            Call::Write => libc::write(fd(0), source(s, n(1)), n(1)) as i64,
            Call::WriteV => {
                let (v, k) = pieces(source(s, n(1)), n(1), a(2));
                libc::writev(fd(0), v.as_ptr(), k) as i64
            }
            Call::PwriteV2 => {
                let (v, k) = pieces(source(s, n(1)), n(1), a(2));
                libc::pwritev2(fd(0), v.as_ptr(), k, -1, 0) as i64
            }
            Call::SendMsg => {
                let (mut v, k) = pieces(source(s, n(1)), n(1), a(2));
                libc::sendmsg(fd(0), &message(&mut v, k), fd(3)) as i64
            }
            Call::SendMmsg => send_many(s, fd(0), n(1), a(2), fd(3)),
            Call::SendMore => {
                let p = source(s, n(1) + n(2));
                let first = libc::send(fd(0), p, n(1), libc::MSG_MORE);
                s.put_aux(first as i64);
                libc::send(fd(0), (p as *const u8).add(n(1)) as *const c_void, n(2), 0) as i64
            }
            Call::SendFile => send_file(s, fd(0), fd(1), a(2), n(3)),
            Call::Recv => take(s, n(1), |p| libc::recv(fd(0), p, n(1), fd(2))),
            Call::RecvFrom => take(s, n(1), |p| {
                let mut name: sockaddr_storage = zeroed();
                let mut len = size_of::<sockaddr_storage>() as socklen_t;
                let r = libc::recvfrom(fd(0), p, n(1), fd(2), &mut name as *mut _ as *mut sockaddr, &mut len);
                // A failed call leaves the length as it was.
                s.put_aux(if r < 0 { 0 } else { len.into() });
                r
            }),
            Call::Read => take(s, n(1), |p| libc::read(fd(0), p, n(1))),
            Call::ReadV => take(s, n(1), |p| {
                let (v, k) = pieces(p, n(1), a(2));
                libc::readv(fd(0), v.as_ptr(), k)
            }),
            Call::PreadV2 => take(s, n(1), |p| {
                let (v, k) = pieces(p, n(1), a(2));
                libc::preadv2(fd(0), v.as_ptr(), k, -1, 0)
            }),
            Call::RecvMsg => take(s, n(1), |p| receive_message(s, p, fd(0), n(1), a(2), fd(3))),
            Call::RecvMmsg => receive_many(s, fd(0), n(1), a(2), fd(3)),
            Call::SetOpt => {
                let (_, level, name) = OPTIONS[a(1) as usize];
                let v = fd(2);
                libc::setsockopt(fd(0), level, name, &v as *const c_int as *const c_void, 4).into()
            }
            Call::GetOpt => {
                let (_, level, name) = OPTIONS[a(1) as usize];
                let mut v: c_int = -77;
                let mut len: socklen_t = 4;
                let r = libc::getsockopt(fd(0), level, name, &mut v as *mut c_int as *mut c_void, &mut len);
                s.put_aux(v.into());
                s.put_aux(len.into());
                r.into()
            }
            Call::SetLinger => {
                let v = libc::linger { l_onoff: fd(1), l_linger: fd(2) };
                set(fd(0), libc::SO_LINGER, &v)
            }
            Call::GetLinger => {
                let mut v = libc::linger { l_onoff: -1, l_linger: -1 };
                let r = get(fd(0), libc::SOL_SOCKET, libc::SO_LINGER, &mut v);
                s.put_aux(v.l_onoff.into());
                s.put_aux(v.l_linger.into());
                r
            }
            Call::SetRcvTimeo => set(fd(0), libc::SO_RCVTIMEO, &timeval(a(1))),
            Call::SetSndTimeo => set(fd(0), libc::SO_SNDTIMEO, &timeval(a(1))),
            Call::GetRcvTimeo => get_time(s, fd(0), libc::SO_RCVTIMEO),
            Call::GetSndTimeo => get_time(s, fd(0), libc::SO_SNDTIMEO),
            Call::TcpState => {
                let mut info = [0u8; 256];
                let r = get(fd(0), libc::IPPROTO_TCP, libc::TCP_INFO, &mut info);
                s.put_aux(info[0].into());
                r
            }
            Call::GetFl => libc::fcntl(fd(0), libc::F_GETFL).into(),
            Call::SetFl => libc::fcntl(fd(0), libc::F_SETFL, fd(1)).into(),
            Call::GetFd => libc::fcntl(fd(0), libc::F_GETFD).into(),
            Call::SetFd => libc::fcntl(fd(0), libc::F_SETFD, fd(1)).into(),
            Call::Dup => libc::dup(fd(0)).into(),
            Call::Dup2 => libc::dup2(fd(0), fd(1)).into(),
            Call::Dup3 => libc::dup3(fd(0), fd(1), fd(2)).into(),
            Call::DupFd => libc::fcntl(fd(0), libc::F_DUPFD, fd(1)).into(),
            Call::DupFdCloexec => libc::fcntl(fd(0), libc::F_DUPFD_CLOEXEC, fd(1)).into(),
            Call::NbIo => {
                let mut on = fd(1);
                libc::ioctl(fd(0), libc::FIONBIO, &mut on).into()
            }
            Call::FionRead => int_out(s, |v| libc::ioctl(fd(0), libc::FIONREAD, v)),
            Call::OutQ => int_out(s, |v| libc::ioctl(fd(0), libc::TIOCOUTQ, v)),
            Call::AtMark => sockatmark(fd(0)).into(),
            Call::Poll => poll_list(s, 1, |p, k| libc::poll(p, k, fd(0))),
            Call::PPoll => {
                let mask = mask(a(1));
                let t = timespec(a(0));
                poll_list(s, 2, |p, k| libc::ppoll(p, k, t.as_ref().map_or(null(), |t| t), &mask))
            }
            Call::Select => {
                let mut t = (a(0) >= 0).then(|| timeval(a(0)));
                select_list(s, 1, |k, [r, w, x]| libc::select(k, r, w, x, t.as_mut().map_or(null_mut(), |t| t)))
            }
            Call::PSelect => {
                let mask = mask(a(1));
                let t = timespec(a(0));
                select_list(s, 2, |k, [r, w, x]| libc::pselect(k, r, w, x, t.as_ref().map_or(null(), |t| t), &mask))
            }
            Call::EpollCreate => libc::epoll_create1(fd(0)).into(),
            Call::EpollAdd => epoll_ctl(s, libc::EPOLL_CTL_ADD),
            Call::EpollMod => epoll_ctl(s, libc::EPOLL_CTL_MOD),
            Call::EpollDel => epoll_ctl(s, libc::EPOLL_CTL_DEL),
            Call::EpollWait => epoll_events(s, |p, max| libc::epoll_wait(fd(0), p, max, fd(2))),
            Call::EpollPwait => {
                let mask = mask(a(3));
                epoll_events(s, |p, max| libc::epoll_pwait(fd(0), p, max, fd(2), &mask))
            }
            Call::EpollPwait2 => {
                let mask = mask(a(3));
                let t = timespec(a(2));
                epoll_events(s, |p, max| epoll_pwait2(fd(0), p, max, t.as_ref().map_or(null(), |t| t), &mask))
            }
            Call::Pipe => two(s, |p| libc::pipe2(p, fd(0))),
            Call::SocketPair => two(s, |p| libc::socketpair(libc::AF_UNIX, libc::SOCK_STREAM | fd(0), 0, p)),
            Call::EventFd => libc::eventfd(a(0) as u32, fd(1)).into(),
            Call::TimerFd => timer(a(0) != 0),
            Call::File => file(s, n(0)),
            Call::SendFd => send_fd(fd(0), fd(1)),
            Call::RecvFd => receive_fd(fd(0)),
            Call::Sleep => {
                sys::nanosleep(a(0).max(0) as u64 * 1_000_000);
                0
            }
            Call::SetRestart => {
                handle_signals(if a(0) != 0 { libc::SA_RESTART } else { 0 });
                0
            }
            Call::BlockSignals => {
                let r = libc::pthread_sigmask(libc::SIG_SETMASK, &mask(a(0)), null_mut());
                -i64::from(r)
            }
            Call::Exit => libc::_exit(0),
            Call::Fork | Call::Thread | Call::Exec | Call::Kill | Call::Signal => -1,
        }
    }
}

extern "C" {
    fn sockatmark(fd: c_int) -> c_int;
    fn epoll_pwait2(
        ep: c_int,
        events: *mut libc::epoll_event,
        max: c_int,
        timeout: *const libc::timespec,
        mask: *const libc::sigset_t,
    ) -> c_int;
}

fn timeval(ms: i64) -> libc::timeval {
    libc::timeval { tv_sec: ms / 1000, tv_usec: ms % 1000 * 1000 }
}

/// Negative: no limit.
fn timespec(ms: i64) -> Option<libc::timespec> {
    (ms >= 0).then(|| libc::timespec { tv_sec: ms / 1000, tv_nsec: ms % 1000 * 1_000_000 })
}

unsafe fn mask(bits: i64) -> libc::sigset_t {
    // SAFETY: a set of ours.
    unsafe {
        let mut set: libc::sigset_t = zeroed();
        libc::sigemptyset(&mut set);
        for (bit, signal) in [(1, libc::SIGUSR1), (2, libc::SIGUSR2)] {
            if bits & bit != 0 {
                libc::sigaddset(&mut set, signal);
            }
        }
        set
    }
}

/// An address as [`crate::symbols::ADDR`] numbers them.
unsafe fn named(addr: i64, port: i64, call: impl FnOnce(*const sockaddr, socklen_t) -> c_int) -> i64 {
    let port = (port.max(0) as u16).to_be();
    // SAFETY: zero is a valid address; the call copies it.
    unsafe {
        if matches!(addr, 0 | 1 | 4) {
            let mut name: libc::sockaddr_in = zeroed();
            name.sin_family = libc::AF_INET as u16;
            name.sin_port = port;
            name.sin_addr.s_addr = match addr {
                0 => u32::from_ne_bytes([127, 0, 0, 1]),
                4 => u32::from_ne_bytes([127, 0, 0, 2]),
                _ => 0,
            };
            return call(&name as *const _ as *const sockaddr, size_of::<libc::sockaddr_in>() as socklen_t).into();
        }
        let mut name: libc::sockaddr_in6 = zeroed();
        name.sin6_family = libc::AF_INET6 as u16;
        name.sin6_port = port;
        match addr {
            2 => name.sin6_addr.s6_addr[15] = 1,
            5 => name.sin6_addr.s6_addr[10..].copy_from_slice(&[255, 255, 127, 0, 0, 1]),
            _ => {}
        }
        call(&name as *const _ as *const sockaddr, size_of::<libc::sockaddr_in6>() as socklen_t).into()
    }
}

/// `connect`, and what local port it got: the name of the connection.
unsafe fn connect(s: &Slot, fd: c_int, addr: i64, port: i64) -> i64 {
    // SAFETY: as the calls want it; the name is ours.
    unsafe {
        let r = named(addr, port, |p, len| libc::connect(fd, p, len));
        let saved = errno();
        let mut name: libc::sockaddr_in6 = zeroed();
        let mut len = size_of::<libc::sockaddr_in6>() as socklen_t;
        let known = (r == 0 || saved == libc::EINPROGRESS)
            && libc::getsockname(fd, &mut name as *mut _ as *mut sockaddr, &mut len) == 0;
        s.put_aux(if known { u16::from_be(name.sin6_port).into() } else { 0 });
        *libc::__errno_location() = saved;
        r
    }
}

/// A call that gives an address: it goes into the buffer as it came.
unsafe fn name_out(s: &Slot, call: impl FnOnce(*mut sockaddr, *mut socklen_t) -> c_int) -> i64 {
    // SAFETY: a buffer of ours; the slot is the caller's.
    unsafe {
        let mut name: sockaddr_storage = zeroed();
        let mut len = size_of::<sockaddr_storage>() as socklen_t;
        let r = call(&mut name as *mut _ as *mut sockaddr, &mut len);
        if r >= 0 {
            let from = std::slice::from_raw_parts(&name as *const _ as *const u8, (len as usize).min(128));
            s.data()[..from.len()].copy_from_slice(from);
            s.len.store(from.len() as u32, Relaxed);
        }
        r.into()
    }
}

unsafe fn listen(s: &Slot, fd: c_int, backlog: c_int) -> i64 {
    // SAFETY: a listener of ours too is a listener of the kernel's, which knows
    // the port.
    unsafe {
        let r = libc::listen(fd, backlog);
        let saved = errno();
        let mut name: libc::sockaddr_in6 = zeroed();
        let mut len = size_of::<libc::sockaddr_in6>() as u32;
        let args = [fd as usize, &mut name as *mut _ as usize, &mut len as *mut u32 as usize, 0, 0, 0];
        let known = r == 0 && sys::raw(libc::SYS_getsockname, args).is_ok();
        s.put_aux(if known { u16::from_be(name.sin6_port).into() } else { 0 });
        *libc::__errno_location() = saved;
        r.into()
    }
}

/// Bytes of this step to send.
unsafe fn source(s: &Slot, n: usize) -> *const c_void {
    // SAFETY: the slot is the caller's.
    let data = unsafe { s.data() };
    let step = s.step.load(Relaxed);
    for (i, b) in data[..n.min(TRANSFER)].iter_mut().enumerate() {
        *b = pattern(step, i);
    }
    data.as_ptr() as *const c_void
}

/// A receive into the buffer; tells if bytes behind the end were touched.
unsafe fn take(s: &Slot, n: usize, call: impl FnOnce(*mut c_void) -> isize) -> i64 {
    // SAFETY: the slot is the caller's.
    unsafe {
        s.data()[..n + GUARD].fill(CANARY);
        let r = call(s.data().as_mut_ptr() as *mut c_void);
        let saved = errno();
        let got = (r.max(0) as usize).min(n);
        s.len.store(got as u32, Relaxed);
        if s.data()[got..n + GUARD].iter().any(|b| *b != CANARY) {
            s.put_aux(-99);
        }
        *libc::__errno_location() = saved;
        r as i64
    }
}

unsafe fn pieces(p: *const c_void, n: usize, k: i64) -> ([iovec; PIECES], c_int) {
    let k = (k.max(0) as usize).min(PIECES);
    let each = n / k.max(1);
    let mut v = [iovec { iov_base: null_mut(), iov_len: 0 }; PIECES];
    for (i, part) in v[..k].iter_mut().enumerate() {
        part.iov_len = if i + 1 == k { n - each * i } else { each };
        // SAFETY: within the n bytes.
        part.iov_base = unsafe { (p as *mut u8).add(each * i) } as *mut c_void;
    }
    (v, k as c_int)
}

unsafe fn message(v: &mut [iovec; PIECES], k: c_int) -> msghdr {
    // SAFETY: zero is an empty message.
    let mut m: msghdr = unsafe { zeroed() };
    m.msg_iov = v.as_mut_ptr();
    m.msg_iovlen = k as usize;
    m
}

unsafe fn receive_message(s: &Slot, p: *mut c_void, fd: c_int, n: usize, k: i64, flags: c_int) -> isize {
    // SAFETY: `p` has n bytes; name and control are ours.
    unsafe {
        let (mut v, k) = pieces(p, n, k);
        let mut m = message(&mut v, k);
        let mut name: sockaddr_storage = zeroed();
        let mut control = [0u64; 16];
        m.msg_name = &mut name as *mut _ as *mut c_void;
        m.msg_namelen = size_of::<sockaddr_storage>() as socklen_t;
        m.msg_control = control.as_mut_ptr() as *mut c_void;
        m.msg_controllen = size_of::<[u64; 16]>();
        let r = libc::recvmsg(fd, &mut m, flags);
        if r >= 0 {
            for v in [m.msg_flags as i64, m.msg_namelen as i64, m.msg_controllen as i64] {
                s.put_aux(v);
            }
        }
        r
    }
}

unsafe fn send_many(s: &Slot, fd: c_int, n: usize, k: i64, flags: c_int) -> i64 {
    // SAFETY: the vectors point into the slot's buffer.
    unsafe {
        let k = (k.max(0) as usize).min(PIECES);
        let p = source(s, n * k);
        let mut v = [iovec { iov_base: null_mut(), iov_len: 0 }; PIECES];
        let mut many: [libc::mmsghdr; PIECES] = zeroed();
        for i in 0..k {
            v[i] = iovec { iov_base: (p as *mut u8).add(n * i) as *mut c_void, iov_len: n };
            many[i].msg_hdr.msg_iov = &mut v[i];
            many[i].msg_hdr.msg_iovlen = 1;
        }
        let r = libc::sendmmsg(fd, many.as_mut_ptr(), k as u32, flags);
        for m in &many[..(r.max(0) as usize).min(PIECES)] {
            s.put_aux(m.msg_len.into());
        }
        r.into()
    }
}

unsafe fn receive_many(s: &Slot, fd: c_int, n: usize, k: i64, flags: c_int) -> i64 {
    // SAFETY: as `send_many`.
    unsafe {
        let k = (k.max(0) as usize).min(PIECES);
        let n = n.min(TRANSFER / PIECES);
        s.data()[..n * k].fill(CANARY);
        let p = s.data().as_mut_ptr();
        let mut v = [iovec { iov_base: null_mut(), iov_len: 0 }; PIECES];
        let mut many: [libc::mmsghdr; PIECES] = zeroed();
        for i in 0..k {
            v[i] = iovec { iov_base: p.add(n * i) as *mut c_void, iov_len: n };
            many[i].msg_hdr.msg_iov = &mut v[i];
            many[i].msg_hdr.msg_iovlen = 1;
        }
        let r = libc::recvmmsg(fd, many.as_mut_ptr(), k as u32, flags, null_mut());
        for m in &many[..(r.max(0) as usize).min(PIECES)] {
            s.put_aux(m.msg_len.into());
        }
        if r > 0 {
            s.len.store((n * r as usize) as u32, Relaxed);
        }
        r.into()
    }
}

unsafe fn send_file(s: &Slot, out: c_int, input: c_int, offset: i64, n: usize) -> i64 {
    // SAFETY: the offset is ours.
    unsafe {
        let mut at = offset;
        let r = libc::sendfile(out, input, if offset < 0 { null_mut() } else { &mut at }, n);
        let saved = errno();
        s.put_aux(at);
        s.put_aux(libc::lseek(input, 0, libc::SEEK_CUR));
        *libc::__errno_location() = saved;
        r as i64
    }
}

unsafe fn set<T>(fd: c_int, name: c_int, v: &T) -> i64 {
    // SAFETY: a value of that size.
    unsafe {
        let p = v as *const T as *const c_void;
        libc::setsockopt(fd, libc::SOL_SOCKET, name, p, size_of::<T>() as socklen_t).into()
    }
}

unsafe fn get<T>(fd: c_int, level: c_int, name: c_int, v: &mut T) -> i64 {
    // SAFETY: a value of that size.
    unsafe {
        let mut len = size_of::<T>() as socklen_t;
        libc::getsockopt(fd, level, name, v as *mut T as *mut c_void, &mut len).into()
    }
}

unsafe fn get_time(s: &Slot, fd: c_int, name: c_int) -> i64 {
    let mut t = libc::timeval { tv_sec: -7, tv_usec: -7 };
    // SAFETY: a timeval of ours.
    let r = unsafe { get(fd, libc::SOL_SOCKET, name, &mut t) };
    s.put_aux(t.tv_sec);
    s.put_aux(t.tv_usec);
    r
}

fn int_out(s: &Slot, call: impl FnOnce(*mut c_int) -> c_int) -> i64 {
    let mut v: c_int = -77;
    let r = call(&mut v);
    s.put_aux(v.into());
    r.into()
}

/// Arguments from `from` on are pairs (descriptor, events).
fn pairs(s: &Slot, from: usize) -> impl Iterator<Item = (c_int, i64)> + '_ {
    let n = s.n_args.load(Relaxed) as usize;
    (from..n.saturating_sub(1)).step_by(2).map(|i| (s.arg(i) as c_int, s.arg(i + 1)))
}

fn poll_list(s: &Slot, from: usize, call: impl FnOnce(*mut libc::pollfd, libc::nfds_t) -> c_int) -> i64 {
    let mut list: Vec<_> =
        pairs(s, from).map(|(fd, events)| libc::pollfd { fd, events: events as i16, revents: 0x55 }).collect();
    let r = call(list.as_mut_ptr(), list.len() as libc::nfds_t);
    if r >= 0 {
        for p in &list {
            s.put_aux((p.revents as u16).into());
        }
    }
    r.into()
}

unsafe fn select_list(s: &Slot, from: usize, call: impl FnOnce(c_int, [*mut libc::fd_set; 3]) -> c_int) -> i64 {
    // SAFETY: the sets are ours; numbers are checked.
    unsafe {
        let mut sets: [libc::fd_set; 3] = zeroed();
        let mut top = 0;
        for (fd, which) in pairs(s, from).filter(|(fd, _)| (0..1024).contains(fd)) {
            for (i, set) in sets.iter_mut().enumerate().filter(|(i, _)| which >> i & 1 != 0) {
                let _ = i;
                libc::FD_SET(fd, set);
                top = top.max(fd + 1);
            }
        }
        let [r, w, x] = &mut sets;
        let ret = call(top, [r, w, x]);
        if ret >= 0 {
            for (fd, _) in pairs(s, from) {
                let mut bits = 0;
                for (i, set) in sets.iter().enumerate() {
                    bits |= i64::from((0..1024).contains(&fd) && libc::FD_ISSET(fd, set)) << i;
                }
                s.put_aux(bits);
            }
        }
        ret.into()
    }
}

/// The data of an event is the variable's number, which the scheduler adds as a
/// last argument.
unsafe fn epoll_ctl(s: &Slot, op: c_int) -> i64 {
    let tag = s.arg(s.n_args.load(Relaxed) as usize - 1) as u64;
    let events = if op == libc::EPOLL_CTL_DEL { 0 } else { s.arg(2) as u32 };
    let mut event = libc::epoll_event { events, u64: tag };
    // SAFETY: an event of ours.
    unsafe { libc::epoll_ctl(s.arg(0) as c_int, op, s.arg(1) as c_int, &mut event).into() }
}

fn epoll_events(s: &Slot, call: impl FnOnce(*mut libc::epoll_event, c_int) -> c_int) -> i64 {
    let mut list = [libc::epoll_event { events: 0, u64: 0 }; 32];
    let r = call(list.as_mut_ptr(), (s.arg(1) as c_int).min(32));
    let mut got: Vec<(u64, u32)> = list[..r.max(0) as usize].iter().map(|e| (e.u64, e.events)).collect();
    got.sort_unstable();
    for (tag, events) in got {
        s.put_aux(tag as i64);
        s.put_aux(events.into());
    }
    r.into()
}

/// Two descriptors: the second is a further result.
fn two(s: &Slot, call: impl FnOnce(*mut c_int) -> c_int) -> i64 {
    let mut p = [-1; 2];
    if call(p.as_mut_ptr()) < 0 {
        return -1;
    }
    s.put_aux(p[1].into());
    p[0].into()
}

unsafe fn timer(fired: bool) -> i64 {
    // SAFETY: plain calls on a descriptor of ours.
    unsafe {
        let fd = libc::timerfd_create(libc::CLOCK_MONOTONIC, libc::TFD_NONBLOCK);
        let mut spec: libc::itimerspec = zeroed();
        spec.it_value = libc::timespec { tv_sec: if fired { 0 } else { 1000 }, tv_nsec: fired.into() };
        libc::timerfd_settime(fd, 0, &spec, null_mut());
        if fired {
            let mut p = libc::pollfd { fd, events: libc::POLLIN, revents: 0 };
            let _ = sys::ppoll(&mut p, 1, Some(100_000_000), null());
        }
        fd.into()
    }
}

unsafe fn file(s: &Slot, n: usize) -> i64 {
    // SAFETY: a plain call.
    let fd = unsafe { libc::memfd_create(c"file".as_ptr(), 0) };
    // SAFETY: the slot is the caller's.
    let content = unsafe { std::slice::from_raw_parts(source(s, n) as *const u8, n) };
    if fd < 0 || sys::write(fd, content) != Ok(n) {
        return -1;
    }
    // SAFETY: a plain call.
    unsafe { libc::lseek(fd, 0, libc::SEEK_SET) };
    fd.into()
}

unsafe fn send_fd(over: c_int, fd: c_int) -> i64 {
    // SAFETY: one byte, one control message, all ours.
    unsafe {
        let mut byte = [b'F'];
        let mut v = [iovec { iov_base: null_mut(), iov_len: 0 }; PIECES];
        v[0] = iovec { iov_base: byte.as_mut_ptr() as *mut c_void, iov_len: 1 };
        let mut m = message(&mut v, 1);
        let mut control = [0u64; 4];
        m.msg_control = control.as_mut_ptr() as *mut c_void;
        m.msg_controllen = libc::CMSG_SPACE(4) as usize;
        let c = libc::CMSG_FIRSTHDR(&m);
        (*c).cmsg_level = libc::SOL_SOCKET;
        (*c).cmsg_type = libc::SCM_RIGHTS;
        (*c).cmsg_len = libc::CMSG_LEN(4) as usize;
        (libc::CMSG_DATA(c) as *mut c_int).write_unaligned(fd);
        libc::sendmsg(over, &m, libc::MSG_NOSIGNAL) as i64
    }
}

unsafe fn receive_fd(over: c_int) -> i64 {
    // SAFETY: as `send_fd`.
    unsafe {
        let mut byte = [0u8];
        let mut v = [iovec { iov_base: null_mut(), iov_len: 0 }; PIECES];
        v[0] = iovec { iov_base: byte.as_mut_ptr() as *mut c_void, iov_len: 1 };
        let mut m = message(&mut v, 1);
        let mut control = [0u64; 4];
        m.msg_control = control.as_mut_ptr() as *mut c_void;
        m.msg_controllen = size_of::<[u64; 4]>();
        if libc::recvmsg(over, &mut m, 0) < 0 {
            return -1;
        }
        let c = libc::CMSG_FIRSTHDR(&m);
        if c.is_null() || (*c).cmsg_type != libc::SCM_RIGHTS {
            *libc::__errno_location() = libc::ENOMSG;
            return -1;
        }
        i64::from((libc::CMSG_DATA(c) as *const c_int).read_unaligned())
    }
}
