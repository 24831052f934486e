#!/usr/bin/env python3
"""Threads and children in another network namespace than the program that made them.

    namespaces.py CASE PORT      prints what happens, line by line; needs root

In the namespace in which this starts, `namespaces.py serve PORT` listens on 127.0.0.1. The lines
must be the same on kernel sockets and on ours.
"""

import ctypes
import errno
import fcntl
import mmap
import os
import signal
import socket
import struct
import sys
import threading

libc = ctypes.CDLL(None, use_errno=True)
CLONE_NEWNET = 0x40000000
SIGCHLD = int(signal.SIGCHLD)
SYS = {"x86_64": (272, 308, 56, 435), "aarch64": (97, 268, 220, 435)}[os.uname().machine]
SYS_UNSHARE, SYS_SETNS, SYS_CLONE, SYS_CLONE3 = SYS
PORT = int(sys.argv[2])
print = __import__("functools").partial(print, flush=True)


def check(r):
    if r < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return r


def loopback_up():
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s:
        fcntl.ioctl(s, 0x8914, struct.pack("16sh22x", b"lo", 0x1 | 0x40))  # SIOCSIFFLAGS, IFF_UP | IFF_RUNNING


def attempt(port, sock=None):
    """The outcome of a connection attempt, in a word."""
    try:
        with sock or socket.socket() as s:
            s.settimeout(10)
            s.connect(("127.0.0.1", port))
            s.sendall(b"hello")
            return s.recv(100).decode()
    except OSError as e:
        return errno.errorcode.get(e.errno, str(e))


def serve_one(listener):
    listener.settimeout(20)
    c, _ = listener.accept()
    with c:
        c.setblocking(True)
        c.recv(100)
        c.sendall(b"from there")


def serve():
    """Answers each client in a thread of its own."""

    def answer(c):
        with c:
            while c.recv(100):
                c.sendall(b"from here")

    with socket.create_server(("127.0.0.1", PORT)) as s:
        while True:
            threading.Thread(target=answer, args=(s.accept()[0],), daemon=True).start()


def there():
    """Runs in the other namespace, in whatever thread or child entered it."""
    print("before lo is up:", attempt(PORT))
    loopback_up()
    print("nobody listens here:", attempt(PORT))
    with socket.create_server(("127.0.0.1", PORT)) as mine:
        t = threading.Thread(target=serve_one, args=(mine,))
        t.start()
        print("my own listener:", attempt(PORT))
        t.join()


def wait(pid):
    _, status = os.waitpid(pid, 0)
    print("child:", status)


def in_child(fork, enter):
    pid = fork()
    if pid == 0:
        try:
            enter()
            there()
        except BaseException as e:
            print("child failed:", repr(e))
            os._exit(1)
        os._exit(0)
    wait(check(pid))
    print("here:", attempt(PORT))


def clone3():
    args = ctypes.create_string_buffer(struct.pack("<11Q", CLONE_NEWNET, 0, 0, 0, SIGCHLD, 0, 0, 0, 0, 0, 0))
    return libc.syscall(ctypes.c_long(SYS_CLONE3), args, ctypes.c_long(88))


def clone_number():
    return libc.syscall(ctypes.c_long(SYS_CLONE), ctypes.c_long(CLONE_NEWNET | SIGCHLD), None, None, None, None)


def clone_libc():
    stack = mmap.mmap(-1, 8 << 20)
    top = ctypes.addressof(ctypes.c_char.from_buffer(stack)) + len(stack)

    def child(_):
        there()
        os._exit(0)

    kind = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)
    wait(check(libc.clone(kind(child), ctypes.c_void_p(top - 64), CLONE_NEWNET | SIGCHLD, None, None, None, None)))
    print("here:", attempt(PORT))


def elsewhere():
    """Makes a namespace and returns a descriptor of it."""
    r, w = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(r)
        check(libc.unshare(CLONE_NEWNET))
        loopback_up()
        os.write(w, b"x")
        signal.pause()
        os._exit(0)
    os.close(w)
    assert os.read(r, 1) == b"x"
    os.close(r)
    fd = os.open(f"/proc/{pid}/ns/net", os.O_RDONLY)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return fd


def threads():
    """One thread in each namespace at the same time. Sockets must stay in the namespace where they
    were made."""
    ns = elsewhere()
    early = socket.socket()
    kept = socket.create_connection(("127.0.0.1", PORT))
    went, done = threading.Event(), threading.Event()
    # A recently closed socket may be reused, but not in another namespace.
    print("here, before:", attempt(PORT), attempt(PORT))

    def other():
        check(libc.setns(ns, CLONE_NEWNET))
        print("there:", attempt(PORT))
        with socket.create_server(("127.0.0.1", PORT)) as mine:
            t = threading.Thread(target=serve_one, args=(mine,))
            t.start()
            print("there, own listener:", attempt(PORT))
            t.join()
        went.set()
        done.wait(20)
        print("there, a socket from here:", attempt(PORT, early))

    t = threading.Thread(target=other)
    t.start()
    went.wait(20)
    print("here, after:", attempt(PORT), attempt(PORT))
    kept.sendall(b"hello")
    print("a connection from before:", kept.recv(100).decode())
    kept.close()
    done.set()
    t.join()
    print("here, last:", attempt(PORT))


def back_and_forth():
    """Enters a namespace and returns, many times, as a container manager does."""
    here, ns = os.open("/proc/self/ns/net", os.O_RDONLY), elsewhere()
    for i in range(3):
        print("here:", attempt(PORT), attempt(PORT))
        by_number = [ctypes.c_long(n) for n in (SYS_SETNS, ns, CLONE_NEWNET)]
        check(libc.syscall(*by_number) if i % 2 else libc.setns(ns, 0))
        print("there:", attempt(PORT))
        check(libc.setns(here, CLONE_NEWNET))
    print("here:", attempt(PORT))


def inherited(workers):
    """Children in namespaces of their own accept on a listener of this namespace."""
    import select

    with socket.create_server(("127.0.0.1", 0), backlog=128) as listener:
        port = listener.getsockname()[1]
        listener.setblocking(False)
        pids = []
        for _ in range(workers):
            pid = os.fork()
            if pid == 0:
                check(libc.unshare(CLONE_NEWNET))
                ep = select.epoll()
                ep.register(listener, select.EPOLLIN)
                # In this namespace the address must be free, whatever the library does for the
                # inherited listener.
                socket.create_server(("127.0.0.1", port)).close()
                while True:
                    ep.poll()
                    try:
                        c, _ = listener.accept()
                    except BlockingIOError:
                        continue
                    with c:
                        c.settimeout(10)
                        c.sendall(c.recv(100) + b" back")
            pids.append(pid)
        # The parent only supervises its children, as a master does, and acts as their client.
        answers = {}
        for _ in range(40):
            a = attempt(port)
            answers[a] = answers.get(a, 0) + 1
        print("answers:", answers)
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


CASES = {
    "serve": serve,
    "unshare": lambda: in_child(os.fork, lambda: check(libc.unshare(CLONE_NEWNET))),
    "unshare-number": lambda: in_child(
        os.fork, lambda: check(libc.syscall(ctypes.c_long(SYS_UNSHARE), ctypes.c_long(CLONE_NEWNET)))
    ),
    "clone-number": lambda: in_child(clone_number, lambda: None),
    "clone3": lambda: in_child(clone3, lambda: None),
    "clone-libc": clone_libc,
    "threads": threads,
    "back-and-forth": back_and_forth,
    "inherited": lambda: inherited(2),
}


if __name__ == "__main__":
    CASES[sys.argv[1]]()
    print("ok")
