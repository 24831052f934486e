"""A socket that is bound before the fork (or exec) and listens after it, in one process, while the
same or another one accepts. Usage: bound_first.py serve WAY PORT | inherited FD | ask PORT"""

import os
import select
import socket
import subprocess
import sys

PIECE = 100_000


def answer(listener):
    conn, _ = listener.accept()
    with conn:
        got = b""
        while more := conn.recv(1 << 16):
            got += more
        conn.sendall(got[::-1])


def in_child(work):
    pid = os.fork()
    if pid == 0:
        work()
        os._exit(0)
    return pid


def wait_until_it_listens(s, port):
    """Listens in a child, which lives until the pipe is closed."""
    told, tell = os.pipe()
    stay, leave = os.pipe()

    def listen():
        os.close(leave)
        s.listen(16)
        os.write(tell, b"x")
        os.read(stay, 1)

    pid = in_child(listen)
    os.close(stay)
    os.read(told, 1)
    return pid, leave


def serve(way, port):
    s = socket.socket()
    s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if way != "unbound":
        s.bind(("127.0.0.1", port))

    def all_of_it():
        if way == "unbound":
            s.bind(("127.0.0.1", port))
        s.listen(16)
        answer(s)

    if way == "exec":
        # uvicorn and hypercorn start their workers like this.
        told = [sys.executable, __file__, "inherited", str(s.fileno())]
        subprocess.run(told, pass_fds=[s.fileno()], check=True)
        return print("ok", flush=True)
    if way in ("child", "unbound"):
        pid, leave = in_child(all_of_it), None
    else:
        pid, leave = wait_until_it_listens(s, port)
        if way == "poll":
            p = select.poll()
            p.register(s, select.POLLIN)
            assert p.poll(20_000) == [(s.fileno(), select.POLLIN)]
        elif way == "select":
            assert select.select([s], [], [], 20)[0] == [s]
        elif way == "epoll":
            ep = select.epoll()
            ep.register(s, select.EPOLLIN)
            assert ep.poll(20) == [(s.fileno(), select.EPOLLIN)]
        else:
            assert way == "accept", way
        answer(s)
        os.close(leave)
    assert os.waitpid(pid, 0)[1] == 0
    print("ok", flush=True)


def ask(port):
    data = os.urandom(PIECE)
    with socket.create_connection(("127.0.0.1", port), timeout=20) as c:
        c.sendall(data)
        c.shutdown(socket.SHUT_WR)
        got = b""
        while more := c.recv(1 << 16):
            got += more
    assert got == data[::-1], f"{len(got)} bytes"
    print("ok")


if sys.argv[1] == "serve":
    serve(sys.argv[2], int(sys.argv[3]))
elif sys.argv[1] == "inherited":
    successor = socket.socket(fileno=int(sys.argv[2]))
    successor.listen(16)
    answer(successor)
else:
    ask(int(sys.argv[2]))
