"""Flags of `send` and `recv`, and what buffers hold back."""
import array
import fcntl
import hashlib
import socket
import struct
import termios
import time

from .kit import data, events, pair, read_all


@pair()
def peek():
    def server(t, s):
        s.sendall(b"hello")
        t.step()
        t.step()
        s.sendall(b" world")
        t.step()
        t.step()
        s.close()
        t.step()

    def client(t, s):
        t.step()
        t.call("peek 3", s.recv, 3, socket.MSG_PEEK)
        t.call("peek 100", s.recv, 100, socket.MSG_PEEK)
        t.call("recv 2", s.recv, 2)
        t.call("peek", s.recv, 100, socket.MSG_PEEK)
        t.step()
        t.step()
        t.call("peek", s.recv, 100, socket.MSG_PEEK)
        t.call("recv", s.recv, 100)
        t.call("peek empty", s.recv, 100, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        t.step()
        t.step()
        t.call("peek EOF", s.recv, 100, socket.MSG_PEEK)
        t.call("recv EOF", s.recv, 100)

    return server, client


@pair()
def waitall():
    def server(t, s):
        for i in range(5):
            s.sendall(b"%d" % i * 100)
            time.sleep(0.01)
        t.step()
        s.sendall(b"last")
        s.close()

    def client(t, s):
        t.call("waitall 450", s.recv, 450, socket.MSG_WAITALL)
        t.call("waitall 50", s.recv, 50, socket.MSG_WAITALL)
        t.step()
        t.call("waitall until EOF", s.recv, 100, socket.MSG_WAITALL)
        t.call("EOF", s.recv, 100, socket.MSG_WAITALL)

    return server, client


@pair()
def waitall_with_peek_and_timeout():
    def server(t, s):
        s.sendall(b"12345")
        t.step()
        t.step()

    def client(t, s):
        t.step()
        s.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", 0, 100_000))
        t.call("waitall, timeout", s.recv, 10, socket.MSG_WAITALL)
        t.call("nothing", s.recv, 10, socket.MSG_WAITALL)
        t.step()

    return server, client


@pair()
def dontwait():
    def server(t, s):
        t.step()
        s.send(b"x")
        t.step()
        t.step()

    def client(t, s):
        t.call("empty", s.recv, 1, socket.MSG_DONTWAIT)
        t.step()
        t.step()
        t.call("one", s.recv, 1, socket.MSG_DONTWAIT)
        t.call("empty", s.recv, 1, socket.MSG_DONTWAIT)
        t.step()

    return server, client


@pair()
def trunc_discards():
    def server(t, s):
        s.sendall(b"0123456789")
        t.step()

    def client(t, s):
        t.step()
        buffer = bytearray(4)
        t.call("trunc", s.recv_into, buffer, 4, socket.MSG_TRUNC)
        t.call("rest", s.recv, 100)

    return server, client


@pair()
def dontwait_fills():
    def server(t, s):
        t.step()
        got = read_all(s)
        t.log("nothing lost", hashlib.sha256(got).hexdigest() == t.hear())

    def client(t, s):
        digest, total = hashlib.sha256(), 0
        block = data(70_000)
        while True:
            try:
                sent = s.send(block, socket.MSG_DONTWAIT)
            except BlockingIOError:
                t.log("full")
                break
            digest.update(block[:sent])
            total += sent
        t.log("some", total > 70_000)
        t.log("poll", events(s, 4))
        t.step()
        s.close()
        t.tell(digest.hexdigest())

    return server, client


@pair()
def small_buffers_hold_back():
    def server(t, s):
        s.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        t.step()
        t.step()
        got = read_all(s)
        t.log("nothing lost", hashlib.sha256(got).hexdigest() == t.hear())

    def client(t, s):
        t.call("more than the system allows", s.setsockopt, socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 30)
        t.log("clamped", s.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF))
        s.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        t.step()
        digest, total = hashlib.sha256(), 0
        block = data(1000)
        for _ in range(3):
            # The kernel moves bytes meanwhile, so a little more may fit.
            while True:
                try:
                    sent = s.send(block, socket.MSG_DONTWAIT)
                except BlockingIOError:
                    break
                digest.update(block[:sent])
                total += sent
            time.sleep(0.02)
        # Without the bound more than a megabyte would fit.
        t.log("some", 2000 < total < 250_000)
        t.step()
        t.log("writable again", events(s, 4, 10_000))
        rest = data(300_000, 2)
        s.sendall(rest)
        digest.update(rest)
        s.close()
        t.tell(digest.hexdigest())

    return server, client


@pair()
def taken_by_the_receiver_is_acknowledged():
    def server(t, s):
        t.step()
        t.log("bytes", s.recv(100))

    def client(t, s):
        s.send(b"not read yet")
        time.sleep(0.05)
        value = array.array("i", [7])
        fcntl.ioctl(s.fileno(), termios.TIOCOUTQ, value)
        t.log("SIOCOUTQ", value[0])
        t.step()

    return server, client
