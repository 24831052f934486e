"""`splice` between a connection and a pipe."""
import fcntl
import os
import signal
import socket
import struct
import tempfile
import termios
import threading
import time

from .kit import data, pair, read_all

NOW, MORE = os.SPLICE_F_NONBLOCK, os.SPLICE_F_MORE


def held(r):
    """Number of bytes in a pipe."""
    return struct.unpack("i", fcntl.ioctl(r, termios.FIONREAD, b"\0" * 4))[0]


def note_sigpipe(t):
    """Returns a list in which a handler notes SIGPIPE. If both sides share a process, neither has the main thread,
    and no handler is set."""
    seen = []
    if not t.together:
        signal.signal(signal.SIGPIPE, lambda *_: seen.append("SIGPIPE"))
    return seen


@pair()
def from_a_connection():
    def server(t, s):
        t.step()
        s.sendall(b"first ")
        s.sendall(b"second ")
        s.sendall(b"third")
        t.step()
        t.step()
        s.shutdown(socket.SHUT_WR)
        t.step()

    def client(t, s):
        r, w = os.pipe()
        s.setblocking(False)
        t.call("nothing", os.splice, s.fileno(), w, 100)
        t.step()
        t.step()
        t.call("four", os.splice, s.fileno(), w, 4)
        t.log(held(r), os.read(r, 100))
        t.call("rest", os.splice, s.fileno(), w, 100)
        t.log(held(r), os.read(r, 100))
        t.call("none", os.splice, s.fileno(), w, 100, flags=NOW)
        t.step()
        t.step()
        t.call("end", os.splice, s.fileno(), w, 100)
        t.call("again", os.splice, s.fileno(), w, 100, flags=NOW)
        t.log(held(r))

    return server, client


@pair()
def to_a_connection():
    def server(t, s):
        t.step()
        t.log(s.recv(3), s.recv(100))
        t.step()
        t.step()
        t.log(read_all(s))

    def client(t, s):
        r, w = os.pipe()
        t.call("nothing", os.splice, r, s.fileno(), 100, flags=NOW)
        os.write(w, b"through the pipe")
        t.call("three", os.splice, r, s.fileno(), 3, flags=MORE)
        t.call("more", os.splice, r, s.fileno(), 5)
        t.log(held(r))
        t.step()
        t.step()
        t.call("rest", os.splice, r, s.fileno(), 100, flags=NOW | MORE)
        t.call("none", os.splice, r, s.fileno(), 100, flags=NOW)
        os.set_blocking(r, False)
        t.call("none, by the pipe", os.splice, r, s.fileno(), 100)
        os.close(w)
        t.call("no writer", os.splice, r, s.fileno(), 100)
        t.call("no writer", os.splice, r, s.fileno(), 100, flags=NOW)
        s.shutdown(socket.SHUT_WR)
        t.step()

    return server, client


@pair()
def there_and_back():
    """Three megabytes go from a ring through a pipe into a ring."""

    def server(t, s):
        sender = threading.Thread(target=lambda: (s.sendall(data(3_000_000)), s.shutdown(socket.SHUT_WR)))
        sender.start()
        t.log("same", read_all(s) == data(3_000_000))
        sender.join()

    def client(t, s):
        r, w = os.pipe()
        total = 0
        while n := os.splice(s.fileno(), w, 1 << 30):
            while n:
                k = os.splice(r, s.fileno(), n, flags=MORE)
                n, total = n - k, total + k
        s.shutdown(socket.SHUT_WR)
        t.log("moved", total)

    return server, client


@pair()
def there_and_back_without_waits():
    def server(t, s):
        sender = threading.Thread(target=lambda: (s.sendall(data(3_000_000, 2)), s.shutdown(socket.SHUT_WR)))
        sender.start()
        t.log("same", read_all(s) == data(3_000_000, 2))
        sender.join()

    def client(t, s):
        r, w = os.pipe()
        s.setblocking(False)
        total, end = 0, False
        while not end or held(r):
            moved = False
            for source, to in (s.fileno(), w), (r, s.fileno()):
                try:
                    n = os.splice(source, to, 1 << 20, flags=NOW)
                except BlockingIOError:
                    continue
                moved |= n > 0
                end |= n == 0 and to == w
                total += n if source == r else 0
            if not moved:
                time.sleep(0.001)
        s.shutdown(socket.SHUT_WR)
        t.log("moved", total)

    return server, client


