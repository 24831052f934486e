#!/usr/bin/env python3
"""Forty threads of one process sleep in poll, each on a connection of its own. Meanwhile the main
thread shuts down a hundred other connections, which must not wake these threads (the caller counts
sleeps). Then it shuts down their connections, which must wake each of them.
"""
import os
import select
import socket
import threading
import time

N = 40
OTHERS = 100
WAYS = [(events, how) for events in (select.POLLIN, select.POLLIN | select.POLLPRI, 0) for how in (socket.SHUT_RDWR, socket.SHUT_RD)]


def main():
    listener = socket.create_server(("127.0.0.1", 0), backlog=N)
    ready, go = os.pipe()
    pid = os.fork()
    if pid == 0:
        kept = [socket.create_connection(listener.getsockname()) for _ in range(N)]
        for _ in range(OTHERS):
            with socket.create_connection(listener.getsockname()) as c:
                c.sendall(b"x")
                assert c.recv(1) == b""
        os.read(ready, 1)
        os._exit(0)
    kept = [listener.accept()[0] for _ in range(N)]
    found = [[] for _ in kept]

    def wait(i, events):
        p = select.poll()
        p.register(kept[i], events)
        found[i] = [ev for _, ev in p.poll(20000)]

    threads = [threading.Thread(target=wait, args=(i, WAYS[i % 6][0])) for i in range(N)]
    for t in threads:
        t.start()
    time.sleep(0.5)
    for _ in range(OTHERS):
        with listener.accept()[0] as c:
            assert c.recv(1) == b"x"
            c.shutdown(socket.SHUT_WR)
            assert c.recv(1) == b""
    for i, c in enumerate(kept):
        # A poll for no events ends only when both directions are shut down.
        c.shutdown(WAYS[i % 6][1] if WAYS[i % 6][0] else socket.SHUT_RDWR)
    for t in threads:
        t.join()
    os.write(go, b".")
    assert os.waitpid(pid, 0)[1] == 0
    for i, events in enumerate(found[:6]):
        print(i, events)
    assert all(found) and found[6:12] == found[:6]
    print("ok")


main()
