//! A program below whose calls we cannot see: what it has becomes the kernel's.

use crate::table::{self, DESCS};
use crate::unhooked::registration;
use crate::{opts, path};
use fsocket_sys as sys;

/// Everything goes to the kernel, and is watched there as it was.
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
            // Another socket under the same number is not registered.
            for (ep, fd, ev) in watched.iter().flatten() {
                let _ = sys::epoll_ctl(*ep, libc::EPOLL_CTL_ADD, *fd, Some(ev));
            }
        }
    }
}
