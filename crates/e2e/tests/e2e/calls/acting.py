#!/usr/bin/python3
"""Checks the effect of socket options (not what `getsockopt` returns): the same on stock sockets
and on ours.

    acting.py CASE...

Each case prints lines. The option is set in turn before `connect`, on the connection, on the
listener, and on the accepted socket.
"""
import errno
import select
import signal
import socket
import struct
import sys
import threading
import time

TCP = socket.IPPROTO_TCP
USER_TIMEOUT, DEFER_ACCEPT, NOTSENT_LOWAT = 18, 9, 25
MAX_PACING_RATE, IP_LOCAL_PORT_RANGE = 47, 51


def pair(before=(), after=(), listener=(), accepted=(), family=socket.AF_INET):
    """A client and a server's end, with these options."""
    with socket.socket(family) as l:
        for o in listener:
            l.setsockopt(*o)
        l.bind(("127.0.0.1" if family == socket.AF_INET else "::1", 0))
        l.listen()
        c = socket.socket(family)
        for o in before:
            c.setsockopt(*o)
        c.connect(l.getsockname())
        s, _ = l.accept()
    for o in after:
        c.setsockopt(*o)
    for o in accepted:
        s.setsockopt(*o)
    return c, s


WHERE = [("before", 0), ("after", 0), ("listener", 1), ("accepted", 1)]


def places(option):
    """For each place where the option can be set: the end that has it, and its peer."""
    for where, side in WHERE:
        ends = pair(**{where: [option]})
        yield where, ends[side], ends[1 - side]


def fill(s, most=64 << 20):
    s.setblocking(False)
    n = 0
    try:
        while n < most:
            n += s.send(bytes(16384))
    except BlockingIOError:
        pass
    return n


def ready(s, events, ms=0):
    p = select.poll()
    p.register(s, events)
    return [hex(e) for _, e in p.poll(ms)]


def take(s, n):
    got = 0
    while got < n:
        got += len(s.recv(min(n - got, 1 << 20)))
    return got


def lowat():
    for n in (1, 16384, 100000):
        for where, a, b in places((TCP, NOTSENT_LOWAT, n)):
            sent = fill(a)
            print(n, where, "few bytes:", sent < (400 << 10) + n, ready(a, select.POLLOUT))
            ep = select.epoll()
            ep.register(a, select.EPOLLOUT | select.EPOLLET)
            print(ep.poll(0), [], select.select([], [a], [], 0)[1])
            take(b, sent)
            print("read", [e for _, e in ep.poll(5)], ready(a, select.POLLOUT, 5000), fill(a) > 0)
    # 0 switches the limit off: a send then takes as many bytes as there is room for.
    a, b = pair(before=[(TCP, NOTSENT_LOWAT, 16384)])
    fill(a)
    a.setsockopt(TCP, NOTSENT_LOWAT, 0)
    print("none", ready(a, select.POLLOUT, 5000), fill(a) > 1 << 20)
    # A blocking send must go on while the peer reads.
    a, b = pair(before=[(TCP, NOTSENT_LOWAT, 4096)])
    t = threading.Thread(target=lambda: take(b, 8 << 20))
    t.start()
    a.sendall(bytes(8 << 20))
    t.join()
    print("8 MiB")


def outcome(what, s):
    try:
        return what()
    except OSError as e:
        return errno.errorcode[e.errno]


def timed(wait, s):
    """Prints what ends a wait on a stuck connection, and what the next calls return."""
    begin = time.monotonic()
    r = outcome(wait, s)
    late = time.monotonic() - begin >= 0.7
    after = [outcome(lambda: s.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR), s)]
    after += [outcome(lambda: s.send(b"x", socket.MSG_NOSIGNAL), s), outcome(lambda: s.recv(9), s)]
    after += [outcome(s.getpeername, s) if not isinstance(outcome(s.getpeername, s), tuple) else "name"]
    return r, late, after, ready(s, select.POLLIN | select.POLLOUT)


def until_error(s):
    while True:
        s.send(bytes(65536))


def by_epoll(s):
    ep = select.epoll()
    ep.register(s, select.EPOLLIN | select.EPOLLET)
    return [hex(e) for _, e in ep.poll(10)]


