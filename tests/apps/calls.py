#!/usr/bin/python3
"""Calls and options that few programs use, as a transcript: stock sockets and ours must
print the same.

    calls.py [case ...]
"""
import array
import ctypes
import errno
import fcntl
import os
import select
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import termios
import threading
import time

CASES = {}
libc = ctypes.CDLL(None, use_errno=True)


def case(f):
    CASES[f.__name__] = f
    return f


def pair(family=socket.AF_INET, address="127.0.0.1", listener=None, client=None):
    l = listener or socket.create_server((address, 0), family=family)
    c = client or socket.socket(family)
    c.settimeout(10)
    c.connect(l.getsockname())
    c.setblocking(True)
    s, _ = l.accept()
    for x in c, s:
        x.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", 10, 0))
    return c, s


def say(label, f, *args):
    try:
        r = f(*args)
    except OSError as e:
        r = errno.errorcode.get(e.errno, e)
    print(label, r, flush=True)
    return r


def raw(label, function, *args):
    """A function of libc's by ctypes."""
    ctypes.set_errno(0)
    r = getattr(libc, function)(*args)
    print(label, r if r >= 0 else errno.errorcode[ctypes.get_errno()], flush=True)
    return r


# --- options ----------------------------------------------------------------

S, T, I4, I6 = socket.SOL_SOCKET, socket.IPPROTO_TCP, socket.IPPROTO_IP, socket.IPPROTO_IPV6

# Only their length or errno is compared: what they say is different each time, or is
# about packets.
ANY = {
    (S, 7): "SO_SNDBUF: grows by itself",
    (S, 28): "SO_PEERNAME: compared below",
    (S, 49): "SO_INCOMING_CPU: where the other side ran last",
    (S, 55): "SO_MEMINFO: memory of packets, and SO_SNDBUF",
    (S, 57): "SO_COOKIE: unique",
    (I4, 52): "IP_PROTOCOL: compared below",
    (T, 2): "TCP_MAXSEG: half of the peer's window so far; compared below",
    (T, 12): "TCP_QUICKACK: a state, of who answered what how soon",
    (T, 11): "TCP_INFO: counters of packets",
    (T, 24): "TCP_TIMESTAMP: a clock with an offset of its own",
    (T, 26): "TCP_CC_INFO: counters of packets",
}


def every_option(family, address):
    c, s = pair(family, address)
    c.sendall(b"x")
    s.recv(1)
    s.sendall(b"y")
    c.recv(1)
    for side, x in ("connected", c), ("accepted", s):
        # Numbers of IP beyond are netfilter's, which reads the buffer.
        for level, last in (S, 100), (I4, 64), (I6, 79), (T, 64), (282, 4), (284, 4), (17, 4):
            for name in range(0, last):
                for size in 4, 256:
                    try:
                        value = x.getsockopt(level, name, size)
                        value = len(value) if (level, name) in ANY else value.hex()
                    except OSError as e:
                        value = errno.errorcode[e.errno]
                    print(side, level, name, size, value)
        peer = x.getsockopt(S, 28, 8)
        print("peer", struct.unpack("!H", peer[2:4])[0] == x.getpeername()[1], peer[4:].hex())
        print("port", x.getsockopt(I4, 52) == x.getsockname()[1])
        print("segment", 32000 < x.getsockopt(T, 2) <= 32768)
        print("cpu", 0 <= x.getsockopt(S, 49) < os.cpu_count())
        print("state", x.getsockopt(T, 11, 1)[0])


@case
def every_option_ipv4():
    every_option(socket.AF_INET, "127.0.0.1")


@case
def every_option_ipv6():
    every_option(socket.AF_INET6, "::1")


RARE = [
    (S, socket.SO_PRIORITY, 5),
    (I4, socket.IP_TOS, 0x10),
    (I4, socket.IP_TTL, 33),
    (T, 25, 12345),  # TCP_NOTSENT_LOWAT
    (S, 46, 20),  # SO_BUSY_POLL
    (T, socket.TCP_SYNCNT, 3),
    (S, 60, 1),  # SO_ZEROCOPY
    (S, 69, 1),  # SO_PREFER_BUSY_POLL
]


