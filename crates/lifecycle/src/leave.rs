//! Moves one descriptor, or everything of the program, to the kernel. Needed when the kernel uses
//! descriptors in ways that the hooks cannot see.

use crate::table::{self, Desc, Kind, DESCS};
use crate::unhooked::registration;
use crate::{epoll, exec, opts, path, process, socks, stats, upgrade, zone};
use fsocket_abi::arena::Reason;
use fsocket_sys as sys;

/// Moves `fd` to the kernel, which is about to use it below the hooks.
pub fn used_below(fd: i32, why: Reason) {
    let Some(d) = table::lookup(fd) else { return };
    match d.kind() {
        Kind::Shm => {
            path::materialize_one(d, why);
            // From now on the connection must also not return to shared memory.
            table::lookup(fd).filter(|d| d.kind() == Kind::Kernel).into_iter().for_each(upgrade::give_up);
        }
        Kind::Listener | Kind::KernelListener => leave_listener(d, why),
        Kind::Kernel => upgrade::give_up(d),
        Kind::Fresh | Kind::Bound if d.is_used() => {
            epoll::leave_to_kernel(d);
            table::forget(d);
        }
        // The kernel's instance does not report connections over shared memory, so all of them
        // move.
        Kind::Epoll if epoll::has_items(d) => everything(why),
        Kind::Epoll => table::forget(d),
        _ => {}
    }
}

fn leave_listener(d: &'static Desc, why: Reason) {
    let zoned = zone::leave(d, Reason::ZoneUnseen);
    if d.kind() == Kind::Listener {
        path::abandon(d, why);
    } else if zoned {
        stats::fall_back(why);
    }
}

/// Moves everything to the kernel, because the program may pass any descriptor to it from now on.
pub fn everything(why: Reason) {
    upgrade::give_up_all();
    if process::nonce() == 0 {
        return;
    }
    // The counters need an arena, even in a program that has not used the library yet.
    let _ = socks::arena();
    stats::fall_back(why);
    process::disable();
    for d in table::all().filter(|d| matches!(d.kind(), Kind::Listener | Kind::KernelListener)) {
        leave_listener(d, why);
    }
    exec::hand_over_all();
}

/// Moves all connections to the kernel, and registers them again in the instances that watched
/// them.
pub fn to_instances(instances: &[i32]) {
    path::give_up_all();
    for d in (0..DESCS.len()).filter_map(|i| DESCS.get(i)).filter(|d| d.is_conn()) {
        let mut watched = [None; 4];
        let mut n = 0;
        table::each_fd(d, |fd| {
            opts::nonblock_from_below(d, fd);
            for ep in instances {
                if let Some(ev) = registration(*ep, fd).filter(|_| n < watched.len()) {
                    watched[n] = Some((*ep, fd, ev));
                    n += 1;
                }
            }
        });
        if path::materialize(&[Some(d)]) {
            // The connection has another socket now, which is not registered under the same
            // number.
            for (ep, fd, ev) in watched.iter().flatten() {
                let _ = sys::epoll_ctl(*ep, libc::EPOLL_CTL_ADD, *fd, Some(ev));
            }
        }
    }
}
