#!/usr/bin/python3
"""Listeners and connections that go to another process in a message (SCM_RIGHTS).

passing.py give PORT PATH serves|watches close|exit   listens, serves one connection or none, hands the listener to the
                                                      process that connects to PATH, and ends as it is told to
passing.py take PATH N [late]                         takes it and echoes N connections; late: after the file PATH.go is
                                                      there, and the giver has ended
passing.py pass PORT PATH N [keep]                    accepts N connections and hands them to the process that connects to
                                                      PATH; keep: uses each of them itself afterwards, in turn with it
passing.py serve PATH N [keep]                        takes them, and echoes; keep: one message of each first
passing.py ask PORT N [EACH]                          N connections one after the other, with EACH messages
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
        # Detached: Python does not close a descriptor that belongs to no object.
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


def pass_on(port, path, n, keep=None):
    listener = socket.create_server(("127.0.0.1", int(port)))
    meeting = socket.socket(socket.AF_UNIX)
    meeting.bind(path)
    meeting.listen(1)
    print("listens", flush=True)
    server, _ = meeting.accept()
    for _ in range(int(n)):
        c, _ = listener.accept()
        socket.send_fds(server, [b"c"], [c.fileno()])
        if keep:
            # When the receiver has echoed a message, this process echoes the rest on the same
            # connection.
            server.recv(1)
            while data := c.recv(65536):
                c.sendall(data)
            server.send(b"e")
        c.close()


def serve(path, n, keep=None):
    giver = socket.socket(socket.AF_UNIX)
    giver.connect(path)
    for _ in range(int(n)):
        _, fds, _, _ = socket.recv_fds(giver, 1, 1)
        with socket.socket(fileno=fds[0]) as c:
            while data := c.recv(65536):
                c.sendall(data)
                if keep:
                    giver.send(b"e")
                    giver.recv(1)
                    break


def ask(port, n, each=0):
    for i in range(int(n)):
        with socket.create_connection(("127.0.0.1", int(port)), timeout=LIMIT) as c:
            for k in range(int(each)):
                data = b"%d %d" % (i, k)
                c.sendall(data)
                assert (got := c.recv(65536)) == data, got
            data = f"{i} ".encode() * 1000
            c.sendall(data)
            print("sent", flush=True)
            c.shutdown(socket.SHUT_WR)
            got = b""
            while part := c.recv(65536):
                got += part
            assert got == data, f"{len(got)} bytes instead of {len(data)}"
    print("ok", n, flush=True)


{"give": give, "take": take, "pass": pass_on, "serve": serve, "ask": ask}[sys.argv[1]](*sys.argv[2:])
