#!/usr/bin/env python3
"""A thread sleeps in a call on a socket while another thread closes the descriptor. The call must
go on to its normal end, and so must the connection.

    closed.py      prints what the calls returned, and how much arrived; the same on every path
"""

import ctypes
import os
import socket
import tempfile
import threading
import time

MB = 1 << 20
BIG = 16 * MB
listener = socket.create_server(("127.0.0.1", 0))
libc = ctypes.CDLL(None, use_errno=True)


class Iovec(ctypes.Structure):
    _fields_ = [("base", ctypes.c_void_p), ("len", ctypes.c_size_t)]


class Msghdr(ctypes.Structure):
    _fields_ = [("name", ctypes.c_void_p), ("namelen", ctypes.c_uint), ("iov", ctypes.POINTER(Iovec)),
                ("iovlen", ctypes.c_size_t), ("control", ctypes.c_void_p), ("controllen", ctypes.c_size_t),
                ("flags", ctypes.c_int)]


class Mmsghdr(ctypes.Structure):
    _fields_ = [("hdr", Msghdr), ("len", ctypes.c_uint)]


def messages(buffers):
    """An array for sendmmsg and recvmmsg, with one buffer for each message."""
    vec = (Mmsghdr * len(buffers))()
    for m, b in zip(vec, buffers):
        m.hdr.iov = ctypes.pointer(Iovec(ctypes.addressof(b), len(b)))
        m.hdr.iovlen = 1
    return vec


def number():
    client = socket.create_connection(listener.getsockname())
    server = listener.accept()[0]
    return client, server.detach()


def during(name, call, fd, then):
    """Runs `call` in a thread, which sleeps in it when `fd` is closed; then runs `then`."""
    result = []
    thread = threading.Thread(target=lambda: result.append(call()))
    thread.start()
    time.sleep(0.15)
    os.close(fd)
    # The next call that makes a descriptor gets the closed number.
    other = os.dup(listener.fileno())
    time.sleep(0.05)
    seen = then()
    thread.join(10)
    os.close(other)
    print(name, *result, seen, "" if not thread.is_alive() else "still there")


def drained(client):
    n = 0
    while b := client.recv(MB):
        n += len(b)
    client.close()
    return n


def sends():
    file = tempfile.TemporaryFile()
    file.write(b"z" * BIG)
    file.flush()
    parts = [b"a" * (4 * MB)] * 4
    buffers = [ctypes.create_string_buffer(4 * MB) for _ in parts]
    calls = {
        "write": lambda fd: os.write(fd, b"a" * BIG),
        "writev": lambda fd: os.writev(fd, parts),
        "sendmmsg": lambda fd: libc.sendmmsg(fd, messages(buffers), 4, 0),
        "sendfile": lambda fd: os.sendfile(fd, file.fileno(), 0, BIG),
    }
    for name, call in calls.items():
        client, fd = number()
        during(name, lambda: call(fd), fd, lambda: drained(client))


def receives():
    def slowly(client, total, step):
        for _ in range(total // step):
            client.sendall(b"q" * step)
            time.sleep(0.001)
        return ""

    def all_of_it(fd):
        s = socket.socket(fileno=fd)
        try:
            return s.recv_into(bytearray(4 * MB), 4 * MB, socket.MSG_WAITALL)
        finally:
            s.detach()

    def several(fd):
        buffers = [ctypes.create_string_buffer(3) for _ in range(3)]
        n = libc.recvmmsg(fd, messages(buffers), 3, 0, None)
        return n, [b.raw for b in buffers]

    def parts(fd):
        buffers = [bytearray(3), bytearray(3), bytearray(10)]
        return os.readv(fd, buffers), buffers

    for name, call, total, step in [
        ("read", lambda fd: os.read(fd, 100), 8, 8),
        ("recv, all of it", all_of_it, 4 * MB, MB // 16),
        ("readv", parts, 10, 10),
        ("recvmmsg", several, 10, 10),
    ]:
        client, fd = number()
        during(name, lambda: call(fd), fd, lambda: slowly(client, total, step))
        client.close()


sends()
receives()
print("ok")
