#!/usr/bin/python3
"""space.py COUNT...: prints, for each COUNT, how much address space (kB) that many simultaneous
connections to itself take, beyond what the process takes with a listener alone. Then prints
"ok"."""
import socket
import sys


def size():
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("VmSize:"))


# The first descriptors make the library allocate its tables, which must not count below.
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
