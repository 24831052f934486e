//! Summarizes the present and possible rights of this process as one number. Two processes share an
//! arena only while their numbers are equal (ADR 35).

use crate::fnv::Fnv;
use core::sync::atomic::{AtomicU64, Ordering};
use fsocket_sys as sys;

const CAP_SETGID: u32 = 6;

const CAP_SETUID: u32 = 7;

/// The number of capabilities in a set.
const CAPS: u32 = 64;

/// The most supplementary groups that are hashed. With more, only their number counts.
const GROUPS: usize = 256;

/// Number of Landlock domains entered by this process and its ancestors.
static DOMAINS: AtomicU64 = AtomicU64::new(0);

struct Hash(Fnv);

impl Hash {
    fn add(&mut self, v: u64) {
        self.0.add(&v.to_le_bytes());
    }
    /// Hashes user or group numbers independent of their order.
    fn add_all(&mut self, ids: &mut [u32]) {
        ids.sort_unstable();
        let mut last = None;
        for id in ids {
            if last.replace(*id) != Some(*id) {
                self.add(u64::from(*id));
            }
        }
        self.add(u64::MAX);
    }
}

/// The real, effective and saved number, by `getresuid` or `getresgid`.
fn three(call: libc::c_long) -> [u32; 3] {
    let mut ids = [u32::MAX; 3];
    let p = ids.as_mut_ptr() as usize;
    // SAFETY: the kernel writes three numbers, for which `ids` has room.
    let _ = unsafe { sys::raw(call, [p, p + 4, p + 8, 0, 0, 0]) };
    ids
}

/// Permitted capabilities.
fn permitted() -> u64 {
    const VERSION_3: u32 = 0x2008_0522;
    let mut head = [VERSION_3, 0];
    // Effective, permitted, inheritable: first the lower halves, then the upper ones.
    let mut data = [0u32; 6];
    let args = [head.as_mut_ptr() as usize, data.as_mut_ptr() as usize, 0, 0, 0, 0];
    // SAFETY: version 3 has a header of this size and two structures of three numbers.
    match unsafe { sys::raw(libc::SYS_capget, args) } {
        Ok(_) => u64::from(data[1]) | u64::from(data[4]) << 32,
        Err(_) => 0,
    }
}

/// The rights that this process has or can get, as a number. Processes with equal numbers may
/// share memory. With CAP_SETUID the users do not count, because the process can become any user.
#[link_section = ".text.fsocket_start"]
pub fn class() -> u64 {
    let caps = permitted();
    let mut h = Hash(Fnv::new());
    h.add(caps);
    h.add(DOMAINS.load(Ordering::Relaxed));
    if caps >> CAP_SETUID & 1 == 0 {
        h.add_all(&mut three(libc::SYS_getresuid));
    }
    if caps >> CAP_SETGID & 1 == 0 {
        h.add_all(&mut three(libc::SYS_getresgid));
        add_groups(&mut h);
    }
    h.0.value()
}

#[link_section = ".text.fsocket_start"]
fn add_groups(h: &mut Hash) {
    let mut groups = [0u32; GROUPS];
    let args = [GROUPS, groups.as_mut_ptr() as usize, 0, 0, 0, 0];
    // SAFETY: `groups` has room for GROUPS numbers.
    match unsafe { sys::raw(libc::SYS_getgroups, args) } {
        Ok(n) => h.add_all(&mut groups[..n.min(GROUPS)]),
        // SAFETY: with size 0 the kernel only returns the count, and writes nothing.
        Err(_) => h.add(unsafe { sys::raw(libc::SYS_getgroups, [0; 6]) }.unwrap_or(0) as u64),
    }
}

/// A hash of the supplementary groups of this thread.
pub fn groups() -> u64 {
    let mut h = Hash(Fnv::new());
    add_groups(&mut h);
    h.0.value()
}

/// The user and group with which this thread makes files and sockets.
pub fn for_files() -> u64 {
    // SAFETY: the calls take numbers only. An invalid number changes nothing, and the call returns
    // the present one.
    let ask = |call| unsafe { sys::raw(call, [usize::MAX, 0, 0, 0, 0, 0]) }.unwrap_or(usize::MAX) as u32;
    u64::from(ask(libc::SYS_setfsuid)) << 32 | u64::from(ask(libc::SYS_setfsgid))
}

/// Does this process keep all its capabilities at `exec`? (If `exec` takes some away, the library
/// sees no call that does so.)
pub fn kept_by_exec() -> bool {
    let caps = permitted();
    if caps == 0 {
        return true;
    }
    let securebits = prctl(libc::PR_GET_SECUREBITS, 0);
    three(libc::SYS_getresuid) == [0; 3]
        && securebits & 1 == 0
        && (0..CAPS).filter(|c| caps >> c & 1 != 0).all(|c| prctl(libc::PR_CAPBSET_READ, c as usize) == 1)
}

fn prctl(what: i32, arg: usize) -> i32 {
    // SAFETY: these requests take numbers only.
    unsafe { sys::raw(libc::SYS_prctl, [what as usize, arg, 0, 0, 0, 0]) }.map_or(-1, |v| v as i32)
}

/// Records that the process has entered a Landlock domain.
pub fn note_domain() {
    DOMAINS.fetch_add(1, Ordering::Relaxed);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_order_of_groups_says_nothing() {
        let of = |ids: &mut [u32]| {
            let mut h = Hash(Fnv::new());
            h.add_all(ids);
            h.0.value()
        };
        assert_eq!(of(&mut [3, 1, 2]), of(&mut [1, 2, 3, 3]));
        assert_ne!(of(&mut [1, 2]), of(&mut [1, 2, 3]));
        assert_eq!(class(), class());
    }
}
