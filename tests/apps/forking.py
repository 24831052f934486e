"""A server that forks for each connection, and its client.

forking.py serve PORT:             serves until it is killed; a child ends with its connection.
forking.py ask PORT N REQUESTS:    N connections, one after the other, each with so many requests. Prints "ok".
forking.py together PORT N REQUESTS: the same, all open at once.
"""
import os
import signal
import socket
import sys


def serve(port):
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind(("127.0.0.1", port))
    listener.listen(128)
    while True:
        conn, _ = listener.accept()
        if os.fork() == 0:
            listener.close()
            while data := conn.recv(64):
                conn.sendall(data)
            os._exit(0)
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