@case
def options_of_a_listener_are_inherited():
    for n in 1, 3, 8:
        l = socket.create_server(("127.0.0.1", 0))
        for level, name, value in RARE[:n]:
            l.setsockopt(level, name, value)
        c, s = pair(listener=l)
        for level, name, _ in RARE:
            print(n, name, s.getsockopt(level, name), c.getsockopt(level, name))
        c.sendall(b"bytes")
        print(s.recv(10))


@case
def options_survive_a_switch():
    for n in 1, 8:
        c, s = pair()
        for level, name, value in RARE[:n]:
            c.setsockopt(level, name, value)
        c.setsockopt(I4, socket.IP_TOS, b"\x08")
        c.sendall(b"!")
        os.set_inheritable(c.fileno(), True)
        subprocess.run("true", close_fds=False)
        os.system("true")
        for level, name, _ in RARE:
            print(n, name, c.getsockopt(level, name))
        print(s.recv(10))


@case
def values_out_of_range():
    c, s = pair()
    for level, name, values in (
        (T, 2, (0, 87, 88, 500, 32767, 32768, 70000, -1)),
        (T, 10, (0, 1000, 100000)),
        (T, 25, (0, 5)),
        (S, 46, (-1, 0, 7)),
        (S, 49, (0, 1, -1)),
        (S, 42, (-1,)),
        (S, 36, (0, 77)),
        (T, 19, (0, -1)),
        (I6, 1, (2, 10)),
    ):
        for v in values:
            try:
                c.setsockopt(level, name, v)
                r = "ok"
            except OSError as e:
                r = errno.errorcode[e.errno]
            print(level, name, v, r)
    c.sendall(b"still")
    print(s.recv(10))


@case
def timestamps():
    for name in 29, 35, 37, 63:
        c, s = pair()
        s.setsockopt(S, name, 0x10 if name == 37 else 1)
        c.sendall(b"when")
        data, controls, flags, _ = s.recvmsg(10, 200)
        print(name, data, flags)
        l = socket.create_server(("127.0.0.1", 0))
        l.setsockopt(S, name, 0x10 if name == 37 else 1)
        c, s = pair(listener=l)
        for _ in range(50):
            # The kernel begins to take the time a moment after somebody wants it.
            c.sendall(b"again")
            data, controls, flags, _ = s.recvmsg(5, 200)
            if controls:
                break
            time.sleep(0.02)
        print(name, data, [(level, kind, len(d)) for level, kind, d in controls], s.getsockopt(S, name))


@case
def unread_by_control_message():
    c, s = pair()
    s.setsockopt(T, 36, 1)  # TCP_INQ
    c.sendall(b"0123456789")
    time.sleep(0.02)
    data, controls, _, _ = s.recvmsg(4, 200)
    print(data, [(level, kind, struct.unpack("i", d)[0]) for level, kind, d in controls])


@case
def peeking_further():
    c, s = pair()
    c.sendall(b"0123456789")
    time.sleep(0.02)
    say("set", s.setsockopt, S, 42, 2)
    print(s.recv(3, socket.MSG_PEEK), s.recv(3, socket.MSG_PEEK), s.recv(4))


def completions(s):
    got = []
    for _ in range(100):
        try:
            data, controls, flags, _ = s.recvmsg(10, 200, socket.MSG_ERRQUEUE)
        except BlockingIOError:
            time.sleep(0.01)
            continue
        for level, kind, d in controls:
            err, origin, typ, code, _, info, last = struct.unpack("IBBBBII", d[:16])
            got.append((level, kind, err, origin, code, info, last, flags & socket.MSG_ERRQUEUE != 0))
        if got:
            return got
    return got


