//! Each call of a program, made through libc.

mod act;
pub mod any;
mod bytes;
pub mod child;
mod come;
mod echo;
pub mod long;
pub mod names;
mod ready;
mod settle;
mod splice;
mod touch;
mod tree;

use super::{clone_files, exec, fork_actor, handle_signals, start_thread};
use crate::call::Call;
use crate::shared::{state, Shared, Slot, TRANSFER};
use crate::symbols::OPTIONS;
use bytes::{
    file, message, pieces, receive_fd, receive_many, receive_message, send_fd, send_file, send_many, source, take,
};
use fsocket_sys as sys;
use libc::{c_int, c_void, sockaddr, sockaddr_storage, socklen_t};
use names::{connect, listen, name_out, named, place};
use ready::{epoll_ctl, epoll_events, mask, poll_list, select_list, timer, timespec};
use settle::{await_ack, await_acks, drain_nagle, holds_back};
use std::mem::{size_of, zeroed};
use std::ptr::{null, null_mut};
use std::sync::atomic::Ordering::{Relaxed, Release};

fn errno() -> i32 {
    std::io::Error::last_os_error().raw_os_error().unwrap_or(0)
}

/// Makes the call that is in the slot. Returns its result and errno.
pub fn make(shared: &'static Shared, slot: &Slot) -> (i64, i32) {
    let Some(call) = Call::by_number(slot.call.load(Relaxed)) else { return (-1, libc::ENOSYS) };
    if call == Call::SendMmsg && !names::is_unix(slot.arg(0) as c_int) {
        slot.state.store(state::SETTLING, Release);
        await_acks(slot.arg(0) as c_int);
        slot.state.store(state::BUSY, Release);
    }
    let ret = match call {
        Call::Fork => fork_actor(shared, slot.arg(0) as usize),
        Call::CloneFiles => clone_files(shared, slot.arg(0) as usize),
        Call::Thread => start_thread(shared, slot.arg(0) as usize),
        Call::Exec => exec(shared, slot),
        // SAFETY: the arguments are numbers, and the slot's buffers belong to this thread until it
        // answers.
        _ => unsafe { dispatch(call, slot) },
    };
    let error = if ret < 0 { errno() } else { 0 };
    if call.sends() || matches!(call, Call::Shutdown | Call::SetOpt | Call::Child | Call::SendFd) {
        slot.state.store(state::SETTLING, Release);
        if call == Call::Shutdown {
            await_ack(slot.arg(0) as c_int);
        } else if !holds_back(call, slot) {
            drain_nagle(slot.arg(0) as c_int);
        }
    }
    (ret, error)
}

