//! Repeats one attack, each time in a new process of a user.

use super::table::ATTACKS;
use crate::lives::Life;
use crate::random::Random;
use fsocket_sys as sys;
use std::path::PathBuf;
use std::time::{Duration, Instant};

#[derive(clap::Args, Debug)]
pub struct Assault {
    /// Which of the table; each in turn, if none is named
    #[arg(long)]
    pub which: Option<usize>,
    #[arg(long)]
    pub socket: PathBuf,
    #[arg(long)]
    pub port: u16,
    #[arg(long)]
    pub uid: u32,
    /// Seconds
    #[arg(long)]
    pub time: f64,
    #[arg(long, default_value_t = 1)]
    pub seed: u64,
    /// The same by kernel TCP
    #[arg(long)]
    pub kernel: bool,
}

/// Limit of descriptors for a user's processes, as a service may have it.
const FILES: u64 = 8192;

pub fn run(a: &Assault) {
    let end = Instant::now() + Duration::from_secs_f64(a.time);
    let mut random = Random::new(a.seed);
    let mut n = 0;
    while Instant::now() < end {
        let which = a.which.unwrap_or(n % ATTACKS.len());
        // If all attacks take turns, none gets all of the time.
        let until = if a.which.is_some() { end } else { end.min(Instant::now() + Duration::from_millis(700)) };
        one(a, which, random.next(), until);
        n += 1;
    }
    println!("{n} times");
}

fn one(a: &Assault, which: usize, seed: u64, until: Instant) {
    // SAFETY: this process has one thread.
    let pid = unsafe { libc::fork() };
    if pid == 0 {
        // SAFETY: the calls use numbers and a local value.
        unsafe {
            libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL);
            let files = libc::rlimit { rlim_cur: FILES, rlim_max: FILES };
            libc::setrlimit(libc::RLIMIT_NOFILE, &raw const files);
            libc::setgid(a.uid);
            libc::setuid(a.uid);
            libc::signal(libc::SIGPIPE, libc::SIG_IGN);
        }
        let mut life = Life { socket: &a.socket, ports: &[a.port], random: Random::new(seed) };
        let attack = &ATTACKS[which];
        let done = if a.kernel { (attack.kernel)(&mut life) } else { (attack.ours)(&mut life) };
        if done.is_none() {
            sys::nanosleep(20_000_000); // the monitor has thrown out or refused it
        }
        // SAFETY: `_exit` runs no exit handlers of the parent.
        unsafe { libc::_exit(0) }
    }
    let ended = |flags| {
        // SAFETY: the status pointer is null, and `pid` is a child of this process.
        unsafe { libc::waitpid(pid, std::ptr::null_mut(), flags) == pid }
    };
    while pid > 0 && !ended(libc::WNOHANG) {
        if Instant::now() >= until {
            // SAFETY: `kill` takes numbers only, and the child is not collected yet.
            unsafe { libc::kill(pid, libc::SIGKILL) };
            ended(0);
            return;
        }
        sys::nanosleep(2_000_000);
    }
}
