//! Starts the library in a program: reads the settings, contacts the monitor, and takes over
//! inherited state. Afterwards the monitor knows the process, or the process uses the kernel.

use crate::{ctl, dispatch, inherit, process, room, stats, successor, upgrade, zone};
use core::sync::atomic::AtomicU8;
use fsocket_abi::arena::Reason;
use fsocket_sys as sys;

/// Settings from the environment.
pub struct Config<'a> {
    pub socket: Option<&'a [u8]>,
    /// Do not use shared memory.
    pub disabled: bool,
    /// Do not use zones.
    pub no_zones: bool,
    /// Do not steal connections from other workers.
    pub no_balance: bool,
    /// Unix sockets stay with the kernel.
    pub no_unix: bool,
    pub pin: zone::Pin,
    /// Number of calls on a kernel connection before it may move to shared memory; 0: never.
    pub upgrade: Option<u32>,
    /// FASTSOCKET_PATIENCE, in milliseconds.
    pub patience: Option<u32>,
    pub rseq_offset: Option<isize>,
    /// `__libc_single_threaded` of glibc (2.32 and later), which is not 0 until a second thread is
    /// made.
    pub single_threaded: Option<&'static AtomicU8>,
    /// The value of FASTSOCKET_SUCCESSOR: the former program has left state.
    pub successor: Option<&'a [u8]>,
    /// The program was started with sockets.
    pub inherits: bool,
}

/// Called once: before `main` if the program has inherited sockets, otherwise in its first call
/// that concerns the library. In the second case other threads may exist; their calls go to the
/// kernel until the start is complete.
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
