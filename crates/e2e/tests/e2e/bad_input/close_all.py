#!/usr/bin/python3
"""A daemon's habit: close every descriptor above stderr, then go on with
sockets. close_all.py PORT (of an echo server). Prints "ok"."""
import os
import socket
import sys

port = int(sys.argv[1])


def echo(tag):
    with socket.create_connection(("127.0.0.1", port), timeout=20) as sock:
        for i in range(50):
            message = b"%s %d\n" % (tag, i)
            sock.sendall(message)
            got = b""
            while len(got) < len(message):
                part = sock.recv(100)
                if not part:
                    raise SystemExit("EOF")
                got += part
            if got != message:
                raise SystemExit("bytes differ")


echo(b"before")
old = socket.create_connection(("127.0.0.1", port), timeout=20)
old.sendall(b"x")
os.closerange(3, 4096)
old.detach()
echo(b"after closerange")

for fd in range(3, 4096):
    try:
        os.close(fd)
    except OSError:
        pass
echo(b"after close one by one")

server = socket.socket()
server.bind(("127.0.0.1", 0))
server.listen()
client = socket.create_connection(server.getsockname(), timeout=20)
conn, _ = server.accept()
client.sendall(b"self")
if conn.recv(10) != b"self":
    raise SystemExit("own listener")
print("ok", client.fileno() < 16)
