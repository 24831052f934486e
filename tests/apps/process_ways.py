#!/usr/bin/env python3
"""A server that serves each connection in a process which is made or confined in a different way.

    process_ways.py serve PORT    serves one connection for each way, then prints "ok"
    process_ways.py ask PORT      the client: sends 300 kB and receives them, for each way, then prints "ok"

The ways: fork by system-call number (clone, clone3); libc's _Fork and clone; a child that lowers RLIMIT_AS to what
a program of its size needs; a child whose seccomp filter forbids the calls that only the library makes.
"""

import ctypes
import mmap
import os
import resource
import signal
import socket
import struct
import sys

libc = ctypes.CDLL(None, use_errno=True)
SIGCHLD = int(signal.SIGCHLD)
SYS_CLONE, SYS_CLONE3 = 56, 435  # x86-64; aarch64: 220, 435
if os.uname().machine == "aarch64":
    SYS_CLONE = 220
#: Numbers of eventfd2, futex, membarrier, memfd_create, sendmsg, recvmsg, socketpair, getrandom.
FORBIDDEN = {"x86_64": (290, 202, 324, 319, 46, 47, 53, 318), "aarch64": (19, 98, 283, 279, 211, 212, 199, 278)}


def by_number():
    return libc.syscall(ctypes.c_long(SYS_CLONE), ctypes.c_long(SIGCHLD), None, None, None, None)


def clone3():
    # struct clone_args: flags, pidfd, child_tid, parent_tid, exit_signal, stack, …
    args = ctypes.create_string_buffer(struct.pack("<11Q", 0, 0, 0, 0, SIGCHLD, 0, 0, 0, 0, 0, 0))
    return libc.syscall(ctypes.c_long(SYS_CLONE3), args, ctypes.c_long(88))


def _fork():
    return libc._Fork()


def echo(c):
    c.settimeout(20)
    c.setblocking(True)
    while True:
        data = c.recv(65536)
        if not data:
            return
        c.sendall(data)


def limited(c):
    # The limit is twice what this interpreter needs without the library.
    resource.setrlimit(resource.RLIMIT_AS, (400 << 20, 400 << 20))
    with mmap.mmap(-1, 64 << 20) as m:
        m[::4096] = bytes(len(m) // 4096)
        echo(c)


def filtered(c):
    # Load the number of the call. If it is forbidden, kill the process; otherwise allow the call.
    numbers = FORBIDDEN[os.uname().machine]
    code = [struct.pack("<HBBI", 0x20, 0, 0, 0)]
    for i, n in enumerate(numbers):
        code.append(struct.pack("<HBBI", 0x15, len(numbers) - i, 0, n))
    code += [struct.pack("<HBBI", 0x06, 0, 0, 0x7FFF0000), struct.pack("<HBBI", 0x06, 0, 0, 0x80000000)]
    program = ctypes.create_string_buffer(b"".join(code))
    fprog = ctypes.create_string_buffer(struct.pack("<HxxxxxxQ", len(code), ctypes.addressof(program)))
    assert libc.prctl(38, 1, 0, 0, 0) == 0  # PR_SET_NO_NEW_PRIVS
    assert libc.prctl(22, 2, fprog, 0, 0) == 0  # PR_SET_SECCOMP, SECCOMP_MODE_FILTER
    echo(c)


def by_clone(c, served):
    """Calls libc's clone, which takes a function and a stack for the child."""
    stack = mmap.mmap(-1, 8 << 20)
    top = ctypes.addressof(ctypes.c_char.from_buffer(stack)) + len(stack)

    def child(_):
        served(c)
        os._exit(0)

    kind = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)
    return libc.clone(kind(child), ctypes.c_void_p(top - 64), SIGCHLD, None, None, None, None)


WAYS = [("syscall clone", by_number, echo), ("syscall clone3", clone3, echo), ("_Fork", _fork, echo)]
WAYS += [("clone", None, echo), ("fork, RLIMIT_AS", os.fork, limited), ("fork, seccomp", os.fork, filtered)]


def serve(port):
    with socket.create_server(("127.0.0.1", port)) as s:
        for name, fork, served in WAYS:
            c, _ = s.accept()
            pid = by_clone(c, served) if fork is None else fork()
            if pid == 0:
                served(c)
                os._exit(0)
            assert pid > 0, (name, os.strerror(ctypes.get_errno()))
            # From now on only the child has the connection. This close must not send an end to the
            # client.
            c.close()
            _, status = os.waitpid(pid, 0)
            assert status == 0, f"{name}: the child ended with status {status:#x}"
            print(name, flush=True)
    print("ok", flush=True)


def ask(port):
    for name, _, _ in WAYS:
        with socket.create_connection(("127.0.0.1", port), timeout=20) as c:
            for i in range(30):
                data = bytes([i + 1]) * 10000
                c.sendall(data)
                got = b""
                while len(got) < len(data):
                    more = c.recv(65536)
                    assert more, f"{name}: ended after {i} messages"
                    got += more
                assert got == data, name
            c.shutdown(socket.SHUT_WR)
            assert c.recv(1) == b"", name
    print("ok", flush=True)


if __name__ == "__main__":
    {"serve": serve, "ask": ask}[sys.argv[1]](int(sys.argv[2]))