/// # Safety
/// The slot is BUSY, and the caller is its actor.
// Long: one arm for each system call.
unsafe fn dispatch(call: Call, s: &Slot) -> i64 {
    let a = |i: usize| s.arg(i);
    let fd = |i: usize| s.arg(i) as c_int;
    let n = |i: usize| (s.arg(i).max(0) as usize).min(TRANSFER);
    // SAFETY: this actor has exclusive use of the slot, which is BUSY; each call gets what its manual page asks for.
    unsafe {
        match call {
            Call::Socket => libc::socket(fd(0), libc::SOCK_STREAM | fd(1), 0).into(),
            Call::Bind => named(a(1), place(s, a(1), a(2)), |p, len| libc::bind(fd(0), p, len)),
            Call::Connect | Call::Come => connect(s, fd(0), a(1), a(2)),
            Call::AcceptAll => come::accept_all(s, fd(0)),
            Call::Ping => echo::ping(fd(0), a(1)),
            Call::Echo => echo::echo(fd(0), a(1)),
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
            Call::SpliceTo => splice::to(s, fd(0), n(1), fd(2) as u32),
            Call::SpliceFrom => splice::from(s, fd(0), n(1), fd(2) as u32),
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
            Call::SetAny => {
                let mut v = [0u8; 300];
                v[..4].copy_from_slice(&fd(4).to_ne_bytes());
                libc::setsockopt(fd(0), fd(1), fd(2), v.as_ptr().cast(), fd(3) as socklen_t).into()
            }
            Call::GetAny => {
                let (mut v, mut len) = ([0u8; 300], fd(3) as socklen_t);
                let r = libc::getsockopt(fd(0), fd(1), fd(2), v.as_mut_ptr().cast(), &mut len);
                s.put_aux(len.into());
                r.into()
            }
            Call::Any => any::any(s),
            Call::Long => long::long(s),
            Call::Touch => touch::touch(fd(0), a(1)),
            Call::Attributes => touch::attributes(s, fd(0)),
            Call::SockMap => touch::put_into_map(fd(0)),
            Call::TcpState => {
                let mut info = [0u8; 256];
                let r = get(fd(0), libc::IPPROTO_TCP, libc::TCP_INFO, &mut info);
                s.put_aux(info[0].into());
                r
            }
            Call::Fill => act::fill(s, fd(0)),
            Call::Drain => act::drain(fd(0)),
            Call::Stuck => act::stuck(fd(0), a(1), a(2) != 0),
            Call::Clock => act::start_clock(),
            Call::Passed => act::passed(a(0)),
            Call::Queue => act::queue(s, fd(0)),
            Call::OrigDst => name_out(s, |p, len| libc::getsockopt(fd(0), fd(1), act::ORIGINAL_DST, p.cast(), len)),
            Call::GetFl => libc::fcntl(fd(0), libc::F_GETFL).into(),
            Call::SetFl => libc::fcntl(fd(0), libc::F_SETFL, fd(1)).into(),
            Call::GetFd => libc::fcntl(fd(0), libc::F_GETFD).into(),
            Call::SetFd => libc::fcntl(fd(0), libc::F_SETFD, fd(1)).into(),
            Call::Dup => libc::dup(fd(0)).into(),
            Call::Dup2 => libc::dup2(fd(0), fd(1)).into(),
            Call::Dup3 => libc::dup3(fd(0), fd(1), fd(2)).into(),
            Call::DupOnto => dup_onto(fd(0), fd(1), a(2)),
            Call::CloseStd => close_std(fd(0)),
            Call::Child => child::child(s, fd(0), n(1), a(2)),
            Call::DupFd => libc::fcntl(fd(0), libc::F_DUPFD, fd(1)).into(),
            Call::DupFdCloexec => libc::fcntl(fd(0), libc::F_DUPFD_CLOEXEC, fd(1)).into(),
            Call::NbIo => {
                let mut on = fd(1);
                libc::ioctl(fd(0), libc::FIONBIO, &mut on).into()
            }
            Call::FionRead => int_out(s, |v| libc::ioctl(fd(0), libc::FIONREAD, v)),
            Call::OutQ => int_out(s, |v| names::out_queue(fd(0), v)),
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
            Call::VFork => tree::vfork(s, fd(0), a(1), a(2) != 0),
            Call::Unshare => tree::unshare_files(a(0)),
            Call::Subreaper => libc::prctl(libc::PR_SET_CHILD_SUBREAPER, a(0)).into(),
            Call::Reap => tree::reap(s),
            Call::Limit => tree::limit(a(0), a(1)),
            Call::Exit => libc::_exit(0),
            Call::Fork | Call::CloneFiles | Call::Thread | Call::Exec | Call::Kill | Call::Signal => -1,
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

/// Gives `fd` a number that is in use, in one of four ways.
unsafe fn dup_onto(fd: c_int, number: c_int, how: i64) -> i64 {
    // SAFETY: the calls take numbers only.
    unsafe {
        let r = match how {
            0 => libc::dup2(fd, number),
            1 => libc::dup3(fd, number, libc::O_CLOEXEC),
            // A bad `fd` must not close `number`.
            _ if libc::fcntl(fd, libc::F_GETFD) < 0 => -1,
            2 => {
                libc::close(number);
                libc::dup(fd)
            }
            _ => {
                libc::close(number);
                libc::fcntl(fd, libc::F_DUPFD, number)
            }
        };
        r.into()
    }
}

unsafe fn close_std(number: c_int) -> i64 {
    // SAFETY: the calls take numbers and a constant path; `__errno_location` is valid in its
    // thread.
    unsafe {
        let r = libc::close(number);
        let saved = errno();
        let null = libc::open(c"/dev/null".as_ptr(), libc::O_RDWR);
        if null != number && number >= 0 {
            libc::dup2(null, number);
            libc::close(null);
        }
        *libc::__errno_location() = saved;
        r.into()
    }
}

fn timeval(ms: i64) -> libc::timeval {
    libc::timeval { tv_sec: ms.div_euclid(1000), tv_usec: ms.rem_euclid(1000) * 1000 }
}

unsafe fn set<T>(fd: c_int, name: c_int, v: &T) -> i64 {
    // SAFETY: `p` points to a value of the given size.
    unsafe {
        let p = v as *const T as *const c_void;
        libc::setsockopt(fd, libc::SOL_SOCKET, name, p, size_of::<T>() as socklen_t).into()
    }
}

unsafe fn get<T>(fd: c_int, level: c_int, name: c_int, v: &mut T) -> i64 {
    // SAFETY: the call writes at most `len` bytes, the size of `v`.
    unsafe {
        let mut len = size_of::<T>() as socklen_t;
        libc::getsockopt(fd, level, name, v as *mut T as *mut c_void, &mut len).into()
    }
}

unsafe fn get_time(s: &Slot, fd: c_int, name: c_int) -> i64 {
    let mut t = libc::timeval { tv_sec: -7, tv_usec: -7 };
    // SAFETY: the call writes one local timeval.
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

/// Makes a call that returns two descriptors. The second one is a further result.
fn two(s: &Slot, call: impl FnOnce(*mut c_int) -> c_int) -> i64 {
    let mut p = [-1; 2];
    if call(p.as_mut_ptr()) < 0 {
        return -1;
    }
    s.put_aux(p[1].into());
    p[0].into()
}
