//! System calls whose arguments contain the number of a socket, in a structure or in memory.
//!
//! The kernel looks up the file behind the number. For a connection over shared memory it would
//! find the placeholder, so the connection moves to the kernel before the call. The list comes
//! from the kernel's sources (6.18): uses of `sockfd_lookup`, `sock_from_file` and `fget` with a
//! number from user space.
//!
//! | call | where the number is | handled by |
//! | --- | --- | --- |
//! | `bpf(BPF_MAP_UPDATE_ELEM)`, `BPF_MAP_UPDATE_BATCH` of a sock map, sock hash or array of listeners | in the value | [`bpf`] |
//! | `ioctl(NBD_SET_SOCK)` | the argument | [`ioctl`] |
//! | `ioctl(SIOCKCMATTACH)` | first member of the structure | [`ioctl`] |
//! | `ioctl(VHOST_NET_SET_BACKEND)` | second member | [`ioctl`] |
//! | `io_submit` | in each `iocb` | [`io_submit`] |
//! | `ioctl(SECCOMP_IOCTL_NOTIF_ADDFD)` | `srcfd` | [`ioctl`] |
//! | `ioctl(BTRFS_IOC_SEND)` | first member of the structure | [`ioctl`] |
//! | SCM_RIGHTS, `pidfd_getfd`, io_uring, `sendfile`, `splice`, `epoll_ctl`, `poll`, `select` | | their own hooks |
//! | `kcmp` | two numbers | not needed: placeholders compare as their connections do |
//! | `mount` and `fsconfig` of 9p, netlink of iSCSI, sysfs of usbip, netlink of NVMe | as text, or in a message | docs/limits.md |

mod descriptors;

use crate::{exec, pool, process, user};
use core::ffi::{c_long, c_ulong};
use fsocket_sys as sys;

const BPF_MAP_UPDATE_ELEM: c_ulong = 2;
const BPF_OBJ_GET_INFO_BY_FD: c_long = 15;
const BPF_MAP_UPDATE_BATCH: c_ulong = 26;
/// BPF_MAP_TYPE_SOCKMAP, BPF_MAP_TYPE_SOCKHASH, BPF_MAP_TYPE_REUSEPORT_SOCKARRAY: maps whose
/// values are sockets.
const MAPS_OF_SOCKETS: [u32; 3] = [15, 18, 20];
/// The most elements of a batch that are checked. Sockets beyond that number enter the map as
/// placeholders.
const BATCH: u32 = 4096;

const NBD_SET_SOCK: c_ulong = 0xab00;
const SIOCKCMATTACH: c_ulong = 0x89e0;
const VHOST_NET_SET_BACKEND: c_ulong = 0x4008_af30;
const SECCOMP_IOCTL_NOTIF_ADDFD: c_ulong = 0x4018_2103;
const BTRFS_IOC_SEND: c_ulong = 0x4048_9426;

/// Called before a raw system call. False: the call names a descriptor of the library, which the
/// program does not have. If the call names a descriptor that the program has closed but the
/// library has kept, this closes it.
#[inline]
pub fn may_have(number: c_long, args: &[c_ulong; 6]) -> bool {
    let mut bits = descriptors::of(number);
    while bits != 0 {
        let fd = args[bits.trailing_zeros() as usize] as i32;
        pool::let_go(fd);
        if process::owns(fd) {
            return false;
        }
        bits &= bits - 1;
    }
    true
}

/// The first members of `union bpf_attr` for an update of one element.
#[derive(Clone, Copy)]
#[repr(C)]
struct Update {
    map: u32,
    _pad: u32,
    _key: u64,
    value: u64,
}

/// The first members of `union bpf_attr` for a batch.
#[derive(Clone, Copy)]
#[repr(C)]
struct Batch {
    _in: u64,
    _out: u64,
    _keys: u64,
    values: u64,
    count: u32,
    map: u32,
}

