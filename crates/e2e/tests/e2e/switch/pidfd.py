#!/usr/bin/env python3
"""Descriptors that one process takes from another by pidfd_getfd, without the other's help.

    pidfd.py              all cases, as a transcript, then "ok"
    pidfd.py hold …       a holder that is not related to the taker (started by the first)

The holder has a connection or a listener and waits in one of several ways. The taker reads the
bytes that the holder has not read, writes, and then leaves the connection to the holder again.
"""

import ctypes
import os
import select
import socket
import struct
import subprocess
import sys
import threading
import time

libc = ctypes.CDLL(None, use_errno=True)
SYS_PIDFD_GETFD = 438
WAYS = ["recv", "epoll", "poll", "calls", "send", "listener"]


def say(*words):
    print(*words, flush=True)


def take(pid, number, by_syscall):
    pidfd = os.pidfd_open(pid)
    if by_syscall:
        fd = libc.syscall(*map(ctypes.c_long, (SYS_PIDFD_GETFD, pidfd, number, 0)))
    else:
        fd = libc.pidfd_getfd(pidfd, number, 0)
    assert fd >= 0, os.strerror(ctypes.get_errno())
    assert not os.get_inheritable(fd)
    os.close(pidfd)
    return socket.socket(fileno=fd)


def recv(sock, n):
    got = b""
    while len(got) < n:
        part = sock.recv(n - len(got))
        if not part:
            break
        got += part
    return got


def hold(way, port, ready):
    """The holder: prints the number of its descriptor, and waits."""
    sock = socket.socket()
    sock.settimeout(None)
    if way == "listener":
        sock.bind(("127.0.0.1", 0))
        sock.listen()
    else:
        sock.connect(("127.0.0.1", port))
        sock.sendall(b"hello")
        assert sock.recv(2, socket.MSG_PEEK | socket.MSG_WAITALL) == b"un"
    ready(sock.fileno())
    if way == "listener":
        # Waits for no event at all.
        poll = select.epoll()
        poll.register(sock, 0)
        poll.poll(30)
        return
    if way == "recv":
        assert recv(sock, 6) == b"unread"
        assert recv(sock, 4) == b"back", "blocked when it was taken"
    elif way == "epoll":
        # The taker reads the data, so this process waits only for the end of the stream.
        poll = select.epoll()
        poll.register(sock, select.EPOLLRDHUP)
        assert poll.poll(30)
    elif way == "poll":
        poll = select.poll()
        poll.register(sock, select.POLLRDHUP)
        assert poll.poll(30000)
    elif way == "calls":
        end = time.monotonic() + 30
        while time.monotonic() < end and sock.recv(1, socket.MSG_PEEK):
            select.select([], [], [sock], 0.001)
    elif way == "send":
        sock.sendall(bytes(12 << 20))
    if way != "recv":
        left = recv(sock, 100)
        assert left in (b"", b"back"), left
    sock.sendall(b"held")
    assert sock.recv(1) == b""
    os._exit(0)


def other(way, port):
    child = subprocess.Popen([sys.executable, __file__, "hold", way, str(port)], stdout=subprocess.PIPE)
    return child.pid, int(child.stdout.readline()), child.wait


def relative(way, port):
    r, w = os.pipe()
    pid = os.fork()
    if pid == 0:
        hold(way, port, lambda number: os.write(w, b"%d\n" % number))
        os._exit(0)
    number = int(os.read(r, 20))
    return pid, number, lambda: os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def case(start, way, by_syscall):
    what = f"{start.__name__} {way}{' by number' if by_syscall else ''}:"
    listener = socket.create_server(("127.0.0.1", 0))
    accepted = []
    if way != "listener":
        # The holder connects and waits for the first bytes.
        def serve():
            s, _ = listener.accept()
            s.settimeout(20)
            assert recv(s, 5) == b"hello"
            s.sendall(b"unread")
            accepted.append(s)

        t = threading.Thread(target=serve)
        t.start()
        pid, number, wait = start(way, listener.getsockname()[1])
        t.join()
    else:
        pid, number, wait = start(way, 0)
    time.sleep(0.15)
    taken = take(pid, number, by_syscall)
    if way == "listener":
        c = socket.create_connection(taken.getsockname())
        s, peer = taken.accept()
        c.sendall(b"to the taker")
        say(what, recv(s, 12), peer == c.getsockname())
        os.kill(pid, 9)
        wait()
        return
    s = accepted[0]
    # Not settimeout: it would set O_NONBLOCK for the holder, too.
    taken.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", 20, 0))
    say(what, "names", taken.getpeername() == s.getsockname(), taken.getsockname() == s.getpeername())
    if way != "recv":
        say(what, "not read by the holder", recv(taken, 6))
    if way == "send":
        say(what, "sent by the holder", len(recv(s, 12 << 20)))
    taken.sendall(b"taker")
    say(what, "by the taker", recv(s, 5))
    s.sendall(b"back")
    if way not in ("recv", "send"):
        say(what, "to the taker", recv(taken, 4))
    s.shutdown(socket.SHUT_WR)
    say(what, "by the holder", recv(s, 4))
    say(what, "end", taken.recv(1), wait())
    taken.close()
    say(what, "and theirs", s.recv(1))


def own():
    listener = socket.create_server(("127.0.0.1", 0))
    c = socket.create_connection(listener.getsockname())
    s, _ = listener.accept()
    for by_syscall in (False, True):
        copy = take(os.getpid(), c.fileno(), by_syscall)
        copy.sendall(b"copy")
        say("own:", recv(s, 4), copy.getpeername() == listener.getsockname())
        copy.close()
    c.sendall(b"still there")
    say("own:", recv(s, 11))


if sys.argv[1:2] == ["hold"]:
    hold(sys.argv[2], int(sys.argv[3]), say)
else:
    for start in (other, relative):
        for way in WAYS:
            case(start, way, way == "poll")
    own()
    print("ok")
