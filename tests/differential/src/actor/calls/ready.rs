//! Waiting for several descriptors: lists, sets, events, time limits, signal masks.

use crate::shared::Slot;
use fsocket_sys as sys;
use libc::c_int;
use std::mem::zeroed;
use std::ptr::{null, null_mut};
use std::sync::atomic::Ordering::Relaxed;

/// A negative time means no limit.
pub(super) fn timespec(ms: i64) -> Option<libc::timespec> {
    (ms >= 0).then(|| libc::timespec { tv_sec: ms / 1000, tv_nsec: ms % 1000 * 1_000_000 })
}

pub(super) unsafe fn mask(bits: i64) -> libc::sigset_t {
    // SAFETY: the set is a local variable.
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

/// The arguments from number `from` on, as pairs (descriptor, events).
fn pairs(s: &Slot, from: usize) -> impl Iterator<Item = (c_int, i64)> + '_ {
    let n = s.n_args.load(Relaxed) as usize;
    (from..n.saturating_sub(1)).step_by(2).map(|i| (s.arg(i) as c_int, s.arg(i + 1)))
}

pub(super) fn poll_list(s: &Slot, from: usize, call: impl FnOnce(*mut libc::pollfd, libc::nfds_t) -> c_int) -> i64 {
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

pub(super) unsafe fn select_list(
    s: &Slot,
    from: usize,
    call: impl FnOnce(c_int, [*mut libc::fd_set; 3]) -> c_int,
) -> i64 {
    // SAFETY: the sets are local variables, and all descriptor numbers are below 1024.
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

/// The data of an event is the number of the variable, which the scheduler adds as the last
/// argument.
pub(super) unsafe fn epoll_ctl(s: &Slot, op: c_int) -> i64 {
    let tag = s.arg(s.n_args.load(Relaxed) as usize - 1) as u64;
    let events = if op == libc::EPOLL_CTL_DEL { 0 } else { s.arg(2) as u32 };
    let mut event = libc::epoll_event { events, u64: tag };
    // SAFETY: the event is a local variable.
    unsafe { libc::epoll_ctl(s.arg(0) as c_int, op, s.arg(1) as c_int, &mut event).into() }
}

pub(super) fn epoll_events(s: &Slot, call: impl FnOnce(*mut libc::epoll_event, c_int) -> c_int) -> i64 {
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

pub(super) unsafe fn timer(fired: bool) -> i64 {
    // SAFETY: the calls use local variables and a descriptor that this function has made.
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
