//! Measuring for a while.

use anyhow::{bail, Result};
use std::time::Duration;

/// Says on standard error that the measurement runs, and waits until its time is
/// over or somebody has had enough (SIGINT, SIGTERM). Seconds that it took.
///
/// # Errors
/// Not a number of seconds.
pub fn wait(option: &str, seconds: f64) -> Result<f64> {
    let Some(time) = Duration::try_from_secs_f64(seconds).ok().filter(|t| !t.is_zero()) else {
        bail!("{option} {seconds}: not a number of seconds")
    };
    // SAFETY: zero is a valid sigset_t; sigemptyset initialises it anyway.
    let mut enough: libc::sigset_t = unsafe { std::mem::zeroed() };
    // SAFETY: the set is valid for all calls.
    unsafe {
        libc::sigemptyset(&raw mut enough);
        libc::sigaddset(&raw mut enough, libc::SIGINT);
        libc::sigaddset(&raw mut enough, libc::SIGTERM);
        libc::sigprocmask(libc::SIG_BLOCK, &raw const enough, std::ptr::null_mut());
    }
    anstream::eprintln!("measuring for {seconds} s, or until Ctrl-C");
    let began = std::time::Instant::now();
    while let Some(left) = time.checked_sub(began.elapsed()).filter(|left| !left.is_zero()) {
        let left = libc::timespec { tv_sec: left.as_secs() as libc::time_t, tv_nsec: left.subsec_nanos().into() };
        // SAFETY: both arguments are valid; no siginfo is wanted.
        if unsafe { libc::sigtimedwait(&raw const enough, std::ptr::null_mut(), &raw const left) } > 0 {
            break;
        }
    }
    Ok(began.elapsed().as_secs_f64())
}
