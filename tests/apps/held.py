#!/usr/bin/python3
"""Opens a connection and keeps it open: held.py HOST PORT [save_syn] [titled]. Prints "ok" after an answer.

save_syn: sets TCP_SAVE_SYN, which only kernel TCP supports. titled: first overwrites the environment, as programs do
that set a long process title."""
import ctypes
import socket
import sys
import time

if "titled" in sys.argv[3:]:
    # Values 50 and 51 of proc_pid_stat(5): the addresses where the environment begins and ends.
    begin, end = map(int, open("/proc/self/stat").read().rsplit(")", 1)[1].split()[47:49])
    ctypes.memset(begin, 0, end - begin)

with socket.create_connection((sys.argv[1], int(sys.argv[2])), timeout=30) as sock:
    if "save_syn" in sys.argv[3:]:
        sock.setsockopt(socket.IPPROTO_TCP, 27, 1)
    sock.sendall(b"x")
    assert sock.recv(1) == b"x"
    print("ok", flush=True)
    time.sleep(600)
