"""A signal interrupts a blocking accept with SO_RCVTIMEO in one of two workers. The handler
restarts calls, but the kernel does not restart this one. Prints the error, its time, and the
number of listen sockets on the port after both workers have run."""

import ctypes
import errno
import os
import signal
import socket
import struct
import sys
import time

signal.alarm(50)
# Python's own handler of this signal does not restart calls.
signal.signal(signal.SIGINT, signal.SIG_DFL)
port = int(sys.argv[1])
libc = ctypes.CDLL(None, use_errno=True)
listener = socket.create_server(("127.0.0.1", port), backlog=128)


def listening():
    lines = open("/proc/net/tcp").read().splitlines()[1:]
    return sum(line.split()[1].endswith(f":{port:04X}") and line.split()[3] == "0A" for line in lines)


def accept():
    fd = libc.accept(listener.fileno(), None, None)
    if fd >= 0:
        os.close(fd)
    return fd


def limit(seconds, microseconds=0):
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", seconds, microseconds))


def child(work):
    pid = os.fork()
    if pid == 0:
        signal.alarm(50)
        while True:
            work()
    return pid


def pinned(cpu, work):
    def on_cpu():
        os.sched_setaffinity(0, [cpu])
        while True:
            work()

    return child(on_cpu)


def connect():
    socket.create_connection(("127.0.0.1", port)).close()


cpus = sorted(os.sched_getaffinity(0))[:2]
other = pinned(cpus[1], accept)
clients = [pinned(cpu, connect) for cpu in cpus]
os.sched_setaffinity(0, cpus[:1])
# A worker gets a queue only after the library has seen it come back to its call at once.
until = time.monotonic() + 15
while time.monotonic() < until and (listening() < 3 or until - time.monotonic() > 14):
    for _ in range(50):
        accept()
sockets = listening()
for pid in clients:
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
limit(0, 500000)
while accept() >= 0:
    pass

limit(4)
signal.signal(signal.SIGUSR1, lambda *_: None)
signal.siginterrupt(signal.SIGUSR1, False)
parent = os.getpid()


def wake():
    time.sleep(0.5)
    os.kill(parent, signal.SIGUSR1)
    os._exit(0)


child(wake)
started = time.monotonic()
assert accept() < 0
took = time.monotonic() - started
os.kill(other, signal.SIGKILL)
print(errno.errorcode[ctypes.get_errno()], "soon" if took < 3 else "late", sockets)
