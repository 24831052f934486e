//! Options that the kernel's placeholder keeps, by name.

use crate::options::KEPT;
use crate::table::{self, Desc};
use core::sync::atomic::{AtomicU32, Ordering};
use fsocket_sys as sys;

const S: i32 = libc::SOL_SOCKET;

/// Bytes of the longest.
const LONG: usize = 64;

fn entry(level: i32, name: i32) -> u32 {
    (level as u32) << 16 | name as u32 & 0xFFFF
}

/// The placeholder keeps this option; what takes its place gets it, too.
pub fn kept(d: &Desc, level: i32, name: i32) {
    if (0..0x8000).contains(&level) && (0..0x8000).contains(&name) {
        enter(&d.extra, entry(level, name));
    }
}

type List = [AtomicU32; KEPT];

fn enter(list: &List, new: u32) {
    for e in list {
        match e.load(Ordering::Relaxed) {
            0 => return e.store(new, Ordering::Relaxed),
            x if x == new => return,
            _ => {}
        }
    }
    // No room: all of them.
    list[KEPT - 1].store(u32::MAX, Ordering::Relaxed);
}

/// What is in `from`, is in `to`, too.
pub fn merge(to: &List, from: &List) {
    from.iter().map(|e| e.load(Ordering::Relaxed)).take_while(|e| *e != 0).for_each(|e| enter(to, e));
}

/// Are there any?
#[inline]
pub fn any(d: &Desc) -> bool {
    d.extra[0].load(Ordering::Relaxed) != 0
}

/// Set on socket `to` what the program has set on `from`, a number of `d`.
fn copy(d: &Desc, from: i32, to: i32) {
    copy_each(d, from, to);
    // IP_TOS has set it, too.
    one(from, to, S, libc::SO_PRIORITY);
}

fn copy_each(d: &Desc, from: i32, to: i32) {
    for e in &d.extra {
        let e = match e.load(Ordering::Relaxed) {
            0 => return,
            u32::MAX => {
                let v6 = d.family.load(Ordering::Relaxed) as i32 == libc::AF_INET6;
                let _ = fsocket_reuseport::copy::options(from, to, v6);
                return;
            }
            e => e,
        };
        one(from, to, (e >> 16) as i32, (e & 0xFFFF) as i32);
    }
}

fn one(from: i32, to: i32, level: i32, name: i32) {
    let mut value = [0u8; LONG];
    // What cannot be read (a filter, a key) cannot be given on either.
    if let Ok(n) = sys::getsockopt(from, level, name, &mut value) {
        let _ = sys::setsockopt(to, level, name, &value[..n.min(LONG)]);
    }
}

/// An accepted connection has what was set on its listener.
pub fn inherit(listener: &Desc, fd: i32, d: &Desc, placeholder: i32) {
    copy_each(listener, fd, placeholder);
    // But for this one (`sk_clone_lock`).
    let _ = sys::setsockopt(placeholder, S, libc::SO_PRIORITY, &[0; 4]);
    for (to, from) in d.extra.iter().zip(&listener.extra) {
        to.store(from.load(Ordering::Relaxed), Ordering::Relaxed);
    }
    d.dirty.store(true, Ordering::Relaxed);
}

/// The kernel end of a switched connection has what was set on the placeholder.
pub fn apply_options(d: &Desc, fd: i32) {
    if any(d) {
        if let Some(from) = table::fd_of(d) {
            copy(d, from, fd);
        }
    }
}
