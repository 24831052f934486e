"""A server whose single epoll instance watches many listeners, and a client that connects to the
last ones first.

usage: many_listeners.py HOW N
HOW: `epoll`, `edge`, `late` (the instance watches the sockets before they listen), or `poll`.
"""
import select
import socket
import subprocess
import sys


def accept(listener):
    try:
        conn, _ = listener.accept()
    except BlockingIOError:
        return False
    with conn:
        conn.sendall(b"%d" % listener.getsockname()[1])
    return True


def serve(how, n):
    listeners = {}
    for _ in range(n):
        s = socket.socket()
        s.setblocking(False)
        s.bind(("127.0.0.1", 0))
        listeners[s.fileno()] = s
    edge = select.EPOLLET if how == "edge" else 0
    instance = select.poll() if how == "poll" else select.epoll()
    if how != "late":
        [s.listen() for s in listeners.values()]
    for fd in listeners:
        instance.register(fd, select.EPOLLIN | edge)
    if how == "late":
        [s.listen() for s in listeners.values()]
    print(*(s.getsockname()[1] for s in listeners.values()), flush=True)
    while True:
        for fd, _ in instance.poll():
            while accept(listeners[fd]):
                pass


def main(how, n):
    server = subprocess.Popen([sys.executable, __file__, "serve", how, str(n)], stdout=subprocess.PIPE, text=True)
    ports = [int(p) for p in server.stdout.readline().split()]
    for port in reversed(ports):
        with socket.create_connection(("127.0.0.1", port), timeout=10) as c:
            assert c.recv(100) == b"%d" % port
    server.kill()
    server.wait()
    print("ok", len(ports))


if sys.argv[1] == "serve":
    serve(sys.argv[2], int(sys.argv[3]))
else:
    main(sys.argv[1], int(sys.argv[2]))
