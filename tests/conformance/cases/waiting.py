"""Blocking, time limits, signals, readiness by `poll` and `select`."""
import ctypes
import errno
import os
import select
import signal
import socket
import struct
import threading
import time

from .kit import data, events, pair


@pair()
def receive_timeout():
    def server(t, s):
        t.step()

    def client(t, s):
        s.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", 0, 200_000))
        start = time.monotonic()
        t.call("recv", s.recv, 10)
        took = time.monotonic() - start
        t.log("in time", 0.19 <= took)
        t.call("value", s.getsockopt, socket.SOL_SOCKET, socket.SO_RCVTIMEO, 16)
        t.step()

    return server, client


@pair()
def negative_timeouts():
    """A negative timeout has expired when the wait begins, and is read as 0."""
    past = struct.pack("ll", -1, 0)

    def server(t, s):
        s.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, past)
        t.call("recv", s.recv, 10)
        t.call("value", s.getsockopt, socket.SOL_SOCKET, socket.SO_RCVTIMEO, 16)
        t.step()
        s.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", 0, 0))
        t.call("without a limit", s.recv, 10)
        t.step()
        t.step()

    def client(t, s):
        t.step()
        time.sleep(0.1)
        s.send(b"late")
        t.step()
        s.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, past)
        block = data(400_000)
        for _ in range(1000):
            try:
                s.send(block)
            except OSError as error:
                t.log("send", errno.errorcode[error.errno])
                break
        t.step()

    return server, client


@pair(raw=True)
def negative_timeouts_of_a_handshake():
    past = struct.pack("ll", -1, 0)

    def server(t, listener):
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, past)
        t.call("nobody", listener.accept)
        t.step()
        t.step()
        conn, _ = listener.accept()
        t.call("inherited", conn.recv, 10)
        t.step()

    def client(t, address):
        t.step()
        s = socket.socket()
        s.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, past)
        t.call("connect", s.connect, address)
        select.select([], [s], [], 5)
        t.call("and again", s.connect_ex, address)
        t.call("error", s.getsockopt, socket.SOL_SOCKET, socket.SO_ERROR)
        t.step()
        t.step()

    return server, client


@pair()
def send_timeout():
    def server(t, s):
        t.step()

    def client(t, s):
        s.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", 0, 200_000))
        block = data(400_000)
        for _ in range(1000):
            try:
                sent = s.send(block)
            except OSError as error:
                t.log("send", errno.errorcode[error.errno])
                break
        t.step()

    return server, client


@pair()
def python_timeout():
    def server(t, s):
        t.step()
        s.send(b"x")

    def client(t, s):
        s.settimeout(0.1)
        t.call("recv", s.recv, 10)
        t.step()
        s.settimeout(5)
        t.call("recv", s.recv, 10)

    return server, client


@pair()
def signal_interrupts_recv():
    def server(t, s):
        t.step()

    def client(t, s):
        # The calls run in a child, whose main thread can set a handler. They go to libc directly,
        # since Python itself starts again after EINTR.
        pid = os.fork()
        if pid == 0:
            import ctypes

            libc = ctypes.CDLL(None, use_errno=True)
            signal.signal(signal.SIGALRM, lambda *_: None)
            signal.setitimer(signal.ITIMER_REAL, 0.1)
            buffer = ctypes.create_string_buffer(10)
            result = libc.recv(s.fileno(), buffer, 10, 0)
            os._exit(ctypes.get_errno() if result < 0 else 255)
        t.log("errno", errno.errorcode.get(os.WEXITSTATUS(os.waitpid(pid, 0)[1])))
        t.step()

    return server, client


