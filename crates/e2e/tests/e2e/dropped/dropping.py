#!/usr/bin/env python3
"""Servers that give up root's rights, in the order in which well-known servers do it.

    dropping.py serve HOW PORT    until it is killed
    dropping.py ask PORT N        N connections one after the other, each answered; then "ok"

HOW:

- workers: as nginx; each child becomes nobody and accepts.
- alone: as haproxy; one process listens, then becomes nobody.
- chroot: the same in an empty root directory.
- session: as vsftpd; root accepts, and a child becomes nobody and serves.
- toggle: root acts as nobody for a moment, again and again.
- served: root accepts, then becomes nobody and accepts.
- mixed: both root and nobody accept.
"""

import os
import select
import signal
import socket
import sys
import tempfile
import time

NOBODY = 65534


def drop():
    os.setgroups([])
    os.setgid(NOBODY)
    os.setuid(NOBODY)


def echo(c):
    c.setblocking(True)
    with c:
        c.settimeout(20)
        while data := c.recv(65536):
            c.sendall(data)


def serve(listener, n=None):
    listener.setblocking(False)
    ready = select.epoll()
    ready.register(listener, select.EPOLLIN)
    while n is None or n > 0:
        ready.poll()
        try:
            c, _ = listener.accept()
        except BlockingIOError:
            continue
        echo(c)
        if n is not None:
            n -= 1


def child(f):
    pid = os.fork()
    if pid == 0:
        f()
        os._exit(0)
    return pid


def server(how, port):
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind(("127.0.0.1", port))
    listener.listen(64)

    def worker():
        drop()
        serve(listener)

    if how == "workers":
        for _ in range(2):
            child(worker)
        time.sleep(3600)
    elif how in ("alone", "chroot"):
        time.sleep(0.5)  # the first connections wait
        if how == "chroot":
            os.chroot(tempfile.mkdtemp(dir="."))
            os.chdir("/")
        worker()
    elif how == "session":
        while True:
            c, _ = listener.accept()

            def session():
                listener.close()
                drop()
                echo(c)

            child(session)
            c.close()
    elif how == "toggle":
        while True:
            c, _ = listener.accept()
            os.setegid(NOBODY)
            os.seteuid(NOBODY)
            echo(c)
            os.seteuid(0)
            os.setegid(0)
    elif how == "served":
        serve(listener, 3)
        worker()
    elif how == "mixed":
        child(worker)
        serve(listener)


def ask(port, n):
    for i in range(n):
        with socket.create_connection(("127.0.0.1", port), timeout=20) as c:
            for size in (8, 3000, 100_000):
                data = os.urandom(size)
                c.sendall(data)
                got = b""
                while len(got) < size and (part := c.recv(size)):
                    got += part
                assert got == data, f"connection {i}: other bytes"
    print("ok")


if sys.argv[1] == "serve":
    server(sys.argv[2], int(sys.argv[3]))
else:
    ask(int(sys.argv[2]), int(sys.argv[3]))
