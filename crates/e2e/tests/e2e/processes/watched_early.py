"""A child sleeps in an epoll instance that watches another instance, and the socket listens
afterwards.

    watched_early.py serve PORT
    watched_early.py ask PORT
"""

import os
import select
import socket
import sys


def child(port):
    inner, outer = select.epoll(), select.epoll()
    outer.register(inner, select.EPOLLIN)
    assert outer.poll(0.1) == []
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind(("127.0.0.1", port))
    listener.listen()
    inner.register(listener, select.EPOLLIN)
    assert outer.poll(30) == [(inner.fileno(), select.EPOLLIN)]
    assert inner.poll(0) == [(listener.fileno(), select.EPOLLIN)]
    conn, _ = listener.accept()
    conn.settimeout(20)
    conn.sendall(conn.recv(100).upper())


def serve(port):
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            child(port)
            status = 0
        finally:
            os._exit(status)
    assert os.waitpid(pid, 0)[1] == 0
    print("ok", flush=True)


def ask(port):
    conn = socket.create_connection(("127.0.0.1", port), 20)
    conn.sendall(b"hello")
    assert conn.recv(100) == b"HELLO"
    print("ok", flush=True)


{"serve": serve, "ask": ask}[sys.argv[1]](int(sys.argv[2]))
