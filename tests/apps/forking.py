"""A server that forks for each connection, and its client.

forking.py serve PORT [FROM]:      serves until it is killed; a child ends with its connection. The parent passes those
                                   from number FROM on, in messages that nobody receives.
forking.py ask PORT N REQUESTS:    N connections, one after the other, each with so many requests. Prints "ok".
forking.py together PORT N REQUESTS: the same, all open at once.
"""
import itertools
import os
import signal
import socket
import sys


def serve(port, passes_from=1 << 30):
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind(("127.0.0.1", port))
    listener.listen(128)
    passed, _never_read = socket.socketpair()
    for number in itertools.count():
        conn, _ = listener.accept()
        if os.fork() == 0:
            listener.close()
            while data := conn.recv(64):
                conn.sendall(data)
            conn.shutdown(socket.SHUT_WR)
            os._exit(0)
        if number >= passes_from:
            socket.send_fds(passed, [b"x"], [conn.fileno()])
        conn.close()


def request(conn, i):
    text = b"request %d" % i
    conn.sendall(text)
    got = b""
    while len(got) < len(text):
        got += conn.recv(64)
    assert got == text


def connect(port):
    return socket.create_connection(("127.0.0.1", port))


def ask(port, n, requests):
    for _ in range(n):
        with connect(port) as conn:
            for i in range(requests):
                request(conn, i)
            # Until the child is through, so that it is counted.
            conn.shutdown(socket.SHUT_WR)
            assert conn.recv(1) == b""


def together(port, n, requests):
    conns = [connect(port) for _ in range(n)]
    for i in range(requests):
        for conn in conns:
            request(conn, i)


if __name__ == "__main__":
    how, *numbers = sys.argv[1:]
    {"serve": serve, "ask": ask, "together": together}[how](*map(int, numbers))
    print("ok")
