//! What the front gives up.

use rustix::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::io;

const LAST: u32 = 63;
/// A user of no name, whose number nobody gives out (systemd's and Debian's ranges end before it), so
/// that no other process may signal or trace the front.
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

/// Gives up all capabilities, for good, and root. To be called while there is no other thread.
///
/// # Errors
/// Of the calls.
pub fn drop_privileges() -> io::Result<()> {
    // SAFETY: plain numbers; and structures as the call has them, which live during it.
    unsafe {
        for cap in 0..=LAST {
            // Those that the kernel does not know are refused, and so are all without CAP_SETPCAP.
            libc::prctl(libc::PR_CAPBSET_DROP, cap, 0, 0, 0);
        }
        libc::prctl(libc::PR_CAP_AMBIENT, libc::PR_CAP_AMBIENT_CLEAR_ALL, 0, 0, 0);
        // A user namespace that has no such user leaves root's number, without root's rights.
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

/// What the front still reads: others' /proc, the machine's CPUs and cgroups, whether a module is built in.
const READ: [&std::ffi::CStr; 3] = [c"/proc", c"/sys", c"/lib/modules"];

/// From linux/landlock.h: to read files, and directories; all of the first version.
const READ_FILE: u64 = 1 << 2;
const READ_DIR: u64 = 1 << 3;
const FIRST_VERSION: u64 = (1 << 13) - 1;

/// Closes the file system but for [`READ`] (Landlock), and keeps only the system calls of [`CALLS`]
/// (seccomp). To be called once everything is made, and while there is no other thread.
///
/// # Errors
/// There is no seccomp.
pub fn close() -> io::Result<()> {
    if let Err(e) = close_files() {
        tracing::warn!("no Landlock: {e}");
    }
    close_calls()
}

/// A descriptor, or why not.
fn opened(rc: libc::c_long) -> io::Result<OwnedFd> {
    checked(rc)?;
    // SAFETY: just made, and ours alone.
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
    // SAFETY: asks for the version; no memory is involved.
    let version = unsafe { libc::syscall(libc::SYS_landlock_create_ruleset, 0, 0, 1) };
    // To link between directories, and to truncate.
    handled |= if version >= 2 { 1 << 13 } else { 0 } | if version >= 3 { 1 << 14 } else { 0 };
    // SAFETY: `struct landlock_ruleset_attr` as of its first version.
    let made = unsafe { libc::syscall(libc::SYS_landlock_create_ruleset, &raw const handled, size_of::<u64>(), 0) };
    let rules = opened(made)?;
    for place in READ {
        // SAFETY: a C string.
        let there = unsafe { libc::open(place.as_ptr(), libc::O_PATH | libc::O_CLOEXEC) };
        let Ok(there) = opened(there.into()) else { continue };
        let beneath = Beneath { allowed: READ_FILE | READ_DIR, parent: there.as_raw_fd() };
        // SAFETY: the structure lives during the call; 1: it is about what is beneath a directory.
        checked(unsafe { libc::syscall(libc::SYS_landlock_add_rule, rules.as_raw_fd(), 1, &raw const beneath, 0) })?;
    }
    // SAFETY: no memory is involved.
    checked(unsafe { libc::syscall(libc::SYS_landlock_restrict_self, rules.as_raw_fd(), 0) })
}

#[cfg(target_arch = "x86_64")]
const ARCH: u32 = 0xC000_003E;
#[cfg(target_arch = "aarch64")]
const ARCH: u32 = 0xC000_00B7;

/// All system calls of the front's loop, and of its short threads. No `connect`, `listen`, `execve`,
/// `kill`, `ptrace`, `setns`, `unshare`, `mount`.
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
    #[cfg(target_arch = "x86_64")] libc::SYS_poll,
    #[cfg(target_arch = "x86_64")] libc::SYS_epoll_wait,
    #[cfg(target_arch = "x86_64")] libc::SYS_readlink,
    #[cfg(target_arch = "x86_64")] libc::SYS_open,
    #[cfg(target_arch = "x86_64")] libc::SYS_stat,
    #[cfg(target_arch = "x86_64")] libc::SYS_lstat,
    #[cfg(target_arch = "x86_64")] libc::SYS_access,
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
    // `struct seccomp_data`: the call's number, then the architecture.
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
    // SAFETY: the program lives during the call, and is as long as said.
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

    /// Landlock restricts the thread that asks for it.
    #[test]
    fn the_front_changes_no_file_and_reads_few() {
        // SAFETY: asks for the version; no memory is involved.
        if unsafe { libc::syscall(libc::SYS_landlock_create_ruleset, 0, 0, 1) } < 1 {
            eprintln!("SKIPPED: the_front_changes_no_file_and_reads_few: no Landlock");
            return;
        }
        let dir = tempfile::tempdir().unwrap();
        let at = |name: &str| dir.path().join(name);
        fs::write(at("there"), "as it was").unwrap();
        std::thread::scope(|scope| {
            let confined = scope.spawn(|| {
                // SAFETY: plain numbers; concerns this thread alone.
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
