//! Tells which arguments of a system call are descriptors.
//!
//! The source is the kernel's own list (`events/syscalls/*/format` in tracefs, 6.18): every
//! argument that is named like a descriptor. `close`, `close_range` and the second number of
//! `dup2` and `dup3` are missing, because there the number need not be open.

#![allow(non_upper_case_globals)] // system call numbers, with the kernel's names

use libc::*;

const SYS_cachestat: c_long = 451;
const SYS_fchmodat2: c_long = 452;
const SYS_setxattrat: c_long = 463;
const SYS_getxattrat: c_long = 464;
const SYS_listxattrat: c_long = 465;
const SYS_removexattrat: c_long = 466;
const SYS_open_tree_attr: c_long = 467;
const SYS_file_getattr: c_long = 468;
const SYS_file_setattr: c_long = 469;

/// A set of bits: bit `i` says that argument `i` is a descriptor.
#[inline]
pub fn of(number: c_long) -> u8 {
    usize::try_from(number).ok().and_then(|n| ARGUMENTS.get(n)).copied().unwrap_or(0)
}

type Lists = &'static [(u8, &'static [c_long])];

static ARGUMENTS: [u8; 512] = filled(LISTS, filled(OLDER, [0; 512]));

const fn filled(lists: Lists, mut all: [u8; 512]) -> [u8; 512] {
    let mut i = 0;
    while i < lists.len() {
        let (bits, numbers) = lists[i];
        let mut k = 0;
        while k < numbers.len() {
            all[numbers[k] as usize] = bits;
            k += 1;
        }
        i += 1;
    }
    all
}

const LISTS: Lists = &[
    (
        1 << 0,
        &[
            SYS_accept,
            SYS_accept4,
            SYS_bind,
            SYS_cachestat,
            SYS_connect,
            SYS_dup,
            SYS_dup3,
            SYS_epoll_pwait,
            SYS_epoll_pwait2,
            SYS_execveat,
            SYS_faccessat,
            SYS_faccessat2,
            SYS_fadvise64,
            SYS_fallocate,
            SYS_fchdir,
            SYS_fchmod,
            SYS_fchmodat,
            SYS_fchmodat2,
            SYS_fchown,
            SYS_fchownat,
            SYS_fcntl,
            SYS_fdatasync,
            SYS_fgetxattr,
            SYS_file_getattr,
            SYS_file_setattr,
            SYS_flistxattr,
            SYS_flock,
            SYS_fremovexattr,
            SYS_fsconfig,
            SYS_fsetxattr,
            SYS_fsmount,
            SYS_fspick,
            SYS_fstatfs,
            SYS_fsync,
            SYS_ftruncate,
            SYS_getdents64,
            SYS_getpeername,
            SYS_getsockname,
            SYS_getsockopt,
            SYS_getxattrat,
            SYS_inotify_add_watch,
            SYS_inotify_rm_watch,
            SYS_io_uring_enter,
            SYS_io_uring_register,
            SYS_ioctl,
            SYS_landlock_add_rule,
            SYS_landlock_restrict_self,
            SYS_listen,
            SYS_listxattrat,
            SYS_lseek,
            SYS_mkdirat,
            SYS_mknodat,
            SYS_mount_setattr,
            SYS_mq_getsetattr,
            SYS_mq_notify,
            SYS_mq_timedreceive,
            SYS_mq_timedsend,
            SYS_name_to_handle_at,
            SYS_fstat,
            SYS_newfstatat,
            SYS_open_by_handle_at,
            SYS_open_tree,
            SYS_open_tree_attr,
            SYS_openat,
            SYS_openat2,
            SYS_pidfd_getfd,
            SYS_pidfd_send_signal,
            SYS_pread64,
            SYS_preadv,
            SYS_preadv2,
            SYS_process_madvise,
            SYS_process_mrelease,
            SYS_pwrite64,
            SYS_pwritev,
            SYS_pwritev2,
            SYS_quotactl_fd,
            SYS_read,
            SYS_readahead,
            SYS_readlinkat,
            SYS_readv,
            SYS_recvfrom,
            SYS_recvmmsg,
            SYS_recvmsg,
            SYS_removexattrat,
            SYS_sendmmsg,
            SYS_sendmsg,
            SYS_sendto,
            SYS_setns,
            SYS_setsockopt,
            SYS_setxattrat,
            SYS_shutdown,
            SYS_signalfd4,
            SYS_statx,
            SYS_syncfs,
            SYS_timerfd_gettime,
            SYS_timerfd_settime,
            SYS_unlinkat,
            SYS_utimensat,
            SYS_vmsplice,
            SYS_write,
            SYS_writev,
        ],
    ),
    (1 << 0 | 1 << 1, &[SYS_sendfile, SYS_tee]),
    (1 << 0 | 1 << 2, &[SYS_copy_file_range, SYS_epoll_ctl, SYS_linkat, SYS_move_mount, SYS_renameat2, SYS_splice]),
    (1 << 0 | 1 << 3, &[SYS_fanotify_mark]),
    (1 << 1, &[SYS_symlinkat]),
    (1 << 3, &[SYS_perf_event_open]),
    (1 << 4, &[SYS_mmap]),
];

/// Calls that newer architectures do not have.
const OLDER: Lists = &[
    (1 << 0, &[SYS_dup2, SYS_epoll_wait, SYS_futimesat, SYS_getdents, SYS_signalfd, SYS_sync_file_range]),
    (1 << 0 | 1 << 2, &[SYS_renameat]),
];
