#!/usr/bin/python3
"""memory.py N: a server with N connections, each from a process of its own. Prints how many KiB of
its memory a core file would contain, and how many `mlockall` locks. N = 0: a program without
sockets."""

import ctypes
import os
import socket
import sys


def mappings():
    """Size in KiB, flags and name of each mapping, except for the kernel's own (vdso, vvar)."""
    found, size = [], 0
    for line in open("/proc/self/smaps"):
        words = line.split()
        if "-" in words[0] and not words[0].endswith(":"):
            name = words[5] if len(words) > 5 else ""
        elif words[0] == "Size:":
            size = int(words[1])
        elif words[0] == "VmFlags:" and "io" not in words and not name.startswith("[v"):
            found.append((size, words[1:], name))
    return found


def status(name):
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith(name + ":"))


n, kept = int(sys.argv[1]), []
if n:
    listener = socket.create_server(("127.0.0.1", 0))
    for _ in range(n):
        if os.fork() == 0:
            with socket.create_connection(listener.getsockname(), timeout=60) as client:
                client.sendall(b"x")
                client.recv(1)
            os._exit(0)
        kept.append(listener.accept()[0])
        assert kept[-1].recv(1) == b"x"
size = status("VmSize")
# A core file contains private memory that is writable, and shared memory.
dumped = sum(size for size, flags, _ in mappings() if "dd" not in flags and ("wr" in flags or "sh" in flags))
print("size", size, "dumped", dumped)
print("ok")
