#!/usr/bin/env python3
"""Makes requests on one connection, each with a poll and a select before the answer. First makes
BEFORE requests, then puts a mark into the list of system calls, then makes COUNTED requests, whose
system calls the test counts.

    settled.py PORT BEFORE COUNTED
"""

import os
import select
import socket
import sys

port, before, counted = map(int, sys.argv[1:])
s = socket.create_connection(("127.0.0.1", port))
waits = select.poll()
waits.register(s, select.POLLIN)
for n in range(before + counted):
    if n == before:
        os.write(1, b"settled\n")
    s.sendall(b"12345678")
    assert waits.poll(60_000)
    assert select.select([s], [], [], 60)[0]
    assert s.recv(8) == b"12345678"
os.write(1, b"counted\n")
