#!/usr/bin/env python3
"""A server whose workers can stop accepting for a while, for the tests of load balancing.

    busy_server.py MODE PORT WORKERS BACKLOG

MODE is how a worker waits: epoll, edge, exclusive, poll, select, or block. With the prefix "thread-" the workers
are threads; with "own-" each worker has its own listen socket (SO_REUSEPORT). Worker i pins itself to CPU i modulo
the number of CPUs. A client sends one line, "who" or "sleep SECONDS". After "sleep" the worker does nothing else
for that time. The answer is "PID TID SERVED\\n"; SERVED counts the connections of this process.
"""
import os
import select
import signal
import socket
import sys
import threading
import time

mode, port, workers, backlog = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
served = 0
threads, own, wait = mode.startswith("thread-"), "own-" in mode, mode.rsplit("-", 1)[-1]
cpus = sorted(os.sched_getaffinity(0))


def serve(conn):
    global served
    served += 1
    conn.setblocking(True)
    conn.settimeout(10)
    try:
        words = conn.recv(100).decode().split()
        if words and words[0] == "sleep":
            time.sleep(float(words[1]))
        conn.sendall(f"{os.getpid()} {threading.get_native_id()} {served}\n".encode())
    except OSError:
        pass
    conn.close()


def listening():
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if own:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    listener.bind(("127.0.0.1", port))
    listener.listen(backlog)
    return listener


def work(listener, index):
    os.sched_setaffinity(0, {cpus[index % len(cpus)]})
    listener = listener or listening()
    if wait == "block":
        while True:
            serve(listener.accept()[0])
    listener.setblocking(False)

    def drain():
        # Accept one connection at each wake-up, as most servers do.
        try:
            conn, _ = listener.accept()
        except BlockingIOError:
            return False
        serve(conn)
        return True

    if wait == "poll":
        poll = select.poll()
        poll.register(listener, select.POLLIN)
        while True:
            poll.poll()
            drain()
    if wait == "select":
        while True:
            select.select([listener], [], [])
            drain()
    flags = {"epoll": 0, "edge": select.EPOLLET, "exclusive": select.EPOLLEXCLUSIVE}[wait]
    epoll = select.epoll()
    epoll.register(listener, select.EPOLLIN | flags)
    while True:
        epoll.poll()
        while drain() and flags == select.EPOLLET:
            pass


listener = None if own else listening()
if threads:
    for i in range(workers):
        threading.Thread(target=work, args=(listener, i), daemon=True).start()
    threading.Event().wait()
children = []
signal.signal(signal.SIGTERM, lambda *_: [os.kill(c, signal.SIGKILL) for c in children] and os._exit(0))
for i in range(workers):
    pid = os.fork()
    if pid == 0:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        work(listener, i)
    children.append(pid)
while children:
    pid, _ = os.wait()
    children.remove(pid)
