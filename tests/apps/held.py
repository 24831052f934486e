#!/usr/bin/python3
"""A connection that stays open: held.py HOST PORT [inq], with TCP_INQ, as gRPC's. Says "ok" once the server has answered."""
import socket
import sys
import time

with socket.create_connection((sys.argv[1], int(sys.argv[2])), timeout=30) as sock:
    if "inq" in sys.argv[3:]:
        sock.setsockopt(socket.IPPROTO_TCP, 36, 1)
    sock.sendall(b"x")
    assert sock.recv(1) == b"x"
    print("ok", flush=True)
    time.sleep(600)
