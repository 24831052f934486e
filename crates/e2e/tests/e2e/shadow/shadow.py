#!/usr/bin/env python3
"""Listeners of one port that shadow each other (SO_REUSEPORT).

    shadow.py serve NAME PORT ADDRESS [OPTION...]
    shadow.py ask PORT COUNT ADDRESS...
    shadow.py later PORT SECONDS stock|OPTION...

A listener sends its NAME to each connection. Options: v6only, lo (SO_BINDTODEVICE), timestamp.
`later`: while connections go to one listener, a nearer listener starts, in a program without the
library or with that option. After SECONDS it must get all connections.
"""

import os
import socket
import subprocess
import sys
import time


def serve(name, port, address, *options):
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    listener = socket.socket(family)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    if "v6only" in options:
        listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
    if "lo" in options:
        listener.setsockopt(socket.SOL_SOCKET, 25, b"lo")
    if "timestamp" in options:
        listener.setsockopt(socket.SOL_SOCKET, 29, 1)
    listener.bind((address, int(port)))
    listener.listen(64)
    print("listens", flush=True)
    while True:
        s, _ = listener.accept()
        s.sendall(name.encode())
        s.close()


def ask(port, count, *addresses):
    for address in addresses:
        names = []
        for _ in range(int(count)):
            with socket.create_connection((address, int(port)), timeout=20) as c:
                names.append(c.recv(100).decode())
        print(address, *sorted(set(names)), flush=True)


def later(port, seconds, *how):
    def start(name, address, how):
        env = {k: v for k, v in os.environ.items() if how != ("stock",) or k != "LD_PRELOAD"}
        command = [sys.executable, __file__, "serve", name, port, address, *how]
        server = subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True)
        assert server.stdout.readline() == "listens\n"
        return server

    def name():
        with socket.create_connection(("127.0.0.1", int(port)), timeout=20) as c:
            return c.recv(100).decode()

    servers = [start("A", "0.0.0.0", ())]
    assert {name() for _ in range(20)} == {"A"}
    servers.append(start("B", "127.0.0.1", how))
    until = time.monotonic() + float(seconds)
    while time.monotonic() < until:
        name()
    print(*sorted({name() for _ in range(20)}), flush=True)
    servers.pop().kill()
    time.sleep(0.2)
    print(*sorted({name() for _ in range(20)}), flush=True)
    servers.pop().kill()


globals()[sys.argv[1]](*sys.argv[2:])
