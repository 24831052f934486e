//! Prevents hostile descriptors from blocking the event loop.
//!
//! A few system calls on descriptors from clients may block in spite of all precautions. One is a
//! write to an eventfd whose owner has filled the counter (the owner shares the file status
//! flags). Another one drops the last reference to a socket with SO_LINGER. All of them end with
//! EINTR when a signal comes. So while the loop handles events, a timer sends its thread a signal
//! every 50 ms.
//!
//! Setting the timer is a system call, and a whole request takes only ten of those. So the timer
//! runs on while the loop sleeps, and the first signal that ends a sleep stops it. A signal may
//! therefore come early during an event. An early signal is harmless: only a call that blocks is
//! interrupted.

use std::cell::Cell;
use std::io;
use std::time::Duration;

/// Time between two signals. No call blocks longer than this.
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

    /// A watchdog for the calling thread, with this time between two signals.
    ///
    /// # Errors
    /// Those of the system calls.
    pub fn every(period: Duration) -> io::Result<Watchdog> {
        // SAFETY: zero is a valid value for these plain C structs.
        let (mut action, mut event): (libc::sigaction, libc::sigevent) = unsafe { std::mem::zeroed() };
        // SA_RESTART is not set, because the signal must interrupt system calls.
        action.sa_sigaction = nothing as extern "C" fn(libc::c_int) as libc::sighandler_t;
        // SAFETY: the handler does nothing, so it is safe in any context.
        if unsafe { libc::sigaction(libc::SIGALRM, &raw const action, std::ptr::null_mut()) } != 0 {
            return Err(io::Error::last_os_error());
        }
        // The parent process may have blocked the signal.
        // SAFETY: zero is a valid sigset_t, and `set` is valid for the calls.
        unsafe {
            let mut set: libc::sigset_t = std::mem::zeroed();
            libc::sigaddset(&raw mut set, libc::SIGALRM);
            libc::pthread_sigmask(libc::SIG_UNBLOCK, &raw const set, std::ptr::null_mut());
        }
        event.sigev_notify = libc::SIGEV_THREAD_ID;
        event.sigev_signo = libc::SIGALRM;
        // SAFETY: the call has no preconditions.
        event.sigev_notify_thread_id = unsafe { libc::gettid() };
        let mut timer = std::ptr::null_mut();
        // SAFETY: both pointers are valid for the call.
        if unsafe { libc::timer_create(libc::CLOCK_MONOTONIC, &raw mut event, &raw mut timer) } != 0 {
            return Err(io::Error::last_os_error());
        }
        Ok(Watchdog { timer, period, is_running: Cell::new(false) })
    }

    /// Checks the result of the loop's wait. False: only the timer's signal has ended it.
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

    /// From here on, a system call that blocks is interrupted.
    pub fn arm(&self) {
        if !self.is_running.replace(true) {
            self.set(self.period);
        }
    }

    /// Stops the timer: the signal has only ended a sleep of the loop.
    pub fn disarm(&self) {
        if self.is_running.replace(false) {
            self.set(Duration::ZERO);
        }
    }

    fn set(&self, period: Duration) {
        let each = libc::timespec { tv_sec: period.as_secs() as _, tv_nsec: period.subsec_nanos().into() };
        let spec = libc::itimerspec { it_interval: each, it_value: each };
        // SAFETY: `self` owns the timer, and `spec` is valid for the call.
        unsafe { libc::timer_settime(self.timer, 0, &raw const spec, std::ptr::null_mut()) };
    }
}

impl Drop for Watchdog {
    fn drop(&mut self) {
        // SAFETY: `self` owns the timer, which is deleted once.
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
        // The timer is not set again: the next request costs no system call here.
        assert!(first > 0 && next_signal(&dog) <= first);
        dog.disarm();
        dog.arm();
        assert!(next_signal(&dog) > 0);
    }

    /// Nanoseconds until the next signal of the timer. 0: the timer is stopped.
    fn next_signal(dog: &Watchdog) -> i64 {
        // SAFETY: `spec` is a plain C struct for which zero is valid, and the call writes it.
        unsafe {
            let mut spec: libc::itimerspec = std::mem::zeroed();
            assert_eq!(libc::timer_gettime(dog.timer, &raw mut spec), 0);
            spec.it_value.tv_sec * 1_000_000_000 + spec.it_value.tv_nsec
        }
    }
}
