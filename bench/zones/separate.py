#!/usr/bin/env python3
"""Stock SO_REUSEPORT as applications use it: every worker makes its own listen socket.

    separate.py PORT WORKERS

Answers each connection with 64 bytes. A worker that dies is started again; SIGHUP
replaces all workers: the old ones close their sockets and end.
"""
import os
import select
import signal
import socket
import sys

port, workers = int(sys.argv[1]), int(sys.argv[2])
ANSWER = b"HTTP/1.0 200 OK\r\nContent-Length: 64\r\n\r\n" + b"x" * 64


def work(index):
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    leaving = []
    signal.signal(signal.SIGQUIT, lambda *_: leaving.append(1))
    cpus = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cpus[index % len(cpus)]})
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    listener.bind(("127.0.0.1", port))
    listener.listen(4096)
    listener.setblocking(False)
    epoll = select.epoll()
    epoll.register(listener, select.EPOLLIN)
    conns = {}
    while conns or not leaving:
        if leaving and listener.fileno() >= 0:
            epoll.unregister(listener)
            listener.close()
        for fd, _ in epoll.poll(0.05):
            if listener.fileno() == fd:
                try:
                    conn, _ = listener.accept()
                except BlockingIOError:
                    continue
                conns[conn.fileno()] = conn
                epoll.register(conn, select.EPOLLIN)
            else:
                conn = conns.pop(fd)
                try:
                    if conn.recv(4096):
                        conn.sendall(ANSWER)
                except OSError:
                    pass
                epoll.unregister(fd)
                conn.close()
    os._exit(0)


def main():
    running = {}

    def start(index):
        pid = os.fork()
        if pid == 0:
            work(index)
        running[pid] = index

    def reload(*_):
        old = list(running)
        for index in range(workers):
            start(index)
        for pid in old:
            retired.add(pid)
            os.kill(pid, signal.SIGQUIT)

    def end(*_):
        for pid in list(running):
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
        os._exit(0)

    retired = set()
    signal.signal(signal.SIGHUP, reload)
    signal.signal(signal.SIGTERM, end)
    for index in range(workers):
        start(index)
    while True:
        pid, _ = os.wait()
        index = running.pop(pid)
        if pid not in retired:
            start(index)


main()
