"""A server that starts `cat` on each connection (as inetd does), while its client sends in one
thread and receives in another. Then clients that send and close at once. Prints how many clients
were served in full, and the exit status of the servers. Each server first waits for all its `cat`
processes.

usage: cat_server.py ROUNDS BYTES
"""

import os
import socket
import sys
import threading

ROUNDS, SIZE = int(sys.argv[1]), int(sys.argv[2])


def serve(l, rounds):
    children = []
    for _ in range(rounds):
        c, _ = l.accept()
        pid = os.fork()
        if pid == 0:
            for fd in (0, 1):
                os.dup2(c.fileno(), fd)
            os.execvp("cat", ["cat"])
        c.close()
        children.append(pid)
    for pid in children:
        os.waitpid(pid, 0)


def echo(port, data):
    with socket.create_connection(("127.0.0.1", port), timeout=20) as c:
        def send():
            c.sendall(data)
            c.shutdown(socket.SHUT_WR)

        t = threading.Thread(target=send)
        t.start()
        got = bytearray()
        while part := c.recv(65536):
            got += part
        t.join()
    return got == data


def in_a_child(f):
    pid = os.fork()
    if pid == 0:
        f()
        os._exit(0)
    return pid


def ended(server):
    print("server ended:", os.waitpid(server, 0)[1], flush=True)


def main():
    # From its first 32 listeners, a fork group learns that connections should begin in the kernel.
    # It learns nothing from a later listener such as this one, so all of its connections are
    # switched.
    _others = [socket.create_server(("127.0.0.1", 0)) for _ in range(32)]
    l = socket.create_server(("127.0.0.1", 0), backlog=64)
    port = l.getsockname()[1]
    data = os.urandom(SIZE)
    server = in_a_child(lambda: serve(l, ROUNDS))
    print(sum(echo(port, data) for _ in range(ROUNDS)), "of", ROUNDS, flush=True)
    ended(server)
    server = in_a_child(lambda: serve(l, ROUNDS))
    for _ in range(ROUNDS):
        with socket.create_connection(("127.0.0.1", port), timeout=20) as c:
            c.sendall(b"hello")
    ended(server)
    print("ok")


main()
