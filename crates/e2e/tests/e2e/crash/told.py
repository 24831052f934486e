#!/usr/bin/python3
"""Connects, echoes a line, prints "established", and sleeps in the given call until the peer ends:
told.py PORT recv | timeout | poll | select | epoll
Then prints "told" with the monotonic clock in nanoseconds, and the result of recv.
"""
import select
import socket
import sys
import time

port, call = int(sys.argv[1]), sys.argv[2]
sock = socket.create_connection(("127.0.0.1", port), timeout=20)
sock.sendall(b"hello\n")
if sock.recv(100) != b"hello\n":
    raise SystemExit("bytes differ")
sock.settimeout(None)
if call == "timeout":
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, (60).to_bytes(8, "little") + bytes(8))
print("established", flush=True)
if call == "poll":
    p = select.poll()
    p.register(sock, select.POLLIN)
    p.poll()
elif call == "select":
    select.select([sock], [], [])
elif call == "epoll":
    e = select.epoll()
    e.register(sock, select.EPOLLIN)
    e.poll()
try:
    said = "EOF" if sock.recv(100) == b"" else "data"
except ConnectionResetError:
    said = "ECONNRESET"
print("told", time.monotonic_ns(), said, flush=True)
