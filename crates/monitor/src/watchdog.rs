//! Keeps a hostile descriptor from holding up the event loop.
//!
//! A few system calls on descriptors that clients gave us can block whatever
//! we do: writing to an eventfd whose counter its owner filled (he shares the
//! file status flags), or dropping the last reference to a socket with
//! SO_LINGER. All of them end with EINTR on a signal. So while the loop handles
//! events a timer sends this thread a signal every 50 ms.
//!
//! Setting a timer is a system call, and a request takes ten of these in all. So
//! the timer goes on running when the loop sleeps; the first signal that ends a
//! sleep stops it. A signal may therefore come early in an event, which is harmless:
//! only a call that blocks notices it, and none should.

use std::cell::Cell;
use std::io;
use std::time::Duration;

/// Between two signals; a call blocks no longer.
const PATIENCE: Duration = Duration::from_millis(50);

pub struct Watchdog {
    timer: libc::timer_t,
    period: Duration,
    is_running: Cell<bool>,
}

extern "C" fn nothing(_: libc::c_int) {}

impl Watchdog {
    /// A watchdog for the calling thread.
    pub fn new() -> io::Result<Watchdog> {
        Watchdog::every(PATIENCE)
    }

    /// A watchdog for the calling thread, with so much time between two signals.
    ///
    /// # Errors
    /// Of the calls.
    pub fn every(period: Duration) -> io::Result<Watchdog> {
        // SAFETY: zero is a valid value of these plain C structs.
        let (mut action, mut event): (libc::sigaction, libc::sigevent) = unsafe { std::mem::zeroed() };
        // No SA_RESTART: the point is to interrupt.
        action.sa_sigaction = nothing as extern "C" fn(libc::c_int) as libc::sighandler_t;
        // SAFETY: the handler does nothing, so it is safe in any context.
        if unsafe { libc::sigaction(libc::SIGALRM, &raw const action, std::ptr::null_mut()) } != 0 {
            return Err(io::Error::last_os_error());
        }
        // The parent may have blocked it.
        // SAFETY: zero is a valid sigset_t, and `set` is valid for the calls.
        unsafe {
            let mut set: libc::sigset_t = std::mem::zeroed();
            libc::sigaddset(&raw mut set, libc::SIGALRM);
            libc::pthread_sigmask(libc::SIG_UNBLOCK, &raw const set, std::ptr::null_mut());
        }
        event.sigev_notify = libc::SIGEV_THREAD_ID;
        event.sigev_signo = libc::SIGALRM;
        // SAFETY: no preconditions.
        event.sigev_notify_thread_id = unsafe { libc::gettid() };
        let mut timer = std::ptr::null_mut();
        // SAFETY: both pointers are valid for the call.
        if unsafe { libc::timer_create(libc::CLOCK_MONOTONIC, &raw mut event, &raw mut timer) } != 0 {
            return Err(io::Error::last_os_error());
        }
        Ok(Watchdog { timer, period, is_running: Cell::new(false) })
    }

    /// What the loop's wait has returned. False: only the timer's signal has ended it.
    ///
    /// # Errors
    /// Those of the wait.
    pub fn after_sleep<T>(&self, woken: rustix::io::Result<T>) -> io::Result<bool> {
        match woken {
            Ok(_) => self.arm(),
            Err(rustix::io::Errno::INTR) => {
                self.disarm();
                return Ok(false);
            }
            Err(e) => return Err(e.into()),
        }
        Ok(true)
    }

    /// From here on a blocking call is interrupted.
    pub fn arm(&self) {
        if !self.is_running.replace(true) {
            self.set(self.period);
        }
    }

    /// The loop slept when the signal came: nothing is to be interrupted.
    pub fn disarm(&self) {
        if self.is_running.replace(false) {
            self.set(Duration::ZERO);
        }
    }

    fn set(&self, period: Duration) {
        let each = libc::timespec { tv_sec: period.as_secs() as _, tv_nsec: period.subsec_nanos().into() };
        let spec = libc::itimerspec { it_interval: each, it_value: each };
        // SAFETY: our own timer; `spec` is valid for the call.
        unsafe { libc::timer_settime(self.timer, 0, &raw const spec, std::ptr::null_mut()) };
    }
}

impl Drop for Watchdog {
    fn drop(&mut self) {
        // SAFETY: our own timer, deleted once.
        unsafe { libc::timer_delete(self.timer) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::event::{eventfd, EventfdFlags};

    #[test]
    fn a_blocking_write_is_interrupted() {
        let dog = Watchdog::new().unwrap();
        let fd = eventfd(0, EventfdFlags::CLOEXEC).unwrap();
        rustix::io::write(&fd, &(u64::MAX - 1).to_ne_bytes()).unwrap();
        dog.arm();
        assert_eq!(rustix::io::write(&fd, &1u64.to_ne_bytes()), Err(rustix::io::Errno::INTR));
        dog.disarm();
        assert_eq!(next_signal(&dog), 0);
    }

    #[test]
    fn it_runs_on_until_it_is_stopped() {
        let dog = Watchdog::new().unwrap();
        dog.arm();
        let first = next_signal(&dog);
        dog.arm();
        // Not set again: a request that follows another one costs no system call here.
        assert!(first > 0 && next_signal(&dog) <= first);
        dog.disarm();
        dog.arm();
        assert!(next_signal(&dog) > 0);
    }

    /// Nanoseconds until the timer's next signal; 0: it does not run.
    fn next_signal(dog: &Watchdog) -> i64 {
        // SAFETY: a plain C struct, written by the call.
        unsafe {
            let mut spec: libc::itimerspec = std::mem::zeroed();
            assert_eq!(libc::timer_gettime(dog.timer, &raw mut spec), 0);
            spec.it_value.tv_sec * 1_000_000_000 + spec.it_value.tv_nsec
        }
    }
}
