#!/usr/bin/env python3
"""Listeners on which another process accepts than the one that polls, or on which accept comes
late.

    super_server.py wait PORT WAY       polls, never accepts; starts a program without the library that accepts
    super_server.py own PORT PATH       accepts when the polling process tells it to
    super_server.py look PATH           polls the listener that `own` has made
    super_server.py busy PORT WAY N     is away for three seconds; accepts N connections then, and N more later
    super_server.py helper N            accepts N connections on descriptor 7
    super_server.py ask PORT N          N clients, one after the other
    super_server.py order PORT N        N connections while the server is away, in order, and N more later
"""

import os
import select
import shutil
import signal
import socket
import sys
import time

HELPER = """
import socket, sys
l = socket.socket(fileno=7)
l.settimeout(10)
for _ in range(int(sys.argv[1])):
    c, _ = l.accept()
    c.sendall(b"served")
    c.close()
"""


def wait(port, way):
    """As inetd and dovecot's master: `way` is how it waits, and what its child does before
    `exec`."""
    how, child = way.split("-")
    # Copy the interpreter, because the library would be loaded again into the same file.
    helper = shutil.copy(os.path.realpath(sys.executable), "/tmp/super_server.%d" % os.getpid())
    l = socket.create_server(("127.0.0.1", port))
    l.setblocking(False)
    print("listens", flush=True)
    if how == "epoll":
        e = select.epoll()
        e.register(l, select.EPOLLIN)
        e.poll()
    elif how == "edge":
        e = select.epoll()
        e.register(l, select.EPOLLIN | select.EPOLLET)
        e.poll()
    elif how == "poll":
        p = select.poll()
        p.register(l, select.POLLIN)
        p.poll()
    else:
        select.select([l], [], [])
    pid = os.fork()
    if pid == 0:
        drop = lambda: (os.setgroups([]), os.setgid(65534), os.setuid(65534))  # noqa: E731
        if child == "id":
            drop()
        if child == "root":
            os.chroot("/")
        os.dup2(l.fileno(), 7)
        if child == "late":
            drop()
        os.execve(helper, ["helper", "-c", HELPER, "3"], {"PYTHONHOME": sys.base_prefix})
    print("ended", os.waitpid(pid, 0)[1], flush=True)
    os.unlink(helper)


def helper(n):
    exec(HELPER.replace("sys.argv[1]", str(n)))


def own(port, path):
    l = socket.create_server(("127.0.0.1", port))
    meeting = socket.socket(socket.AF_UNIX)
    meeting.bind(path)
    meeting.listen(1)
    print("listens", flush=True)
    looks, _ = meeting.accept()
    socket.send_fds(looks, [b"x"], [l.fileno()])
    while looks.recv(1):
        c, _ = l.accept()
        c.sendall(b"served")
        c.close()
        looks.sendall(b"x")


def look(path):
    meeting = socket.socket(socket.AF_UNIX)
    meeting.connect(path)
    fd = socket.recv_fds(meeting, 1, 1)[1][0]
    p = select.poll()
    p.register(fd, select.POLLIN)
    print("looks", flush=True)
    while p.poll():
        meeting.sendall(b"x")
        meeting.recv(1)


def busy(port, way, n):
    l = socket.create_server(("127.0.0.1", port))
    if way == "edge":
        e = select.epoll()
        e.register(l, select.EPOLLIN | select.EPOLLET)
        l.setblocking(False)

    def accept():
        while True:
            try:
                return l.accept()[0]
            except BlockingIOError:
                e.poll()

    def serve():
        c = accept()
        c.setblocking(True)
        number = c.recv(1)
        c.sendall(number)
        print("served", number.decode(), flush=True)
        return c

    print("listens", flush=True)
    kept = [serve()]
    if way == "stopped":
        if os.fork() == 0:
            time.sleep(3)
            os.kill(os.getppid(), signal.SIGCONT)
            os._exit(0)
        os.kill(os.getpid(), signal.SIGSTOP)
    else:
        time.sleep(3)
    for _ in range(2 * n):
        kept.append(serve())
    print("ok", flush=True)
    for c in kept:
        c.recv(1)


def ask(port, n):
    for i in range(n):
        with socket.create_connection(("127.0.0.1", port), timeout=15) as c:
            c.settimeout(15)
            print("client", c.recv(100).decode(), flush=True)
    print("ok")


def order(port, n):
    def begin(i):
        c = socket.create_connection(("127.0.0.1", port), timeout=15)
        c.settimeout(15)
        c.sendall(b"%d" % i)
        return c

    def ends(c):
        print("client", c.recv(100).decode(), flush=True)

    first = begin(0)
    ends(first)
    away = []
    for i in range(n):
        # Some connections wait for longer than a second, and some come after that.
        time.sleep(2 if i == n - 2 else 0)
        away.append(begin(i % 10))
    for c in away:
        ends(c)
    for i in range(n):
        c = begin(i)
        ends(c)
        away.append(c)
    print("ok")


if __name__ == "__main__":
    globals()[sys.argv[1]](*[int(a) if a.isdigit() else a for a in sys.argv[2:]])
