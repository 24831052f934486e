//! The start of the library in a program.

use crate::{ctl, dispatch, inherit, process, room, stats, successor, upgrade, zone};
use core::sync::atomic::AtomicU8;
use fsocket_abi::arena::Reason;
use fsocket_sys as sys;

/// Settings from the environment.
pub struct Config<'a> {
    pub socket: Option<&'a [u8]>,
    /// No shared memory.
    pub disabled: bool,
    /// No zones.
    pub no_zones: bool,
    /// No stealing.
    pub no_balance: bool,
    /// Unix sockets stay the kernel's.
    pub no_unix: bool,
    pub pin: zone::Pin,
    /// Calls on a kernel connection before it may go over; 0: never.
    pub upgrade: Option<u32>,
    /// FASTSOCKET_PATIENCE, milliseconds.
    pub patience: Option<u32>,
    pub rseq_offset: Option<isize>,
    /// glibc's `__libc_single_threaded`, of 2.32 and later: not 0 while no second thread was ever made.
    pub single_threaded: Option<&'static AtomicU8>,
    /// What the program before this one has left (FASTSOCKET_SUCCESSOR).
    pub successor: Option<&'a [u8]>,
    /// The program was started with sockets.
    pub inherits: bool,
}

/// Called once: before `main` where the program has inherited sockets, else by its first call that concerns the
/// library, beside other threads, perhaps, whose calls go to the kernel until then.
pub fn init(c: &Config) {
    let successor = c.successor.and_then(successor::of);
    dispatch::connect();
    process::set_nonce(successor.map_or_else(|| sys::getrandom_u64() | 1, |(_, nonce)| nonce));
    sys::cpu::init(c.rseq_offset);
    process::begin(c.single_threaded);
    upgrade::init(c.upgrade, !c.no_unix);
    ctl::init(c.patience);
    zone::init(!c.no_zones, c.pin);
    process::set_balance(!c.no_zones && !c.no_balance);
    let has_room = !room::is_narrow() && !room::is_locked();
    let shm = !c.disabled && has_room && sys::membarrier(sys::MEMBARRIER_REGISTER_GLOBAL_EXPEDITED).is_ok();
    if !shm && c.no_zones {
        if let Some((fd, _)) = successor {
            let _ = sys::close(fd);
        }
        return;
    }
    let open = match successor {
        Some((fd, _)) => {
            ctl::remember(c.socket.unwrap_or(fsocket_proto::paths::SYSTEM_SOCKET.as_bytes()));
            ctl::adopt_fd(process::high_fd(fd))
        }
        None => ctl::open(c.socket),
    };
    if open && shm {
        process::enable();
    } else if !c.disabled && !has_room {
        stats::fall_back(Reason::Disabled);
    }
    if !c.inherits {
        return;
    }
    if open && shm {
        inherit::take_over(successor.is_some());
    } else if !c.no_zones {
        inherit::take_zones();
    }
}
