"""Unix sockets that are used before they are connected: an epoll instance watches the socket, it
is duplicated, or a child has it as well. Each case then makes enough requests for the connection
to move to shared memory. The output is the transcript.

early.py [CASE...]
"""

import fcntl
import os
import select
import signal
import socket
import sys
import tempfile
import threading
import time

REQUESTS = 120
IN, OUT, ET, RDHUP, ONESHOT = select.EPOLLIN, select.EPOLLOUT, select.EPOLLET, select.EPOLLRDHUP, select.EPOLLONESHOT
#: The library would lose an event: longer than any wait here, seconds.
LIMIT = 20


def say(*what):
    print(" ", *what, flush=True)


def new():
    s = socket.socket(socket.AF_UNIX)
    s.setblocking(False)
    return s


def answered(s, e, again=None):
    """Makes requests; the instance reports the answers. `again`: events to register after each
    answer."""
    for i in range(REQUESTS):
        want = b"request %d" % i
        s.sendall(want)
        got = b""
        while got != want:
            if not e.poll(LIMIT):
                return f"request {i}: no event, although {s.recv(100)} is there"
            try:
                got += s.recv(100)
            except BlockingIOError:
                pass
            if again is not None:
                e.modify(s, again)
    return "answered"


def watched(path, events, again=None):
    s, e = new(), select.epoll()
    e.register(s, events)
    say([n & ~OUT for _, n in e.poll(0)])
    s.connect(path)
    if again is not None:
        e.modify(s, again)
    say(answered(s, e, again))
    s.shutdown(socket.SHUT_WR)
    seen = 0
    while not seen & RDHUP:
        seen |= e.poll(LIMIT)[0][1]
    say(seen & (IN | RDHUP), s.recv(1))
    e.unregister(s)
    say(e.poll(0))


def edge(path):
    watched(path, IN | OUT | ET | RDHUP)


def level(path):
    watched(path, IN | RDHUP)


def one_shot(path):
    watched(path, IN | RDHUP | ONESHOT, IN | RDHUP | ONESHOT)


def modified(path):
    s, e = new(), select.epoll()
    e.register(s, OUT)
    s.connect(path)
    e.modify(s, IN | ET)
    say(answered(s, e))


def taken_out(path):
    s, e = new(), select.epoll()
    e.register(s, IN | ET)
    e.unregister(s)
    s.connect(path)
    e.register(s, IN | ET)
    say(answered(s, e))
    try:
        e.register(s, IN)
    except FileExistsError:
        say("there already")


def two_instances(path):
    s, e, f = new(), select.epoll(), select.epoll()
    e.register(s, IN | ET)
    f.register(s, IN)
    s.connect(path)
    say(answered(s, e))
    s.sendall(b"one more")
    say([n for _, n in f.poll(LIMIT)], s.recv(100))


def another_number(path):
    s, e = new(), select.epoll()
    e.register(s, IN | ET)
    other = s.dup()
    s.connect(path)
    say(answered(s, e))
    other.sendall(b"other")
    say(len(e.poll(LIMIT)), other.recv(100))
    s.close()
    other.sendall(b"still")
    say(len(e.poll(LIMIT)), other.recv(100))


def second_number(path):
    s = socket.socket(socket.AF_UNIX)
    s.settimeout(LIMIT)
    other = s.dup()
    other.settimeout(LIMIT)
    s.connect(path)
    for i in range(REQUESTS):
        a, b = (s, other) if i % 2 else (other, s)
        a.sendall(b"request")
        b.recv(100)
    say("answered")


def a_child(path):
    s, e = new(), select.epoll()
    e.register(s, IN | ET)
    r, w = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.read(r, 1)
        s.setblocking(True)
        s.settimeout(LIMIT)
        s.sendall(b"child")
        say("child", s.recv(100))
        os._exit(0)
    s.connect(path)
    say(answered(s, e))
    os.write(w, b"x")
    os.waitpid(pid, 0)


def an_unwatched_child(path):
    s = socket.socket(socket.AF_UNIX)
    s.settimeout(LIMIT)
    r, w = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.read(r, 1)
        s.sendall(b"child")
        say("child", s.recv(100))
        os._exit(0)
    s.connect(path)
    for _ in range(REQUESTS):
        s.sendall(b"request")
        s.recv(100)
    os.write(w, b"x")
    os.waitpid(pid, 0)
    s.sendall(b"parent")
    say("parent", s.recv(100))


def signals(path):
    s = new()
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGIO])
    fcntl.fcntl(s, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(s, fcntl.F_SETFL, fcntl.fcntl(s, fcntl.F_GETFL) | os.O_ASYNC)
    s.connect(path)
    for i in range(REQUESTS):
        s.sendall(b"request")
        got = b""
        while got != b"request":
            if signal.sigtimedwait([signal.SIGIO], LIMIT) is None:
                return say(f"request {i}: no signal, although {s.recv(100)} is there")
            try:
                got += s.recv(100)
            except BlockingIOError:
                pass
    say("answered")


def a_listener(path):
    path += "2"
    s, e = new(), select.epoll()
    e.register(s, IN)
    s.bind(path)
    s.listen()
    c = new()
    c.connect(path)
    say(len(e.poll(LIMIT)))
    a, _ = s.accept()
    a.setblocking(True)
    threading.Thread(target=echo, args=(a,), daemon=True).start()
    e.register(c, IN | ET)
    say(answered(c, e))


def refused(path):
    s, e = new(), select.epoll()
    e.register(s, IN | OUT | ET)
    try:
        s.connect(path + "-nobody")
    except FileNotFoundError:
        say("nobody")
    e.poll(0)
    s.connect(path)
    say(answered(s, e))


def echo(s):
    with s:
        while data := s.recv(1000):
            s.sendall(data)


def serve(path):
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(path)
    listener.listen()
    while True:
        threading.Thread(target=echo, args=(listener.accept()[0],), daemon=True).start()


CASES = [edge, level, one_shot, modified, taken_out, two_instances, another_number, second_number, a_child]
CASES += [an_unwatched_child, signals, a_listener, refused]


def main():
    names = sys.argv[1:]
    for case in CASES:
        if names and case.__name__ not in names:
            continue
        print("#", case.__name__, flush=True)
        with tempfile.TemporaryDirectory() as place:
            path = os.path.join(place, "s")
            server = os.fork()
            if server == 0:
                serve(path)
            with socket.socket(socket.AF_UNIX) as probe:
                while probe.connect_ex(path) != 0:
                    time.sleep(0.01)
            pid = os.fork()
            if pid == 0:
                case(path)
                os._exit(0)
            os.waitpid(pid, 0)
            os.kill(server, 9)
            os.waitpid(server, 0)
    print("ok")


if __name__ == "__main__":
    main()
