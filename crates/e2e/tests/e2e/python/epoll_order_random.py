#!/usr/bin/env python3
"""Prints the order in which an epoll instance reports connections. At random, they are sent to,
read, polled, or left alone.

    epoll_order_random.py PORT SEED ROUNDS      the output must be the same on every path
"""

import os
import random
import select
import socket
import sys

N = 6
MODES = {"level": 0, "edge": select.EPOLLET, "once": select.EPOLLONESHOT}


def client(port, orders, done):
    conns = []
    for i in range(N):
        conns.append(socket.create_connection(("127.0.0.1", port)))
        # Without this, the kernel may delay a second small message.
        conns[i].setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        conns[i].sendall(b"%d" % i)
    os.write(done, b".")
    for line in orders:
        for i in line.split():
            conns[int(i)].sendall(b"x" * 8)
        os.write(done, b".")


def main():
    port, seed, rounds = map(int, sys.argv[1:])
    listener = socket.create_server(("127.0.0.1", port))
    (orders_r, orders_w), (done_r, done_w) = os.pipe(), os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(orders_w)
        with os.fdopen(orders_r) as orders:
            client(port, orders, done_w)
        os._exit(0)
    os.close(orders_r)
    rng = random.Random(seed)
    conn, mode, number = {}, {}, {}
    for _ in range(N):
        c, _ = listener.accept()
        i = int(c.recv(1))
        c.setblocking(False)
        conn[i], number[c.fileno()] = c, i
    ep = select.epoll()
    for i in range(N):
        mode[i] = MODES[rng.choice(list(MODES))]
        ep.register(conn[i], select.EPOLLIN | mode[i])
    assert os.read(done_r, 1) == b"."
    for n in range(rounds):
        told = []
        # Often reads no connection, so that one which was reported and left is reported again.
        for _ in range(rng.choice([0, 1, 1, 2])):
            wait = rng.choice([0, 0, 0, 0.003])
            most = rng.choice([-1, -1, -1, 2])
            told.append([number[fd] for fd, _ in ep.poll(wait, most)])
            for i in told[-1]:
                if rng.random() < 0.8:
                    try:
                        conn[i].recv(rng.choice([4, 1000, 1000, 1000]))
                    except BlockingIOError:
                        pass
                if mode[i] == select.EPOLLONESHOT and rng.random() < 0.8:
                    ep.modify(conn[i], select.EPOLLIN | mode[i])
        order = [rng.randrange(N) for _ in range(rng.choice([0, 1, 2, 3, 5]))]
        os.write(orders_w, (" ".join(map(str, order)) + "\n").encode())
        assert os.read(done_r, 1) == b"."
        print(n, *told, "sent to", *order)
    os.close(orders_w)
    os.waitpid(pid, 0)
    print("ok")


main()
