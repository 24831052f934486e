#!/usr/bin/python3
"""A program limits its address space while it has connections to itself. They must go on. Prints
"ok"."""
import resource
import socket

with socket.create_server(("127.0.0.1", 0)) as listener:
    pairs = [(socket.create_connection(listener.getsockname(), timeout=20), listener.accept()[0]) for _ in range(20)]
for n, (client, server) in enumerate(pairs):
    client.sendall(b"%d" % n)
# Channels with that many connections take more than a quarter of this limit.
resource.setrlimit(resource.RLIMIT_AS, (600 << 20, 600 << 20))
for n, (client, server) in enumerate(pairs):
    assert server.recv(100) == b"%d" % n
    server.sendall(b"back")
    assert client.recv(100) == b"back"
print("ok")
