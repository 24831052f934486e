#!/usr/bin/python3
"""interrupted.py [late] NAME...: calls these functions of libc so that each sleeps, on a connection of
its own. Then a signal arrives whose handler has SA_RESTART. Prints "NAME restarts" if the call
went on, or "NAME EINTR" if it failed.

late: the handler has no SA_RESTART. From soon after the beginning of the sleep, a process with a
higher priority keeps the first thread's CPU, and the signal arrives meanwhile. So the thread runs
again only after the signal, whatever has woken it before.

Both ends of each connection are in this process. A second thread waits until the first one sleeps,
and signals it. It waits until the first one has returned or sleeps again, and then lets the call
end."""
import ctypes
import errno
import os
import select
import signal
import socket
import sys
import threading
import time

libc = ctypes.CDLL(None, use_errno=True)
MAIN = threading.main_thread()
# Number of successive looks, 10 ms apart, that must find the thread asleep. It may also sleep for
# a moment before the call, for Python's global lock.
LOOKS = 12
FUTEX, FUTEX_PRIVATE_FLAG = 202, 128


class Iovec(ctypes.Structure):
    _fields_ = [("base", ctypes.c_void_p), ("len", ctypes.c_size_t)]


class Msghdr(ctypes.Structure):
    _fields_ = [("name", ctypes.c_void_p), ("namelen", ctypes.c_uint), ("iov", ctypes.POINTER(Iovec)),
                ("iovlen", ctypes.c_size_t), ("control", ctypes.c_void_p), ("controllen", ctypes.c_size_t),
                ("flags", ctypes.c_int)]


class Mmsghdr(ctypes.Structure):
    _fields_ = [("hdr", Msghdr), ("len", ctypes.c_uint)]


class Pollfd(ctypes.Structure):
    _fields_ = [("fd", ctypes.c_int), ("events", ctypes.c_short), ("revents", ctypes.c_short)]


buffer = ctypes.create_string_buffer(64)
iov = Iovec(ctypes.cast(buffer, ctypes.c_void_p), 1)
message = Msghdr(None, 0, ctypes.pointer(iov), 1, None, 0, 0)
messages = (Mmsghdr * 1)(Mmsghdr(message, 0))
event = ctypes.create_string_buffer(64)
one = ctypes.c_size_t(1)
size = ctypes.c_size_t(64)
# The offset -1 of preadv2 and pwritev2 means the descriptor's own position.
here = ctypes.c_long(-1)
pipe = os.pipe()
file = os.memfd_create("a byte")
os.write(file, b"x")


def fds(fd):
    return ctypes.byref(Pollfd(fd, select.POLLIN, 0))


