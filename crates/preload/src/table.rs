//! The table of hooks: one entry for each function that `libfsocket.so` exports.
//!
//! Long: a table.
//!
//! ```text
//! family(properties) "what it does"
//!     fn name(arguments) -> result, lent how
//!     = form(code);
//! ```
//!
//! - `family` says where a body that is written by hand is (`hooks/FAMILY.rs`), and which
//!   properties the hook always has. Families and properties are functions of
//!   [`crate::hook::Hook`].
//! - `lent own`: in a child that runs in its parent's memory (`vfork`), the function of that name
//!   in `hooks/borrower.rs` runs; `lent same`: the hook itself. Without `lent`, libc's function
//!   runs there.
//! - `= form(code)`: the body is made from this code; `hooks/passed.rs` has the forms. Without it
//!   the body is the function `hooks::family::name`.
//!
//! From an entry the macros make the exported function with its guards (`hooks.rs`), and the call
//! of libc's function (`real.rs`). The entry also gives a name for plug-ins (`deep.rs`), a line of
//! docs/hooks.md, and a test case (`fsocket-hooktable`).

/// Calls a macro with the table.
macro_rules! hooks {
    ($then:ident) => {
        $then! {
            sockets(wakes, names_none) "placeholder from the pool or the kernel"
                fn socket(domain: c_int, ty: c_int, protocol: c_int) -> c_int;
            sockets() "kernel; the socket then is a listener or a kernel connection to be"
                fn bind(fd: c_int, addr: *const sockaddr, len: socklen_t) -> c_int;
            sockets(wakes) "kernel, registered with the monitor; workers may get local listen sockets"
                fn listen(fd: c_int, backlog: c_int) -> c_int;
            sockets(point, wakes) "SYN queues, then kernel queues: the worker's own, the global one"
                fn accept(fd: c_int, addr: *mut sockaddr, len: *mut socklen_t) -> c_int;
            sockets(point, wakes) "SYN queues, then kernel queues: the worker's own, the global one"
                fn accept4(fd: c_int, addr: *mut sockaddr, len: *mut socklen_t, flags: c_int) -> c_int;
            sockets(point, wakes) "a slot in a channel, else the kernel"
                fn connect(fd: c_int, addr: *const sockaddr, len: socklen_t) -> c_int;
            sockets(catches, child) "FIN in the ring"
                fn shutdown(fd: c_int, how: c_int) -> c_int;
            sockets(child) "from the connection"
                fn getsockname(fd: c_int, addr: *mut sockaddr, len: *mut socklen_t) -> c_int;
            sockets(child) "from the connection"
                fn getpeername(fd: c_int, addr: *mut sockaddr, len: *mut socklen_t) -> c_int;
            sockets(catches, child) "common options recorded, others kept by the placeholder; some move the connection to the kernel"
                fn setsockopt(fd: c_int, level: c_int, name: c_int, val: *const c_void, len: socklen_t) -> c_int;
            sockets(child) "common options recorded, others answered by the placeholder"
                fn getsockopt(fd: c_int, level: c_int, name: c_int, val: *mut c_void, len: *mut socklen_t) -> c_int;
            io(point, child) "ring"
                fn read(fd: c_int, buf: *mut c_void, n: size_t) -> ssize_t;
            io(point, child) "ring"
                fn write(fd: c_int, buf: *const c_void, n: size_t) -> ssize_t;
            io(point, child) "ring"
                fn readv(fd: c_int, iov: *const iovec, n: c_int) -> ssize_t;
            io(point, child) "ring; small vectors are one record"
                fn writev(fd: c_int, iov: *const iovec, n: c_int) -> ssize_t;
            io(point, child) "ring"
                fn recv(fd: c_int, buf: *mut c_void, n: size_t, flags: c_int) -> ssize_t;
            io(point, child) "ring"
                fn send(fd: c_int, buf: *const c_void, n: size_t, flags: c_int) -> ssize_t;
            io(point, child) "ring"
                fn recvfrom(fd: c_int, buf: *mut c_void, n: size_t, flags: c_int, addr: *mut sockaddr, len: *mut socklen_t) -> ssize_t;
            io(point, child) "ring; the address is ignored, as for any connected TCP socket"
                fn sendto(fd: c_int, buf: *const c_void, n: size_t, flags: c_int, addr: *const sockaddr, len: socklen_t) -> ssize_t;
            io(point, wakes, child) "ring"
                fn recvmsg(fd: c_int, msg: *mut msghdr, flags: c_int) -> ssize_t;
            io(point, child) "ring"
                fn sendmsg(fd: c_int, msg: *const msghdr, flags: c_int) -> ssize_t;
            io(point, wakes) "ring, message by message"
                fn recvmmsg(fd: c_int, vec: *mut mmsghdr, n: c_uint, flags: c_int, timeout: *mut timespec) -> c_int;
            io(point) "ring, message by message"
                fn sendmmsg(fd: c_int, vec: *mut mmsghdr, n: c_uint, flags: c_int) -> c_int;
            io(point) "ring"
                fn __read_chk(fd: c_int, buf: *mut c_void, n: size_t, cap: size_t) -> ssize_t;
            io(point) "ring"
                fn __recv_chk(fd: c_int, buf: *mut c_void, n: size_t, cap: size_t, flags: c_int) -> ssize_t;
            io(point) "ring"
                fn __recvfrom_chk(fd: c_int, buf: *mut c_void, n: size_t, cap: size_t, flags: c_int, addr: *mut sockaddr, len: *mut socklen_t) -> ssize_t;
            io(sleeps, child) "file read into the ring"
                fn sendfile(out: c_int, input: c_int, off: *mut off_t, n: size_t) -> ssize_t;
            io(sleeps) "file read into the ring"
                fn sendfile64(out: c_int, input: c_int, off: *mut off_t, n: size_t) -> ssize_t;
            io(point) "ring, at offset -1; ESPIPE at any other"
                fn preadv2(fd: c_int, iov: *const iovec, n: c_int, off: off_t, flags: c_int) -> ssize_t;
            io(point) "ring, at offset -1; ESPIPE at any other"
                fn pwritev2(fd: c_int, iov: *const iovec, n: c_int, off: off_t, flags: c_int) -> ssize_t;
            io(point) "as preadv2"
                fn preadv64v2(fd: c_int, iov: *const iovec, n: c_int, off: off_t, flags: c_int) -> ssize_t;
            io(point) "as pwritev2"
                fn pwritev64v2(fd: c_int, iov: *const iovec, n: c_int, off: off_t, flags: c_int) -> ssize_t;
            io() "moves the connection to the kernel first"
                fn vdprintf(fd: c_int, format: *const c_char, args: *mut c_void) -> c_int
                = before(io::to_kernel(fd));
            io() "as vdprintf"
                fn __vdprintf_chk(fd: c_int, flag: c_int, format: *const c_char, args: *mut c_void) -> c_int
                = before(io::to_kernel(fd));
            io(names_none) "moves the connection to the kernel first"
                fn aio_read(cb: *mut c_void) -> c_int
                = before(io::aio_to_kernel(&cb, 1));
            io(names_none) "as aio_read"
                fn aio_write(cb: *mut c_void) -> c_int
                = before(io::aio_to_kernel(&cb, 1));
            io(names_none) "as aio_read"
                fn aio_read64(cb: *mut c_void) -> c_int
                = before(io::aio_to_kernel(&cb, 1));
            io(names_none) "as aio_read"
                fn aio_write64(cb: *mut c_void) -> c_int
                = before(io::aio_to_kernel(&cb, 1));
            io(names_none) "as aio_read, for each"
                fn lio_listio(mode: c_int, list: *const *mut c_void, n: c_int, event: *mut c_void) -> c_int
                = before(io::aio_to_kernel(list, n));
            io(names_none) "as lio_listio"
                fn lio_listio64(mode: c_int, list: *const *mut c_void, n: c_int, event: *mut c_void) -> c_int
                = before(io::aio_to_kernel(list, n));
            io(point) "between ring and pipe"
                fn splice(input: c_int, in_off: *mut loff_t, out: c_int, out_off: *mut loff_t, n: size_t, flags: c_uint) -> ssize_t;
            io() "`EINVAL`, as of any socket"
                fn tee(input: c_int, out: c_int, n: size_t, flags: c_uint) -> ssize_t
                = before({ pool::let_go(input); pool::let_go(out) });
            sockets() "never at the mark"
                fn sockatmark(fd: c_int) -> c_int;
            descriptors(point, child) "FIN or RST, placeholder back to the pool"
                fn close(fd: c_int) -> c_int, lent own;
            descriptors(child) "another number for the same connection"
                fn dup(fd: c_int) -> c_int, lent own;
            descriptors() "EBADF for a number just closed, or the library's own; the rest by the placeholder"
                fn fstat(fd: c_int, buf: *mut c_void) -> c_int
                = or(descriptors::gone_or_shown(fd));
            descriptors() "EBADF as fstat; the placeholder is changed, and not recycled"
                fn fchmod(fd: c_int, mode: mode_t) -> c_int
                = or(descriptors::gone_or_shown(fd));
            descriptors() "as fchmod"
                fn fchown(fd: c_int, user: uid_t, group: gid_t) -> c_int
                = or(descriptors::gone_or_shown(fd));
            descriptors() "as fstat"
                fn fstat64(fd: c_int, buf: *mut c_void) -> c_int
                = or(descriptors::gone_or_shown(fd));
            descriptors() "as fstat; programs built before glibc 2.33"
                fn __fxstat(version: c_int, fd: c_int, buf: *mut c_void) -> c_int
                = or(descriptors::gone_or_shown(fd));
            descriptors() "as __fxstat"
                fn __fxstat64(version: c_int, fd: c_int, buf: *mut c_void) -> c_int
                = or(descriptors::gone_or_shown(fd));
            descriptors(wakes) "moves the other process's connection to the kernel first"
                fn pidfd_getfd(pidfd: c_int, target: c_int, flags: c_uint) -> c_int
                = instead(pidfd_transfer::obtain(pidfd, target, flags).answer());
            descriptors(child) "another number for the same connection"
                fn dup2(old: c_int, new: c_int) -> c_int, lent own;
            descriptors(child) "another number for the same connection"
                fn dup3(old: c_int, new: c_int, flags: c_int) -> c_int, lent own;
            descriptors(point, child) "O_NONBLOCK and F_DUPFD; signals move the connection to the kernel; the rest by the placeholder"
                fn fcntl(fd: c_int, cmd: c_int, arg: c_ulong) -> c_int, lent own
                = instead(descriptors::fcntl_with(fd, cmd, arg, real::fcntl));
            descriptors(point) "as fcntl"
                fn fcntl64(fd: c_int, cmd: c_int, arg: c_ulong) -> c_int, lent own
                = instead(descriptors::fcntl_with(fd, cmd, arg, real::fcntl64));
            descriptors(child) "FIONBIO, FIONREAD, SIOCOUTQ, SIOCATMARK; signals move the connection to the kernel; the rest by the placeholder"
                fn ioctl(fd: c_int, request: c_ulong, arg: c_ulong) -> c_int, lent own;
            descriptors() "each connection closed, our own descriptors spared"
                fn close_range(first: c_uint, last: c_uint, flags: c_int) -> c_int, lent own;
            descriptors() "as close_range"
                fn closefrom(first: c_int) -> (), lent own;
            readiness(point, child) "rings and kernel together"
                fn poll(fds: *mut pollfd, n: nfds_t, timeout: c_int) -> c_int;
            readiness(point, child) "rings and kernel together"
                fn ppoll(fds: *mut pollfd, n: nfds_t, timeout: *const timespec, mask: *const sigset_t) -> c_int;
            readiness(point) "rings and kernel together"
                fn __poll_chk(fds: *mut pollfd, n: nfds_t, timeout: c_int, cap: size_t) -> c_int;
            readiness(point) "rings and kernel together"
                fn __ppoll_chk(fds: *mut pollfd, n: nfds_t, timeout: *const timespec, mask: *const sigset_t, cap: size_t) -> c_int;
            readiness(point, child) "rings and kernel together"
                fn select(n: c_int, r: *mut fd_set, w: *mut fd_set, x: *mut fd_set, timeout: *mut timeval) -> c_int;
            readiness(point) "rings and kernel together"
                fn pselect(n: c_int, r: *mut fd_set, w: *mut fd_set, x: *mut fd_set, timeout: *const timespec, mask: *const sigset_t) -> c_int;
            readiness(wakes, child) "kernel, and known to us"
                fn epoll_create(size: c_int) -> c_int
                = around(readiness::made);
            readiness(wakes, child) "kernel, and known to us"
                fn epoll_create1(flags: c_int) -> c_int
                = around(readiness::made);
            readiness(child) "items of the library, or of the kernel"
                fn epoll_ctl(ep: c_int, op: c_int, fd: c_int, ev: *mut epoll_event) -> c_int;
            readiness(point, child) "rings and kernel together"
                fn epoll_wait(ep: c_int, evs: *mut epoll_event, max: c_int, timeout: c_int) -> c_int;
            readiness(point, child) "rings and kernel together"
                fn epoll_pwait(ep: c_int, evs: *mut epoll_event, max: c_int, timeout: c_int, mask: *const sigset_t) -> c_int;
            readiness(point) "rings and kernel together"
                fn epoll_pwait2(ep: c_int, evs: *mut epoll_event, max: c_int, timeout: *const timespec, mask: *const sigset_t) -> c_int;
            process(runs) "a fork without handlers: the library's handlers run"
                fn _Fork() -> pid_t
                = instead(process::forked(0, || real::_Fork().into()) as pid_t);
            process(runs, catches) "a forked child notes whether its connection was short; prints the line of --summary"
                fn _exit(status: c_int) -> (), lent own;
            process(runs, catches) "as _exit"
                fn _Exit(status: c_int) -> (), lent own
                = instead(process::_exit(status));
            process(runs) "with memory of its own, the child is a fork"
                fn clone(f: *mut c_void, stack: *mut c_void, flags: c_int, arg: *mut c_void, parent_tid: *mut c_void, tls: *mut c_void, child_tid: *mut c_void) -> c_int;
            process(runs) "moves everything to the kernel before a system-call filter is set"
                fn prctl(option: c_int, a: c_ulong, b: c_ulong, c: c_ulong, d: c_ulong) -> c_int;
            rights() "moves what the process shares with its fork group to the kernel before it gives up rights"
                fn setuid(uid: uid_t) -> c_int
                = around(credentials::changing);
            rights() "as setuid"
                fn seteuid(uid: uid_t) -> c_int
                = around(credentials::changing);
            rights() "as setuid"
                fn setreuid(real: uid_t, effective: uid_t) -> c_int
                = around(credentials::changing);
            rights() "as setuid"
                fn setresuid(real: uid_t, effective: uid_t, saved: uid_t) -> c_int
                = around(credentials::changing);
            rights() "as setuid"
                fn setgid(gid: gid_t) -> c_int
                = around(credentials::changing);
            rights() "as setuid"
                fn setegid(gid: gid_t) -> c_int
                = around(credentials::changing);
            rights() "as setuid"
                fn setregid(real: gid_t, effective: gid_t) -> c_int
                = around(credentials::changing);
            rights() "as setuid"
                fn setresgid(real: gid_t, effective: gid_t, saved: gid_t) -> c_int
                = around(credentials::changing);
            rights() "as setuid"
                fn setgroups(n: size_t, groups: *const gid_t) -> c_int
                = around(credentials::changing_groups);
            rights() "as setuid"
                fn initgroups(user: *const c_char, gid: gid_t) -> c_int
                = around(credentials::changing_groups);
            rights() "policy takes new sockets for this user's from then on"
                fn setfsuid(uid: uid_t) -> c_int
                = around(credentials::changing_thread);
            rights() "as setfsuid"
                fn setfsgid(gid: gid_t) -> c_int
                = around(credentials::changing_thread);
            rights() "as setuid"
                fn capset(header: *mut c_void, data: *const c_void) -> c_int
                = around(credentials::changing);
            process(wakes) "the monitor is greeted before"
                fn chroot(path: *const c_char) -> c_int
                = before(());
            process(wakes) "shared memory off when the network namespace changes; CLONE_FILES moves everything to the kernel first"
                fn unshare(flags: c_int) -> c_int;
            process(wakes) "shared memory off when the network namespace changes"
                fn setns(fd: c_int, kind: c_int) -> c_int;
            process() "a lower limit counts for the descriptors that we keep, too"
                fn setrlimit(resource: c_uint, limit: *const rlimit) -> c_int
                = around(|f| process::limiting(0, resource, limit.cast(), f));
            process() "as setrlimit"
                fn setrlimit64(resource: c_uint, limit: *const rlimit) -> c_int
                = around(|f| process::limiting(0, resource, limit.cast(), f));
            process() "as setrlimit"
                fn prlimit(pid: pid_t, resource: c_uint, new: *const rlimit, old: *mut rlimit) -> c_int
                = around(|f| process::limiting(pid, resource, new.cast(), f));
            process() "as setrlimit"
                fn prlimit64(pid: pid_t, resource: c_uint, new: *const rlimit, old: *mut rlimit) -> c_int
                = around(|f| process::limiting(pid, resource, new.cast(), f));
            process(runs) "shared memory is left before: locked, all that is mapped would be memory"
                fn mlockall(flags: c_int) -> c_int
                = around(|f| locked::locking(flags, process::single_threaded(), f));
            process(runs) "shared memory may be used again"
                fn munlockall() -> c_int
                = then(process::unlocked);
            process(runs, shell) "a program that loads the library inherits connections as they are; for others they move to the kernel first"
                fn execve(path: *const c_char, argv: *const *const c_char, envp: *const *const c_char) -> c_int, lent same;
            process(runs) "as execve"
                fn execv(path: *const c_char, argv: *const *const c_char) -> c_int, lent same
                = instead(process::execve(path, argv, process::current()));
            process(runs) "as execve"
                fn execvp(file: *const c_char, argv: *const *const c_char) -> c_int, lent same
                = instead(process::execvpe(file, argv, process::current()));
            process(runs) "as execve"
                fn execvpe(file: *const c_char, argv: *const *const c_char, envp: *const *const c_char) -> c_int, lent same;
            process(runs) "as execve"
                fn fexecve(fd: c_int, argv: *const *const c_char, envp: *const *const c_char) -> c_int, lent same;
            process(runs) "as execve"
                fn execveat(dir: c_int, path: *const c_char, argv: *const *const c_char, envp: *const *const c_char, flags: c_int) -> c_int, lent same;
            process(runs) "as execve, in the parent"
                fn posix_spawn(pid: *mut pid_t, path: *const c_char, actions: *const c_void, attributes: *const c_void, argv: *const *const c_char, envp: *const *const c_char) -> c_int;
            process(runs) "as posix_spawn"
                fn posix_spawnp(pid: *mut pid_t, file: *const c_char, actions: *const c_void, attributes: *const c_void, argv: *const *const c_char, envp: *const *const c_char) -> c_int;
            process(point) "moves inheritable connections to the kernel first"
                fn system(command: *const c_char) -> c_int
                = before(process::before_shell());
            process() "as system"
                fn popen(command: *const c_char, mode: *const c_char) -> *mut c_void
                = before(process::before_shell());
            uring() "the ring is known"
                fn io_uring_queue_init(entries: c_uint, ring: *mut c_void, flags: c_uint) -> c_int
                = then(|r| uring::made(ring, r));
            uring() "the ring is known"
                fn io_uring_queue_init_params(entries: c_uint, ring: *mut c_void, params: *mut c_void) -> c_int
                = then(|r| uring::made(ring, r));
            uring() "the ring is known"
                fn io_uring_queue_init_mem(entries: c_uint, ring: *mut c_void, params: *mut c_void, memory: *mut c_void, size: size_t) -> c_int
                = then(|r| uring::made(ring, r));
            uring() "the ring is known"
                fn io_uring_queue_mmap(fd: c_int, params: *mut c_void, ring: *mut c_void) -> c_int
                = then(|r| uring::made(ring, r));
            uring() "the ring is forgotten"
                fn io_uring_queue_exit(ring: *mut c_void) -> ();
            uring() "moves what the entries name to the kernel first"
                fn io_uring_submit(ring: *mut c_void) -> c_int
                = before(uring::submitting(ring));
            uring() "as io_uring_submit"
                fn io_uring_submit_and_wait(ring: *mut c_void, n: c_uint) -> c_int
                = before(uring::submitting(ring));
            uring() "as io_uring_submit"
                fn io_uring_submit_and_wait_timeout(ring: *mut c_void, cqe: *mut c_void, n: c_uint, timeout: *mut c_void, mask: *mut c_void) -> c_int
                = before(uring::submitting(ring));
            uring() "as io_uring_submit"
                fn io_uring_submit_and_wait_min_timeout(ring: *mut c_void, cqe: *mut c_void, n: c_uint, timeout: *mut c_void, least: c_uint, mask: *mut c_void) -> c_int
                = before(uring::submitting(ring));
            uring() "as io_uring_submit"
                fn io_uring_submit_and_wait_reg(ring: *mut c_void, cqe: *mut c_void, n: c_uint, index: c_int) -> c_int
                = before(uring::submitting(ring));
            uring() "as io_uring_submit"
                fn io_uring_submit_and_get_events(ring: *mut c_void) -> c_int
                = before(uring::submitting(ring));
            uring() "the ring is known"
                fn io_uring_setup(entries: c_uint, params: *mut c_void) -> c_int
                = then(|r: c_int| uring::setup(params as c_ulong, r.into()) as c_int);
            uring() "as io_uring_submit"
                fn io_uring_enter(fd: c_uint, submit: c_uint, n: c_uint, flags: c_uint, mask: *mut c_void) -> c_int
                = before(uring::enter(fd as c_int, submit, flags));
            uring() "as io_uring_submit"
                fn io_uring_enter2(fd: c_uint, submit: c_uint, n: c_uint, flags: c_uint, arg: *mut c_void, size: size_t) -> c_int
                = before(uring::enter(fd as c_int, submit, flags));
            uring() "moves registered descriptors to the kernel first"
                fn io_uring_register(fd: c_uint, op: c_uint, arg: *const c_void, n: c_uint) -> c_int
                = before(uring::register(op, arg.cast(), n));
            uring() "as io_uring_register"
                fn io_uring_register_files(ring: *mut c_void, files: *const c_int, n: c_uint) -> c_int
                = before(uring::named(files, n));
            uring() "as io_uring_register"
                fn io_uring_register_files_tags(ring: *mut c_void, files: *const c_int, tags: *const c_void, n: c_uint) -> c_int
                = before(uring::named(files, n));
            uring() "as io_uring_register"
                fn io_uring_register_files_update(ring: *mut c_void, off: c_uint, files: *const c_int, n: c_uint) -> c_int
                = before(uring::named(files, n));
            uring() "as io_uring_register"
                fn io_uring_register_files_update_tag(ring: *mut c_void, off: c_uint, files: *const c_int, tags: *const c_void, n: c_uint) -> c_int
                = before(uring::named(files, n));
            signals(shell, child) "what the program wants of SIGSEGV and SIGBUS is kept: the library handles them first, for arguments that are not there"
                fn sigaction(signal: c_int, new: *const sigaction, old: *mut sigaction) -> c_int
                = or(signals::act(signal, new, old));
            signals() "as sigaction"
                fn __sigaction(signal: c_int, new: *const sigaction, old: *mut sigaction) -> c_int
                = or(signals::act(signal, new, old));
            signals(child) "as sigaction"
                fn signal(signal: c_int, handler: sighandler_t) -> sighandler_t
                = or(signals::simple(signal, handler, SA_RESTART, true));
            signals() "as sigaction"
                fn ssignal(signal: c_int, handler: sighandler_t) -> sighandler_t
                = or(signals::simple(signal, handler, SA_RESTART, true));
            signals() "as sigaction"
                fn bsd_signal(signal: c_int, handler: sighandler_t) -> sighandler_t
                = or(signals::simple(signal, handler, SA_RESTART, true));
            signals() "as sigaction"
                fn sysv_signal(signal: c_int, handler: sighandler_t) -> sighandler_t
                = or(signals::simple(signal, handler, SA_RESETHAND | SA_NODEFER, false));
            signals() "as sigaction"
                fn __sysv_signal(signal: c_int, handler: sighandler_t) -> sighandler_t
                = or(signals::simple(signal, handler, SA_RESETHAND | SA_NODEFER, false));
            threads() "wakes a thread that sleeps in the library, which is cancelled when it holds no lock"
                fn pthread_cancel(thread: pthread_t) -> c_int;
            threads() "asynchronous cancellation is deferred inside our functions"
                fn pthread_setcanceltype(kind: c_int, old: *mut c_int) -> c_int;
            process(names_one) "a stream over the library's read and write; an undecided socket moves to the kernel"
                fn fdopen(fd: c_int, mode: *const c_char) -> *mut c_void;
        }
    };
}
pub(crate) use hooks;

/// Calls a macro with the functions that need other code, because they have variable arguments or
/// must see their real caller. Each entry is: family "what it does" first_step fn name;
macro_rules! variadic_hooks {
    ($then:ident) => {
        $then! {
            process "as execve" list fn execl;
            process "as execve" list_by_path fn execlp;
            process "as execve" list_and_environment fn execle;
            io "moves the connection to the kernel first" hand_over fn dprintf;
            io "as dprintf" hand_over fn __dprintf_chk;
            process "libc's: the child uses the kernel, and before its exec the parent does what it does before posix_spawn" own fn vfork;
            syscall "the call of that number, as if made by its name" own fn syscall;
            process "replaces the libc functions that a library loaded by path with RTLD_DEEPBIND has found" load fn dlopen;
        }
    };
}
pub(crate) use variadic_hooks;
