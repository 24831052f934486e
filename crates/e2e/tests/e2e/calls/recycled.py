"""Changes sockets in every possible way (by libc, by raw system calls, through names in /proc) and
closes them. The next socket must be as new. Prints its properties, which must be the same on stock
sockets."""

import ctypes
import fcntl
import mmap
import os
import select
import signal
import socket
import struct

F_SETSIG, F_GETSIG, FIOASYNC, SIOCSPGRP = 10, 11, 0x5452, 0x8902
MSG_FASTOPEN = 0x20000000
SYS_SHUTDOWN = 48
TCP_INFO, IP_TOS, SO_ATTACH_FILTER = 11, 1, 26
libc = ctypes.CDLL(None, use_errno=True)
signal.signal(signal.SIGIO, signal.SIG_IGN)
listener = socket.socket()
listener.bind(("127.0.0.1", 0))
listener.listen(64)
ADDRESS = listener.getsockname()


def attributes(s):
    poll = select.poll()
    poll.register(s, select.POLLIN | select.POLLOUT | select.POLLRDHUP)
    status = os.fstat(s.fileno())
    try:
        s.getpeername()
        peer = "a peer"
    except OSError as error:
        peer = error.errno
    try:
        filters = s.getsockopt(socket.SOL_SOCKET, SO_ATTACH_FILTER, 0)
    except OSError as error:
        filters = error.errno
    flags = fcntl.fcntl(s, fcntl.F_GETFL)
    return (
        f"flags {flags:x} cloexec {fcntl.fcntl(s, fcntl.F_GETFD)} owner {fcntl.fcntl(s, fcntl.F_GETOWN)} "
        f"signal {fcntl.fcntl(s, F_GETSIG)} mode {status.st_mode:o} of {status.st_uid}:{status.st_gid} "
        f"port {s.getsockname()[1]} {peer} state {s.getsockopt(socket.IPPROTO_TCP, TCP_INFO, 1)[0]} "
        f"poll {poll.poll(0)[0][1]:x} filter {filters} tos {s.getsockopt(socket.IPPROTO_IP, IP_TOS)} "
        f"reuse {s.getsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR)} "
        f"keepalive {s.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)}"
    )


def attempt(call, *arguments):
    try:
        call(*arguments)
    except OSError:
        pass