@pair()
def splice_sleeps():
    """A splice sleeps for bytes, for a writer, and for room."""

    def server(t, s):
        t.step()
        time.sleep(0.1)
        s.sendall(b"late")
        t.step()
        t.log(s.recv(100))
        t.step()
        s.sendall(data(300_000))
        s.shutdown(socket.SHUT_WR)

    def client(t, s):
        r, w = os.pipe()
        t.step()
        t.call("bytes", os.splice, s.fileno(), w, 100, flags=NOW)
        t.log(os.read(r, 100))
        t.step()
        writer = threading.Timer(0.1, os.write, [w, b"written late"])
        writer.start()
        t.call("writer", os.splice, r, s.fileno(), 100)
        writer.join()
        t.step()
        got = bytearray()

        def reader():
            while part := os.read(r, 10_000):
                got.extend(part)
                time.sleep(0.001)

        thread = threading.Thread(target=reader)
        thread.start()
        total = 0
        while n := os.splice(s.fileno(), w, 1 << 20):
            total += n
        os.close(w)
        thread.join()
        t.log(total, bytes(got) == data(300_000))

    return server, client


@pair()
def a_pipe_that_is_full():
    def server(t, s):
        s.sendall(b"x" * 3000)
        t.step()
        t.step()
        t.log(read_all(s))

    def client(t, s):
        t.step()
        r, w = os.pipe()
        fcntl.fcntl(w, fcntl.F_SETPIPE_SZ, 4096)
        os.write(w, b"y" * 4096)
        t.call("full", os.splice, s.fileno(), w, 100, flags=NOW)
        os.set_blocking(w, False)
        t.call("full, by the pipe", os.splice, s.fileno(), w, 100)
        os.set_blocking(w, True)
        threading.Timer(0.1, os.read, [r, 4096]).start()
        t.call("room", os.splice, s.fileno(), w, 2000)
        t.log(held(r))
        t.log(len(os.read(r, 4096)))
        t.call("rest", os.splice, s.fileno(), w, 2000)
        t.log(os.read(r, 4096) == b"x" * 1000)
        t.step()

    return server, client


@pair()
def a_peer_that_does_not_read():
    def server(t, s):
        t.step()
        got = read_all(s)
        t.log("same", len(got) > 100_000, got.count(b"z") == len(got))

    def client(t, s):
        r, w = os.pipe()
        s.setblocking(False)
        total = 0
        while True:
            if not held(r):
                os.write(w, b"z" * 20_000)
            try:
                total += os.splice(r, s.fileno(), 20_000)
            except BlockingIOError:
                break
        t.log("full", total > 100_000, held(r) > 0)
        t.step()
        s.shutdown(socket.SHUT_WR)

    return server, client


@pair()
def with_a_time_limit():
    def server(t, s):
        t.step()

    def client(t, s):
        r, w = os.pipe()
        s.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", 0, 100_000))
        t.call("too late", os.splice, s.fileno(), w, 100)
        t.step()

    return server, client


@pair()
def arguments_of_splice():
    def server(t, s):
        s.sendall(b"stays")
        t.step()
        t.step()
        t.log(read_all(s))

    def client(t, s):
        t.step()
        r, w = os.pipe()
        other = socket.socketpair()
        with tempfile.TemporaryFile() as f:
            t.call("to a file", os.splice, s.fileno(), f.fileno(), 10)
            t.call("from a file", os.splice, f.fileno(), s.fileno(), 10)
        t.call("to a socket", os.splice, s.fileno(), other[0].fileno(), 10)
        t.call("to itself", os.splice, s.fileno(), s.fileno(), 10)
        t.call("the wrong end", os.splice, s.fileno(), r, 10)
        t.call("the wrong end", os.splice, w, s.fileno(), 10)
        t.call("no number", os.splice, s.fileno(), 999, 10)
        t.call("no number", os.splice, 999, s.fileno(), 10)
        t.call("nothing", os.splice, s.fileno(), w, 0)
        t.call("nothing", os.splice, r, s.fileno(), 0)
        t.call("flags", os.splice, s.fileno(), w, 10, flags=0x100)
        t.call("flags", os.splice, r, s.fileno(), 10, flags=0x100)
        t.call("offset", os.splice, s.fileno(), w, 10, offset_src=0)
        t.call("offset", os.splice, s.fileno(), w, 10, offset_dst=0)
        t.call("offset", os.splice, r, s.fileno(), 10, offset_src=0)
        t.call("offset", os.splice, r, s.fileno(), 10, offset_dst=0)
        path = os.open(".", os.O_PATH)
        t.call("a path", os.splice, s.fileno(), path, 10)
        t.log(held(r))
        t.call("at last", os.splice, s.fileno(), w, 10)
        s.shutdown(socket.SHUT_WR)
        t.step()

    return server, client