@pair()
def poll_through_a_connections_life():
    def server(t, s):
        t.step()
        s.send(b"x")
        t.step()
        t.step()
        s.shutdown(socket.SHUT_WR)
        t.step()
        t.step()
        s.close()
        t.step()

    def client(t, s):
        t.call("idle", events, s)
        t.step()
        t.step()
        t.call("data", events, s)
        t.call("recv", s.recv, 10)
        t.call("empty", events, s)
        t.step()
        t.step()
        t.call("FIN", events, s)
        t.call("FIN, asked IN", events, s, 1)
        t.step()
        t.step()
        t.call("closed", events, s)
        s.shutdown(socket.SHUT_WR)
        t.call("both closed", events, s)
        t.call("asked nothing", events, s, 0)

    return server, client


@pair()
def poll_waits_and_times_out():
    def server(t, s):
        t.step()
        time.sleep(0.1)
        s.send(b"x")
        t.step()

    def client(t, s):
        start = time.monotonic()
        t.call("nothing", events, s, 1, 100)
        t.log("waited", time.monotonic() - start >= 0.099)
        t.step()
        t.call("woken", events, s, 1, 5000)
        t.step()

    return server, client


@pair()
def select_on_sockets_and_pipes():
    def server(t, s):
        t.step()
        s.send(b"x")
        t.step()
        t.step()

    def client(t, s):
        r, w = os.pipe()
        labels = {s.fileno(): "socket", r: "pipe", w: "pipe end"}

        def show(what, lists):
            t.log(what, [[labels[f] if isinstance(f, int) else "socket" for f in part] for part in lists])

        show("idle", select.select([s, r], [s, w], [s], 0))
        t.step()
        t.step()
        show("data", select.select([s, r], [s, w], [s], 1))
        os.write(w, b"y")
        show("both", select.select([s, r], [], [], 1))
        s.recv(1)
        show("pipe", select.select([s, r], [], [], 1))
        os.read(r, 1)
        show("timeout", select.select([s, r], [], [], 0.05))
        t.step()

    return server, client


@pair()
def a_larger_send_buffer():
    """A larger send buffer gives room to a poll, to an edge-triggered epoll instance, and to a sender that waits."""

    def server(t, s):
        t.step()
        t.step()

    def client(t, s):
        s.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 20_000)
        t.step()
        s.setblocking(False)
        ep = select.epoll()
        ep.register(s, select.EPOLLOUT | select.EPOLLET)
        t.log("at first", len(ep.poll(1)))
        try:
            while True:
                s.send(bytes(10_000))
        except BlockingIOError:
            pass
        # Fill the room that was granted before, and the room that the receiver makes little by
        # little.
        time.sleep(0.3)
        try:
            while True:
                s.send(b"x")
        except BlockingIOError:
            pass
        t.log("full", len(select.select([], [s], [], 0)[1]))
        ep.poll(0)
        t.log("edge", len(ep.poll(0)))
        timer = threading.Timer(0.3, s.setsockopt, (socket.SOL_SOCKET, socket.SO_SNDBUF, 100_000))
        timer.start()
        t.log("edge of room", len(ep.poll(5)))
        t.log("room", len(select.select([], [s], [], 0)[1]))
        timer.join()
        try:
            while True:
                s.send(bytes(1000))
        except BlockingIOError:
            pass
        s.setblocking(True)
        sent = []
        sender = threading.Thread(target=lambda: sent.append(s.send(bytes(1000))))
        sender.start()
        time.sleep(0.3)
        t.log("waits", sent)
        s.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 212_992)
        sender.join(5)
        t.log("goes on", sent)
        t.step()

    return server, client