@case
def zerocopy():
    MSG_ZEROCOPY = 0x4000000
    c, s = pair()
    print("without", c.send(b"a" * 100, MSG_ZEROCOPY))
    say("queue", c.recvmsg, 1, 100, socket.MSG_ERRQUEUE)
    c.setsockopt(S, 60, 1)
    s.sendall(b"unread")
    print("send", c.send(b"b" * 100, MSG_ZEROCOPY))
    got = b""
    while len(got) < 200:
        got += s.recv(1000)
    print(got == b"a" * 100 + b"b" * 100)
    print(completions(c))
    print("sendmsg", c.sendmsg([b"c" * 3000, b"d" * 3000], [], MSG_ZEROCOPY))
    got = b""
    while len(got) < 6000:
        got += s.recv(10000)
    print(got == b"c" * 3000 + b"d" * 3000)
    print(completions(c))
    poller = select.poll()
    poller.register(c, select.POLLIN)
    print(poller.poll(0), c.recv(10))


@case
def repair():
    c, s = pair()
    c.sendall(b"before")
    try:
        c.setsockopt(T, 19, 1)
    except PermissionError:
        print("no right", s.recv(10))
        return
    c.setsockopt(T, 20, 2)  # TCP_REPAIR_QUEUE: send
    print("sequence", c.getsockopt(T, 21) != 0)
    c.setsockopt(T, 19, 0)
    c.sendall(b" after")
    time.sleep(0.02)
    print(s.recv(20))


# --- signals ----------------------------------------------------------------


def signals(set_up):
    """Which signals arrive, waited for as such: nothing of ours runs meanwhile."""
    for side in 0, 1:
        both = pair()
        x, other = both[side], both[1 - side]
        set_up(x)
        other.sendall(b"news")
        got = signal.sigtimedwait([signal.SIGIO, signal.SIGUSR1, signal.SIGURG], 5)
        print(side, got and (got.si_signo, got.si_code), x.recv(10))
        while signal.sigtimedwait([signal.SIGIO, signal.SIGUSR1], 0.05):
            pass
        x.close()
        other.close()
        while signal.sigtimedwait([signal.SIGIO, signal.SIGUSR1], 0.05):
            pass


def blocked(f):
    def g():
        old = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGIO, signal.SIGUSR1, signal.SIGURG])
        try:
            f()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, old)

    g.__name__ = f.__name__
    return case(g)


@blocked
def signal_by_o_async():
    def set_up(s):
        fcntl.fcntl(s, fcntl.F_SETOWN, os.getpid())
        print("owner", fcntl.fcntl(s, fcntl.F_GETOWN) == os.getpid())
        fcntl.fcntl(s, fcntl.F_SETFL, fcntl.fcntl(s, fcntl.F_GETFL) | os.O_ASYNC)
        print("flag", fcntl.fcntl(s, fcntl.F_GETFL) & os.O_ASYNC != 0)

    signals(set_up)


@blocked
def signal_of_choice():
    def set_up(s):
        fcntl.fcntl(s, 10, signal.SIGUSR1)  # F_SETSIG
        print("signal", fcntl.fcntl(s, 11))
        fcntl.fcntl(s, 15, struct.pack("ii", 1, os.getpid()))  # F_SETOWN_EX
        fcntl.fcntl(s, fcntl.F_SETFL, os.O_ASYNC)

    signals(set_up)


@blocked
def signal_by_ioctl():
    def set_up(s):
        fcntl.ioctl(s, 0x8902, struct.pack("i", os.getpid()))  # SIOCSPGRP
        print("owner", struct.unpack("i", fcntl.ioctl(s, 0x8904, b"    "))[0] == os.getpid())
        fcntl.ioctl(s, 0x5452, struct.pack("i", 1))  # FIOASYNC

    signals(set_up)


@blocked
def signal_of_a_listener():
    for late in False, True:
        l = socket.create_server(("127.0.0.1", 0))
        early = socket.create_connection(l.getsockname()) if late else None
        fcntl.fcntl(l, fcntl.F_SETOWN, os.getpid())
        fcntl.fcntl(l, fcntl.F_SETFL, os.O_ASYNC | os.O_NONBLOCK)
        if early:
            print("early", l.accept()[1] == early.getsockname())
            while signal.sigtimedwait([signal.SIGIO], 0.05):
                pass
        c = socket.create_connection(l.getsockname())
        got = signal.sigtimedwait([signal.SIGIO], 5)
        s, _ = l.accept()
        print(late, got and got.si_signo, fcntl.fcntl(s, fcntl.F_GETFL) & os.O_ASYNC)
        c.sendall(b"x")
        print(s.recv(2))
        while signal.sigtimedwait([signal.SIGIO], 0.05):
            pass