# Machine code: it loads rax, rdi, rsi, rdx, r10 from its first five arguments, then executes
# `syscall` and `ret`.
CODE = mmap.mmap(-1, 4096, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
CODE.write(bytes.fromhex("4889f8 4889f7 4889d6 4889ca 4d89c2 0f05 c3"))
below = ctypes.CFUNCTYPE(ctypes.c_long, *[ctypes.c_long] * 5)(ctypes.addressof(ctypes.c_char.from_buffer(CODE)))
HERE = ctypes.create_string_buffer(struct.pack("=H2s4s8x", 2, struct.pack(">H", ADDRESS[1]), b"\x7f\0\0\1"))
ANY = ctypes.create_string_buffer(struct.pack("=H14x", 2))


def raw(number, *arguments):
    """Makes the change by a syscall instruction of the program itself, which no library sees."""
    return lambda s: below(number, s.fileno(), *arguments, *[0] * (3 - len(arguments)))


def in_child(change):
    """Makes the change in another process that has the socket as well."""

    def there(s):
        pid = os.fork()
        if pid == 0:
            change(s)
            os._exit(0)
        os.waitpid(pid, 0)

    return there


def asynchronous(s):
    fcntl.ioctl(s, FIOASYNC, struct.pack("i", 1))


def owned(s):
    fcntl.fcntl(s, fcntl.F_SETOWN, os.getpid())


CHANGES = {
    "nothing": lambda s: None,
    "O_ASYNC by ioctl": asynchronous,
    "O_ASYNC by fcntl": lambda s: fcntl.fcntl(s, fcntl.F_SETFL, os.O_ASYNC),
    "O_ASYNC by a child": in_child(asynchronous),
    "owner": owned,
    "owner by ioctl": lambda s: fcntl.ioctl(s, SIOCSPGRP, struct.pack("i", os.getpid())),
    "owner by a child": in_child(owned),
    "signal": lambda s: fcntl.fcntl(s, F_SETSIG, signal.SIGUSR1),
    "other flags": lambda s: fcntl.fcntl(s, fcntl.F_SETFL, os.O_NONBLOCK | os.O_APPEND),
    "mode": lambda s: os.fchmod(s.fileno(), 0o600),
    "mode by name": lambda s: os.chmod(f"/proc/self/fd/{s.fileno()}", 0o400),
    "user": lambda s: attempt(os.fchown, s.fileno(), 65534, 65534),
    "close-on-exec": lambda s: os.set_inheritable(s.fileno(), True),
    "port": lambda s: s.bind(("127.0.0.1", 0)),
    "shutdown": lambda s: attempt(s.shutdown, socket.SHUT_RDWR),
    "shutdown by number": lambda s: libc.syscall(SYS_SHUTDOWN, s.fileno(), 2),
    "connect by a raw call": raw(42, ctypes.addressof(HERE), 16),
    "bind by a raw call": raw(49, ctypes.addressof(ANY), 16),
    "listen by a raw call": raw(50, 5),
    "shutdown by a raw call": raw(48, 0),
    "O_NONBLOCK by a raw call": raw(72, fcntl.F_SETFL, os.O_NONBLOCK),
    "O_ASYNC by a raw call": raw(72, fcntl.F_SETFL, os.O_ASYNC),
    "owner by a raw call": raw(72, fcntl.F_SETOWN, os.getpid()),
    "mode by a raw call": raw(91, 0o600),
    "user by a raw call": raw(93, 65534, 65534),
    "fast open": lambda s: s.sendto(b"x", MSG_FASTOPEN, ADDRESS),
    "fast open by sendmsg": lambda s: s.sendmsg([b"x"], [], MSG_FASTOPEN, ADDRESS),
    "fast open refused": lambda s: attempt(s.sendto, b"x", MSG_FASTOPEN, ("127.0.0.1", 1)),
    "connect refused": lambda s: attempt(s.connect, ("127.0.0.1", 1)),
    "options": lambda s: [s.setsockopt(*o, 1) for o in ((1, socket.SO_REUSEADDR), (1, socket.SO_KEEPALIVE))],
    "tos": lambda s: s.setsockopt(socket.IPPROTO_IP, IP_TOS, 0x10),
    "filter": lambda s: s.setsockopt(socket.SOL_SOCKET, SO_ATTACH_FILTER, _filter()),
    "a duplicate": lambda s: kept.append(os.dup(s.fileno())),
    "a child that lives on": lambda s: kept.append(_sleeper()),
}
kept = []


def _filter():
    code = ctypes.create_string_buffer(struct.pack("HBBI", 6, 0, 0, 0xFFFF))
    kept.append(code)
    return struct.pack("HxxxxxxP", 1, ctypes.addressof(code))


def _sleeper():
    pid = os.fork()
    if pid == 0:
        signal.pause()
    return pid


def accepted(s):
    """Returns the end at the server that belongs to this client, whatever was accepted before
    it."""
    me = s.getsockname()
    while True:
        server, peer = listener.accept()
        if peer == me:
            return server
        server.close()


for name, change in CHANGES.items():
    for when in ("before it connects", "when it is connected"):
        if when == "when it is connected" and name in ("port", "connect refused", "fast open refused"):
            continue
        s = socket.socket()
        server = None
        if when == "when it is connected":
            s.connect(ADDRESS)
            server = accepted(s)
        attempt(change, s)
        s.close()
        if server:
            server.close()
        fresh = socket.socket()
        print(f"{name} {when}: {attributes(fresh)}", flush=True)
        fresh.connect(ADDRESS)
        server = accepted(fresh)
        fresh.sendall(b"hello")
        assert server.recv(9) == b"hello"
        fresh.close()
        server.close()
for _ in range(20):
    s = socket.create_connection(ADDRESS)
    accepted(s).close()
    s.close()
for pid in kept:
    if isinstance(pid, int) and pid > 1000:
        attempt(os.kill, pid, signal.SIGKILL)
print("ok")
