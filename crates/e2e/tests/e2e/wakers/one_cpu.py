#!/usr/bin/env python3
"""Two processes on one CPU send messages of SIZE bytes back and forth, TIMES times. Each waits for
the other in `recv` and `send` (blocking), or in `poll`.

Usage: one_cpu.py SIZE TIMES blocking|poll
"""
import os
import select
import socket
import sys


def waiting(s, what, how):
    if how == "poll":
        p = select.poll()
        p.register(s, what)
        assert p.poll(20000)


def send(s, message, how):
    left = memoryview(message)
    while left:
        try:
            left = left[s.send(left):]
        except BlockingIOError:
            waiting(s, select.POLLOUT, how)


def receive(s, buffer, how):
    room = memoryview(buffer)
    while room:
        waiting(s, select.POLLIN, how)
        n = s.recv_into(room)
        assert n, "too few bytes"
        room = room[n:]


def message(size):
    return os.urandom(size)


def main():
    size, times, how = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    os.sched_setaffinity(0, [min(os.sched_getaffinity(0))])
    listener = socket.create_server(("127.0.0.1", 0))
    pid = os.fork()
    s = socket.create_connection(listener.getsockname()) if pid == 0 else listener.accept()[0]
    s.setblocking(how == "blocking")
    buffer = bytearray(size)
    if pid == 0:
        for _ in range(times):
            receive(s, buffer, how)
            send(s, buffer, how)
        os._exit(0)
    for n in range(times):
        said = message(size) if n == 0 else said[7:] + said[:7]
        send(s, said, how)
        receive(s, buffer, how)
        assert buffer == said, f"message {n} differs"
    assert os.waitpid(pid, 0)[1] == 0
    print("ok")


if __name__ == "__main__":
    main()
