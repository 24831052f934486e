"""Runs a program as container engines do by default: confined.py ENGINE PROGRAM [ARGUMENT ...]

ENGINE is docker, podman, containerd (Kubernetes' RuntimeDefault), or podman3. As in its default
profile:

- the system calls below fail, and newer ones fail with ENOSYS;
- capabilities that a container does not get are dropped;
- processes, mounts, and System V IPC are in namespaces of their own;
- all files are read-only.
"""
import ctypes
import os
import struct
import sys

libc = ctypes.CDLL(None, use_errno=True)

# Source: moby/profiles/seccomp. Calls that no list allows without a capability, with their numbers
# on x86-64.
REFUSED = {
    "acct": 163, "add_key": 248, "bpf": 321, "clock_adjtime": 305, "clock_settime": 227, "delete_module": 176,
    "fanotify_init": 300, "finit_module": 313, "fsconfig": 431, "fsmount": 432, "fsopen": 430, "fspick": 433,
    "get_mempolicy": 239, "init_module": 175, "io_uring_enter": 426, "io_uring_register": 427, "io_uring_setup": 425,
    "ioperm": 173, "iopl": 172, "kcmp": 312, "kexec_file_load": 320, "kexec_load": 246, "keyctl": 250,
    "lookup_dcookie": 212, "mbind": 237, "mount": 165, "mount_setattr": 442, "move_mount": 429, "move_pages": 279,
    "open_by_handle_at": 304, "open_tree": 428, "perf_event_open": 298, "pidfd_getfd": 438, "pivot_root": 155,
    "process_madvise": 440, "process_vm_readv": 310, "process_vm_writev": 311, "ptrace": 101, "quotactl": 179,
    "reboot": 169, "request_key": 249, "set_mempolicy": 238, "setdomainname": 171, "sethostname": 170, "setns": 308,
    "settimeofday": 164, "swapoff": 168, "swapon": 167, "sysfs": 139, "syslog": 103, "umount2": 166, "unshare": 272,
    "uselib": 134, "userfaultfd": 323, "ustat": 136, "vhangup": 153,
}
CLONE3 = 435
MEMBARRIER = 324
# Differences of the other engines. podman: github.com/containers/common 0.50.1 (podman 4.3, Debian
# 12), pkg/seccomp/seccomp.json. podman3: an older version of this file, without membarrier.
# containerd: containerd 1.7, contrib/seccomp/seccomp_default.go. Calls that no kernel has are left
# out.
ALLOWED = {
    "podman": "clock_adjtime fsconfig fsmount fsopen fspick get_mempolicy keyctl mbind mount mount_setattr move_mount "
              "open_tree pidfd_getfd pivot_root process_vm_readv process_vm_writev ptrace reboot set_mempolicy setns "
              "syslog umount2 unshare",
    "containerd": "clock_adjtime io_uring_enter io_uring_register io_uring_setup ptrace",
}
REFUSED_TOO = {
    "podman": {"io_pgetevents": 333, "migrate_pages": 256, "vmsplice": 278},
    "containerd": {"migrate_pages": 256, "name_to_handle_at": 303},
}
# These calls fail with ENOSYS, in addition to those of docker's profile: futex_waitv, quotactl_fd,
# set_mempolicy_home_node.
UNKNOWN = {"podman": {248, 249, 425, 426, 427, 443, 449, 450}}
# First number after the calls that the profile knows.
NEW = 463
# CHOWN, DAC_OVERRIDE, FOWNER, FSETID, KILL, SETGID, SETUID, SETPCAP, NET_BIND_SERVICE, NET_RAW, SYS_CHROOT, MKNOD,
# AUDIT_WRITE, SETFCAP
CAPABILITIES = {0, 1, 3, 4, 5, 6, 7, 8, 10, 13, 18, 27, 29, 31}
NAMESPACES = 0x00020000 | 0x08000000 | 0x20000000  # mounts, IPC, processes


def check(result):
    if result != 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def errors(engine):
    """Maps the number of each refused system call to its error."""
    base = engine.rstrip("3")
    names = REFUSED | REFUSED_TOO.get(base, {})
    refused = {number: 1 for name, number in names.items() if name not in ALLOWED.get(base, "").split()}
    refused |= {number: 38 for number in UNKNOWN.get(base, ())}
    if base != "podman":
        refused[CLONE3] = 38
    if engine == "podman3":
        refused[MEMBARRIER] = 1
    return refused


def profile(refused):
    load, equal, at_least, give = 0x20, 0x15, 0x35, 0x06
    allow, error = 0x7FFF0000, 0x00050000
    code = [(load, 0, 0, 0), (at_least, 0, 1, NEW), (give, 0, 0, error | 38)]
    for number, errno in refused.items():
        code += [(equal, 0, 1, number), (give, 0, 0, error | errno)]
    return code + [(give, 0, 0, allow)]


def confine(refused):
    for capability in range(64):
        if capability not in CAPABILITIES and libc.prctl(24, capability, 0, 0, 0) != 0:
            break
    code = profile(refused)
    instructions = b"".join(struct.pack("HBBI", *c) for c in code)
    buffer = ctypes.create_string_buffer(instructions)
    program = struct.pack("HxxxxxxQ", len(code), ctypes.addressof(buffer))
    check(libc.prctl(22, 2, program, 0, 0))


def main():
    check(libc.unshare(NAMESPACES))
    pid = os.fork()
    if pid:
        # This process waits for the first process of the namespace, and ends with its status.
        sys.exit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
    libc.prctl(1, 9, 0, 0, 0)
    private, read_only = 0x44000, 0x1021
    check(libc.mount(None, b"/", None, private, None))
    check(libc.mount(b"proc", b"/proc", b"proc", 0, None))
    check(libc.mount(None, b"/", None, read_only, None))
    refused = errors(sys.argv[1])
    confine(refused)
    for number in {321, 438, 425, CLONE3, MEMBARRIER} & refused.keys():
        assert libc.syscall(number, 0, 0, 0, 0, 0) == -1 and ctypes.get_errno() == refused[number], number
    os.execvp(sys.argv[2], sys.argv[2:])


main()
