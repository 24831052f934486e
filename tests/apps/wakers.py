#!/usr/bin/python3
"""Two processes that wake each other again and again, and then look who has what.

wakers.py serve PORT         an echo server that sleeps in epoll
wakers.py talk PORT N WHERE  N round trips, with pauses so that both sides sleep; this side in
                             WHERE: epoll or poll. Prints "ok", then sleeps until it is killed.
wakers.py shared PID PID     open files that two processes have in common, one a line; "ok".
"""
import ctypes
import os
import select
import socket
import sys
import time

KCMP, KCMP_FILE = 312, 0


def serve(port):
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind(("127.0.0.1", port))
    listener.listen()
    listener.setblocking(False)
    poll = select.epoll()
    poll.register(listener, select.EPOLLIN)
    conns = {}
    while True:
        for fd, _ in poll.poll():
            if fd == listener.fileno():
                conn, _ = listener.accept()
                conn.setblocking(False)
                conns[conn.fileno()] = conn
                poll.register(conn, select.EPOLLIN)
            else:
                data = conns[fd].recv(4096)
                if data:
                    conns[fd].send(data)
                else:
                    poll.unregister(fd)
                    conns.pop(fd).close()


def talk(port, rounds, where):
    conn = socket.create_connection(("127.0.0.1", port), timeout=20)
    conn.setblocking(False)
    poll = select.epoll() if where == "epoll" else select.poll()
    poll.register(conn, select.EPOLLIN if where == "epoll" else select.POLLIN)
    for i in range(rounds):
        conn.send(b"%d" % i)
        if not poll.poll(10 if where == "epoll" else 10_000):
            raise SystemExit(f"no answer to {i}")
        if conn.recv(100) != b"%d" % i:
            raise SystemExit("other bytes")
        time.sleep(0.002)
    print("ok", flush=True)
    time.sleep(60)


def shared(one, other):
    libc = ctypes.CDLL(None, use_errno=True)
    fds = [[int(fd) for fd in os.listdir(f"/proc/{pid}/fd")] for pid in (one, other)]
    kinds = set()
    own = [fd for fd in os.listdir("/proc/self/fd") if os.path.lexists(f"/proc/self/fd/{fd}")]
    # What all three have from the program that started them.
    inherited = {os.readlink(f"/proc/{os.getpid()}/fd/{fd}") for fd in own}
    for a in fds[0]:
        kinds.add(os.readlink(f"/proc/{one}/fd/{a}").split(":")[0])
        for b in fds[1]:
            same = libc.syscall(KCMP, one, other, KCMP_FILE, ctypes.c_ulong(a), ctypes.c_ulong(b))
            if same < 0:
                raise SystemExit(os.strerror(ctypes.get_errno()))
            if same == 0 and os.readlink(f"/proc/{one}/fd/{a}") not in inherited:
                print("shared", os.readlink(f"/proc/{one}/fd/{a}"))
    print("has", *sorted(kinds))
    print("ok", flush=True)


if sys.argv[1] == "serve":
    serve(int(sys.argv[2]))
elif sys.argv[1] == "talk":
    talk(int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
else:
    shared(int(sys.argv[2]), int(sys.argv[3]))
