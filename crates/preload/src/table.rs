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
    sockets: "common options recorded, others kept by the placeholder" fn setsockopt(fd: c_int, level: c_int, name: c_int, val: *const c_void, len: socklen_t) -> c_int;
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
    descriptors: "another number for the same connection" fn dup2(old: c_int, new: c_int) -> c_int;
    descriptors: "another number for the same connection" fn dup3(old: c_int, new: c_int, flags: c_int) -> c_int;
    descriptors: "O_NONBLOCK and F_DUPFD; the rest by the placeholder" fn fcntl(fd: c_int, cmd: c_int, arg: c_ulong) -> c_int;
    descriptors: "as fcntl" fn fcntl64(fd: c_int, cmd: c_int, arg: c_ulong) -> c_int;
    descriptors: "FIONBIO, FIONREAD, SIOCOUTQ, SIOCATMARK" fn ioctl(fd: c_int, request: c_ulong, arg: c_ulong) -> c_int;
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
    process: "as fork: a child that shares our memory would close the parent's connections" fn vfork() -> pid_t;
    process: "a fork that runs no handlers: ours run" fn _Fork() -> pid_t;
    process: "with memory of its own, the child is a fork" fn clone(f: *mut c_void, stack: *mut c_void, flags: c_int, arg: *mut c_void, parent_tid: *mut c_void, tls: *mut c_void, child_tid: *mut c_void) -> c_int;
    process: "everything becomes the kernel's before a filter of system calls is set" fn prctl(option: c_int, a: c_ulong, b: c_ulong, c: c_ulong, d: c_ulong) -> c_int;
    process: "shared memory off when the network namespace changes" fn unshare(flags: c_int) -> c_int;
    process: "shared memory off when the network namespace changes" fn setns(fd: c_int, kind: c_int) -> c_int;
    process: "a lower limit counts for the descriptors that we keep, too" fn setrlimit(resource: c_uint, limit: *const rlimit) -> c_int;
    process: "as setrlimit" fn setrlimit64(resource: c_uint, limit: *const rlimit) -> c_int;
    process: "as setrlimit" fn prlimit(pid: pid_t, resource: c_uint, new: *const rlimit, old: *mut rlimit) -> c_int;
    process: "as setrlimit" fn prlimit64(pid: pid_t, resource: c_uint, new: *const rlimit, old: *mut rlimit) -> c_int;
    process: "the call of that number, as if made by its name" fn syscall(number: c_long, a: c_ulong, b: c_ulong, c: c_ulong, d: c_ulong, e: c_ulong, f: c_ulong) -> c_long;
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
    process: "a stream over our read and write; an undecided socket becomes the kernel's" fn fdopen(fd: c_int, mode: *const c_char) -> *mut c_void;
}

// Functions with variable arguments: looked at, and passed on as they came, or
// called with a list.
//
// family: "what it does on our path" what_happens_first fn name;
variadic_table! {
    process: "as execve" list fn execl;
    process: "as execve" list_by_path fn execlp;
    process: "as execve" list_and_environment fn execle;
    io: "the connection becomes the kernel's first" hand_over fn dprintf;
    io: "as dprintf" hand_over fn __dprintf_chk;
}
