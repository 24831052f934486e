"""Vectors with flags, many messages at once, pipes, files, `ioctl` and `fcntl`."""
import ctypes
import fcntl
import os
import signal
import socket
import struct
import tempfile
import termios
import threading
import time

from .kit import case, pair, raw, say


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
    # Send until the buffer is full; the call must still not block.
    total = 0
    while True:
        try:
            total += os.pwritev(c.fileno(), [bytes(100000)], -1, RWF_NOWAIT)
        except BlockingIOError:
            break
    print("full", total > 100000)


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


def send_when_empty(sender, receiver, data):
    while struct.unpack("i", fcntl.ioctl(receiver, termios.FIONREAD, bytes(4)))[0] > 0:
        time.sleep(0.01)
    time.sleep(1)
    sender.sendall(data)


@case
def many_messages_with_a_limit():
    def receive(label, s, n, flags, limit):
        buffers = [ctypes.create_string_buffer(4) for _ in range(n)]
        m, _keep = messages(buffers)
        t = Timespec(*limit) if limit else None
        start = time.monotonic()
        r = raw(label, "recvmmsg", s.fileno(), m, n, flags, ctypes.byref(t) if t else None)
        print("  ", [m[i].len for i in range(max(r, 0))], b"".join(b.raw[: m[i].len] for i, b in enumerate(buffers[: max(r, 0)])))
        print("   left", t and (t.sec, t.nsec > 0), "waited", time.monotonic() - start > 30)

    c, s = pair()
    c.sendall(b"abcdefgh")
    time.sleep(0.02)
    receive("two", s, 2, 0, None)
    c.sendall(b"abcdefgh")
    time.sleep(0.02)
    receive("at once", s, 4, socket.MSG_DONTWAIT, (60, 0))
    receive("none", s, 4, socket.MSG_DONTWAIT, (60, 0))
    receive("bad", s, 4, 0, (0, 1000000000))
    receive("negative", s, 4, 0, (-1, 0))
    c.sendall(b"abcd")
    time.sleep(0.02)
    # The kernel checks the time limit after each message.
    receive("no time", s, 4, 0, (0, 0))
    c.sendall(b"abcdefgh")
    time.sleep(0.02)
    # The third message comes after the limit: the call has taken two and waits for it.
    late = threading.Thread(target=send_when_empty, args=(c, s, b"late"))
    late.start()
    receive("runs out", s, 8, 0, (0, 500000000))
    late.join()
    c.sendall(b"abcd")
    time.sleep(0.02)
    receive("wait for one", s, 4, 0x10000, (60, 0))
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
    # After splice between a file and a pipe, the descriptor accepts no `RWF_NOWAIT` any more.
    with tempfile.TemporaryFile() as f:
        f.write(b"from a file")
        f.flush()
        os.splice(f.fileno(), w, 11, offset_src=0)
        print(os.read(r, 100))
        c.sendall(bytes(range(256)) * 400)
        for _ in range(2):
            time.sleep(0.02)
            got = bytearray()
            while len(got) < 51200:
                n = os.splice(s.fileno(), w, 51200 - len(got))
                got += os.read(r, n)
            print(got == bytes(range(256)) * 200)


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
        # A socket cannot be the source of sendfile.
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
