#!/usr/bin/env python3
"""A reload as haproxy does it: the master passes the listener on by a message, and only then does
the new worker poll it.

    reloaded_master.py PORT WORKERS      WORKERS: the workers run as `root` (as the master) or `nobody`
    reloaded_master.py ask PORT N        N clients, one after the other
"""

import os
import socket
import subprocess
import sys


def worker(l, user, go, n):
    pid = os.fork()
    if pid:
        return pid
    if user == "nobody":
        os.setgroups([])
        os.setgid(65534)
        os.setuid(65534)
    os.read(go, 1)
    for _ in range(n):
        c, _ = l.accept()
        c.sendall(c.recv(100).upper())
        c.close()
    l.close()
    os._exit(0)


def ask(port, n):
    for i in range(n):
        with socket.create_connection(("127.0.0.1", port), 30) as c:
            c.sendall(b"hello %d" % i)
            print(c.recv(100).decode(), flush=True)
    print("ok")


def reload(port, user):
    l = socket.create_server(("127.0.0.1", port))
    gates = [os.pipe() for _ in range(2)]
    old = worker(l, user, gates[0][0], 3)
    a, b = socket.socketpair()
    socket.send_fds(a, [b"x"], [l.fileno()])
    l.close()
    l = socket.socket(fileno=socket.recv_fds(b, 1, 1)[1][0])
    os.write(gates[0][1], b"g")
    client = lambda: subprocess.run([sys.executable, __file__, "ask", str(port), "3"], check=True)  # noqa: E731
    client()
    new = worker(l, user, gates[1][0], 3)
    print("old worker", os.waitpid(old, 0)[1], flush=True)
    socket.send_fds(a, [b"x"], [l.fileno()])
    os.write(gates[1][1], b"g")
    client()
    print("new worker", os.waitpid(new, 0)[1], flush=True)
    print("ok")


if __name__ == "__main__":
    if sys.argv[1] == "ask":
        ask(int(sys.argv[2]), int(sys.argv[3]))
    else:
        reload(int(sys.argv[1]), sys.argv[2])
