"""Random socket calls on two Unix stream sockets, each in a process of its own.

The first process draws the calls (from a seed) and decides which process makes the next one. Each
process waits for the previous call, so the transcript is the same in every run. No time passes
between two calls: if the kernel has an effect at once, such as waking a waiter or returning an
error, it must be visible at once.

programs.py SEED NUMBER [CALLS]      prints the transcript
"""

import array
import fcntl
import itertools
import os
import random
import select
import socket
import struct
import subprocess
import sys
import tempfile
import termios

WARM = 24
FLAGS = [0, 0, 0, *map(int, (socket.MSG_PEEK, socket.MSG_TRUNC, socket.MSG_WAITALL, socket.MSG_ERRQUEUE, socket.MSG_NOSIGNAL, socket.MSG_OOB))]
OPTIONS = [
    ("SO_ERROR", socket.SO_ERROR, None),
    ("SO_SNDBUF", socket.SO_SNDBUF, [150000, 300000]),
    ("SO_RCVBUF", socket.SO_RCVBUF, [4096, 65536]),
    ("SO_RCVLOWAT", socket.SO_RCVLOWAT, [0, 1, 5, 100]),
    ("SO_PASSCRED", socket.SO_PASSCRED, [0]),
    ("SO_PEEK_OFF", 42, [-1, 0, 3]),
    ("SO_KEEPALIVE", socket.SO_KEEPALIVE, [0, 1]),
    ("SO_REUSEADDR", socket.SO_REUSEADDR, [0, 1]),
    ("SO_PRIORITY", socket.SO_PRIORITY, [0, 3]),
    ("SO_TIMESTAMP", 29, [0, 1]),
    ("SO_DOMAIN", socket.SO_DOMAIN, None),
    ("SO_TYPE", socket.SO_TYPE, None),
    ("SO_PROTOCOL", socket.SO_PROTOCOL, None),
    ("SO_ACCEPTCONN", socket.SO_ACCEPTCONN, None),
    ("SO_OOBINLINE", socket.SO_OOBINLINE, [0, 1]),
]
NAMES = itertools.count()
EVENTS = select.POLLIN | select.POLLOUT | select.POLLRDHUP | select.POLLPRI


def fresh(place):
    """The state of a process: its descriptors of the socket, and an epoll instance of each kind
    that watches it."""
    return {"place": place, "fds": [], "level": select.epoll(), "edge": select.epoll(), "spare": []}


def adopt(state, s):
    s.setblocking(False)
    state["fds"].append(s)
    state["level"].register(s.fileno(), EVENTS)
    # Without POLLOUT: each read by the peer frees memory of the sender, which is an edge for
    # POLLOUT even if there was room before.
    state["edge"].register(s.fileno(), EVENTS & ~select.POLLOUT | select.EPOLLET)


def nobody():
    with open("/dev/null") as f:
        return os.dup(f.fileno())


def call(state, what, *a):
    """Makes one call. Returns a line with its result."""
    s = state["fds"][a[0] % len(state["fds"])] if state["fds"] else None
    a = a[1:]
    if s is None:
        return "no socket"
    try:
        if what == "send":
            return s.send(bytes(range(256)) * (a[0] // 256) + b"x" * (a[0] % 256), a[1])
        if what == "sendto":
            return s.sendto(b"to", "/nonexistent")
        if what == "sendmsg":
            return s.sendmsg([b"a" * a[0], b"b" * a[0]])
        if what == "pass":
            fd = nobody()
            try:
                return s.sendmsg([b"fd"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [fd]))])
            finally:
                os.close(fd)
        if what == "recv":
            return s.recv(a[0], a[1])
        if what == "recvfrom":
            return s.recvfrom(a[0])
        if what == "recvmsg":
            data, control, flags, name = s.recvmsg(a[0], 256)
            for level, kind, value in control:
                if kind == socket.SCM_RIGHTS:
                    for fd in struct.unpack(f"{len(value) // 4}i", value):
                        os.close(fd)
            kinds = [(level, kind, len(value)) for level, kind, value in control if kind != 29]
            return data, kinds, flags, name
        if what == "read":
            return os.read(s.fileno(), a[0])
        if what == "write":
            return os.write(s.fileno(), b"w" * a[0])
        if what == "readv":
            b = [bytearray(3), bytearray(a[0])]
            n = os.readv(s.fileno(), b)
            return n, bytes(b[0]), bytes(b[1])
        if what == "writev":
            return os.writev(s.fileno(), [b"1" * a[0], b"", b"2" * a[0]])
        if what == "shutdown":
            return s.shutdown(a[0])
        if what == "poll":
            p = select.poll()
            p.register(s.fileno(), EVENTS)
            return p.poll(0)[0][1] if p.poll(0) else 0
        if what == "select":
            r, w, x = select.select([s], [s], [s], 0)
            return len(r), len(w), len(x)
        if what in ("level", "edge"):
            return sorted(e for _, e in state[what].poll(0))
        if what == "unread":
            return struct.unpack("i", fcntl.ioctl(s, termios.FIONREAD, struct.pack("i", 0)))[0]
        if what == "look":
            # A connection that returns to the kernel does so as soon as both processes have
            # polled.
            select.select(state["fds"], [], [], 0)
            return None
        if what == "get":
            return OPTIONS[a[0]][0], s.getsockopt(socket.SOL_SOCKET, OPTIONS[a[0]][1])
        if what == "set":
            name, number, values = OPTIONS[a[0]]
            return name, values and s.setsockopt(socket.SOL_SOCKET, number, values[a[1] % len(values)])
        if what == "peercred":
            return [n > 0 for n in struct.unpack("3i", s.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))][0]
        if what == "names":
            return s.getsockname(), s.getpeername()
        if what == "tcp":
            return s.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
        if what == "connect":
            return s.connect("/nonexistent")
        if what == "listen":
            return s.listen()
        if what == "bind":
            # Each name is used once, because it becomes free only when the monitor has closed its
            # copy of the socket.
            return s.bind("\0%s bound %d" % (state["place"], next(NAMES)))
        if what == "accept":
            return s.accept()
        if what == "flags":
            return fcntl.fcntl(s, fcntl.F_GETFL)
        if what == "blocking":
            s.setblocking(False)
            return s.getblocking()
        if what == "dup":
            if len(state["fds"]) < 3:
                state["fds"].append(s.dup())
            return len(state["fds"])
        if what == "close":
            if len(state["fds"]) > 1 or a[0]:
                s.close()
                state["fds"].remove(s)
            return len(state["fds"])
        if what == "nothing":
            return s.send(b""), os.read(s.fileno(), 0)
    except (OSError, ValueError) as e:
        return type(e).__name__, getattr(e, "errno", None)
    raise ValueError(what)


