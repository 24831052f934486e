#!/usr/bin/python3
"""A connection held by parent and child: fork_group.py PORT.

Says "child PID"; when the parent is gone, the child talks on for a second, says
so, and sleeps.
"""
import os
import socket
import sys
import time

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
