//! What the front gives up.

use std::io;

/// From linux/capability.h.
const CAP_NET_ADMIN: u32 = 12;
const CAP_SYS_PTRACE: u32 = 19;
const CAP_SYS_ADMIN: u32 = 21;
const CAP_PERFMON: u32 = 38;
const CAP_BPF: u32 = 39;
const LAST: u32 = 63;

/// What the front still does itself: BPF and devices, namespaces, and others' /proc.
const KEPT: u64 = 1 << CAP_NET_ADMIN | 1 << CAP_SYS_PTRACE | 1 << CAP_SYS_ADMIN | 1 << CAP_PERFMON | 1 << CAP_BPF;

/// `struct __user_cap_header_struct`, version 3.
#[repr(C)]
struct Header {
    version: u32,
    pid: i32,
}

impl Header {
    const OWN: Header = Header { version: 0x2008_0522, pid: 0 };
}

/// `struct __user_cap_data_struct`: the lower 32 capabilities, then the others.
#[derive(Clone, Copy, Default)]
#[repr(C)]
struct Data {
    effective: u32,
    permitted: u32,
    inheritable: u32,
}

/// Those that this process has in effect.
pub fn capabilities() -> u64 {
    let (header, mut data) = (Header::OWN, [Data::default(); 2]);
    // SAFETY: the structures of that version, which live during the call.
    let rc = unsafe { libc::syscall(libc::SYS_capget, &raw const header, &raw mut data) };
    if rc != 0 {
        return 0;
    }
    u64::from(data[0].effective) | u64::from(data[1].effective) << 32
}

fn checked(rc: libc::c_long) -> io::Result<()> {
    if rc < 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(())
}

/// Gives up what the front does not need, for good. To be called while there is no other thread.
///
/// # Errors
/// Of the calls.
pub fn drop_privileges() -> io::Result<()> {
    let kept = capabilities() & KEPT;
    // SAFETY: plain numbers; and structures as the call has them, which live during it.
    unsafe {
        for cap in (0..=LAST).filter(|cap| kept & 1 << cap == 0) {
            // Those that the kernel does not know are refused, and so are all without CAP_SETPCAP.
            libc::prctl(libc::PR_CAPBSET_DROP, cap, 0, 0, 0);
        }
        libc::prctl(libc::PR_CAP_AMBIENT, libc::PR_CAP_AMBIENT_CLEAR_ALL, 0, 0, 0);
        let half = |bits: u32| Data { effective: bits, permitted: bits, inheritable: 0 };
        let header = Header::OWN;
        let data = [half(kept as u32), half((kept >> 32) as u32)];
        checked(libc::syscall(libc::SYS_capset, &raw const header, &raw const data))?;
        checked(libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0).into())
    }
}
