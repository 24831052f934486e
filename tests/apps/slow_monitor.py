#!/usr/bin/python3
"""Nobody waits for the monitor.

slow_monitor.py children N:          a parent with a connection forks N children, one after the other, each with
                                     a listener and a connection of its own.
slow_monitor.py stopped PID KNOWN NEW: the monitor, process PID, is stopped for a while. Connects to two
                                     servers, one known before and one not, and listens.

Prints the longest call in milliseconds, and "end".
"""
import os
import signal
import socket
import sys
import time

LONGEST = 0.0


def timed(call, *args):
    global LONGEST
    begin = time.monotonic()
    result = call(*args)
    LONGEST = max(LONGEST, time.monotonic() - begin)
    return result


def to_itself():
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listener.bind(("127.0.0.1", 0))
    timed(listener.listen)
    client = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    timed(client.connect, listener.getsockname())
    server, _ = listener.accept()
    client.sendall(b"hello")
    assert server.recv(64) == b"hello"
    return listener, client, server


def children(n):
    global LONGEST
    kept = to_itself()
    for _ in range(n):
        r, w = os.pipe()
        if os.fork() == 0:
            LONGEST = 0.0
            to_itself()
            os.write(w, str(LONGEST).encode())
            os._exit(0)
        os.close(w)
        LONGEST = max(LONGEST, float(os.read(r, 64)))
        os.close(r)
        os.wait()
    kept[1].sendall(b"still")
    assert kept[2].recv(64) == b"still"


def echo(port):
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as s:
        timed(s.connect, ("127.0.0.1", port))
        s.sendall(b"hello")
        assert s.recv(64) == b"hello"


def stopped(pid, known, new):
    global LONGEST
    echo(known)
    os.kill(pid, signal.SIGSTOP)
    try:
        LONGEST = 0.0
        echo(known)
        echo(new)
        kept = to_itself()
        echo(new)
    finally:
        os.kill(pid, signal.SIGCONT)
    # It is asked again, and what came too late is no obstacle.
    time.sleep(1.5)
    echo(new)
    echo(known)
    del kept


{"children": children, "stopped": stopped}[sys.argv[1]](*map(int, sys.argv[2:]))
print(int(LONGEST * 1000))
print("end")
