#!/usr/bin/python3
"""A connection that stays open: held.py HOST PORT [inq] [titled]. Says "ok" once the server has answered.

inq: with TCP_INQ, as gRPC's. titled: it writes over its environment first, as programs do that set a long title."""
import ctypes
import socket
import sys
import time

if "titled" in sys.argv[3:]:
    # The 50th and 51st value of proc_pid_stat(5): where the environment begins and ends.
    begin, end = map(int, open("/proc/self/stat").read().rsplit(")", 1)[1].split()[47:49])
    ctypes.memset(begin, 0, end - begin)

with socket.create_connection((sys.argv[1], int(sys.argv[2])), timeout=30) as sock:
    if "inq" in sys.argv[3:]:
        sock.setsockopt(socket.IPPROTO_TCP, 36, 1)
    sock.sendall(b"x")
    assert sock.recv(1) == b"x"
    print("ok", flush=True)
    time.sleep(600)
