#!/usr/bin/python3
"""Connections with much data, whose other side keeps its descriptors after the server has closed.

rings.py serve PORT N WAY         serves N connections, closes each, and prints "served". WAY: down (the server sends
                                  and closes), up (it receives everything), both, or half (it shuts its side down
                                  first).
rings.py hold PORT N WAY          connects N times, checks the bytes, keeps the descriptors, and prints "holds".
rings.py short PORT N             connects N times, one after the other in each of 4 threads, and closes at once.
"""
import signal
import socket
import sys
import threading

SIZE = 3_000_000


def text(i):
    return (b"%07d." % (i % 1_000_000)) * (SIZE // 8)


def receive(conn, size):
    got = bytearray()
    while len(got) < size and (data := conn.recv(1 << 20)):
        got += data
    return bytes(got)


def end(conn):
    assert conn.recv(1) == b""


def serve(port, n, way):
    listener = socket.create_server(("127.0.0.1", port), backlog=200)
    for i in range(n):
        conn, _ = listener.accept()
        number = int(conn.recv(8).rstrip(b"."))
        if way in ("up", "both"):
            assert receive(conn, SIZE) == text(number)
        if way != "up":
            conn.sendall(text(number))
        if way == "half":
            conn.shutdown(socket.SHUT_WR)
            assert conn.recv(1) == b"k"
        conn.close()
    print("served", flush=True)
    # The server continues to accept.
    listener.accept()


def connection(port, i, way):
    conn = socket.create_connection(("127.0.0.1", port))
    conn.sendall(b"%07d." % i)
    if way in ("up", "both"):
        conn.sendall(text(i))
    if way != "up":
        assert receive(conn, SIZE) == text(i), "other bytes"
    if way == "half":
        end(conn)
        conn.send(b"k")
    return conn


def hold(port, n, way):
    held = [connection(port, i, way) for i in range(n)]
    for conn in held[1:] if way != "half" else []:
        end(conn)
    print("holds", flush=True)
    signal.pause()


def short(port, n):
    failed = []

    def some(first):
        try:
            for i in range(first, n, 4):
                connection(port, i, "down").close()
        except BaseException as e:
            failed.append(e)
            raise

    threads = [threading.Thread(target=some, args=(i,)) for i in range(4)]
    [t.start() for t in threads]
    [t.join() for t in threads]
    assert not failed, failed
    print("ok", flush=True)


what, port, n = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
{"serve": lambda: serve(port, n, sys.argv[4]), "hold": lambda: hold(port, n, sys.argv[4]), "short": lambda: short(port, n)}[
    what
]()
