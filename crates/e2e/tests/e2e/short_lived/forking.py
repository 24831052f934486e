"""A server that forks for each connection, and its client.

forking.py serve PORT [HOW]:       serves until it is killed; a child ends with its connection. HOW the child waits:
                                   `blocking`, or in an epoll instance (`epoll`), in a duplicate of it (`dup`), in an
                                   instance that watches it (`nested`), by one-shot registrations (`oneshot`), by edges
                                   (`edge`), with two threads in turn (`threads`), or in a child (`fork`).
forking.py inetd PORT:             the same, but a child has the connection as its standard input and output, and
                                   executes cat.
forking.py ask PORT N REQUESTS:    N connections in turn, with REQUESTS requests each. Prints "ok".
forking.py together PORT N REQUESTS: the same, but all connections are open at once.
"""
import contextlib
import os
import select
import signal
import socket
import sys
import threading


def waiter(conn, how):
    """Returns a function that waits for something to read."""
    conn.setblocking(False)
    instance = select.epoll()
    flags = {"oneshot": select.EPOLLONESHOT, "edge": select.EPOLLET}.get(how, 0)
    instance.register(conn, select.EPOLLIN | flags)
    wait = instance.poll
    if how == "dup":
        duplicate = select.epoll.fromfd(os.dup(instance.fileno()))
        return lambda: duplicate.poll() and instance.poll(0)
    if how == "nested":
        outer = select.epoll()
        outer.register(instance, select.EPOLLIN)
        return lambda: outer.poll() and instance.poll(0)
    if how == "oneshot":
        return lambda: wait() and instance.modify(conn, select.EPOLLIN | flags)
    if how == "threads":
        def in_turn():
            thread = threading.Thread(target=wait)
            thread.start()
            thread.join()
        return in_turn
    return wait


def serve_waiting(conn, how):
    """Serves until the client has closed the connection."""
    wait = waiter(conn, how)
    if how == "fork" and (pid := os.fork()):
        with contextlib.suppress(ChildProcessError):  # although SIGCHLD is ignored, it waits
            os.waitpid(pid, 0)
        os._exit(0)
    while True:
        try:
            data = conn.recv(64)
        except BlockingIOError:
            wait()
            continue
        if not data:
            return
        conn.sendall(data)


def listen(port):
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind(("127.0.0.1", port))
    listener.listen(128)
    return listener


def inetd(port):
    listener = listen(port)
    while True:
        conn, _ = listener.accept()
        if os.fork() == 0:
            os.dup2(conn.fileno(), 0)
            os.dup2(conn.fileno(), 1)
            os.execv("/bin/cat", ["cat"])
        conn.close()


def serve(port, how="blocking"):
    listener = listen(port)
    while True:
        conn, _ = listener.accept()
        if os.fork() == 0:
            listener.close()
            if how != "blocking":
                serve_waiting(conn, how)
            while data := conn.recv(64):
                conn.sendall(data)
            conn.shutdown(socket.SHUT_WR)
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
            # Wait until the child has finished, so that the connection is counted.
            conn.shutdown(socket.SHUT_WR)
            assert conn.recv(1) == b""


def together(port, n, requests):
    conns = [connect(port) for _ in range(n)]
    for i in range(requests):
        for conn in conns:
            request(conn, i)


if __name__ == "__main__":
    what, *rest = sys.argv[1:]
    rest = [int(r) if r.isdigit() else r for r in rest]
    {"serve": serve, "inetd": inetd, "ask": ask, "together": together}[what](*rest)
    print("ok")
