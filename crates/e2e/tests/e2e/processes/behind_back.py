#!/usr/bin/env python3
"""Many client processes connect while the server does something else. Then the server asks for all
of them at once.

    behind_back.py accept|poll|select|epoll CLIENTS      prints how many a server finds at once
"""

import os
import select
import socket
import sys


def client(listener, says):
    address = listener.getsockname()
    listener.close()
    with socket.create_connection(address) as c:
        c.sendall(b"x")
        os.write(says, b"c")
        c.recv(1)
    os._exit(0)


def readable(how, listener):
    if how == "accept":
        return True
    if how == "select":
        return bool(select.select([listener], [], [], 0)[0])
    waiter = select.poll() if how == "poll" else select.epoll()
    waiter.register(listener, select.POLLIN)
    return bool(waiter.poll(0))


def main():
    how, count = sys.argv[1], int(sys.argv[2])
    listener = socket.create_server(("127.0.0.1", 0), backlog=2 * count)
    listener.setblocking(False)
    watched = select.epoll()
    watched.register(listener, select.EPOLLIN)
    hears, says = os.pipe()
    children = []
    for _ in range(count):
        children.append(os.fork())
        if children[-1] == 0:
            client(listener, says)
        # The clients connect one after the other, and the server makes no call on the listener
        # meanwhile.
        os.read(hears, 1)
    got = []
    if readable(how, listener):
        while True:
            try:
                got.append(listener.accept()[0])
            except BlockingIOError:
                break
    print(f"{len(got)} of {count}", flush=True)
    for c in got:
        c.sendall(b"y")
    for c in got:
        c.close()
    listener.close()
    for pid in children:
        os.waitpid(pid, 0)


main()
