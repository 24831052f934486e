"""Servers whose parent made the epoll instance before it forked. Every client must be answered."""

import os
import select
import signal
import socket

WORKERS, CLIENTS = 3, 60


def serve(c):
    with c:
        c.settimeout(10)
        b = c.recv(100)
        c.sendall(b.upper())
        c.recv(1)


def accepting(e, l):
    """The workers share the instance, which contains the listener."""
    while True:
        if e.poll(10):
            try:
                c, _ = l.accept()
            except BlockingIOError:
                continue
            c.setblocking(True)
            serve(c)


def one_more(e, l):
    """Each worker adds its accepted connections itself; the other workers do not know them."""
    mine = {}
    while True:
        for fd, _ in e.poll(10):
            if fd == l.fileno():
                try:
                    c, _ = l.accept()
                except BlockingIOError:
                    continue
                mine[c.fileno()] = c
                e.register(c, select.EPOLLIN)
            elif fd in mine:
                b = mine[fd].recv(100)
                if b:
                    mine[fd].sendall(b.upper())
                else:
                    e.unregister(fd)
                    mine.pop(fd).close()


def run(name, work, workers, flags=0, parent_goes=False):
    l = socket.socket()
    l.bind(("127.0.0.1", 0))
    l.listen(64)
    l.setblocking(False)
    e = select.epoll()
    e.register(l, select.EPOLLIN | flags)
    pids = []
    for _ in range(workers):
        pid = os.fork()
        if pid == 0:
            signal.alarm(60)
            work(e, l)
            os._exit(1)
        pids.append(pid)
    where = l.getsockname()
    if parent_goes:
        e.close()
        l.close()
    answered = 0
    try:
        cs = [socket.create_connection(where, timeout=10) for _ in range(workers)]
        for n in range(CLIENTS):
            c = cs.pop(0)
            c.settimeout(20)
            c.sendall(b"hello %d" % n)
            answered += c.recv(100) == b"HELLO %d" % n
            c.close()
            cs.append(socket.create_connection(where, timeout=10))
        for c in cs:
            c.close()
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
    print(name, answered)


run("all wait for the listener", accepting, WORKERS)
run("one at a time", accepting, WORKERS, select.EPOLLEXCLUSIVE)
run("a server in the background", one_more, 1, 0, True)
run("its parent keeps the instance", one_more, 1)
print("ok")
