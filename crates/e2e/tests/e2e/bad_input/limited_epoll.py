#!/usr/bin/python3
"""limited_epoll.py PORT: programs start with little address space, and watch a socket before
they connect it. Prints "ok"."""

import resource
import select
import socket
import subprocess
import sys

if len(sys.argv) > 2:
    sock, epoll = socket.socket(), select.epoll()
    epoll.register(sock, select.EPOLLIN)
    sock.connect(("127.0.0.1", int(sys.argv[1])))
    sock.sendall(b"ping")
    assert epoll.poll(60) == [(sock.fileno(), select.EPOLLIN)]
    assert sock.recv(4) == b"ping"
    raise SystemExit
for limit in range(96 << 20, 320 << 20, 16 << 20):
    subprocess.run(
        [sys.executable, *sys.argv[:2], "limited"],
        check=True,
        timeout=60,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (limit, limit)),
    )
print("ok")