/// Called before `bpf(command, attr, size)`.
pub fn bpf(command: c_ulong, attr: c_ulong, size: c_ulong) {
    let (map, values, count) = match command {
        BPF_MAP_UPDATE_ELEM if size as usize >= size_of::<Update>() => {
            // SAFETY: any bytes are such integers, and the guarded copy reports a bad pointer.
            let Ok(update) = (unsafe { user::get(attr as *const Update) }) else { return };
            (update.map, update.value, 1)
        }
        BPF_MAP_UPDATE_BATCH if size as usize >= size_of::<Batch>() => {
            // SAFETY: any bytes are such integers, and the guarded copy reports a bad pointer.
            let Ok(batch) = (unsafe { user::get(attr as *const Batch) }) else { return };
            (batch.map, batch.values, batch.count.min(BATCH))
        }
        _ => return,
    };
    let Some(stride) = size_of_sockets_value(map) else { return };
    for i in 0..u64::from(count) {
        // A value may have eight bytes. Then the kernel accepts the number only if it fits into
        // four.
        // SAFETY: any bytes are an integer, and the guarded copy reports a bad pointer.
        if let Ok(fd) = unsafe { user::get(values.wrapping_add(i * stride) as *const i32) } {
            hand_over(fd);
        }
    }
}

/// The size of a value of `map` in bytes, if its values are sockets.
fn size_of_sockets_value(map: u32) -> Option<u64> {
    // `struct bpf_map_info` begins with: type, id, size of a key, size of a value.
    let mut info = [0u32; 4];
    let attr = [u64::from(map) | (size_of_val(&info) as u64) << 32, info.as_mut_ptr() as u64];
    let args = [BPF_OBJ_GET_INFO_BY_FD as usize, attr.as_ptr() as usize, size_of_val(&attr), 0, 0, 0];
    // SAFETY: the kernel reads `attr`, and writes `info` and the length in `attr`. All of them are
    // local variables.
    let asked = unsafe { sys::raw(libc::SYS_bpf, args) };
    (asked.is_ok() && MAPS_OF_SOCKETS.contains(&info[0])).then_some(u64::from(info[3]))
}

/// Called before `ioctl(_, request, arg)` of any descriptor.
#[inline]
pub fn ioctl(request: c_ulong, arg: c_ulong) {
    const ALL: [c_ulong; 5] =
        [NBD_SET_SOCK, SIOCKCMATTACH, VHOST_NET_SET_BACKEND, SECCOMP_IOCTL_NOTIF_ADDFD, BTRFS_IOC_SEND];
    if ALL.contains(&request) {
        named_by(request, arg);
    }
}

#[cold]
fn named_by(request: c_ulong, arg: c_ulong) {
    let fd = match request {
        NBD_SET_SOCK => Ok(arg as i32),
        // SAFETY: any bytes are an integer, and the guarded copy reports a bad pointer.
        SIOCKCMATTACH | BTRFS_IOC_SEND => unsafe { user::get(arg as *const i32) },
        // The number follows eight bytes of an identity and four of flags.
        // SAFETY: any bytes are an integer, and the guarded copy reports a bad pointer.
        SECCOMP_IOCTL_NOTIF_ADDFD => unsafe { user::get((arg as *const i32).wrapping_add(3)) },
        // SAFETY: any bytes are an integer, and the guarded copy reports a bad pointer.
        _ => unsafe { user::get((arg as *const i32).wrapping_add(1)) },
    };
    if let Ok(fd) = fd {
        hand_over(fd);
    }
}

/// The first members of `struct iocb`.
#[derive(Clone, Copy)]
#[repr(C)]
struct Iocb {
    _data: u64,
    _key: u64,
    _opcode: u32,
    fd: i32,
}

/// Called before `io_submit(_, n, list)`.
pub fn io_submit(n: c_ulong, list: c_ulong) {
    for i in 0..n.min(c_ulong::from(BATCH)) {
        // SAFETY: any bytes are a pointer, and the guarded copy reports a bad address.
        let Ok(iocb) = (unsafe { user::get((list as *const *const Iocb).wrapping_add(i as usize)) }) else { return };
        // SAFETY: any bytes are such integers, and the guarded copy reports a bad pointer.
        if let Ok(iocb) = unsafe { user::get(iocb) } {
            hand_over(iocb.fd);
        }
    }
}

fn hand_over(fd: i32) {
    pool::let_go(fd);
    exec::hand_over(fd);
}