def user_timeout():
    for where, a, b in places((TCP, USER_TIMEOUT, 700)):
        fill(a)
        print(where, timed(lambda: ready(a, 0, 10000), a))
    waits = {
        "poll for room": lambda a: ready(a, select.POLLOUT, 10000),
        "poll for data": lambda a: ready(a, select.POLLIN, 10000),
        "select": lambda a: [len(x) for x in select.select([a], [], [], 10)],
        "epoll": by_epoll,
        "send": lambda a: (a.setblocking(True), until_error(a)),
        "recv": lambda a: (a.setblocking(True), a.recv(1)),
        "sleep": lambda a: (time.sleep(1.3), a.send(b"x"))[1],
        "sleep, recv": lambda a: (time.sleep(1.3), a.recv(1))[1],
    }
    for name, wait in waits.items():
        a, b = pair(before=[(TCP, USER_TIMEOUT, 700)])
        fill(a)
        print(name, timed(lambda: wait(a), a))
    # The option is set when the connection is stuck already.
    a, b = pair()
    fill(a)
    a.setsockopt(TCP, USER_TIMEOUT, 700)
    print("late", timed(lambda: ready(a, 0, 10000), a))
    # Received bytes can still be read. The peer reads what has arrived, and then sees the end.
    a, b = pair(before=[(TCP, USER_TIMEOUT, 700)])
    b.send(b"answer")
    fill(a)
    print("with data", ready(a, 0, 10000), outcome(lambda: a.recv(99), a), outcome(lambda: a.recv(99), a))
    b.settimeout(5)

    def all_of_it():
        while b.recv(1 << 20):
            pass

    print("peer", outcome(all_of_it, b))
    # A slow reader is not stuck, and neither is a connection whose buffer has room.
    a, b = pair(before=[(TCP, USER_TIMEOUT, 700)])
    sent = fill(a)
    for _ in range(6):
        time.sleep(0.3)
        take(b, 300 << 10)
    print("slow", ready(a, 0), a.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR))
    a, b = pair(before=[(TCP, USER_TIMEOUT, 300)])
    a.send(bytes(1000))
    print("room", ready(a, select.POLLIN, 1000))


def pacing():
    for where, a, b in places((socket.SOL_SOCKET, MAX_PACING_RATE, 2_000_000)):
        t = threading.Thread(target=lambda: take(b, 3_000_000))
        begin = time.monotonic()
        t.start()
        a.sendall(bytes(3_000_000))
        t.join()
        print(where, "limited:", time.monotonic() - begin > 0.5)
    a, b = pair(after=[(socket.SOL_SOCKET, MAX_PACING_RATE, -1)])
    a.sendall(bytes(100_000))
    print("unlimited", take(b, 100_000))


def ports():
    l = socket.create_server(("127.0.0.1", 0))
    c = socket.socket()
    c.setsockopt(socket.IPPROTO_IP, IP_LOCAL_PORT_RANGE, struct.pack("I", 47003 << 16 | 47000))
    c.connect(l.getsockname())
    print(47000 <= c.getsockname()[1] <= 47003)


def waiting():
    l = socket.create_server(("127.0.0.1", 0), backlog=16)
    clients = [socket.create_connection(l.getsockname()) for _ in range(5)]
    info = lambda: (lambda i: (i[0], struct.unpack_from("II", i, 24)))(l.getsockopt(TCP, socket.TCP_INFO, 104))
    for n in range(6):
        print(info())
        if n < 5:
            l.accept()
    c, s = pair()
    c.send(bytes(1000))
    time.sleep(0.1)
    acked, received = struct.unpack_from("QQ", s.getsockopt(TCP, socket.TCP_INFO, 136), 120)
    print("received", received, "not sent", struct.unpack_from("I", c.getsockopt(TCP, socket.TCP_INFO, 148), 144))


def defer():
    for when in ("before listen", "behind listen"):
        l = socket.socket()
        if when == "before listen":
            l.setsockopt(TCP, DEFER_ACCEPT, 30)
        l.bind(("127.0.0.1", 0))
        l.listen()
        if when == "behind listen":
            l.setsockopt(TCP, DEFER_ACCEPT, 30)
        l.setblocking(False)
        ep = select.epoll()
        ep.register(l, select.EPOLLIN | select.EPOLLET)
        idle = [socket.create_connection(l.getsockname()) for _ in range(3)]
        print(when, ready(l, select.POLLIN, 200), ep.poll(0), outcome(l.accept, l))
        c = socket.create_connection(l.getsockname())
        c.send(b"GET")
        print([e for _, e in ep.poll(5)], select.select([l], [], [], 5)[0] == [l])
        s, peer = l.accept()
        print(peer == c.getsockname(), s.recv(9), outcome(l.accept, l))
        idle[1].send(b"later")
        idle[2].shutdown(socket.SHUT_WR)
        got = []
        while len(got) < 2:
            ready(l, select.POLLIN, 5000)
            got.append(l.accept()[0].recv(9))
        print(sorted(got), outcome(l.accept, l))
    # After the time limit the connection is accepted even without data.
    l = socket.socket()
    l.setsockopt(TCP, DEFER_ACCEPT, 1)
    l.bind(("127.0.0.1", 0))
    l.listen()
    c = socket.create_connection(l.getsockname())
    begin = time.monotonic()
    s, peer = l.accept()
    print(peer == c.getsockname(), time.monotonic() - begin > 0.5, s.getsockopt(TCP, DEFER_ACCEPT))


CASES = {f.__name__: f for f in (lowat, user_timeout, pacing, ports, waiting, defer)}


def main():
    signal.alarm(100)
    for name in sys.argv[1:] or CASES:
        print("#", name, flush=True)
        CASES[name]()
    print("ok")


main()
