#!/usr/bin/python3
"""locked.py N FLAGS WHEN WHO: has N connections, each to a process of its own, and calls
`mlockall`.

FLAGS is a sum of MCL_CURRENT (1), MCL_FUTURE (2) and MCL_ONFAULT (4). WHEN: "before" the first
socket, or "after". WHO calls it: the "main" thread, a "thread", or a "child". Old connections must
go on, and new ones must be possible. The first line says how many KiB are locked."""

import ctypes
import os
import socket
import sys
import threading

n, flags, when, who = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4]
libc = ctypes.CDLL(None, use_errno=True)
done, locked, kept = [], [0], []


def lock():
    r = libc.mlockall(flags)
    done.append((r, os.strerror(ctypes.get_errno()) if r else ""))
    locked[0] = next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmLck:"))


def lock_by():
    if who == "main":
        lock()
    elif who == "thread":
        thread = threading.Thread(target=lock)
        thread.start()
        thread.join()


def serve():
    if when == "after":
        lock_by()
    late = socket.create_connection(address, timeout=60)
    late.sendall(b"late")
    kept.append(listener.accept()[0])
    for i, server in enumerate(kept):
        want = b"late" if i == n else b"%d" % i * 3000
        got = b""
        while len(got) < len(want):
            got += server.recv(65536)
        assert got == want, (i, len(got))
        server.sendall(want[::-1])
    assert late.recv(100) == b"etal"


threading.stack_size(256 << 10)
if when == "before":
    lock_by()
listener = socket.create_server(("127.0.0.1", 0))
address = listener.getsockname()
go = os.pipe()
for i in range(n):
    if os.fork() == 0:
        os.close(go[1])
        with socket.create_connection(address, timeout=60) as client:
            client.sendall(b"%d" % i)
            os.read(go[0], 1)
            client.sendall((b"%d" % i * 3000)[len(b"%d" % i) :])
            got = b""
            while len(got) < 3000 * len(b"%d" % i):
                got += client.recv(65536)
            assert got == (b"%d" % i * 3000)[::-1]
        os._exit(0)
    kept.append(listener.accept()[0])
os.close(go[1])
if who == "child":
    if (pid := os.fork()) == 0:
        who = "main"
        serve()
        print("locked", locked[0])
        print(done, flush=True)
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0
else:
    serve()
    print("locked", locked[0])
    print(done)
for _ in range(n):
    assert os.wait()[1] == 0
print("ok")
