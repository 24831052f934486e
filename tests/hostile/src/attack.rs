//! Starts hostile processes one after the other, and kills each at a random moment.

use crate::control;
use crate::lives::{Life, SCRIPTS};
use crate::random::Random;
use fsocket_sys as sys;
use std::path::PathBuf;
use std::time::{Duration, Instant};

#[derive(clap::Args, Debug)]
pub struct Attack {
    /// The monitor's socket
    #[arg(long)]
    pub socket: PathBuf,
    /// Ports of the victims
    #[arg(long, value_delimiter = ',')]
    pub ports: Vec<u16>,
    #[arg(long)]
    pub seed: u64,
    /// Seconds
    #[arg(long)]
    pub time: u64,
    /// First of the users
    #[arg(long)]
    pub uid: u32,
    /// How many users there are
    #[arg(long, default_value_t = 1)]
    pub uids: u32,
    /// This script only
    #[arg(long)]
    pub script: Option<String>,
    /// The same number of connections and the same CPU time by kernel TCP, and nothing hostile
    #[arg(long)]
    pub kernel: bool,
}

pub fn run(a: &Attack) {
    let mut random = Random::new(a.seed);
    let end = Instant::now() + Duration::from_secs(a.time);
    let scripts: Vec<_> = SCRIPTS.iter().filter(|s| a.script.as_deref().is_none_or(|name| name == s.0)).collect();
    let mut lives = vec![0u64; scripts.len()];
    while Instant::now() < end {
        let (which, seed) = (random.below(scripts.len()), random.next());
        let uid = a.uid + random.below(a.uids as usize) as u32;
        let ms = 20 + random.below(600) as u64;
        lives[which] += 1;
        // SAFETY: this process has one thread.
        match unsafe { libc::fork() } {
            0 => {
                // SAFETY: the calls take numbers only.
                unsafe {
                    libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL);
                    libc::setgid(uid);
                    libc::setuid(uid);
                    libc::signal(libc::SIGPIPE, libc::SIG_IGN);
                }
                let mut life = Life { socket: &a.socket, ports: &a.ports, random: Random::new(seed) };
                let (_, cost, script) = scripts[which];
                let _ = if a.kernel { control::life(&mut life, *cost) } else { script(&mut life) };
                // SAFETY: `_exit` runs no exit handlers of the parent.
                unsafe { libc::_exit(0) }
            }
            pid if pid > 0 => {
                let until = Instant::now() + Duration::from_millis(ms);
                let ended = |flags| {
                    // SAFETY: the status pointer is null, and `pid` is a child of this process.
                    unsafe { libc::waitpid(pid, std::ptr::null_mut(), flags) == pid }
                };
                while Instant::now() < until {
                    if ended(libc::WNOHANG) {
                        break;
                    }
                    sys::nanosleep(2_000_000);
                }
                // SAFETY: `kill` takes numbers only. The child lives, or its number is not used
                // again yet.
                unsafe { libc::kill(pid, libc::SIGKILL) };
                ended(0);
            }
            _ => sys::nanosleep(10_000_000),
        }
    }
    let lived: std::collections::BTreeMap<_, _> = scripts.iter().map(|s| s.0).zip(lives).collect();
    println!("{}", serde_json::to_string(&lived).unwrap_or_default());
}
