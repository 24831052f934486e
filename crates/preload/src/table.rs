// The one table of hooks. Included twice: by this library, where each line
// becomes an exported function and a way to the real one, and by the test kit,
// which checks the exports and writes docs/hooks.md from it.
//
// family: "what it does on our path" fn name(arguments) -> result;
hook_table! {
    sockets: "placeholder from the pool or the kernel" fn socket(domain: c_int, ty: c_int, protocol: c_int) -> c_int;
    sockets: "kernel; the socket then is a listener or a kernel connection to be" fn bind(fd: c_int, addr: *const sockaddr, len: socklen_t) -> c_int;
    sockets: "kernel, registered with the monitor; workers may get local listen sockets" fn listen(fd: c_int, backlog: c_int) -> c_int;
    sockets: "SYN queues, then the kernel's: the worker's own, the global one" fn accept(fd: c_int, addr: *mut sockaddr, len: *mut socklen_t) -> c_int;
    sockets: "SYN queues, then the kernel's: the worker's own, the global one" fn accept4(fd: c_int, addr: *mut sockaddr, len: *mut socklen_t, flags: c_int) -> c_int;
    sockets: "a slot in a channel, else the kernel" fn connect(fd: c_int, addr: *const sockaddr, len: socklen_t) -> c_int;
    sockets: "FIN in the ring" fn shutdown(fd: c_int, how: c_int) -> c_int;
    sockets: "from the connection" fn getsockname(fd: c_int, addr: *mut sockaddr, len: *mut socklen_t) -> c_int;
    sockets: "from the connection" fn getpeername(fd: c_int, addr: *mut sockaddr, len: *mut socklen_t) -> c_int;
    sockets: "common options recorded, others kept by the placeholder; with some it becomes the kernel's" fn setsockopt(fd: c_int, level: c_int, name: c_int, val: *const c_void, len: socklen_t) -> c_int;
    sockets: "common options recorded, others answered by the placeholder" fn getsockopt(fd: c_int, level: c_int, name: c_int, val: *mut c_void, len: *mut socklen_t) -> c_int;
    io: "ring" fn read(fd: c_int, buf: *mut c_void, n: size_t) -> ssize_t;
    io: "ring" fn write(fd: c_int, buf: *const c_void, n: size_t) -> ssize_t;
    io: "ring" fn readv(fd: c_int, iov: *const iovec, n: c_int) -> ssize_t;
    io: "ring; small vectors are one record" fn writev(fd: c_int, iov: *const iovec, n: c_int) -> ssize_t;
    io: "ring" fn recv(fd: c_int, buf: *mut c_void, n: size_t, flags: c_int) -> ssize_t;
    io: "ring" fn send(fd: c_int, buf: *const c_void, n: size_t, flags: c_int) -> ssize_t;
    io: "ring" fn recvfrom(fd: c_int, buf: *mut c_void, n: size_t, flags: c_int, addr: *mut sockaddr, len: *mut socklen_t) -> ssize_t;
    io: "ring; the address is ignored, as for any connected TCP socket" fn sendto(fd: c_int, buf: *const c_void, n: size_t, flags: c_int, addr: *const sockaddr, len: socklen_t) -> ssize_t;
    io: "ring" fn recvmsg(fd: c_int, msg: *mut msghdr, flags: c_int) -> ssize_t;
    io: "ring" fn sendmsg(fd: c_int, msg: *const msghdr, flags: c_int) -> ssize_t;
    io: "ring, message by message" fn recvmmsg(fd: c_int, vec: *mut mmsghdr, n: c_uint, flags: c_int, timeout: *mut timespec) -> c_int;
    io: "ring, message by message" fn sendmmsg(fd: c_int, vec: *mut mmsghdr, n: c_uint, flags: c_int) -> c_int;
    io: "ring" fn __read_chk(fd: c_int, buf: *mut c_void, n: size_t, cap: size_t) -> ssize_t;
    io: "ring" fn __recv_chk(fd: c_int, buf: *mut c_void, n: size_t, cap: size_t, flags: c_int) -> ssize_t;
    io: "ring" fn __recvfrom_chk(fd: c_int, buf: *mut c_void, n: size_t, cap: size_t, flags: c_int, addr: *mut sockaddr, len: *mut socklen_t) -> ssize_t;
    io: "file read into the ring" fn sendfile(out: c_int, input: c_int, off: *mut off_t, n: size_t) -> ssize_t;
    io: "file read into the ring" fn sendfile64(out: c_int, input: c_int, off: *mut off_t, n: size_t) -> ssize_t;
    io: "ring, at offset -1; ESPIPE at any other" fn preadv2(fd: c_int, iov: *const iovec, n: c_int, off: off_t, flags: c_int) -> ssize_t;
    io: "ring, at offset -1; ESPIPE at any other" fn pwritev2(fd: c_int, iov: *const iovec, n: c_int, off: off_t, flags: c_int) -> ssize_t;
    io: "as preadv2" fn preadv64v2(fd: c_int, iov: *const iovec, n: c_int, off: off_t, flags: c_int) -> ssize_t;
    io: "as pwritev2" fn pwritev64v2(fd: c_int, iov: *const iovec, n: c_int, off: off_t, flags: c_int) -> ssize_t;
    io: "the connection becomes the kernel's first" fn vdprintf(fd: c_int, format: *const c_char, args: *mut c_void) -> c_int;
    io: "as vdprintf" fn __vdprintf_chk(fd: c_int, flag: c_int, format: *const c_char, args: *mut c_void) -> c_int;
    io: "the connection becomes the kernel's first" fn aio_read(cb: *mut c_void) -> c_int;
    io: "as aio_read" fn aio_write(cb: *mut c_void) -> c_int;
    io: "as aio_read" fn aio_read64(cb: *mut c_void) -> c_int;
    io: "as aio_read" fn aio_write64(cb: *mut c_void) -> c_int;
    io: "as aio_read, for each" fn lio_listio(mode: c_int, list: *const *mut c_void, n: c_int, event: *mut c_void) -> c_int;
    io: "as lio_listio" fn lio_listio64(mode: c_int, list: *const *mut c_void, n: c_int, event: *mut c_void) -> c_int;
    io: "the connection becomes the kernel's first" fn splice(input: c_int, in_off: *mut loff_t, out: c_int, out_off: *mut loff_t, n: size_t, flags: c_uint) -> ssize_t;
    io: "as splice" fn tee(input: c_int, out: c_int, n: size_t, flags: c_uint) -> ssize_t;
    sockets: "never at the mark" fn sockatmark(fd: c_int) -> c_int;
    descriptors: "FIN or RST, placeholder back to the pool" fn close(fd: c_int) -> c_int;
    descriptors: "another number for the same connection" fn dup(fd: c_int) -> c_int;
    descriptors: "EBADF for a number just closed, or the library's own; the rest by the placeholder" fn fstat(fd: c_int, buf: *mut c_void) -> c_int;
    descriptors: "EBADF as fstat; the placeholder is changed, and not recycled" fn fchmod(fd: c_int, mode: mode_t) -> c_int;
    descriptors: "as fchmod" fn fchown(fd: c_int, user: uid_t, group: gid_t) -> c_int;
    descriptors: "as fstat" fn fstat64(fd: c_int, buf: *mut c_void) -> c_int;
    descriptors: "as fstat; programs built before glibc 2.33" fn __fxstat(version: c_int, fd: c_int, buf: *mut c_void) -> c_int;
    descriptors: "as __fxstat" fn __fxstat64(version: c_int, fd: c_int, buf: *mut c_void) -> c_int;
    descriptors: "what the other process has in shared memory becomes the kernel's first" fn pidfd_getfd(pidfd: c_int, target: c_int, flags: c_uint) -> c_int;
    descriptors: "another number for the same connection" fn dup2(old: c_int, new: c_int) -> c_int;
    descriptors: "another number for the same connection" fn dup3(old: c_int, new: c_int, flags: c_int) -> c_int;
    descriptors: "O_NONBLOCK and F_DUPFD; for signals it becomes the kernel's; the rest by the placeholder" fn fcntl(fd: c_int, cmd: c_int, arg: c_ulong) -> c_int;
    descriptors: "as fcntl" fn fcntl64(fd: c_int, cmd: c_int, arg: c_ulong) -> c_int;
    descriptors: "FIONBIO, FIONREAD, SIOCOUTQ, SIOCATMARK; for signals it becomes the kernel's; the rest by the placeholder" fn ioctl(fd: c_int, request: c_ulong, arg: c_ulong) -> c_int;
    descriptors: "each connection closed, our own descriptors spared" fn close_range(first: c_uint, last: c_uint, flags: c_int) -> c_int;
    descriptors: "as close_range" fn closefrom(first: c_int) -> ();
    readiness: "rings and kernel together" fn poll(fds: *mut pollfd, n: nfds_t, timeout: c_int) -> c_int;
    readiness: "rings and kernel together" fn ppoll(fds: *mut pollfd, n: nfds_t, timeout: *const timespec, mask: *const sigset_t) -> c_int;
    readiness: "rings and kernel together" fn __poll_chk(fds: *mut pollfd, n: nfds_t, timeout: c_int, cap: size_t) -> c_int;
    readiness: "rings and kernel together" fn __ppoll_chk(fds: *mut pollfd, n: nfds_t, timeout: *const timespec, mask: *const sigset_t, cap: size_t) -> c_int;
    readiness: "rings and kernel together" fn select(n: c_int, r: *mut fd_set, w: *mut fd_set, x: *mut fd_set, timeout: *mut timeval) -> c_int;
    readiness: "rings and kernel together" fn pselect(n: c_int, r: *mut fd_set, w: *mut fd_set, x: *mut fd_set, timeout: *const timespec, mask: *const sigset_t) -> c_int;
    readiness: "kernel, and known to us" fn epoll_create(size: c_int) -> c_int;
    readiness: "kernel, and known to us" fn epoll_create1(flags: c_int) -> c_int;
    readiness: "items of ours, or the kernel's" fn epoll_ctl(ep: c_int, op: c_int, fd: c_int, ev: *mut epoll_event) -> c_int;
    readiness: "rings and kernel together" fn epoll_wait(ep: c_int, evs: *mut epoll_event, max: c_int, timeout: c_int) -> c_int;
    readiness: "rings and kernel together" fn epoll_pwait(ep: c_int, evs: *mut epoll_event, max: c_int, timeout: c_int, mask: *const sigset_t) -> c_int;
    readiness: "rings and kernel together" fn epoll_pwait2(ep: c_int, evs: *mut epoll_event, max: c_int, timeout: *const timespec, mask: *const sigset_t) -> c_int;
    process: "a fork that runs no handlers: ours run" fn _Fork() -> pid_t;
    process: "a forked child notes whether its connection was short; prints the line of --summary" fn _exit(status: c_int) -> ();
    process: "as _exit" fn _Exit(status: c_int) -> ();
    process: "with memory of its own, the child is a fork" fn clone(f: *mut c_void, stack: *mut c_void, flags: c_int, arg: *mut c_void, parent_tid: *mut c_void, tls: *mut c_void, child_tid: *mut c_void) -> c_int;
    process: "everything becomes the kernel's before a filter of system calls is set" fn prctl(option: c_int, a: c_ulong, b: c_ulong, c: c_ulong, d: c_ulong) -> c_int;
    rights: "what the process shared with processes of the fork group that keep their rights becomes the kernel's, before it goes on with fewer" fn setuid(uid: uid_t) -> c_int;
    rights: "as setuid" fn seteuid(uid: uid_t) -> c_int;
    rights: "as setuid" fn setreuid(real: uid_t, effective: uid_t) -> c_int;
    rights: "as setuid" fn setresuid(real: uid_t, effective: uid_t, saved: uid_t) -> c_int;
    rights: "as setuid" fn setgid(gid: gid_t) -> c_int;
    rights: "as setuid" fn setegid(gid: gid_t) -> c_int;
    rights: "as setuid" fn setregid(real: gid_t, effective: gid_t) -> c_int;
    rights: "as setuid" fn setresgid(real: gid_t, effective: gid_t, saved: gid_t) -> c_int;
    rights: "as setuid" fn setgroups(n: size_t, groups: *const gid_t) -> c_int;
    rights: "as setuid" fn initgroups(user: *const c_char, gid: gid_t) -> c_int;
    rights: "new sockets are this user's from then on, for the kernel's policy" fn setfsuid(uid: uid_t) -> c_int;
    rights: "as setfsuid" fn setfsgid(gid: gid_t) -> c_int;
    rights: "as setuid" fn capset(header: *mut c_void, data: *const c_void) -> c_int;
    process: "the monitor is greeted before" fn chroot(path: *const c_char) -> c_int;
    process: "shared memory off when the network namespace changes; with CLONE_FILES everything becomes the kernel's before" fn unshare(flags: c_int) -> c_int;
    process: "shared memory off when the network namespace changes" fn setns(fd: c_int, kind: c_int) -> c_int;
    process: "a lower limit counts for the descriptors that we keep, too" fn setrlimit(resource: c_uint, limit: *const rlimit) -> c_int;
    process: "as setrlimit" fn setrlimit64(resource: c_uint, limit: *const rlimit) -> c_int;
    process: "as setrlimit" fn prlimit(pid: pid_t, resource: c_uint, new: *const rlimit, old: *mut rlimit) -> c_int;
    process: "as setrlimit" fn prlimit64(pid: pid_t, resource: c_uint, new: *const rlimit, old: *mut rlimit) -> c_int;
    process: "shared memory is left before: locked, all that is mapped would be memory" fn mlockall(flags: c_int) -> c_int;
    process: "shared memory may be used again" fn munlockall() -> c_int;
    process: "a program that loads the library inherits connections as they are; for others they become the kernel's first" fn execve(path: *const c_char, argv: *const *const c_char, envp: *const *const c_char) -> c_int;
    process: "as execve" fn execv(path: *const c_char, argv: *const *const c_char) -> c_int;
    process: "as execve" fn execvp(file: *const c_char, argv: *const *const c_char) -> c_int;
    process: "as execve" fn execvpe(file: *const c_char, argv: *const *const c_char, envp: *const *const c_char) -> c_int;
    process: "as execve" fn fexecve(fd: c_int, argv: *const *const c_char, envp: *const *const c_char) -> c_int;
    process: "as execve" fn execveat(dir: c_int, path: *const c_char, argv: *const *const c_char, envp: *const *const c_char, flags: c_int) -> c_int;
    process: "as execve, in the parent" fn posix_spawn(pid: *mut pid_t, path: *const c_char, actions: *const c_void, attributes: *const c_void, argv: *const *const c_char, envp: *const *const c_char) -> c_int;
    process: "as posix_spawn" fn posix_spawnp(pid: *mut pid_t, file: *const c_char, actions: *const c_void, attributes: *const c_void, argv: *const *const c_char, envp: *const *const c_char) -> c_int;
    process: "inheritable connections become the kernel's first" fn system(command: *const c_char) -> c_int;
    process: "as system" fn popen(command: *const c_char, mode: *const c_char) -> *mut c_void;
    uring: "the ring is known" fn io_uring_queue_init(entries: c_uint, ring: *mut c_void, flags: c_uint) -> c_int;
    uring: "the ring is known" fn io_uring_queue_init_params(entries: c_uint, ring: *mut c_void, params: *mut c_void) -> c_int;
    uring: "the ring is known" fn io_uring_queue_init_mem(entries: c_uint, ring: *mut c_void, params: *mut c_void, memory: *mut c_void, size: size_t) -> c_int;
    uring: "the ring is known" fn io_uring_queue_mmap(fd: c_int, params: *mut c_void, ring: *mut c_void) -> c_int;
    uring: "the ring is forgotten" fn io_uring_queue_exit(ring: *mut c_void) -> ();
    uring: "what the entries name becomes the kernel's first" fn io_uring_submit(ring: *mut c_void) -> c_int;
    uring: "as io_uring_submit" fn io_uring_submit_and_wait(ring: *mut c_void, n: c_uint) -> c_int;
    uring: "as io_uring_submit" fn io_uring_submit_and_wait_timeout(ring: *mut c_void, cqe: *mut c_void, n: c_uint, timeout: *mut c_void, mask: *mut c_void) -> c_int;
    uring: "as io_uring_submit" fn io_uring_submit_and_wait_min_timeout(ring: *mut c_void, cqe: *mut c_void, n: c_uint, timeout: *mut c_void, least: c_uint, mask: *mut c_void) -> c_int;
    uring: "as io_uring_submit" fn io_uring_submit_and_wait_reg(ring: *mut c_void, cqe: *mut c_void, n: c_uint, index: c_int) -> c_int;
    uring: "as io_uring_submit" fn io_uring_submit_and_get_events(ring: *mut c_void) -> c_int;
    uring: "the ring is known" fn io_uring_setup(entries: c_uint, params: *mut c_void) -> c_int;
    uring: "as io_uring_submit" fn io_uring_enter(fd: c_uint, submit: c_uint, n: c_uint, flags: c_uint, mask: *mut c_void) -> c_int;
    uring: "as io_uring_submit" fn io_uring_enter2(fd: c_uint, submit: c_uint, n: c_uint, flags: c_uint, arg: *mut c_void, size: size_t) -> c_int;
    uring: "registered descriptors become the kernel's first" fn io_uring_register(fd: c_uint, op: c_uint, arg: *const c_void, n: c_uint) -> c_int;
    uring: "as io_uring_register" fn io_uring_register_files(ring: *mut c_void, files: *const c_int, n: c_uint) -> c_int;
    uring: "as io_uring_register" fn io_uring_register_files_tags(ring: *mut c_void, files: *const c_int, tags: *const c_void, n: c_uint) -> c_int;
    uring: "as io_uring_register" fn io_uring_register_files_update(ring: *mut c_void, off: c_uint, files: *const c_int, n: c_uint) -> c_int;
    uring: "as io_uring_register" fn io_uring_register_files_update_tag(ring: *mut c_void, off: c_uint, files: *const c_int, tags: *const c_void, n: c_uint) -> c_int;
    signals: "what the program wants of SIGSEGV and SIGBUS is kept: the library handles them first, for arguments that are not there" fn sigaction(signal: c_int, new: *const sigaction, old: *mut sigaction) -> c_int;
    signals: "as sigaction" fn __sigaction(signal: c_int, new: *const sigaction, old: *mut sigaction) -> c_int;
    signals: "as sigaction" fn signal(signal: c_int, handler: sighandler_t) -> sighandler_t;
    signals: "as sigaction" fn ssignal(signal: c_int, handler: sighandler_t) -> sighandler_t;
    signals: "as sigaction" fn bsd_signal(signal: c_int, handler: sighandler_t) -> sighandler_t;
    signals: "as sigaction" fn sysv_signal(signal: c_int, handler: sighandler_t) -> sighandler_t;
    signals: "as sigaction" fn __sysv_signal(signal: c_int, handler: sighandler_t) -> sighandler_t;
    threads: "a thread that sleeps in us wakes up, and is cancelled when nothing of ours is held" fn pthread_cancel(thread: pthread_t) -> c_int;
    threads: "asynchronous cancellation is deferred inside our functions" fn pthread_setcanceltype(kind: c_int, old: *mut c_int) -> c_int;
    process: "a stream over our read and write; an undecided socket becomes the kernel's" fn fdopen(fd: c_int, mode: *const c_char) -> *mut c_void;
}

