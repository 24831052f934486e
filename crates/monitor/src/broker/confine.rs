//! How the front gives up its privileges.

use rustix::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::io;

const LAST: u32 = 63;
/// A user number without a name, outside the ranges from which systemd and Debian allocate. No
/// other process has this user, so none can signal or trace the front.
pub const USER: u32 = 65526;

/// `struct __user_cap_header_struct`, version 3.
#[repr(C)]
struct Header {
    version: u32,
    pid: i32,
}

impl Header {
    const OWN: Header = Header { version: 0x2008_0522, pid: 0 };
}

/// `struct __user_cap_data_struct`: one element has the lower 32 capabilities, the next one the
/// others.
#[derive(Clone, Copy, Default)]
#[repr(C)]
struct Data {
    effective: u32,
    permitted: u32,
    inheritable: u32,
}

/// The effective capabilities of this process.
pub fn capabilities() -> u64 {
    let (header, mut data) = (Header::OWN, [Data::default(); 2]);
    // SAFETY: the structures have the layout of this version, and live during the call.
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

/// Gives up root and all capabilities, for good. To be called while this process has only one
/// thread.
///
/// # Errors
/// Those of the system calls.
pub fn drop_privileges() -> io::Result<()> {
    // SAFETY: the calls take plain numbers, or structures with the kernel's layout that live
    // during the call.
    unsafe {
        for cap in 0..=LAST {
            // (Fails for capabilities that the kernel does not know, and always without
            // CAP_SETPCAP.)
            libc::prctl(libc::PR_CAPBSET_DROP, cap, 0, 0, 0);
        }
        libc::prctl(libc::PR_CAP_AMBIENT, libc::PR_CAP_AMBIENT_CLEAR_ALL, 0, 0, 0);
        // If this user namespace has no such user, the process keeps root's number but loses
        // root's rights.
        let left = libc::setgroups(0, std::ptr::null()) == 0
            && libc::setresgid(USER, USER, USER) == 0
            && libc::setresuid(USER, USER, USER) == 0;
        let (header, none) = (Header::OWN, [Data::default(); 2]);
        checked(libc::syscall(libc::SYS_capset, &raw const header, &raw const none))?;
        checked(libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0).into())?;
        if !left {
            tracing::warn!("the front is still user {}", libc::geteuid());
        }
    }
    Ok(())
}

/// The files that the front still reads: /proc of other processes, CPUs and cgroups of the
/// machine, and the list of modules that are built into the kernel.
const READ: [&std::ffi::CStr; 3] = [c"/proc", c"/sys", c"/lib/modules"];

/// From linux/landlock.h: the rights to read files and directories, and all rights of the first
/// Landlock version.
const READ_FILE: u64 = 1 << 2;
const READ_DIR: u64 = 1 << 3;
const FIRST_VERSION: u64 = (1 << 13) - 1;

/// Denies access to all files except for reading [`READ`] (Landlock), and denies all system calls
/// except [`CALLS`] (seccomp). To be called when the front has opened everything it needs, and
/// while it has only one thread.
///
/// # Errors
/// The kernel has no seccomp.
pub fn close() -> io::Result<()> {
    if let Err(e) = close_files() {
        tracing::warn!("no Landlock: {e}");
    }
    close_calls()
}

/// Takes ownership of the descriptor that a system call returned.
fn opened(rc: libc::c_long) -> io::Result<OwnedFd> {
    checked(rc)?;
    // SAFETY: the system call has just made this descriptor, and nothing else owns it.
    Ok(unsafe { OwnedFd::from_raw_fd(rc as i32) })
}

