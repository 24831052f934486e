"""Socket options, on both ends of a connection and on accepted sockets."""
import errno
import os
import select
import socket
import struct
import subprocess
import time

from .kit import case, pair, say

S, T, I4, I6 = socket.SOL_SOCKET, socket.IPPROTO_TCP, socket.IPPROTO_IP, socket.IPPROTO_IPV6

# For these options only the length or the errno is compared, because the value is different each
# time, or counts packets.
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
        # Stop at 63 for IP: higher numbers belong to netfilter, which reads the buffer.
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
        for _ in range(500):
            # The kernel starts to take timestamps only a moment after a socket requests them.
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