// Functions with variable arguments, and one that must not see another caller:
// looked at, and passed on as they came, or called with a list.
//
// family: "what it does on our path" what_happens_first fn name;
variadic_table! {
    process: "as execve" list fn execl;
    process: "as execve" list_by_path fn execlp;
    process: "as execve" list_and_environment fn execle;
    io: "the connection becomes the kernel's first" hand_over fn dprintf;
    io: "as dprintf" hand_over fn __dprintf_chk;
    process: "the real one: the child's calls are the kernel's, and before its exec the parent does what it does before posix_spawn" own fn vfork;
    syscall: "the call of that number, as if made by its name" own fn syscall;
    process: "what a library that is loaded with RTLD_DEEPBIND by its path has found in libc is set to ours" load fn dlopen;
}

// What a program may notice that the kernel would not do, in docs/limits.md and beside the hooks
// that it belongs to. What belongs to no hook is in crates/hooktable/limits.toml.
//
// Section: "what" of functions;
limit_table! {
    Programs: "A process keeps an event descriptor for each thread that ever waited in `poll`, `select` or epoll \
     beside others, up to 255, and one for each of those of its peers that it had to ring."
        of poll, select, epoll_wait;
    Programs: "A process that gives up rights for good takes the connections that it holds to the kernel, for processes of the fork group \
     that share them, too (`path_switch`). Where workers of one listener have different users, capabilities or groups the kernel \
     serves it (`fallback.option`)."
        of setuid, setreuid, setresuid, setgid, setregid, setresgid, setgroups, initgroups, capset;
    Zones: "The first time that a process has no number left, an `accept` with nothing to accept may say \
     EAGAIN where the kernel says EMFILE."
        of accept, accept4;
    Zones: "Threads that block in `accept` share the global queue. Workers that handle one \
     connection at a time do, too."
        of accept, accept4;
    Zones: "Options set on the listener while workers run reach another worker's queue at its next \
     `accept`."
        of setsockopt;
    Programs: "A program that installs a seccomp filter uses the kernel from then on, for connections \
     it has (`path_switch`), listeners and new connections (`fallback.disabled`), because \
     the filter knows nothing of the system calls of the library."
        of prctl, syscall;
    Programs: "A process in which a thread gets descriptors of its own (`CLONE_FILES` of `unshare`, `CLOSE_RANGE_UNSHARE`, \
     `clone` with `CLONE_VM` alone) uses the kernel from then on (`path_switch`). If it has one thread nothing changes."
        of unshare, close_range, clone, syscall;
    Programs: "The child of a `vfork` that uses a connection itself, before `exec`, takes it to the kernel (`path_switch`); \
     `poll`, `select` and epoll there see the kernel's sockets only. If another thread of the parent closes a connection between \
     `vfork` and `exec`, the next program inherits an unconnected socket."
        of vfork;
    Programs: "A connection that is inherited through `exec` or `posix_spawn` by a program that does \
     not load the library (or may not: ADR 9), through `system` or `popen`, or together \
     with an epoll instance; that gets one of the numbers 0 to 2, or that is used by `MSG_OOB`, `splice`, `dprintf` or `aio_*`, \
     becomes a kernel connection at that moment and stays one (`path_switch`). Where the \
     monitor lacks `CAP_NET_ADMIN` it shows other port numbers from then on. To edge-triggered epoll that moment is an edge. A listener that is inherited together with \
     an epoll instance gets its new connections in the kernel's queue, for all that hold it, and what waited before stays with \
     the others; \
     one that a program without the library inherits does from the `exec` on, if it was \
     prepared for that (`dup2`, also as a file action of `posix_spawn`, no longer \
     close-on-exec) or its parent has not accepted on it; else as soon as no program with the \
     library holds it, and until then what comes over shared memory is for that one alone. Its \
     zones end with that, for all who share it (`fallback.zone_shared`); what waits for another process of the fork group \
     follows at once where there is a balance, else when that process next looks."
        of execve, posix_spawn, system, popen, dup2, sendmsg, splice, dprintf, aio_read;
    Programs: "A library that is loaded with `RTLD_DEEPBIND` calls the kernel until `dlopen` returns \
     (its constructors), and afterwards, too, if it was not loaded by its path but by a name that is \
     searched for."
        of dlopen;
    Sockets: "Urgent data: the first makes the connection the kernel's (above). If a second urgent byte \
     comes right behind it, with nothing between, and the receiver had not read what lay in \
     the ring, the first one is lost to it (the kernel makes it an ordinary one); a peek with \
     `MSG_WAITALL` that began before does not wait for it. A switched connection of an IPv6 \
     socket answers `IPV6_V6ONLY` with 1, and does not take it once it has ended."
        of send, sendto, sendmsg, recv;
    Programs: "A connection that another process takes by `pidfd_getfd` becomes the kernel's \
     (`path_switch`); of a listener that is taken see below (`SCM_RIGHTS`). A taker without the \
     library, or of another user, gets an unconnected socket; so does, after a second \
     (`fallback.switch`), one that takes from a process that meanwhile neither waits for a \
     socket nor asks whether one is ready. (A socket that is not connected is got a second later.)"
        of pidfd_getfd;
    Programs: "A connection that is passed to another process (`SCM_RIGHTS`, `pidfd_getfd`) is the kernel's \
     (`path_switch`) while it is on its way and as long as several processes have it, and so are, from the first one that \
     is passed, all that come to the listener which has accepted it (`fallback.no_listener`). Such a connection goes over \
     (`path_upgrade`) once a process with the library, of the same user, has it alone and has made some calls on it; not if \
     it was passed by a process without the library, or while there was another monitor, or its sender has forked meanwhile."
        of recvmsg, sendmsg, pidfd_getfd;
    Programs: "A connection cannot be passed where its path cannot be switched (`fallback.switch`): while there is no \
     monitor, or while it has something to read that came before its peer left shared memory, and a whole ring (2 MiB) had \
     come without a pause, or the connection was to another network namespace or host. `sendmsg` fails with ETOOMANYREFS \
     then, and the connection goes on. A message that is sent by io_uring goes all the same, and its receiver gets an \
     unconnected socket."
        of sendmsg, sendmmsg;
    Programs: "Such a connection does not get one of the numbers 0 to 2 either: `dup2` and `dup3` fail with EBUSY and \
     leave the number what it was, `dup` fails with EMFILE, and the connection goes on. If `accept` gives one of these numbers to it, or a file action of \
     `posix_spawn`, it is an unconnected socket to stdio and to a program without the library."
        of dup2, dup3, dup, accept, posix_spawn;
    Programs: "A connection that waits to be accepted, and that its client has passed or taken to the kernel, is reset \
     when the listener is passed."
        of sendmsg, sendmmsg;
    Programs: "What watches a connection once (`EPOLLONESHOT`) and has fired reports an end or a reset once more if the \
     connection has become the kernel's: the kernel has no call that registers it without that."
        of epoll_ctl;
    Programs: "A listener that is passed to another process (`SCM_RIGHTS`, `pidfd_getfd`), or that comes from a program \
     without the library (socket activation), is in shared memory as long as a process with the library accepts on it, and \
     the kernel's (`fallback.no_listener`) while none does: between the close of the old process and the first wait of the \
     new one, too. Those with the library get all connections over shared memory. A process that is killed while it alone \
     accepts resets those that waited for it, unless another one with the library has used the listener; one that received \
     it by io_uring or by system calls of its own leaves it to the kernel. Where processes of several users accept on it \
     the kernel serves all of them (`fallback.option`)."
        of recvmsg, sendmsg;
    Programs: "What a program names on an io_uring becomes the kernel's at that moment: a connection \
     (`path_switch`), a listener with those that wait for it, for all processes that share it. Rings by liburing or by \
     `syscall` are looked into when entries are submitted; one that only reads files costs \
     nothing, and so does `epoll_ctl` on a ring (newer libuv, and with it uvloop). With a ring that the kernel polls (`IORING_SETUP_SQPOLL` by `syscall`, as \
     node with `UV_USE_IO_URING=1`; `fastsocket run` sets that to 0 unless it is set), one that cannot be mapped, or one that was made by system \
     calls of the program's own, the process uses the kernel from then on. Of the last kind \
     one is noticed that is there when the program calls `listen` or `connect`, or waits in \
     a call of libc's; a program that makes it afterwards and never calls libc again needs \
     `fastsocket run --no-shm`."
        of io_uring_submit, io_uring_enter, io_uring_setup, syscall;
    Sockets: "`TCP_INFO` answers the connection's state, its bytes and an estimate of its times; other counters, and \
     those of `TCP_CC_INFO` and `SO_MEMINFO`, are those of a fresh socket. Of a listener it says how many \
     connections wait; the `Recv-Q` of `ss` has those of the kernel's queue alone (`fastsocket ss` has all). `SO_SNDBUF` does not grow by itself, \
     `TCP_MAXSEG` knows nothing of what the other side has set, `TCP_QUICKACK` is as it was \
     set. Every other number of `getsockopt` is compared with the kernel's \
     (`tests/apps/calls.py`)."
        of getsockopt;
    Sockets: "A connection becomes the kernel's (`path_switch`, `fallback.option`), a listener leaves \
     shared memory and a new socket does not use it, when the program sets `O_ASYNC`, an \
     owner for signals, `SO_TIMESTAMP*`, `SO_TXTIME`, `SO_MAX_PACING_RATE`, `IP_LOCAL_PORT_RANGE`, `TCP_INQ`, \
     `TCP_SAVE_SYN`, `TCP_TX_DELAY`, `SO_PEEK_OFF`, `TCP_REPAIR`, `TCP_ULP`, keys, options in packets, a filter, a \
     selector of its own, or an option that the library does not know (`crates/ops/src/opts/effect.rs` has all \
     others); when a listener has `TCP_DEFER_ACCEPT` (its connections may go over); when it sends with `MSG_ZEROCOPY` on a socket with \
     `SO_ZEROCOPY`; and through `splice` and the like (above)."
        of fcntl, ioctl, setsockopt, send;
    Sockets: "Buffers: a ring holds 2 MiB per direction; the kernel's default buffers take up to 4 \
     MiB. A program that sets `SO_SNDBUF` is bounded by it and by the receiver's \
     `SO_RCVBUF`, within a factor of two of what the kernel takes; `SO_RCVBUF` alone bounds \
     nothing, as on loopback the default send buffer is larger than a ring."
        of setsockopt;
    Sockets: "`MSG_MORE`, `TCP_CORK` and Nagle's algorithm hold nothing back: the receiver may have at once what the \
     kernel keeps until a segment is full, an acknowledgement comes or 0.2 s are over (ADR 55). No program \
     can rely on that. A receiver that sleeps is woken for the first part."
        of send, setsockopt;
    Sockets: "`SIOCOUTQ` is what the receiver's buffer would not have taken."
        of ioctl;
    Sockets: "A receive of no bytes waits for data, the end, or a `shutdown` of its own side; in the kernel \
     whatever wakes it ends it, also room to send."
        of recv, recvfrom, recvmsg;
    Sockets: "The backlog of `listen` does not limit connections over shared memory (a SYN queue has \
     256 entries per client process; beyond that the kernel takes over)."
        of listen;
    Sockets: "`connect` has returned when a connection over shared memory waits to be accepted. If the listener \
     ends then, what the kernel would still refuse (`ECONNREFUSED`, where its queue is full) is a reset (`ECONNRESET`)."
        of connect, listen;
    Sockets: "The kernel's tables do not know connections over shared memory. The address of one that lives is refused \
     to programs with the library (`EADDRINUSE`, `EADDRNOTAVAIL`), but not to others, and one that its side has closed \
     (FIN_WAIT2, TIME_WAIT) holds none: a server can be started again at once, without `SO_REUSEADDR`, too."
        of bind, connect;
    Sockets: "Which listener of a port a connection reaches is the kernel's choice (address, family, device). \
     A nearer listener of a process without the library that comes while there are connections to \
     another one is noticed at once by a system monitor, within 2 s by a private one. Of several sockets at one address (`SO_REUSEPORT`), some of \
     them of processes without the library, those with it get all connections over shared memory. In \
     a network namespace that the monitor may not enter, listeners without the library are not seen."
        of connect, listen;
    Sockets: "A listener keeps the order of connections that come from one client process over one \
     path. Between client processes, between processes that accept on it together, and \
     between shared memory and kernel TCP there is no order; the kernel has one queue."
        of accept, accept4;
    Sockets: "`epoll_wait` reports connections over shared memory in the order in which they became ready, \
     as the kernel does, and behind them those of the kernel. Of several that a call before found empty \
     without sleeping, those that different threads sent on may change places. In an instance with more than 128 \
     channels (pairs of process and listener) an event in one that was at rest may be reported after later ones of \
     busy channels, for 10 us at most (ADR 61)."
        of epoll_wait, epoll_pwait, epoll_pwait2;
    Sockets: "An epoll instance that is used by several processes after a fork: what one of them \
     adds or removes the others do not see. A descriptor that is closed leaves an instance \
     at once, also if a forked process still holds the socket."
        of epoll_ctl;
    Sockets: "Connections and listeners that one thread closes while another sleeps in `poll` or `select` \
     on them end when that call returns, as in the kernel; from the 17th that the call names, \
     at once."
        of poll, select, close;
    Sockets: "A listener that one thread closes while another sleeps in `accept` on it takes no connection any more, \
     and the call ends with `EBADF` when something wakes that thread; the kernel would go on accepting for it."
        of accept, accept4, close;
    Sockets: "`accept` is restarted after a signal if all handlers have `SA_RESTART`; where handlers \
     disagree it returns `EINTR`."
        of accept, accept4;
    Sockets: "A connection that has ended cannot be bound again (after a reset the kernel allows \
     that). `TCP_USER_TIMEOUT` shows the peer its reset at once, where the kernel waits until that reads, and holds for \
     256 connections of a process that are behind at the same time. A negative `TCP_LINGER2` is stored and has no effect."
        of bind, setsockopt;
    Sockets: "A descriptor number just closed may still be a live (unconnected) kernel socket for a \
     moment, kept for the next connection: `/proc/self/fd` and system calls past libc see it. At \
     most 16 are kept, and none after the first sleep of 0.2 s in a call that waits for sockets."
        of close;
    Sockets: "An option that a program has set past libc on a connection over shared memory, one of its next sockets \
     may have. Flags are looked at; address, end of receiving, owner, signal and mode are when the program binds, \
     connects or asks that socket, but not if it only waits on it."
        of setsockopt;
    Sockets: "An option that is set on a listener counts for connections that come after it, as in the \
     kernel; for those that wait already, too, if it is not one of the common ones or a \
     process of its fork group that was there before it has set it."
        of setsockopt;
    Sockets: "A non-blocking `connect` that is asked again says `EISCONN` the first time, too, if the connection has \
     become the kernel's meanwhile; the kernel says 0 once."
        of connect;
    Sockets: "A connection that has become the kernel's before keeps its local address after `connect` with `AF_UNSPEC`, and \
     cannot be bound again; after a non-blocking `connect` that was reset the socket names no port, where the kernel still names \
     the one it had."
        of connect;
    Programs: "From its first connection over shared memory on, or its first call with an argument that is looked at, \
     a process has a handler of SIGSEGV and SIGBUS, by which calls with bad addresses return `EFAULT`. The \
     program's own handlers are called as before; a debugger sees these signals first. A thread that blocks \
     SIGSEGV or SIGBUS, a process that ignores them or has set a handler past libc since, and one whose \
     `memcpy` is not libc's (AddressSanitizer), die of such a call."
        of sigaction, signal, read, write;
    Sockets: "Of a vector or a long message with a bad address in it, what lies before that may be sent or \
     received; the kernel takes it or leaves it by pieces of other sizes."
        of readv, writev, recvmsg, sendmsg, send, recv;
    Sockets: "Firewall rules count by the kernel's handshake: where they may concern a connection, one in 2 s to each \
     destination is the kernel's (`fallback.kernel_first`). A connection that they redirect (DNAT) stays there (docs/policy.md)."
        of connect;
}
