//! Waits while a measurement runs.

use anyhow::{bail, Result};
use std::time::Duration;

/// Prints a notice on standard error and waits for `seconds`, or until SIGINT or SIGTERM arrives.
/// Returns the seconds that passed.
///
/// # Errors
/// `seconds` is not a positive number.
pub fn wait(option: &str, seconds: f64) -> Result<f64> {
    let Some(time) = Duration::try_from_secs_f64(seconds).ok().filter(|t| !t.is_zero()) else {
        bail!("{option} {seconds}: not a number of seconds")
    };
    // SAFETY: sigset_t is an array of integers, for which zero is valid.
    let mut enough: libc::sigset_t = unsafe { std::mem::zeroed() };
    // SAFETY: `enough` is a live sigset_t during all calls.
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
        // SAFETY: `enough` and `left` are live; a null siginfo pointer is allowed.
        if unsafe { libc::sigtimedwait(&raw const enough, std::ptr::null_mut(), &raw const left) } > 0 {
            break;
        }
    }
    Ok(began.elapsed().as_secs_f64())
}
