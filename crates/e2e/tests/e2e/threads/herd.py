#!/usr/bin/env python3
"""Eight threads wait for connections of one listener: in accept, in poll, or each in an epoll
instance of its own (with EPOLLEXCLUSIVE: epoll-one). Connections come one at a time. Prints how
many threads each connection has woken in most cases.
"""
import os
import select
import socket
import statistics
import sys
import threading
import time

N = 8
ROUNDS = 20
# Connections before those. (The first three that wake a thread do so through the monitor, whose messages wake all threads.)
FIRST = 4 * N
listener = socket.create_server(("127.0.0.1", 0), backlog=64)
tids = []
done = threading.Event()


def in_accept():
    return listener.accept()[0]


def in_poll():
    p = select.poll()
    p.register(listener, select.POLLIN)
    while True:
        p.poll()
        try:
            return listener.accept()[0]
        except BlockingIOError:
            pass


def in_epoll(flags, kept=threading.local()):
    if not hasattr(kept, "e"):
        kept.e = select.epoll()
        kept.e.register(listener, select.EPOLLIN | flags)
    while True:
        kept.e.poll()
        try:
            return listener.accept()[0]
        except BlockingIOError:
            pass


def serve(way):
    tids.append(threading.get_native_id())
    while not done.is_set():
        with way() as conn:
            conn.sendall(conn.recv(1))
            conn.recv(1)


def switches():
    def of(tid):
        with open(f"/proc/{os.environ['SERVER']}/task/{tid}/status") as f:
            return next(int(line.split()[1]) for line in f if line.startswith("voluntary"))

    return [of(t) for t in tids]


def await_sleep():
    """Waits until all threads sleep for connections. (A child that is forked before may have no library.)"""
    looks = 0
    while looks < 20:
        time.sleep(0.01)
        states = [open(f"/proc/self/task/{t}/stat").read().rsplit(")", 1)[1].split()[0] for t in tids]
        looks = looks + 1 if states == ["S"] * N else 0


def main(name):
    ways = {"accept": in_accept, "poll": in_poll, "epoll": lambda: in_epoll(0), "epoll-one": lambda: in_epoll(select.EPOLLEXCLUSIVE)}
    listener.setblocking(name == "accept")
    os.environ["SERVER"] = str(os.getpid())
    threads = [threading.Thread(target=serve, args=(ways[name],), daemon=True) for _ in range(N)]
    for t in threads:
        t.start()
    await_sleep()
    ask, asked = os.pipe()
    answer, answered = os.pipe()
    if os.fork() == 0:
        # The client is a process of its own, because threads of one interpreter would disturb each
        # other.
        while True:
            if os.read(ask, 1) != b"c":
                os._exit(0)
            with socket.create_connection(listener.getsockname()) as c:
                c.sendall(b"x")
                assert c.recv(1) == b"x"
                os.write(answered, b".")
    woken = []
    for i in range(FIRST + ROUNDS):
        time.sleep(0.05 if i >= FIRST else 0.01)
        before = switches()
        os.write(asked, b"c")
        os.read(answer, 1)
        if i >= FIRST:
            time.sleep(0.1)
            woken.append(sum(a != b for a, b in zip(before, switches())))
    os.write(asked, b"q")
    print(name, statistics.mode(woken), "ok", sep="\n", flush=True)
    os._exit(0)


main(sys.argv[1])