def bits(fd):
    return ctypes.byref((ctypes.c_ulong * 16)(*[1 << fd % 64 if i == fd // 64 else 0 for i in range(16)]))


def instance(fd):
    ep = select.epoll()
    ep.register(fd, select.EPOLLIN)
    kept.append(ep)
    return ep.fileno()


def offset():
    return ctypes.byref(ctypes.c_long(0))


by = ctypes.byref
RECEIVES = {
    "read": lambda fd: (fd, buffer, one),
    "readv": lambda fd: (fd, by(iov), 1),
    "recv": lambda fd: (fd, buffer, one, 0),
    "recvfrom": lambda fd: (fd, buffer, one, 0, None, None),
    "recvmsg": lambda fd: (fd, by(message), 0),
    "recvmmsg": lambda fd: (fd, messages, 1, 0, None),
    "__read_chk": lambda fd: (fd, buffer, one, size),
    "__recv_chk": lambda fd: (fd, buffer, one, size, 0),
    "__recvfrom_chk": lambda fd: (fd, buffer, one, size, 0, None, None),
    "preadv2": lambda fd: (fd, by(iov), 1, here, 0),
    "preadv64v2": lambda fd: (fd, by(iov), 1, here, 0),
    "splice": lambda fd: (fd, None, pipe[1], None, one, 0),
    "poll": lambda fd: (fds(fd), ctypes.c_ulong(1), -1),
    "ppoll": lambda fd: (fds(fd), ctypes.c_ulong(1), None, None),
    "__poll_chk": lambda fd: (fds(fd), ctypes.c_ulong(1), -1, size),
    "__ppoll_chk": lambda fd: (fds(fd), ctypes.c_ulong(1), None, None, size),
    "select": lambda fd: (fd + 1, bits(fd), None, None, None),
    "pselect": lambda fd: (fd + 1, bits(fd), None, None, None, None),
    "epoll_wait": lambda fd: (instance(fd), event, 1, -1),
    "epoll_pwait": lambda fd: (instance(fd), event, 1, -1, None),
    "epoll_pwait2": lambda fd: (instance(fd), event, 1, None, None),
}
SENDS = {
    "write": lambda fd: (fd, buffer, one),
    "writev": lambda fd: (fd, by(iov), 1),
    "send": lambda fd: (fd, buffer, one, 0),
    "sendto": lambda fd: (fd, buffer, one, 0, None, 0),
    "sendmsg": lambda fd: (fd, by(message), 0),
    "sendmmsg": lambda fd: (fd, messages, 1, 0),
    "pwritev2": lambda fd: (fd, by(iov), 1, here, 0),
    "pwritev64v2": lambda fd: (fd, by(iov), 1, here, 0),
    "sendfile": lambda fd: (fd, file, offset(), one),
    "sendfile64": lambda fd: (fd, file, offset(), one),
}
ACCEPTS = {
    "accept": lambda fd: (fd, None, None),
    "accept4": lambda fd: (fd, None, None, 0),
}


def sleeps():
    """Whether the first thread sleeps. False: it has returned."""
    looks = 0
    while looks < LOOKS:
        if returned.is_set():
            return False
        time.sleep(0.01)
        looks = looks + 1 if is_in_the_call() else 0
    return True


def is_in_the_call():
    """Whether the first thread sleeps, but not for Python's global lock (a private futex)."""
    at = f"/proc/self/task/{MAIN.native_id}"
    state = open(f"{at}/stat").read().rsplit(")", 1)[1].split()[0]
    call = open(f"{at}/syscall").read().split()
    private = call[0] == str(FUTEX) and int(call[2], 16) & FUTEX_PRIVATE_FLAG
    return state == "S" and not private


def disturb(let_end):
    if late:
        os.sched_setaffinity(0, {cpus[1]})
        while not is_in_the_call():
            time.sleep(0.001)
        os.write(orders, b"x")
        time.sleep(0.2)
        signal.pthread_kill(MAIN.ident, signal.SIGUSR1)
        time.sleep(0.2)
        sleeps()
    elif sleeps():
        signal.pthread_kill(MAIN.ident, signal.SIGUSR1)
        sleeps()
    let_end()


def keep_cpu(orders):
    """Keeps a CPU for 300 ms, whenever a byte arrives."""
    os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
    while os.read(orders, 1):
        until = time.monotonic() + 0.3
        while time.monotonic() < until:
            pass
    os._exit(0)


def fill(sock):
    sock.setblocking(False)
    try:
        while True:
            sock.send(b"x" * 65536)
    except BlockingIOError:
        pass
    # Fill the buffer to its last byte: the last writes are smaller than a block.
    try:
        while True:
            sock.send(b"x")
    except BlockingIOError:
        sock.setblocking(True)


def drain(sock):
    sock.setblocking(False)
    until = time.monotonic() + 20
    while not returned.is_set() and time.monotonic() < until:
        try:
            sock.recv(1 << 20)
        except BlockingIOError:
            time.sleep(0.001)


def connect():
    kept.append(socket.create_connection(listener.getsockname(), timeout=20))


def run(name):
    if name in ACCEPTS:
        args, let_end = ACCEPTS[name](listener.fileno()), connect
    else:
        client = socket.create_connection(listener.getsockname())
        server, _ = listener.accept()
        kept.extend([client, server])
        if name in SENDS:
            fill(client)
            args, let_end = SENDS[name](client.fileno()), lambda: drain(server)
        else:
            args, let_end = RECEIVES[name](client.fileno()), lambda: server.send(b"y")
    function = getattr(libc, name)
    function.restype = ctypes.c_long if name in SENDS or name in RECEIVES else ctypes.c_int
    returned.clear()
    other = threading.Thread(target=disturb, args=[let_end])
    other.start()
    r = ctypes.c_int(function(*args)).value
    error = ctypes.get_errno()
    returned.set()
    other.join()
    print(name, "restarts" if r >= 0 else errno.errorcode[error], flush=True)


names = sys.argv[1:]
late = names[0] == "late"
if late:
    names.pop(0)
    cpus = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cpus[0]})
    ordered, orders = os.pipe()
    if os.fork() == 0:
        os.close(orders)
        keep_cpu(ordered)
kept = []
returned = threading.Event()
listener = socket.create_server(("127.0.0.1", 0))
# Python installs a handler of SIGINT without SA_RESTART. If handlers disagree about it, `accept`
# fails with EINTR (docs/limits.md), so both signals get the same handler.
for number in (signal.SIGINT, signal.SIGUSR1):
    signal.signal(number, lambda *_: None)
    signal.siginterrupt(number, late)
for each in names:
    run(each)
print("ok")