fn close_files() -> io::Result<()> {
    /// `struct landlock_path_beneath_attr`.
    #[repr(C, packed)]
    struct Beneath {
        allowed: u64,
        parent: i32,
    }
    let mut handled = FIRST_VERSION;
    // SAFETY: this call only asks for the version, and accesses no memory.
    let version = unsafe { libc::syscall(libc::SYS_landlock_create_ruleset, 0, 0, 1) };
    // Rights of later versions: to link files between directories, and to truncate files.
    handled |= if version >= 2 { 1 << 13 } else { 0 } | if version >= 3 { 1 << 14 } else { 0 };
    // SAFETY: the kernel reads one u64, which is `struct landlock_ruleset_attr` of the first
    // version.
    let made = unsafe { libc::syscall(libc::SYS_landlock_create_ruleset, &raw const handled, size_of::<u64>(), 0) };
    let rules = opened(made)?;
    for place in READ {
        // SAFETY: `place` is a C string that ends with a zero byte.
        let there = unsafe { libc::open(place.as_ptr(), libc::O_PATH | libc::O_CLOEXEC) };
        let Ok(there) = opened(there.into()) else { continue };
        let beneath = Beneath { allowed: READ_FILE | READ_DIR, parent: there.as_raw_fd() };
        // SAFETY: `beneath` has the kernel's layout for rule type 1 (paths beneath a directory)
        // and lives during the call.
        checked(unsafe { libc::syscall(libc::SYS_landlock_add_rule, rules.as_raw_fd(), 1, &raw const beneath, 0) })?;
    }
    // SAFETY: the call takes only a descriptor and a number.
    checked(unsafe { libc::syscall(libc::SYS_landlock_restrict_self, rules.as_raw_fd(), 0) })
}

const ARCH: u32 = 0xC000_003E;

/// All system calls of the front's event loop and of its helper threads. Not among them:
/// `connect`, `listen`, `execve`, `kill`, `ptrace`, `setns`, `unshare`, `mount`.
#[rustfmt::skip]
const CALLS: &[libc::c_long] = &[
    libc::SYS_read, libc::SYS_write, libc::SYS_readv, libc::SYS_writev, libc::SYS_pread64, libc::SYS_pwrite64,
    libc::SYS_close, libc::SYS_fstat, libc::SYS_newfstatat, libc::SYS_statx, libc::SYS_fstatfs, libc::SYS_lseek,
    libc::SYS_openat, libc::SYS_readlinkat, libc::SYS_getdents64, libc::SYS_faccessat, libc::SYS_faccessat2,
    libc::SYS_fcntl, libc::SYS_dup, libc::SYS_dup3, libc::SYS_ftruncate, libc::SYS_fallocate, libc::SYS_memfd_create,
    libc::SYS_mmap, libc::SYS_munmap, libc::SYS_mprotect, libc::SYS_mremap, libc::SYS_madvise, libc::SYS_brk,
    libc::SYS_ppoll, libc::SYS_epoll_create1, libc::SYS_epoll_ctl, libc::SYS_epoll_pwait, libc::SYS_epoll_pwait2,
    libc::SYS_pipe2, libc::SYS_eventfd2, libc::SYS_signalfd4, libc::SYS_ioctl,
    libc::SYS_socket, libc::SYS_socketpair, libc::SYS_bind, libc::SYS_accept, libc::SYS_accept4,
    libc::SYS_getsockname, libc::SYS_getpeername, libc::SYS_getsockopt, libc::SYS_setsockopt,
    libc::SYS_sendto, libc::SYS_recvfrom, libc::SYS_sendmsg, libc::SYS_recvmsg, libc::SYS_shutdown,
    libc::SYS_futex, libc::SYS_membarrier, libc::SYS_set_robust_list, libc::SYS_get_robust_list, libc::SYS_rseq,
    libc::SYS_clone, libc::SYS_clone3, libc::SYS_exit, libc::SYS_exit_group, libc::SYS_set_tid_address,
    libc::SYS_rt_sigaction, libc::SYS_rt_sigprocmask, libc::SYS_rt_sigreturn, libc::SYS_sigaltstack,
    libc::SYS_tgkill, libc::SYS_restart_syscall,
    libc::SYS_timer_create, libc::SYS_timer_settime, libc::SYS_timer_delete,
    libc::SYS_clock_gettime, libc::SYS_clock_getres, libc::SYS_clock_nanosleep, libc::SYS_nanosleep,
    libc::SYS_gettimeofday, libc::SYS_sched_yield, libc::SYS_sched_getaffinity, libc::SYS_getcpu,
    libc::SYS_getpid, libc::SYS_gettid, libc::SYS_getppid, libc::SYS_getuid, libc::SYS_geteuid,
    libc::SYS_getgid, libc::SYS_getegid, libc::SYS_getrandom, libc::SYS_uname, libc::SYS_sysinfo,
    libc::SYS_prlimit64, libc::SYS_getrusage, libc::SYS_prctl, libc::SYS_bpf, libc::SYS_getcwd,
    libc::SYS_poll,
    libc::SYS_epoll_wait,
    libc::SYS_readlink,
    libc::SYS_open,
    libc::SYS_stat,
    libc::SYS_lstat,
    libc::SYS_access,
];

