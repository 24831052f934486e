#!/usr/bin/env python3
"""Eighty threads of one process wait, each for one connection: in poll, in select or in an epoll
instance (poll-more: also for a pipe). One other process has all the other ends. For three seconds
nothing comes, which must cost almost nothing. Then each thread is sent a byte, and must get it.
"""
import os
import select
import socket
import sys
import threading
import time

N = 80


def poll(conn):
    p = select.poll()
    p.register(conn, select.POLLIN)
    return p.poll(30000)


def poll_more(conn):
    beside = os.pipe()
    p = select.poll()
    for fd in (conn, beside[0]):
        p.register(fd, select.POLLIN)
    ready = p.poll(30000)
    for fd in beside:
        os.close(fd)
    return ready


def in_select(conn):
    return select.select([conn], [], [], 30)[0]


def epoll(conn):
    e = select.epoll()
    e.register(conn, select.EPOLLIN)
    return e.poll(30)


def main(way):
    listener = socket.create_server(("127.0.0.1", 0), backlog=N)
    ready, go = os.pipe()
    pid = os.fork()
    if pid == 0:
        conns = [socket.create_connection(listener.getsockname()) for _ in range(N)]
        os.read(ready, 1)
        for c in conns:
            c.sendall(b"x")
        for c in conns:
            assert c.recv(1) == b"y"
        os._exit(0)
    got = []

    def wait(conn):
        assert way(conn)
        got.append(conn.recv(1))
        conn.sendall(b"y")

    threads = [threading.Thread(target=wait, args=(listener.accept()[0],)) for _ in range(N)]
    for t in threads:
        t.start()
    time.sleep(0.5)
    before = time.process_time()
    time.sleep(3)
    spent = time.process_time() - before
    os.write(go, b".")
    for t in threads:
        t.join()
    assert got == [b"x"] * N and os.waitpid(pid, 0)[1] == 0
    assert spent < 0.3, f"{spent:.3f} s of CPU while nothing came"
    print("ok")


main({"poll": poll, "select": in_select, "poll-more": poll_more, "epoll": epoll}[sys.argv[1]])