@pair()
def calls_by_number():
    """Calls by number show what libc's functions hide: the mask's size, the time that is left, limits of vectors."""
    PPOLL, SELECT, PSELECT6, EPOLL_PWAIT, PREADV2, PWRITEV2, SENDMSG, SENDMMSG = 271, 23, 270, 281, 327, 328, 46, 307
    libc = ctypes.CDLL(None, use_errno=True)

    class Poll(ctypes.Structure):
        _fields_ = [("fd", ctypes.c_int), ("events", ctypes.c_short), ("revents", ctypes.c_short)]

    class Iov(ctypes.Structure):
        _fields_ = [("base", ctypes.c_char_p), ("len", ctypes.c_size_t)]

    class Msg(ctypes.Structure):
        _fields_ = [(n, ctypes.c_size_t) for n in ("name", "namelen", "iov", "iovlen", "control", "controllen", "flags")]

    class Mmsg(ctypes.Structure):
        _fields_ = [("msg", Msg), ("len", ctypes.c_size_t)]

    def raw(t, label, number, *args):
        ctypes.set_errno(0)
        r = libc.syscall(ctypes.c_long(number), *[ctypes.c_long(a) if isinstance(a, int) else a for a in args])
        t.log(label, r, errno.errorcode.get(ctypes.get_errno()) if r < 0 else None)
        return r

    def server(t, s):
        t.step()
        s.send(b"hello")
        t.step()
        s.settimeout(5)
        got = b""
        while len(got) < 1024 + 3:
            got += s.recv(4096)
        t.log("got", got.count(b"m"), got.count(b"w"))
        t.step()

    def client(t, s):
        fd, mask = s.fileno(), ctypes.c_uint64(0)
        one = Poll(fd, select.POLLIN, 0)
        limit = (ctypes.c_long * 2)(0, 50_000_000)
        for size in (0, 4, 8, 16, 128):
            raw(t, f"ppoll, a mask of {size}", PPOLL, ctypes.byref(one), 1, (ctypes.c_long * 2)(), ctypes.byref(mask), size)
        raw(t, "ppoll", PPOLL, ctypes.byref(one), 1, limit, None, 0)
        t.log("left", list(limit))
        bits = (ctypes.c_uint64 * 16)()
        bits[fd // 64] = 1 << fd % 64
        raw(t, "select", SELECT, fd + 1, bits, None, None, (ctypes.c_long * 2)())
        t.log("bits", sum(bits) != 0)
        bits[fd // 64] = 1 << fd % 64
        for size in (4, 8):
            both = (ctypes.c_size_t * 2)(ctypes.addressof(mask), size)
            limit = (ctypes.c_long * 2)(0, 50_000_000)
            raw(t, f"pselect6, {size}", PSELECT6, fd + 1, bits, None, None, limit, both)
            t.log("left", limit[1] in (0, 50_000_000), limit[1] == 0)
            t.log("bits", sum(bits) != 0)
        ep = select.epoll()
        ep.register(s, select.EPOLLIN)
        events = ctypes.create_string_buffer(12)
        for size in (4, 8):
            raw(t, f"epoll_pwait, {size}", EPOLL_PWAIT, ep.fileno(), events, 1, 0, ctypes.byref(mask), size)
        t.step()
        select.select([s], [], [], 5)
        raw(t, "ppoll of data", PPOLL, ctypes.byref(one), 1, (ctypes.c_long * 2)(9, 0), None, 0)
        room = ctypes.create_string_buffer(10)
        into = Iov(ctypes.cast(room, ctypes.c_char_p), 3)
        raw(t, "preadv2", PREADV2, fd, ctypes.byref(into), 1, -1, 0, 0)
        t.log(room.raw[:3])
        raw(t, "preadv2 somewhere", PREADV2, fd, ctypes.byref(into), 1, 0, 0, 0)
        raw(t, "pwritev2", PWRITEV2, fd, ctypes.byref(Iov(b"www", 3)), 1, -1, 0, 0)
        many = (Iov * 1025)(*[Iov(b"x", 1)] * 1025)
        raw(t, "writev of too many", 20, fd, many, 1025)
        raw(t, "sendmsg of too many", SENDMSG, fd, ctypes.byref(Msg(iov=ctypes.addressof(many), iovlen=1025)), 0)
        m = Iov(b"m", 1)
        each = (Mmsg * 1100)(*[Mmsg(Msg(iov=ctypes.addressof(m), iovlen=1))] * 1100)
        raw(t, "sendmmsg of many", SENDMMSG, fd, each, 1100, 0)
        t.step()
        t.step()

    return server, client
