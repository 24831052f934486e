#!/usr/bin/python3
"""No process may have to wait for the monitor.

slow_monitor.py children N:          a parent with a connection forks N children, one after the other, each with
                                     a listener and a connection of its own.
slow_monitor.py stopped PID KNOWN NEW: the monitor, process PID, is stopped for a while. Connects to two
                                     servers, one known before and one not, and listens.
slow_monitor.py joins PID:           begins to accept, in each way, while the monitor is stopped.
                                     Then the monitor continues, and a child connects.
slow_monitor.py fill PATH:           connects to PATH until the queue there is full, and stays.
slow_monitor.py begins PORT:         a program that starts while the monitor is stopped connects to a
                                     server and prints "began"; after SIGUSR1 it does both again.

Prints the longest call in milliseconds ("children": the longest of the fastest of the last hundred
children), and "end". The calls of "stopped" must return while the monitor is stopped.
"""
import os
import select
import signal
import socket
import sys
import threading
import time

# Other tests give a monitor with too little CPU time more patience. This test makes it slow on
# purpose, so remove the setting.
if os.environ.pop("FASTSOCKET_PATIENCE", None):
    os.execv(sys.executable, [sys.executable, *sys.argv])

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
    longest = []
    for _ in range(n):
        r, w = os.pipe()
        if os.fork() == 0:
            LONGEST = 0.0
            to_itself()
            os.write(w, str(LONGEST).encode())
            os._exit(0)
        os.close(w)
        longest.append(float(os.read(r, 64)))
        os.close(r)
        os.wait()
    kept[1].sendall(b"still")
    assert kept[2].recv(64) == b"still"
    # If a queue that the parent does not read were full, even the fastest of these would have waited.
    LONGEST = min(longest[-100:])


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
    # The monitor is asked again; its late answers must do no harm.
    time.sleep(1.5)
    echo(new)
    echo(known)
    del kept


def in_accept(listener):
    return listener.accept()[0]


def in_poll(listener):
    p = select.poll()
    p.register(listener, select.POLLIN)
    assert p.poll(20_000)
    return listener.accept()[0]


def in_epoll(listener):
    with select.epoll() as p:
        p.register(listener, select.EPOLLIN)
        assert p.poll(20)
    return listener.accept()[0]


def joins(pid):
    for way in (in_accept, in_poll, in_epoll):
        for slow_before in (False, True):
            listener = socket.create_server(("127.0.0.1", 0))
            listener.settimeout(20)
            r, w = os.pipe()
            if os.fork() == 0:
                os.read(r, 1)
                with socket.create_connection(listener.getsockname()) as s:
                    s.sendall(b"hello")
                os._exit(0)
            os.kill(pid, signal.SIGSTOP)
            if slow_before:
                # After a missing answer, the library asks nothing for a while.
                timed(socket.socket().listen)
            went_on = threading.Timer(0.6, os.kill, (pid, signal.SIGCONT))
            went_on.start()
            threading.Timer(1.0, os.write, (w, b"x")).start()
            server = way(listener)
            assert server.recv(64, socket.MSG_WAITALL) == b"hello"
            os.wait()
            went_on.join()
            time.sleep(1.1)


def fill(path):
    kept = []
    while True:
        s = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)
        try:
            s.connect(path)
        except BlockingIOError:
            break
        kept.append(s)
    print("full after", len(kept), flush=True)
    signal.pause()


def begins(port):
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])
    for _ in range(20):
        echo(port)
    print("began", flush=True)
    signal.sigwait([signal.SIGUSR1])
    for _ in range(40):
        echo(port)
        time.sleep(0.1)


if sys.argv[1] == "fill":
    fill(sys.argv[2])
{"begins": begins, "children": children, "stopped": stopped, "joins": joins}[sys.argv[1]](*map(int, sys.argv[2:]))
print(int(LONGEST * 1000))
print("end")
