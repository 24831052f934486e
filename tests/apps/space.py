#!/usr/bin/python3
"""space.py COUNT...: address space of a process that has so many connections with itself at once, kB, beyond what it
has with a listener alone. Prints a line for each, and "ok"."""
import socket
import sys


def size():
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("VmSize:"))


# (Tables of descriptors are made with the first few.)
for few in [socket.create_server(("127.0.0.1", 0)) for _ in range(8)]:
    few.close()
for count in map(int, sys.argv[1:]):
    with socket.create_server(("127.0.0.1", 0), backlog=128) as listener:
        before = size()
        ends = []
        for i in range(count):
            client = socket.create_connection(listener.getsockname(), timeout=20)
            server, _ = listener.accept()
            client.sendall(b"%d" % i)
            assert server.recv(100) == b"%d" % i
            ends += [client, server]
        print("space", count, size() - before)
        for end in ends:
            end.close()
print("ok")
