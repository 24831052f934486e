#!/usr/bin/env python3
"""The order in which an epoll instance reports connections, where there is one to expect.

    epoll_order.py PORT      what was reported; the lines must be the same on every path
"""

import os
import select
import socket
import sys

N = 5


def client(port, orders, done):
    conns = [socket.create_connection(("127.0.0.1", port)) for _ in range(N)]
    for i, c in enumerate(conns):
        c.sendall(b"%d" % i)
    os.write(done, b".")
    for line in orders:
        for i in line.split():
            if i == "new":
                conns.append(socket.create_connection(("127.0.0.1", port)))
            else:
                conns[int(i)].sendall(b"x")
        os.write(done, b".")


def main():
    listener = socket.create_server(("127.0.0.1", int(sys.argv[1])))
    (orders_r, orders_w), (done_r, done_w) = os.pipe(), os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(orders_w)
        with os.fdopen(orders_r) as orders:
            client(int(sys.argv[1]), orders, done_w)
        os._exit(0)
    os.close(orders_r)
    number, conn, new = {}, {}, []
    for _ in range(N):
        c, _ = listener.accept()
        i = int(c.recv(1))
        number[c.fileno()], conn[i] = i, c
    ep = select.epoll()
    for i in range(N):
        ep.register(conn[i], select.EPOLLIN)
    assert os.read(done_r, 1) == b"."

    def send(*order):
        os.write(orders_w, (" ".join(map(str, order)) + "\n").encode())
        assert os.read(done_r, 1) == b"."

    def report(most=-1):
        return [number[fd] for fd, _ in ep.poll(0, most)]

    def take(*which):
        for i in which:
            conn[i].recv(100)

    # An instance must report new connections, and those that it polled in vain, in the order in
    # which they became ready.
    for order in [(4, 1, 0, 3, 2), (0, 4, 1, 2, 3), (2, 0), (3, 2, 1, 0, 4)]:
        send(*order)
        print("by arrival:", *report())
        # More bytes must not change the place of a connection.
        send(order[-1], order[0])
        print("still:", *report())
        take(*order)
        assert ep.poll(0.01) == []
    send(1)
    ep.unregister(conn[2])
    ep.unregister(conn[3])
    ep.register(conn[3], select.EPOLLIN)
    send(3)
    ep.register(conn[2], select.EPOLLIN)
    send(2, 0)
    print("added between:", *report())
    take(0, 1, 2, 3)
    assert ep.poll(0.01) == []
    # Now the listener is in the instance as well.
    number[listener.fileno()] = "new"
    ep.register(listener, select.EPOLLIN)
    assert ep.poll(0.01) == []
    for order in [(3, "new", 0), ("new", 4), (1, "new")]:
        send(*order)
        print("with one that comes:", *report())
        take(*(i for i in order if i != "new"))
        new.append(listener.accept()[0])
        assert ep.poll(0.01) == []
    ep.unregister(listener)
    # A connection that was silent for long comes before one that was answered just now.
    for busy, silent in [(0, 3), (4, 1), (2, 0)]:
        for _ in range(20):
            send(busy)
            assert report() == [busy]
            take(busy)
        # The kernel keeps a connection in the list of ready ones until the next poll.
        assert report() == []
        send(silent, busy)
        print("in order:", report() == [silent, busy])
        take(silent, busy)
    # With room for one or two events per call, every connection must have its turn.
    send(*range(N))
    for most in (1, 2):
        turns = [i for _ in range(4 * N // most) for i in report(most)]
        print("turns:", sorted(turns[: N - N % most]) == sorted(set(turns[: N - N % most])), sorted(turns[:N]) if most == 1 else "")
        print("each as often:", max(map(turns.count, range(N))) - min(map(turns.count, range(N))) <= 1)
    # Other kinds of files are in the order, too.
    pipe = os.pipe()
    number[pipe[0]] = "pipe"
    ep.register(pipe[0], select.EPOLLIN)
    os.write(pipe[1], b"x")
    for most in (1, 3):
        print("all in time:", sorted({i for _ in range(20 * N) for i in report(most)}, key=str))
    ep.unregister(pipe[0])
    print("all, still:", sorted(report()))
    take(*range(N))
    print("none:", report())
    os.close(orders_w)
    os.waitpid(pid, 0)
    print("ok")


main()