@blocked
def signal_for_urgent_data():
    def set_up(s):
        fcntl.fcntl(s, fcntl.F_SETOWN, os.getpid())

    both = pair()
    set_up(both[1])
    both[0].send(b"!", socket.MSG_OOB)
    got = signal.sigtimedwait([signal.SIGURG], 5)
    print(got and got.si_signo, both[1].recv(1, socket.MSG_OOB))


@blocked
def signal_before_connect():
    l = socket.create_server(("127.0.0.1", 0))
    c = socket.socket()
    fcntl.fcntl(c, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(c, fcntl.F_SETFL, os.O_ASYNC)
    c, s = pair(listener=l, client=c)
    while signal.sigtimedwait([signal.SIGIO], 0.05):
        pass
    s.sendall(b"z")
    got = signal.sigtimedwait([signal.SIGIO], 5)
    # settimeout and setblocking have set the flags anew.
    print(bool(got) or not fcntl.fcntl(c, fcntl.F_GETFL) & os.O_ASYNC, c.recv(2))


# --- vectors, messages, pipes, files ----------------------------------------


@case
def vectors_with_flags():
    RWF_NOWAIT, RWF_HIPRI, RWF_DSYNC, RWF_APPEND = 8, 1, 2, 16
    c, s = pair()

    def get(fd, n, off, flags):
        b = bytearray(n)
        r = os.preadv(fd, [b], off, flags)
        return r, bytes(b[:r])

    say("nothing", get, s.fileno(), 10, -1, RWF_NOWAIT)
    say("positioned", get, s.fileno(), 10, 0, 0)
    say("unknown", get, s.fileno(), 10, -1, 0x4000)
    say("write", os.pwritev, c.fileno(), [b"one", b"two"], -1, 0)
    time.sleep(0.02)
    say("read", get, s.fileno(), 4, -1, RWF_NOWAIT)
    say("high", get, s.fileno(), 4, -1, RWF_HIPRI)
    for flags in RWF_DSYNC, RWF_APPEND, RWF_NOWAIT, 0x4000:
        say(f"write {flags}", os.pwritev, c.fileno(), [b"flags"], -1, flags)
    time.sleep(0.02)
    print(s.recv(100))
    # Full, and still not blocked.
    start, total = time.time(), 0
    while True:
        try:
            total += os.pwritev(c.fileno(), [bytes(100000)], -1, RWF_NOWAIT)
        except BlockingIOError:
            break
    print("full", total > 100000, time.time() - start < 5)


class Iovec(ctypes.Structure):
    _fields_ = [("base", ctypes.c_void_p), ("len", ctypes.c_size_t)]


class Msghdr(ctypes.Structure):
    _fields_ = [
        ("name", ctypes.c_void_p),
        ("namelen", ctypes.c_uint32),
        ("iov", ctypes.c_void_p),
        ("iovlen", ctypes.c_size_t),
        ("control", ctypes.c_void_p),
        ("controllen", ctypes.c_size_t),
        ("flags", ctypes.c_int),
    ]


class Mmsghdr(ctypes.Structure):
    _fields_ = [("hdr", Msghdr), ("len", ctypes.c_uint)]


class Timespec(ctypes.Structure):
    _fields_ = [("sec", ctypes.c_long), ("nsec", ctypes.c_long)]


def messages(buffers):
    vecs = [(Iovec * 1)(Iovec(ctypes.addressof(b), len(b))) for b in buffers]
    m = (Mmsghdr * len(buffers))()
    for i, v in enumerate(vecs):
        m[i].hdr.iov, m[i].hdr.iovlen = ctypes.addressof(v), 1
    return m, vecs


@case
def many_messages_with_a_limit():
    def receive(label, s, n, flags, limit):
        buffers = [ctypes.create_string_buffer(4) for _ in range(n)]
        m, _keep = messages(buffers)
        t = Timespec(*limit) if limit else None
        start = time.time()
        r = raw(label, "recvmmsg", s.fileno(), m, n, flags, ctypes.byref(t) if t else None)
        print("  ", [m[i].len for i in range(max(r, 0))], b"".join(b.raw[: m[i].len] for i, b in enumerate(buffers[: max(r, 0)])))
        print("   left", t and (t.sec, t.nsec > 0), "waited", round(time.time() - start, 1))

    c, s = pair()
    c.sendall(b"abcdefgh")
    time.sleep(0.02)
    receive("two", s, 2, 0, None)
    c.sendall(b"abcdefgh")
    time.sleep(0.02)
    receive("at once", s, 4, socket.MSG_DONTWAIT, (5, 0))
    receive("none", s, 4, socket.MSG_DONTWAIT, (5, 0))
    receive("bad", s, 4, 0, (0, 1000000000))
    receive("negative", s, 4, 0, (-1, 0))
    c.sendall(b"abcd")
    time.sleep(0.02)
    # The limit is looked at after each message.
    receive("no time", s, 4, 0, (0, 0))
    c.sendall(b"abcdefgh")
    threading.Timer(0.3, c.sendall, [b"late"]).start()
    time.sleep(0.02)
    receive("runs out", s, 8, 0, (0, 100000000))
    c.sendall(b"abcd")
    time.sleep(0.02)
    receive("wait for one", s, 4, 0x10000, (5, 0))
    m, _keep = messages([ctypes.create_string_buffer(b"x" * 9, 9), ctypes.create_string_buffer(b"y" * 7, 7)])
    raw("sendmmsg", "sendmmsg", c.fileno(), m, 2, 0)
    print([x.len for x in m])
    time.sleep(0.02)
    print(s.recv(100))


@case
def pipes():
    c, s = pair()
    r, w = os.pipe()
    raw("tee in", "tee", s.fileno(), w, 10, 2)
    raw("tee out", "tee", r, c.fileno(), 10, 2)
    b = ctypes.create_string_buffer(b"vector")
    v = Iovec(ctypes.addressof(b), 6)
    raw("vmsplice", "vmsplice", c.fileno(), ctypes.byref(v), 1, 0)
    c.sendall(b"through")
    time.sleep(0.02)
    say("splice", os.splice, s.fileno(), w, 100)
    print(os.read(r, 100))
    os.write(w, b"back")
    say("splice", os.splice, r, s.fileno(), 100)
    print(c.recv(100))


@case
def files():
    with tempfile.TemporaryFile() as f:
        f.write(bytes(range(256)) * 1000)
        f.flush()
        c, s = pair()
        f.seek(100)
        got = bytearray()
        t = threading.Thread(target=lambda: [got.extend(s.recv(100000)) for _ in iter(lambda: len(got) < 256000 - 100, False)])
        t.start()
        total = 0
        while total < 256000 - 100:
            total += os.sendfile(c.fileno(), f.fileno(), None, 1 << 20)
        t.join()
        print(total, bytes(got) == (bytes(range(256)) * 1000)[100:], f.tell())
        say("at end", os.sendfile, c.fileno(), f.fileno(), None, 10)
        say("offset", os.sendfile, c.fileno(), f.fileno(), 255990, 100)
        print(s.recv(100))
        say("negative", os.sendfile, c.fileno(), f.fileno(), -1, 10)
        # From a socket: not to be had.
        say("from a socket", os.sendfile, f.fileno(), s.fileno(), None, 10)
        say("socket to socket", os.sendfile, c.fileno(), s.fileno(), None, 10)
        r, w = os.pipe()
        say("from a pipe", os.sendfile, c.fileno(), r, None, 10)
        say("from nothing", os.sendfile, c.fileno(), 999, None, 10)
        d = os.open("/dev/zero", os.O_RDONLY)
        say("from a device", os.sendfile, c.fileno(), d, None, 10)
        o = os.open("/dev/null", os.O_WRONLY)
        say("write only", os.sendfile, c.fileno(), o, None, 10)
        print("bytes", len(s.recv(100, socket.MSG_DONTWAIT)))
        s.close()
        c.setblocking(False)
        signal.signal(signal.SIGPIPE, signal.SIG_IGN)
        say("first after close", os.sendfile, c.fileno(), f.fileno(), 0, 10)
        time.sleep(0.02)
        say("then", os.sendfile, c.fileno(), f.fileno(), 0, 10)


@case
def controls():
    c, s = pair()

    def number(fd, request, value=0):
        return struct.unpack("i", fcntl.ioctl(fd, request, struct.pack("i", value)))[0]

    c.sendall(b"12345")
    time.sleep(0.02)
    SIOCATMARK, SIOCOUTQNSD = 0x8905, 0x894B
    for label, request in (
        ("FIONREAD", termios.FIONREAD),
        ("TIOCOUTQ", termios.TIOCOUTQ),
        ("SIOCATMARK", SIOCATMARK),
        ("SIOCOUTQNSD", SIOCOUTQNSD),
        ("FIOGETOWN", 0x8903),
        ("SIOCGPGRP", 0x8904),
    ):
        say(label, number, s.fileno(), request)
        say(label, number, c.fileno(), request)
    fcntl.ioctl(s, 0x5450)  # FIONCLEX
    print(os.get_inheritable(s.fileno()))
    fcntl.ioctl(s, 0x5451)  # FIOCLEX
    print(os.get_inheritable(s.fileno()))
    number(s.fileno(), 0x5421, 1)  # FIONBIO
    print(s.recv(10), fcntl.fcntl(s, fcntl.F_GETFL) & os.O_NONBLOCK != 0)
    say("empty", s.recv, 1)
    for label, request in ("TCGETS", 0x5401), ("TIOCGWINSZ", 0x5413), ("FIGETBSZ", 2), ("FIOQSIZE", 0x5460), ("BLKGETSIZE", 0x1260), ("SIOCGSTAMP", 0x8906), ("unknown", 0x12345678):
        say(label, fcntl.ioctl, s.fileno(), request, bytes(64))
    say("name", lambda: fcntl.ioctl(s.fileno(), 0x8910, struct.pack("16si20x", b"", 1))[:3])
    for command in fcntl.F_GETFD, fcntl.F_GETOWN, 11, 1032, 1024, 1034:
        say(f"fcntl {command}", fcntl.fcntl, s.fileno(), command)
    say("pipe size", fcntl.fcntl, s.fileno(), 1031, 4096)
    say("lease", fcntl.fcntl, s.fileno(), 1024, 1)
    say("lock", fcntl.lockf, s.fileno(), fcntl.LOCK_SH | fcntl.LOCK_NB)
    say("flock", fcntl.flock, s.fileno(), fcntl.LOCK_SH | fcntl.LOCK_NB)


# --- commands ---------------------------------------------------------------


@case
def commands_that_get_a_connection():
    c, s = pair()
    s.sendall(b"unread")
    sys.stdout.flush()
    os.dup2(c.fileno(), 9)  # the shell knows numbers of one digit
    print(os.system("echo from the shell >&9"))
    print(s.recv(100), c.recv(100))
    # popen(3) itself: Python's os.popen does not call it.
    libc.popen.restype = ctypes.c_void_p
    d, t = pair()
    os.dup2(d.fileno(), 8)
    f = libc.popen(b"echo by popen >&8", b"r")
    print(libc.pclose(ctypes.c_void_p(f)), t.recv(100))
    for fd in 8, 9:
        os.close(fd)




@case
def commands_that_get_none():
    """Close-on-exec: nothing has to change."""
    c, s = pair()
    s.sendall(b"unread")
    print(os.system("true"))
    libc.popen.restype = ctypes.c_void_p
    f = libc.popen(b"true", b"r")
    print(libc.pclose(ctypes.c_void_p(f)))
    print(c.recv(10))
    c.sendall(b"on")
    print(s.recv(10))


def main():
    signal.alarm(150)
    for name in sys.argv[1:] or CASES:
        print("#", name, flush=True)
        CASES[name]()
    print("ok")


main()
