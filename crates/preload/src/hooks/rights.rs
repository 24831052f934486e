//! What changes what the process may do.

use crate::real;
use fsocket_lifecycle::credentials::{changing, changing_groups, changing_thread};
use libc::*;

pub unsafe fn setuid(uid: uid_t) -> c_int {
    changing(|| unsafe { real::setuid(uid) })
}

pub unsafe fn seteuid(uid: uid_t) -> c_int {
    changing(|| unsafe { real::seteuid(uid) })
}

pub unsafe fn setreuid(real: uid_t, effective: uid_t) -> c_int {
    changing(|| unsafe { real::setreuid(real, effective) })
}

pub unsafe fn setresuid(real: uid_t, effective: uid_t, saved: uid_t) -> c_int {
    changing(|| unsafe { real::setresuid(real, effective, saved) })
}

pub unsafe fn setgid(gid: gid_t) -> c_int {
    changing(|| unsafe { real::setgid(gid) })
}

pub unsafe fn setegid(gid: gid_t) -> c_int {
    changing(|| unsafe { real::setegid(gid) })
}

pub unsafe fn setregid(real: gid_t, effective: gid_t) -> c_int {
    changing(|| unsafe { real::setregid(real, effective) })
}

pub unsafe fn setresgid(real: gid_t, effective: gid_t, saved: gid_t) -> c_int {
    changing(|| unsafe { real::setresgid(real, effective, saved) })
}

pub unsafe fn setgroups(n: size_t, groups: *const gid_t) -> c_int {
    changing_groups(|| unsafe { real::setgroups(n, groups) })
}

pub unsafe fn initgroups(user: *const c_char, gid: gid_t) -> c_int {
    changing_groups(|| unsafe { real::initgroups(user, gid) })
}

pub unsafe fn setfsuid(uid: uid_t) -> c_int {
    changing_thread(|| unsafe { real::setfsuid(uid) })
}

pub unsafe fn setfsgid(gid: gid_t) -> c_int {
    changing_thread(|| unsafe { real::setfsgid(gid) })
}

pub unsafe fn capset(header: *mut c_void, data: *const c_void) -> c_int {
    changing(|| unsafe { real::capset(header, data) })
}
