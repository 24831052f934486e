#!/usr/bin/python3
"""A listener that goes to another process in a message (SCM_RIGHTS).

passing.py give PORT PATH serves|watches close|exit   listens, serves one connection or none, hands the listener to the
                                                      process that connects to PATH, and ends as it is told to
passing.py take PATH N [late]                         takes it and echoes N connections; late: after the file PATH.go is
                                                      there, and the giver has ended
passing.py ask PORT N                                 N connections one after the other
"""
import os
import socket
import sys
import time

LIMIT = 30


def echo(listener, n):
    for _ in range(n):
        c, _ = listener.accept()
        with c:
            while data := c.recv(65536):
                c.sendall(data)


def give(port, path, serves, end):
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind(("127.0.0.1", int(port)))
    listener.listen(64)
    meeting = socket.socket(socket.AF_UNIX)
    meeting.bind(path)
    meeting.listen(1)
    print("listens", flush=True)
    if serves == "serves":
        echo(listener, 1)
    taker, _ = meeting.accept()
    socket.send_fds(taker, [b"l"], [listener.fileno()])
    assert taker.recv(1) == b"e"
    if end == "close":
        listener.close()
        taker.send(b"e")
        taker.recv(1)
    else:
        # The interpreter closes no descriptors that it has not the objects of.
        listener.detach()
    sys.exit()


def take(path, n, late=None):
    giver = socket.socket(socket.AF_UNIX)
    giver.settimeout(LIMIT)
    giver.connect(path)
    _, fds, _, _ = socket.recv_fds(giver, 1, 1)
    listener = socket.socket(fileno=fds[0])
    print("taken", flush=True)
    if late:
        while not os.path.exists(f"{path}.go"):
            time.sleep(0.01)
        giver.send(b"e")
        giver.recv(1)
    echo(listener, int(n))
    if not late:
        giver.send(b"e")
        giver.recv(1)


def ask(port, n):
    for i in range(int(n)):
        with socket.create_connection(("127.0.0.1", int(port)), timeout=LIMIT) as c:
            data = f"{i} ".encode() * 1000
            c.sendall(data)
            print("sent", flush=True)
            c.shutdown(socket.SHUT_WR)
            got = b""
            while part := c.recv(65536):
                got += part
            assert got == data, f"{len(got)} bytes instead of {len(data)}"
    print("ok", n, flush=True)


{"give": give, "take": take, "ask": ask}[sys.argv[1]](*sys.argv[2:])
