#!/usr/bin/python3
"""Two processes wake each other again and again; then their open files are compared.

wakers.py serve PORT [N]     an echo server that sleeps in epoll; with N further listeners, each with an idle connection
wakers.py talk PORT N WHERE  N round trips, with pauses so that both sides sleep; this side in
                             WHERE: epoll or poll. Prints "ok" and the longest in seconds, then sleeps until it is killed.
wakers.py misuse PID HOW     misuses the pipes of that process until it is killed. HOW: full, drained or random.
                             Prints "misuses" at its start. (Run it without the library, which would refuse
                             it these descriptors.)
wakers.py shared PID PID     prints the open files that two processes have in common; then "ok".
"""
import ctypes
import fcntl
import os
import random
import select
import socket
import subprocess
import sys
import time

KCMP, KCMP_FILE = 312, 0
PIDFD_GETFD = 438


def serve(port, more):
    listeners = {}
    poll = select.epoll()
    for at in [port] + [0] * more:
        listener = socket.socket()
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("127.0.0.1", at))
        listener.listen()
        listener.setblocking(False)
        listeners[listener.fileno()] = listener
        poll.register(listener, select.EPOLLIN)
    if more:
        ports = [str(listener.getsockname()[1]) for listener in listeners.values()]
        subprocess.Popen([sys.executable, __file__, "hold", *ports[1:]])
    conns = {}
    while True:
        for fd, _ in poll.poll():
            if fd in listeners:
                conn, _ = listeners[fd].accept()
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


def hold(ports):
    held = [socket.create_connection(("127.0.0.1", port), timeout=20) for port in ports]
    for conn in held:
        conn.send(b"x")
        assert conn.recv(10) == b"x"
    time.sleep(600)


def talk(port, rounds, where):
    conn = socket.create_connection(("127.0.0.1", port), timeout=20)
    conn.setblocking(False)
    poll = select.epoll() if where == "epoll" else select.poll()
    poll.register(conn, select.EPOLLIN if where == "epoll" else select.POLLIN)
    worst = 0.0
    for i in range(rounds):
        began = time.monotonic()
        conn.send(b"%d" % i)
        if not poll.poll(10 if where == "epoll" else 10_000):
            raise SystemExit(f"no answer to {i}")
        if conn.recv(100) != b"%d" % i:
            raise SystemExit("other bytes")
        worst = max(worst, time.monotonic() - began)
        time.sleep(0.002)
    print(f"ok {worst:.3f}", flush=True)
    return conn


def attempt(call, *args):
    try:
        return call(*args)
    except OSError:
        return None


def until_refused(call, *args):
    for _ in range(100_000):
        if not attempt(call, *args):
            return


def pipes(pid):
    """The open files behind the process's pipes. Only the library uses pipes there."""
    libc = ctypes.CDLL(None, use_errno=True)
    at = [int(fd) for fd in os.listdir(f"/proc/{pid}/fd")]
    at = [fd for fd in at if (attempt(os.readlink, f"/proc/{pid}/fd/{fd}") or "").startswith("pipe:")]
    process = os.pidfd_open(pid)
    return [fd for fd in (libc.syscall(PIDFD_GETFD, process, fd, 0) for fd in at) if fd >= 0]


def misuse(pid, how):
    """Misuses the pipes. In "full" and "drained", they stay so all the time."""
    while not (ends := pipes(pid)):
        time.sleep(0.01)
    for fd in list(ends):
        for access in (os.O_RDONLY, os.O_WRONLY, os.O_RDWR):
            again = attempt(os.open, f"/proc/self/fd/{fd}", access | os.O_NONBLOCK)
            ends += [again] if again else []
    print("misuses", flush=True)
    chance = random.Random(1)
    while True:
        for fd in ends:
            # (No call here blocks, because flags are restored before bytes are moved.)
            fcntl.fcntl(fd, fcntl.F_SETFL, os.O_NONBLOCK)
            number = chance.choice([0, 1, 2, 3, 5, 8, chance.getrandbits(32), 2**32 - 1]).to_bytes(4, "little")
            if how == "full":
                until_refused(os.write, fd, number * 700)
                until_refused(os.write, fd, number)
            elif how == "drained":
                until_refused(os.read, fd, 65536)
            else:
                until_refused(os.write, fd, chance.choice([number, b"x", number * 700]))
                if chance.random() < 0.7:
                    until_refused(os.read, fd, 65536)
                attempt(fcntl.fcntl, fd, fcntl.F_SETPIPE_SZ, chance.choice([4096, 65536]))
            for flags in (os.O_APPEND | os.O_ASYNC, os.O_DIRECT, 0):
                attempt(fcntl.fcntl, fd, fcntl.F_SETFL, flags)
        time.sleep({"full": 3, "drained": 0, "random": 0.001}[how])


def shared(one, other):
    libc = ctypes.CDLL(None, use_errno=True)
    fds = [[int(fd) for fd in os.listdir(f"/proc/{pid}/fd")] for pid in (one, other)]
    kinds = set()
    own = [fd for fd in os.listdir("/proc/self/fd") if os.path.lexists(f"/proc/self/fd/{fd}")]
    # Files that all three processes inherited from the program that started them.
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
    serve(int(sys.argv[2]), int(sys.argv[3]) if len(sys.argv) > 3 else 0)
elif sys.argv[1] == "hold":
    hold([int(port) for port in sys.argv[2:]])
elif sys.argv[1] == "talk":
    held = talk(int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
    time.sleep(60)
elif sys.argv[1] == "misuse":
    misuse(int(sys.argv[2]), sys.argv[3])
else:
    shared(int(sys.argv[2]), int(sys.argv[3]))