fn close_calls() -> io::Result<()> {
    let step = |code: u32, jt: usize, jf: usize, k: u32| libc::sock_filter {
        code: code as u16,
        jt: jt as u8,
        jf: jf as u8,
        k,
    };
    let (load, equal, ret) = (
        libc::BPF_LD | libc::BPF_W | libc::BPF_ABS,
        libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K,
        libc::BPF_RET | libc::BPF_K,
    );
    // The offsets are those of `struct seccomp_data`: 0 for the number of the call, 4 for the
    // architecture.
    let mut filter = vec![step(load, 0, 0, 4), step(equal, 1, 0, ARCH)];
    filter.push(step(ret, 0, 0, libc::SECCOMP_RET_KILL_PROCESS));
    filter.push(step(load, 0, 0, 0));
    const _: () = assert!(CALLS.len() < 256, "as far as one can jump");
    for (i, call) in CALLS.iter().enumerate() {
        filter.push(step(equal, CALLS.len() - i, 0, *call as u32));
    }
    filter.push(step(ret, 0, 0, libc::SECCOMP_RET_ERRNO | libc::EPERM as u32));
    filter.push(step(ret, 0, 0, libc::SECCOMP_RET_ALLOW));
    let program = libc::sock_fprog { len: filter.len() as u16, filter: filter.as_mut_ptr() };
    // SAFETY: the filter lives during the call, and `len` is its true length.
    checked(unsafe {
        libc::syscall(
            libc::SYS_seccomp,
            libc::SECCOMP_SET_MODE_FILTER,
            libc::SECCOMP_FILTER_FLAG_TSYNC,
            &raw const program,
        )
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    /// Runs in a thread of its own, because Landlock restricts only the calling thread.
    #[test]
    fn the_front_changes_no_file_and_reads_few() {
        // SAFETY: this call only asks for the version, and accesses no memory.
        if unsafe { libc::syscall(libc::SYS_landlock_create_ruleset, 0, 0, 1) } < 1 {
            eprintln!("SKIPPED: the_front_changes_no_file_and_reads_few: no Landlock");
            return;
        }
        let dir = tempfile::tempdir().unwrap();
        let at = |name: &str| dir.path().join(name);
        fs::write(at("there"), "as it was").unwrap();
        std::thread::scope(|scope| {
            let confined = scope.spawn(|| {
                // SAFETY: the call takes plain numbers, and changes this thread only.
                assert_eq!(unsafe { libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) }, 0);
                close_files().unwrap();
                let tried = [
                    ("write", fs::write(at("there"), "else").err()),
                    ("append", fs::OpenOptions::new().append(true).open(at("there")).err()),
                    ("create", fs::write(at("new"), "").err()),
                    ("read", fs::read(at("there")).err()),
                    ("list", fs::read_dir(dir.path()).err()),
                    ("remove", fs::remove_file(at("there")).err()),
                    ("rename", fs::rename(at("there"), at("new")).err()),
                    ("link", fs::hard_link(at("there"), at("new")).err()),
                    ("symlink", std::os::unix::fs::symlink("there", at("new")).err()),
                    ("mkdir", fs::create_dir(at("new")).err()),
                    ("device", fs::OpenOptions::new().write(true).open("/dev/null").err()),
                    ("proc", fs::OpenOptions::new().write(true).open("/proc/self/comm").err()),
                    ("execute", std::process::Command::new("/bin/true").status().err()),
                ];
                for (what, refused) in tried {
                    assert_eq!(refused.map(|e| e.kind()), Some(io::ErrorKind::PermissionDenied), "{what}");
                }
                assert!(fs::read_to_string("/proc/self/stat").is_ok());
                assert!(fs::read_dir("/sys/devices/system/cpu").is_ok());
            });
            confined.join().unwrap();
        });
        assert_eq!(fs::read(at("there")).unwrap(), b"as it was");
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1);
    }
}