@pair()
def a_pipe_without_a_reader():
    def server(t, s):
        t.step()
        s.sendall(b"stays")
        t.step()
        t.step()

    def client(t, s):
        seen = note_sigpipe(t)
        r, w = os.pipe()
        os.close(r)
        t.call("nothing there", os.splice, s.fileno(), w, 10)
        t.log(seen)
        t.step()
        t.step()
        t.call("something there", os.splice, s.fileno(), w, 10)
        t.log(seen)
        t.log(s.recv(10))
        t.step()

    return server, client


def ended(how):
    def server(t, s):
        t.step()
        if how == "reset":
            s.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        s.close()
        t.step()

    def client(t, s):
        seen = note_sigpipe(t)
        r, w = os.pipe()
        os.write(w, b"never read")
        t.step()
        t.step()
        time.sleep(0.02)
        for _ in range(3):
            t.call("to", os.splice, r, s.fileno(), 3)
            time.sleep(0.02)
            t.log(held(r), seen)
        a, b = os.pipe()
        for _ in range(2):
            t.call("from", os.splice, s.fileno(), b, 10, flags=NOW)

    return server, client


@pair()
def after_a_close():
    return ended("close")


@pair()
def after_a_reset():
    return ended("reset")


@pair()
def a_reset_that_a_reader_sees():
    def server(t, s):
        t.step()
        s.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        s.close()

    def client(t, s):
        r, w = os.pipe()
        t.step()
        t.call("from", os.splice, s.fileno(), w, 10)
        t.call("from", os.splice, s.fileno(), w, 10)
        t.call("no pipe", os.splice, r, s.fileno(), 10, flags=NOW)

    return server, client


@pair()
def after_its_own_shutdown():
    def server(t, s):
        s.sendall(b"unread")
        t.step()
        t.log(read_all(s))

    def client(t, s):
        seen = note_sigpipe(t)
        r, w = os.pipe()
        t.step()
        s.shutdown(socket.SHUT_RDWR)
        t.call("from", os.splice, s.fileno(), w, 10)
        t.call("from", os.splice, s.fileno(), w, 10)
        os.write(w, b"more")
        t.log(os.read(r, 3))
        t.call("to", os.splice, r, s.fileno(), 10)
        t.log(held(r), seen)

    return server, client


@pair()
def two_threads_splice_from_one_connection():
    def server(t, s):
        for i in range(2000):
            s.sendall(struct.pack("i", i) * 8)
        s.shutdown(socket.SHUT_WR)
        t.step()

    def client(t, s):
        got = [bytearray(), bytearray()]

        def move(mine):
            r, w = os.pipe()
            while n := os.splice(s.fileno(), w, 50):
                mine.extend(os.read(r, n))

        threads = [threading.Thread(target=move, args=[mine]) for mine in got]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        t.log("bytes", sum(map(len, got)))
        t.step()

    return server, client


@pair()
def pipes_of_other_kinds():
    """A pipe of packets, a FIFO that is open for both, a FIFO that no process has written to, and a pipe that a file
    was spliced into before."""

    def server(t, s):
        s.sendall(b"0123456789" * 4)
        t.step()
        t.log(s.recv(100))
        t.step()
        t.log(s.recv(100))
        t.step()
        t.step()

    def client(t, s):
        t.step()
        r, w = os.pipe2(os.O_DIRECT)
        os.write(w, b"one packet")
        t.call("part of a packet", os.splice, r, s.fileno(), 4)
        t.log(os.read(r, 100))
        t.step()
        r, w = os.pipe()
        with tempfile.TemporaryFile() as f:
            f.write(b"abc")
            f.flush()
            t.call("by a file", os.splice, f.fileno(), w, 3, offset_src=0)
            t.call("to a file", os.splice, r, f.fileno(), 1, offset_dst=0)
        t.call("behind it", os.splice, s.fileno(), w, 10)
        t.call("and on", os.splice, r, s.fileno(), 5)
        t.log(os.read(r, 100))
        t.step()
        with tempfile.TemporaryDirectory() as at:
            os.mkfifo(at + "/fifo")
            r = os.open(at + "/fifo", os.O_RDONLY | os.O_NONBLOCK)
            t.call("no writer yet", os.splice, r, s.fileno(), 10)
            both = os.open(at + "/fifo", os.O_RDWR)
            t.call("empty", os.splice, r, s.fileno(), 10)
            t.call("to both", os.splice, s.fileno(), both, 10)
            t.log(os.read(r, 100))
        r, w = os.pipe2(os.O_DIRECT)
        t.call("to packets", os.splice, s.fileno(), w, 4)
        t.call("to packets", os.splice, s.fileno(), w, 4)
        t.log(held(r), os.read(r, 100))
        os.write(both, b"x")
        t.call("from both", os.splice, both, s.fileno(), 1)
        t.step()

    return server, client