def draw(r):
    """Draws one call, as (name, arguments)."""
    # Small sizes, so that no buffer becomes full: the kernel also counts its memory for each
    # message.
    size = lambda: r.choice([0, 1, 2, 7, 8, 9, 63, 64, 100, 1000, 1024, 2000])
    which = r.randrange(3)
    make = {
        "send": lambda: (size(), r.choice([0, 0, *map(int, (socket.MSG_NOSIGNAL, socket.MSG_MORE, socket.MSG_EOR))])),
        "sendmsg": lambda: (size(),),
        "recv": lambda: (size(), r.choice(FLAGS)),
        "recvfrom": lambda: (size(),),
        "recvmsg": lambda: (size(),),
        "read": lambda: (size(),),
        "write": lambda: (size(),),
        "readv": lambda: (size(),),
        "writev": lambda: (size(),),
        "shutdown": lambda: (r.randrange(3),),
        "get": lambda: (r.randrange(len(OPTIONS)),),
        "set": lambda: (r.randrange(len(OPTIONS)), r.randrange(4)),
        "close": lambda: (r.random() < 0.3,),
    }
    often = ["send", "recv", "write", "read"] * 6 + ["sendmsg", "recvmsg", "readv", "writev", "recvfrom"] * 2
    often += ["poll", "level", "edge", "select", "unread"] * 2 + ["get", "names", "flags", "peercred", "nothing", "dup"]
    seldom = ["pass", "shutdown", "shutdown", "close", "close", "set", "set", "tcp", "sendto", "connect", "listen", "bind", "accept", "blocking"]
    what = r.choice(seldom if r.random() < 0.08 else often)
    return what, (which, *make.get(what, tuple)())


def serve(path):
    """The other process: makes the calls that it receives."""
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(path)
    listener.listen()
    print("listening", flush=True)
    state = fresh(path)
    for line in sys.stdin:
        what, args = eval(line)
        if what == "begin":
            for s in state["fds"]:
                s.close()
            state = fresh(path)
            s, _ = listener.accept()
            for _ in range(WARM):
                s.sendall(s.recv(100))
            adopt(state, s)
            print(repr("began"), flush=True)
        else:
            print(repr(call(state, what, *args)), flush=True)


def main():
    seed, number = int(sys.argv[1]), int(sys.argv[2])
    calls = int(sys.argv[3]) if len(sys.argv) > 3 else 40
    with tempfile.TemporaryDirectory() as place:
        path = os.path.join(place, "s")
        other = subprocess.Popen([sys.executable, __file__, "serve", path], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        other.stdout.readline()
        state = fresh(path)

        def tell(what, *args):
            other.stdin.write(repr((what, args)) + "\n")
            other.stdin.flush()

        for n in range(seed, seed + number):
            r = random.Random(n)
            print("# program", n)
            for s in state["fds"]:
                s.close()
            state = fresh(path)
            tell("begin")
            s = socket.socket(socket.AF_UNIX)
            s.connect(path)
            for _ in range(WARM):
                s.sendall(b"warm")
                assert s.recv(100) == b"warm"
            other.stdout.readline()
            adopt(state, s)
            moved, shut = False, False
            for _ in range(calls):
                what, args = draw(r)
                # If a connection returns to the kernel, it is added to instances there, which is
                # one edge more. The kernel reports an edge to the peer for a second shutdown, too,
                # although nothing changes.
                here = r.random() < 0.5
                moved |= what == "shutdown" and shut
                shut |= what == "shutdown"
                moved |= what in ("pass", "set") or what == "recv" and args[2] == socket.MSG_OOB
                if moved and what == "edge":
                    continue
                if here:
                    said = repr(call(state, what, *args))
                    tell("look", 0)
                    other.stdout.readline()
                    print(" client", what, args, said.replace(place, "PLACE"))
                else:
                    tell(what, *args)
                    said = other.stdout.readline().strip()
                    call(state, "look", 0)
                    print(" server", what, args, said.replace(place, "PLACE"))
        other.stdin.close()
        other.wait()
    print("ok")


if sys.argv[1] == "serve":
    serve(sys.argv[2])
else:
    main()
