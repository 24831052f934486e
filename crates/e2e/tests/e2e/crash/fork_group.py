#!/usr/bin/python3
"""A connection that parent and child hold: fork_group.py PORT.

Prints "child PID". When the parent is gone, the child uses the connection for another second, says
so, and sleeps.
"""
import os
import socket
import sys
import time

sys.path.append(os.path.join(os.path.dirname(__file__), "../../../../../tests/apps"))
from streams import trip

sock = socket.create_connection(("127.0.0.1", int(sys.argv[1])), timeout=20)
trip(sock, b"hello\n")
parent = os.getpid()
child = os.fork()
if child:
    print("child", child, flush=True)
    time.sleep(60)
    sys.exit(1)
while os.getppid() == parent:
    time.sleep(0.01)
for i in range(20):
    time.sleep(0.05)
    trip(sock, b"message %d\n" % i)
print("the child still talks", flush=True)
time.sleep(60)
