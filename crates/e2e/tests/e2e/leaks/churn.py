#!/usr/bin/python3
"""Opens and closes very many connections, and reports its own descriptors.

churn.py PORT COUNT [CONCURRENT]: makes COUNT connections to an echo server, in groups of
CONCURRENT, with 64 bytes each way. Prints "fds BEFORE AFTER" (the numbers after one warm-up
connection and at the end), and "ok COUNT". Then waits for the end of stdin, or 1 s.
"""
import os
import socket
import sys

port, count = int(sys.argv[1]), int(sys.argv[2])
group = int(sys.argv[3]) if len(sys.argv) > 3 else 1


def descriptors():
    return len(os.listdir("/proc/self/fd"))


def exchange(sock, message):
    sock.sendall(message)
    got = b""
    while len(got) < len(message):
        part = sock.recv(len(message) - len(got))
        if not part:
            raise SystemExit(f"early EOF after {len(got)} bytes")
        got += part
    if got != message:
        raise SystemExit("bytes differ")


def one_group(first, size):
    socks = [socket.create_connection(("127.0.0.1", port), timeout=20) for _ in range(size)]
    for i, sock in enumerate(socks):
        exchange(sock, b"%-63d\n" % (first + i))
    for sock in socks:
        sock.close()


before_any = descriptors()
one_group(0, 1)
done = 0
while done < count:
    size = min(group, count - done)
    one_group(done, size)
    done += size
print("fds", before_any, descriptors())
print("ok", count)
