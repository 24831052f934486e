#!/usr/bin/python3
"""Sends requests all the time, over kept and over new connections, for tests that restart the monitor meanwhile.

restarts.py REDIS HTTP FILE: the port of a Redis server, and a port where GET / answers with FILE. Each of four
threads sends one request after the other and compares the answers. On SIGTERM the program prints the number of
requests of each kind and exits with 0. If a request fails, the program prints it and exits with 1.
"""
import os
import signal
import socket
import sys
import threading
import time
import traceback

from streams import exactly

redis, http = int(sys.argv[1]), int(sys.argv[2])
page = open(sys.argv[3], "rb").read()
stop = threading.Event()
done = {}
LIMIT = 20


def connect(port):
    return socket.create_connection(("127.0.0.1", port), timeout=LIMIT)


def same(got, want):
    if got != want:
        raise ValueError(f"{got[:80]!r} instead of {want[:80]!r}")


def of_redis(sock, i):
    value = b"%d" % i * 20
    sock.sendall(b"*2\r\n$4\r\nECHO\r\n$%d\r\n%s\r\n" % (len(value), value))
    want = b"$%d\r\n%s\r\n" % (len(value), value)
    same(exactly(sock, len(want)), want)


def of_http(sock, i):
    sock.sendall(b"GET /page HTTP/1.1\r\nHost: x\r\n\r\n")
    head = b""
    while not head.endswith(b"\r\n\r\n"):
        head += exactly(sock, 1)
    same(head.split(b"\r\n")[0], b"HTTP/1.1 200 OK")
    same(exactly(sock, len(page)), page)


def kept(port, ask, name):
    with connect(port) as sock:
        for i in range(1 << 62):
            if stop.wait(0.002):
                return
            ask(sock, i)
            done[name] = i + 1


def new(port, ask, name):
    for i in range(1 << 62):
        if stop.wait(0.002):
            return
        with connect(port) as sock:
            ask(sock, i)
        done[name] = i + 1


def run(*what):
    try:
        what[0](*what[1:])
    except Exception:
        sys.stderr.write(f"{time.time():.3f} {what[3]}, request {done.get(what[3], 0) + 1}: {traceback.format_exc()}")
        sys.stderr.flush()
        os._exit(1)


work = [(kept, redis, of_redis, "redis-kept"), (new, redis, of_redis, "redis-new"),
        (kept, http, of_http, "http-kept"), (new, http, of_http, "http-new")]
signal.signal(signal.SIGTERM, lambda *_: stop.set())
threads = [threading.Thread(target=run, args=w) for w in work]
[t.start() for t in threads]
while len(done) < len(work):
    time.sleep(0.01)
print("started", flush=True)
while not stop.wait(0.1):
    pass
[t.join() for t in threads]
print(" ".join(f"{name}={n}" for name, n in sorted(done.items())), flush=True)
