#!/usr/bin/python3
"""Socket semantics as transcripts: what each call returned, on each side.

Kernel TCP is the specification: the same cases run on stock sockets and under
the library, and the transcripts must be equal.

    semantics.py list
    semantics.py run [--server lib|stock] [--client lib|stock] [--together]
                     [--cases a,b] > transcripts.json
    semantics.py compare A.json B.json

`run` starts a process per side (one for both with --together: two threads,
so that a process talks to itself). A side with "lib" gets LD_PRELOAD from
FS_PRELOAD. The two sides keep step over pipes, never over sockets.
"""
import argparse
import array
import contextlib
import errno
import fcntl
import hashlib
import json
import os
import random
import select
import signal
import socket
import struct
import subprocess
import sys
import termios
import threading
import time

CASES = {}
LIMIT = 20


class Log:
    """One side of a case: its transcript, and its step with the other side."""

    def __init__(self, out, rfd, wfd):
        self.out, self.rfd, self.wfd, self.pending = out, rfd, wfd, b""

    def log(self, *values):
        self.out(json.dumps([norm(v) for v in values]))

    def call(self, label, function, *args, **kwargs):
        try:
            result = function(*args, **kwargs)
        except socket.timeout:
            self.log(label, "timeout")
        except OSError as error:
            self.log(label, errno.errorcode.get(error.errno, str(error)))
        else:
            self.log(label, result)
            return result
        return None

    def tell(self, word="go"):
        os.write(self.wfd, word.encode() + b"\n")

    def hear(self):
        while b"\n" not in self.pending:
            part = os.read(self.rfd, 100)
            if not part:
                raise SystemExit("the other side ended")
            self.pending += part
        word, self.pending = self.pending.split(b"\n", 1)
        return word.decode()

    def step(self):
        self.tell("step")
        self.hear()


def norm(value):
    if isinstance(value, (bytes, bytearray, memoryview)):
        value = bytes(value)
        if len(value) <= 40:
            return "b:" + value.decode("latin1")
        return f"{len(value)} bytes {hashlib.sha256(value).hexdigest()[:12]}"
    if isinstance(value, (list, tuple)):
        return [norm(v) for v in value]
    if isinstance(value, (int, str, float, bool)) or value is None:
        return int(value) if isinstance(value, int) and not isinstance(value, bool) else value
    return type(value).__name__


def data(size, seed=1):
    return random.Random(seed).randbytes(size)


def read_all(sock, limit=None):
    got = bytearray()
    while limit is None or len(got) < limit:
        part = sock.recv(65536 if limit is None else min(65536, limit - len(got)))
        if not part:
            break
        got += part
    return bytes(got)


POLL = {"IN": 1, "PRI": 2, "OUT": 4, "ERR": 8, "HUP": 16, "NVAL": 32, "RDHUP": 0x2000}


def names(mask):
    return "|".join(n for n, bit in POLL.items() if mask & bit) or "0"


def events(sock, mask=1 | 4 | 0x2000, timeout=0):
    poller = select.poll()
    poller.register(sock, mask)
    found = poller.poll(timeout)
    return names(found[0][1]) if found else "none"


def epoll_events(poller, timeout=0):
    return sorted(names(mask) for _, mask in poller.poll(timeout))


def pair(**options):
    """Decorator: the function returns (server, client)."""

    def decorate(function):
        server, client = function()
        CASES[function.__name__] = (
            server,
            client,
            options.get("family", socket.AF_INET),
            options.get("raw", False),
            options.get("bind"),
        )
        return function

    return decorate


# --- bytes ------------------------------------------------------------------


@pair()
def echo():
    def server(t, s):
        for _ in range(200):
            s.sendall(s.recv(1000))

    def client(t, s):
        for i in range(200):
            s.sendall(b"message %d" % i)
            if s.recv(1000) != b"message %d" % i:
                t.log("differs", i)
        t.log("done")

    return server, client


@pair()
def bulk_both_ways():
    def both(seed, other):
        def run(t, s):
            thread = threading.Thread(target=lambda: (s.sendall(data(4_000_000, seed)), s.shutdown(socket.SHUT_WR)))
            thread.start()
            got = read_all(s)
            t.log("same", got == data(4_000_000, other))
            thread.join()

        return run

    return both(1, 2), both(2, 1)


@pair()
def sendall_to_a_slow_reader():
    def server(t, s):
        s.sendall(data(3_000_000))
        s.close()

    def client(t, s):
        time.sleep(0.1)
        got = bytearray()
        while part := s.recv(100_000):
            got += part
            time.sleep(0.001)
        t.log("got", bytes(got) == data(3_000_000))

    return server, client


@pair()
def zero_length():
    def server(t, s):
        t.call("send 0", s.send, b"")
        t.step()
        t.step()
        s.send(b"x")
        t.step()
        t.step()

    def client(t, s):
        t.step()
        s.setblocking(False)
        t.call("after send 0", s.recv, 10)
        t.step()
        t.step()
        t.call("recv 0", s.recv, 0)
        t.call("recv", s.recv, 10)
        t.call("recv 0 empty", s.recv, 0)
        t.step()

    return server, client


@pair()
def messages_run_together():
    def server(t, s):
        for i in range(10):
            s.send(b"%d," % i)
        t.step()

    def client(t, s):
        t.step()
        t.call("one", s.recv, 3)
        t.call("rest", s.recv, 1000)

    return server, client


@pair()
def scatter_gather():
    def server(t, s):
        t.call("sendmsg", s.sendmsg, [b"one", b"", b"two", b"three" * 100])
        t.call("writev", os.writev, s.fileno(), [b"four", b"five"])
        t.call("write", os.write, s.fileno(), b"six")
        t.step()
        t.step()

    def client(t, s):
        t.step()
        buffers = [bytearray(2), bytearray(4), bytearray(0), bytearray(10)]
        result = s.recvmsg_into(buffers)
        t.log("recvmsg_into", result[0], result[2], buffers)
        more = [bytearray(490), bytearray(5)]
        t.log("readv", os.readv(s.fileno(), more), more)
        t.call("read", os.read, s.fileno(), 5)
        message = s.recvmsg(100)
        t.log("recvmsg", message[0], len(message[1]), message[2])
        t.step()

    return server, client


@pair()
def recv_into_memoryview():
    def server(t, s):
        s.sendall(data(1000))

    def client(t, s):
        buffer = bytearray(1200)
        view = memoryview(buffer)
        count = 0
        while count < 1000:
            count += s.recv_into(view[count:])
        t.log("bytes", bytes(buffer[:1000]))
        t.call("end", s.recv_into, buffer)

    return server, client


@pair()
def sendfile():
    def server(t, s):
        with open("/proc/self/exe", "rb") as f:
            size = 1_500_000
            offset, sent = 1000, 0
            while sent < size:
                sent += os.sendfile(s.fileno(), f.fileno(), offset + sent, size - sent)
            t.log("position untouched", f.tell())
        t.log("sent", sent)

    def client(t, s):
        with open("/proc/self/exe", "rb") as f:
            f.seek(1000)
            t.log("same", f.read(1_500_000) == read_all(s))

    return server, client


@pair()
def sendfile_moves_the_position():
    def server(t, s):
        with open("/proc/self/exe", "rb", buffering=0) as f:
            sent = os.sendfile(s.fileno(), f.fileno(), None, 5000)
            t.log("sent", sent, os.lseek(f.fileno(), 0, os.SEEK_CUR))

    def client(t, s):
        with open("/proc/self/exe", "rb") as f:
            t.log("same", read_all(s) == f.read(5000))

    return server, client


@pair()
def makefile():
    def server(t, s):
        with s.makefile("rwb") as f:
            for line in f:
                f.write(line.upper())
                f.flush()

    def client(t, s):
        f = s.makefile("rwb")
        for word in (b"alpha\n", b"beta\n", b"x" * 20000 + b"\n"):
            f.write(word)
            f.flush()
            t.log(f.readline())
        s.shutdown(socket.SHUT_WR)
        t.log("end", f.read())

    return server, client


# --- flags ------------------------------------------------------------------


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
            # The kernel moves bytes on while we look: a little more may fit.
            while True:
                try:
                    sent = s.send(block, socket.MSG_DONTWAIT)
                except BlockingIOError:
                    break
                digest.update(block[:sent])
                total += sent
            time.sleep(0.02)
        # Without a bound a megabyte and more would fit.
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


# --- closing ----------------------------------------------------------------


@pair()
def half_close_by_client():
    def server(t, s):
        t.call("all", read_all, s)
        t.call("poll", events, s)
        s.sendall(data(300_000))
        s.close()

    def client(t, s):
        s.sendall(b"question")
        t.call("shutdown", s.shutdown, socket.SHUT_WR)
        t.call("answer", read_all, s)
        t.call("poll", events, s)
        t.call("again", s.recv, 10)

    return server, client


@pair()
def half_close_by_server():
    def server(t, s):
        s.sendall(b"bye")
        s.shutdown(socket.SHUT_WR)
        t.call("still reads", read_all, s)

    def client(t, s):
        t.call("data", s.recv, 100)
        t.call("EOF", s.recv, 100)
        t.call("poll", events, s)
        t.call("send", s.send, b"more")
        t.call("send", s.send, b" and more")
        s.shutdown(socket.SHUT_WR)

    return server, client


@pair()
def send_after_shutdown():
    def server(t, s):
        t.step()

    def client(t, s):
        s.shutdown(socket.SHUT_WR)
        t.call("send", s.send, b"x")
        t.call("send 0", s.send, b"")
        t.call("shutdown again", s.shutdown, socket.SHUT_WR)
        t.call("poll", events, s)
        t.step()

    return server, client


@pair()
def shutdown_read():
    def server(t, s):
        t.step()
        t.call("send", s.send, b"late")
        t.step()
        t.call("EOF", s.recv, 10)

    def client(t, s):
        t.call("shutdown", s.shutdown, socket.SHUT_RD)
        t.call("recv", s.recv, 10)
        t.call("poll", events, s)
        t.step()
        t.step()
        t.call("recv late", s.recv, 10)
        t.call("recv", s.recv, 10)
        t.call("send", s.send, b"")
        s.close()

    return server, client


@pair()
def shutdown_both():
    def server(t, s):
        t.call("EOF", s.recv, 10)
        t.call("poll", events, s)
        t.step()

    def client(t, s):
        t.call("shutdown", s.shutdown, socket.SHUT_RDWR)
        t.call("recv", s.recv, 10)
        t.call("send", s.send, b"x")
        t.call("poll", events, s)
        t.call("peer", lambda: len(s.getpeername()))
        t.step()

    return server, client


@pair()
def shutdown_wakes_a_blocked_reader():
    def server(t, s):
        t.step()

    def client(t, s):
        result = []
        thread = threading.Thread(target=lambda: result.append(s.recv(10)))
        thread.start()
        time.sleep(0.1)
        s.shutdown(socket.SHUT_RDWR)
        thread.join(5)
        t.log("woken", result)
        t.step()

    return server, client


@pair()
def reset_by_linger_zero():
    def server(t, s):
        t.step()
        t.step()
        t.call("poll", events, s)
        t.call("recv", s.recv, 10)
        t.call("recv", s.recv, 10)
        t.call("send", s.send, b"x")
        t.call("error", s.getsockopt, socket.SOL_SOCKET, socket.SO_ERROR)
        t.call("peer", lambda: len(s.getpeername()))

    def client(t, s):
        t.step()
        s.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        s.close()
        t.step()

    return server, client


@pair()
def reset_reported_by_so_error():
    def server(t, s):
        t.step()
        t.step()
        t.call("error", s.getsockopt, socket.SOL_SOCKET, socket.SO_ERROR)
        t.call("error", s.getsockopt, socket.SOL_SOCKET, socket.SO_ERROR)
        t.call("recv", s.recv, 10)
        t.call("send", s.send, b"x")

    def client(t, s):
        t.step()
        s.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        s.close()
        t.step()

    return server, client


@pair()
def reset_while_reader_blocks():
    def server(t, s):
        t.step()
        t.call("recv", s.recv, 10)

    def client(t, s):
        t.step()
        time.sleep(0.1)
        s.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        s.close()

    return server, client


@pair()
def close_with_unread_data_resets():
    def server(t, s):
        s.sendall(b"never read")
        t.step()
        t.step()
        t.call("poll", events, s)
        t.call("recv", s.recv, 10)
        t.call("recv", s.recv, 10)

    def client(t, s):
        t.step()
        s.close()
        t.step()

    return server, client


@pair()
def data_before_a_reset_is_lost():
    def server(t, s):
        t.step()
        t.call("recv", s.recv, 100)
        t.call("recv", s.recv, 100)

    def client(t, s):
        s.sendall(b"sent before the reset")
        s.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        s.close()
        t.step()

    return server, client


@pair()
def epipe_after_close():
    def server(t, s):
        s.close()
        t.step()
        t.step()

    def client(t, s):
        t.step()
        t.call("poll", events, s)
        t.call("first send", s.send, b"x")
        t.step()
        time.sleep(0.02)
        t.call("poll", events, s)
        t.call("second send", s.send, b"x")
        t.call("third send", s.send, b"x")
        t.call("recv", s.recv, 10)

    return server, client


@pair()
def sigpipe_kills_and_nosignal_does_not():
    def server(t, s):
        t.step()

    def client(t, s):
        s.shutdown(socket.SHUT_WR)
        # Only the main thread can set a handler: a child does it.
        t.step()
        pid = os.fork()
        if pid == 0:
            signal.signal(signal.SIGPIPE, signal.SIG_DFL)
            try:
                s.send(b"x", socket.MSG_NOSIGNAL)
            except BrokenPipeError:
                pass
            else:
                os._exit(3)
            try:
                s.send(b"x")
            finally:
                os._exit(4)
        status = os.waitpid(pid, 0)[1]
        t.log("killed by", os.WTERMSIG(status) if os.WIFSIGNALED(status) else f"exit {os.WEXITSTATUS(status)}")

    return server, client


@pair()
def data_then_close_is_all_read():
    def server(t, s):
        s.sendall(data(20_000))
        s.close()
        t.step()

    def client(t, s):
        t.step()
        t.call("poll", events, s)
        t.call("all", read_all, s)
        t.call("poll", events, s)

    return server, client


@pair()
def duplicate_keeps_the_connection():
    def server(t, s):
        t.call("first", s.recv, 100)
        t.step()
        t.call("second", s.recv, 100)
        t.step()
        t.call("EOF", s.recv, 100)

    def client(t, s):
        other = os.dup(s.fileno())
        s.send(b"by the original")
        s.close()
        t.step()
        os.write(other, b"by the duplicate")
        t.step()
        os.close(other)

    return server, client


@pair()
def dup2_over_a_socket_closes_it():
    def server(t, s):
        t.call("EOF", s.recv, 100)

    def client(t, s):
        null = os.open("/dev/null", os.O_RDWR)
        os.dup2(null, s.fileno())
        t.call("now a file", os.write, s.fileno(), b"x")
        t.call("not a socket", s.getpeername)
        os.close(null)
        s.close()

    return server, client


@pair()
def dup2_moves_a_socket():
    def server(t, s):
        t.call("data", s.recv, 100)
        t.call("EOF", s.recv, 100)

    def client(t, s):
        os.dup2(s.fileno(), 200)
        s.close()
        t.call("write", os.write, 200, b"from 200")
        os.close(200)
        t.call("closed", os.write, 200, b"x")

    return server, client


# --- blocking, time, readiness ------------------------------------------------


@pair()
def receive_timeout():
    def server(t, s):
        t.step()

    def client(t, s):
        s.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", 0, 200_000))
        start = time.monotonic()
        t.call("recv", s.recv, 10)
        took = time.monotonic() - start
        t.log("in time", 0.19 <= took < 1.0)
        t.call("value", s.getsockopt, socket.SOL_SOCKET, socket.SO_RCVTIMEO, 16)
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
        # In a child, whose main thread can have a handler; by libc directly,
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
def epoll_level():
    def server(t, s):
        t.step()
        s.send(b"12345")
        t.step()
        t.step()
        s.close()
        t.step()

    def client(t, s):
        e = select.epoll()
        e.register(s, select.EPOLLIN | select.EPOLLRDHUP)
        t.log("idle", epoll_events(e))
        t.step()
        t.step()
        t.log("data", epoll_events(e))
        t.log("again", epoll_events(e))
        s.recv(2)
        t.log("rest", epoll_events(e))
        s.recv(10)
        t.log("empty", epoll_events(e))
        e.modify(s, select.EPOLLIN | select.EPOLLOUT)
        t.log("writable", epoll_events(e))
        e.modify(s, select.EPOLLIN | select.EPOLLRDHUP)
        t.step()
        t.step()
        t.log("closed", epoll_events(e))
        e.unregister(s)
        t.log("unregistered", epoll_events(e))
        t.call("unregister again", e.unregister, s)
        t.call("modify", e.modify, s, 1)
        e.register(s, select.EPOLLIN)
        t.call("register twice", e.register, s, 1)
        t.log("registered late", epoll_events(e))

    return server, client


@pair()
def epoll_edge():
    def server(t, s):
        for word in (b"12345", b"678", b"9"):
            t.step()
            s.send(word)
            t.step()
        t.step()
        s.close()
        t.step()

    def client(t, s):
        e = select.epoll()
        e.register(s, select.EPOLLIN | select.EPOLLOUT | select.EPOLLRDHUP | select.EPOLLET)
        t.log("first", epoll_events(e))
        t.log("second", epoll_events(e))
        t.step()
        t.step()
        t.log("data", epoll_events(e))
        t.log("no new edge", epoll_events(e))
        t.step()
        t.step()
        t.log("more unread", epoll_events(e))
        s.recv(3)
        t.log("part read", epoll_events(e))
        t.step()
        t.step()
        t.log("more", epoll_events(e))
        s.recv(100)
        t.log("all read", epoll_events(e))
        e.modify(s, select.EPOLLIN | select.EPOLLOUT | select.EPOLLRDHUP | select.EPOLLET)
        t.log("modify arms again", epoll_events(e))
        t.step()
        t.step()
        t.log("closed", epoll_events(e))
        t.log("closed again", epoll_events(e))

    return server, client


@pair()
def epoll_edge_out_after_full():
    def server(t, s):
        t.step()
        total = 0
        want = int(t.hear())
        while total < want:
            total += len(s.recv(1 << 20))
        t.step()
        t.step()

    def client(t, s):
        s.setblocking(False)
        e = select.epoll()
        e.register(s, select.EPOLLOUT | select.EPOLLET)
        t.log("writable", epoll_events(e))
        total = 0
        with contextlib.suppress(BlockingIOError):
            while True:
                total += s.send(b"x" * 100_000)
        t.log("full", epoll_events(e))
        t.step()
        t.tell(str(total))
        t.log("edge", epoll_events(e, 5))
        t.step()
        t.call("send", s.send, b"y")
        t.step()

    return server, client


@pair()
def epoll_oneshot():
    def server(t, s):
        for _ in range(3):
            t.step()
            s.send(b"x")
            t.step()
        t.step()

    def client(t, s):
        e = select.epoll()
        e.register(s, select.EPOLLIN | select.EPOLLONESHOT)
        t.step()
        t.step()
        t.log("once", epoll_events(e))
        t.log("no more", epoll_events(e))
        t.step()
        t.step()
        t.log("still none", epoll_events(e))
        e.modify(s, select.EPOLLIN | select.EPOLLONESHOT)
        t.log("armed", epoll_events(e))
        s.recv(100)
        e.modify(s, select.EPOLLIN | select.EPOLLONESHOT)
        t.log("armed, empty", epoll_events(e))
        t.step()
        t.step()
        t.log("data", epoll_events(e))
        t.step()

    return server, client


@pair()
def epoll_nested_and_mixed():
    def server(t, s):
        t.step()
        s.send(b"x")
        t.step()
        t.step()

    def client(t, s):
        inner, outer = select.epoll(), select.epoll()
        r, w = os.pipe()
        inner.register(s, select.EPOLLIN)
        inner.register(r, select.EPOLLIN)
        outer.register(inner.fileno(), select.EPOLLIN)
        t.log("idle", epoll_events(outer), events(inner.fileno(), 1))
        t.step()
        t.step()
        t.log("inner ready", epoll_events(outer), epoll_events(inner), events(inner.fileno(), 1))
        os.write(w, b"y")
        t.log("pipe too", epoll_events(inner))
        s.recv(10)
        t.log("pipe only", epoll_events(inner))
        os.read(r, 1)
        t.log("idle again", epoll_events(outer), events(inner.fileno(), 1))
        t.step()

    return server, client


@pair()
def epoll_forgets_a_closed_socket():
    def server(t, s):
        s.send(b"x")
        t.step()

    def client(t, s):
        t.step()
        e = select.epoll()
        e.register(s, select.EPOLLIN)
        t.log("ready", epoll_events(e))
        copy = s.dup()
        number = s.fileno()
        s.close()
        t.log("duplicate keeps it", epoll_events(e))
        t.call("by number", e.unregister, number)
        copy.close()
        t.log("gone", epoll_events(e))

    return server, client


@pair()
def epoll_waits_in_another_thread():
    def server(t, s):
        t.step()
        time.sleep(0.1)
        s.send(b"x")

    def client(t, s):
        e = select.epoll()
        result = []
        thread = threading.Thread(target=lambda: result.append(epoll_events(e, 5)))
        thread.start()
        time.sleep(0.05)
        e.register(s, select.EPOLLIN)  # while the other thread sleeps in it
        t.step()
        thread.join(6)
        t.log("woken", result)

    return server, client


# --- names, options, descriptors ----------------------------------------------


@pair()
def names_agree():
    def server(t, s):
        mine, peer = s.getsockname(), s.getpeername()
        t.log("addresses", mine[0], peer[0])
        t.tell(json.dumps([mine, peer]))
        t.step()

    def client(t, s):
        mine, peer = json.loads(t.hear())
        t.log("agree", list(s.getpeername()) == mine, list(s.getsockname()) == peer)
        t.log("not privileged", s.getsockname()[1] > 1023)
        t.step()

    return server, client


@pair(raw=True)
def accept_address():
    def server(t, listener):
        conn, address = listener.accept()
        t.log("same", address == conn.getpeername(), address[0])
        t.log("listener", listener.getsockname()[0])
        t.call("listener peer", listener.getpeername)
        t.step()

    def client(t, address):
        s = socket.create_connection(address)
        t.step()

    return server, client


@pair(family=socket.AF_INET6, bind="::1")
def ipv6():
    def server(t, s):
        t.log("family", s.family == socket.AF_INET6, s.getsockname()[0], s.getpeername()[0], len(s.getpeername()))
        s.sendall(s.recv(100))

    def client(t, s):
        t.log("names", s.getpeername()[0], s.getsockname()[0], s.getpeername()[2:])
        s.send(b"over six")
        t.call("recv", s.recv, 100)

    return server, client


@pair(family=socket.AF_INET6, bind="::", raw=True)
def dual_stack_listener():
    def server(t, listener):
        for _ in range(2):
            conn, address = listener.accept()
            t.log("from", address[0], conn.getsockname()[0], conn.getpeername()[0])
            conn.send(b"ok")
            conn.close()

    def client(t, address):
        for target in ("127.0.0.1", "::1"):
            s = socket.create_connection((target, address[1]))
            t.log("to", s.getpeername()[0], s.getsockname()[0], s.recv(10))

    return server, client


@pair(bind="0.0.0.0", raw=True)
def wildcard_and_other_loopback():
    def server(t, listener):
        for _ in range(2):
            conn, address = listener.accept()
            t.log("from", address[0], conn.getsockname()[0])
            conn.send(b"ok")

    def client(t, address):
        for target in ("127.0.0.1", "127.9.9.9"):
            s = socket.create_connection((target, address[1]))
            t.log("to", s.getpeername()[0], s.getsockname()[0], s.recv(10))

    return server, client


@pair(raw=True)
def client_bound_before_connect():
    def server(t, listener):
        conn, address = listener.accept()
        t.log("from", address[0])
        t.tell(str(address[1]))
        conn.send(b"ok")

    def client(t, address):
        s = socket.socket()
        s.bind(("127.0.0.5", 0))
        port = s.getsockname()[1]
        s.connect(address)
        t.log("name", s.getsockname()[0], s.getsockname()[1] == port, int(t.hear()) == port, s.recv(10))

    return server, client


@pair(raw=True)
def nonblocking_connect():
    def server(t, listener):
        conn, _ = listener.accept()
        conn.send(b"ok")
        t.step()

    def client(t, address):
        s = socket.socket()
        s.setblocking(False)
        t.call("connect", s.connect_ex, address)
        t.log("poll", events(s, 4, 5000))
        t.call("error", s.getsockopt, socket.SOL_SOCKET, socket.SO_ERROR)
        t.call("connect again", s.connect_ex, address)
        t.call("and again", s.connect_ex, address)
        t.call("send", s.send, b"x")
        t.log("poll", events(s, 1, 5000))
        t.call("recv", s.recv, 10)
        t.step()

    return server, client


@pair(raw=True)
def nonblocking_connect_with_epoll():
    def server(t, listener):
        conn, _ = listener.accept()
        t.step()

    def client(t, address):
        s = socket.socket()
        s.setblocking(False)
        e = select.epoll()
        e.register(s, select.EPOLLIN | select.EPOLLOUT | select.EPOLLRDHUP | select.EPOLLET)
        t.log("unconnected", epoll_events(e))
        t.call("connect", s.connect_ex, address)
        t.log("connected", epoll_events(e, 5))
        t.log("again", epoll_events(e))
        t.step()

    return server, client


@pair(raw=True)
def refused():
    def server(t, listener):
        t.step()

    def client(t, address):
        free = socket.socket()
        free.bind(("127.0.0.1", 0))
        nobody = free.getsockname()
        s = socket.socket()
        t.call("connect", s.connect, nobody)
        t.call("error", s.getsockopt, socket.SOL_SOCKET, socket.SO_ERROR)
        t.call("recv", s.recv, 10)
        t.call("then to somebody", s.connect, address)
        t.call("peer", lambda: s.getpeername() == address)
        n = socket.socket()
        n.setblocking(False)
        t.call("nonblocking", n.connect_ex, nobody)
        t.log("poll", events(n, 1 | 4, 5000))
        t.call("error", n.getsockopt, socket.SOL_SOCKET, socket.SO_ERROR)
        t.call("error cleared", n.getsockopt, socket.SOL_SOCKET, socket.SO_ERROR)
        t.step()

    return server, client


@pair(raw=True)
def unconnected_socket():
    def server(t, listener):
        t.step()

    def client(t, address):
        s = socket.socket()
        t.call("recv", s.recv, 10)
        t.call("send", s.send, b"x")
        t.call("peer", s.getpeername)
        t.call("name", s.getsockname)
        t.call("shutdown", s.shutdown, socket.SHUT_WR)
        t.call("accept", s.accept)
        t.call("poll", events, s)
        t.call("sendto", s.sendto, b"x", address)
        t.step()

    return server, client


@pair()
def connected_socket_misused():
    def server(t, s):
        t.call("connect", s.connect, ("127.0.0.1", 9))
        t.call("listen", s.listen)
        t.call("accept", s.accept)
        t.call("bind", s.bind, ("127.0.0.1", 0))
        t.call("sendto", s.sendto, b"to", ("127.0.0.1", 9))
        t.step()
        t.step()

    def client(t, s):
        t.call("connect", s.connect, s.getpeername())
        t.step()
        t.call("recv", s.recv, 10)
        t.call("recvfrom", lambda: s.recvfrom(10, socket.MSG_DONTWAIT))
        t.call("lseek", os.lseek, s.fileno(), 0, os.SEEK_SET)
        t.call("pread", os.pread, s.fileno(), 10, 0)
        t.call("fsync", os.fsync, s.fileno())
        t.call("ftruncate", os.ftruncate, s.fileno(), 0)
        t.step()

    return server, client


@pair()
def recvfrom_has_no_address():
    def server(t, s):
        s.send(b"abc")
        t.step()
        t.step()

    def client(t, s):
        t.step()
        t.call("recvfrom", s.recvfrom, 10)
        t.step()

    return server, client


@pair(raw=True)
def listener_nonblocking():
    def server(t, listener):
        listener.setblocking(False)
        t.call("nobody", listener.accept)
        t.log("poll", events(listener))
        t.step()
        t.step()
        t.log("poll", events(listener))
        conn, _ = listener.accept()
        t.log("inherits", conn.getblocking(), bool(fcntl.fcntl(conn, fcntl.F_GETFL) & os.O_NONBLOCK))
        t.log("cloexec", bool(fcntl.fcntl(conn, fcntl.F_GETFD) & fcntl.FD_CLOEXEC))
        t.log("poll", events(listener))
        t.call("recv on a listener", listener.recv, 10)
        t.call("send on a listener", listener.send, b"x")
        t.step()

    def client(t, address):
        t.step()
        s = socket.create_connection(address)
        t.step()
        t.step()

    return server, client


@pair(raw=True)
def listener_in_epoll():
    def server(t, listener):
        listener.setblocking(False)
        level, edge = select.epoll(), select.epoll()
        level.register(listener, select.EPOLLIN)
        edge.register(listener, select.EPOLLIN | select.EPOLLET)
        t.log("idle", epoll_events(level), epoll_events(edge))
        t.step()
        t.step()
        t.log("two wait", epoll_events(level), epoll_events(edge), epoll_events(edge))
        a, _ = listener.accept()
        t.log("one waits", epoll_events(level), epoll_events(edge))
        b, _ = listener.accept()
        t.log("none", epoll_events(level), epoll_events(edge))
        t.step()
        t.step()
        t.log("one more", epoll_events(level), epoll_events(edge))

    def client(t, address):
        t.step()
        a, b = socket.create_connection(address), socket.create_connection(address)
        t.step()
        t.step()
        c = socket.create_connection(address)
        t.step()

    return server, client


@pair(raw=True)
def talk_before_accept():
    def server(t, listener):
        t.step()
        t.step()
        conn, _ = listener.accept()
        t.call("question", conn.recv, 100)
        conn.send(b"answer")
        conn, _ = listener.accept()
        t.call("all", read_all, conn)
        t.step()

    def client(t, address):
        t.step()
        s = socket.create_connection(address)
        s.send(b"question")
        gone = socket.create_connection(address)
        gone.sendall(data(50_000))
        gone.close()
        t.step()
        t.call("answer", s.recv, 100)
        t.step()

    return server, client


@pair(raw=True)
def accept_order():
    def server(t, listener):
        t.step()
        for _ in range(20):
            conn, _ = listener.accept()
            t.call("from", conn.recv, 10)
        t.step()

    def client(t, address):
        socks = []
        for i in range(20):
            s = socket.create_connection(address)
            s.send(b"%d" % i)
            socks.append(s)
        t.step()
        t.step()

    return server, client


@pair(raw=True)
def listener_closed_with_connections_waiting():
    def server(t, listener):
        t.step()
        listener.close()
        t.step()
        t.step()

    def client(t, address):
        s = socket.create_connection(address)
        t.step()
        t.step()
        t.log("poll", events(s))
        t.call("recv", s.recv, 10)
        t.call("recv", s.recv, 10)
        t.call("refused", lambda: socket.create_connection(address))
        t.step()

    return server, client


@pair(raw=True)
def listen_again_on_the_same_port():
    def server(t, listener):
        conn, address = listener.accept()
        port = listener.getsockname()
        listener.close()
        again = socket.socket()
        again.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        t.call("bind", again.bind, port)
        t.call("listen", again.listen, 5)
        t.step()
        second, _ = again.accept()
        conn.send(b"old")
        second.send(b"new")
        t.step()

    def client(t, address):
        old = socket.create_connection(address)
        t.step()
        new = socket.create_connection(address)
        t.call("old", old.recv, 10)
        t.call("new", new.recv, 10)
        t.step()

    return server, client


@pair()
def address_in_use():
    def server(t, s):
        other = socket.socket()
        t.call("bind", other.bind, s.getsockname())
        t.step()

    def client(t, s):
        other = socket.socket()
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        other.bind(("127.0.0.1", 0))
        other.listen()
        third = socket.socket()
        third.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        t.call("listened port", third.bind, other.getsockname())
        t.step()

    return server, client


@pair()
def options():
    def both(t, s):
        for level, name in (
            ("SOL_SOCKET", "SO_TYPE"),
            ("SOL_SOCKET", "SO_PROTOCOL"),
            ("SOL_SOCKET", "SO_DOMAIN"),
            ("SOL_SOCKET", "SO_ACCEPTCONN"),
            ("SOL_SOCKET", "SO_ERROR"),
            ("SOL_SOCKET", "SO_KEEPALIVE"),
            ("SOL_SOCKET", "SO_OOBINLINE"),
            ("SOL_SOCKET", "SO_REUSEADDR"),
            ("SOL_SOCKET", "SO_BROADCAST"),
            ("SOL_SOCKET", "SO_PRIORITY"),
            ("IPPROTO_TCP", "TCP_NODELAY"),
            ("IPPROTO_TCP", "TCP_CORK"),
            ("IPPROTO_TCP", "TCP_KEEPIDLE"),
            ("IPPROTO_TCP", "TCP_KEEPINTVL"),
            ("IPPROTO_TCP", "TCP_KEEPCNT"),
            ("IPPROTO_TCP", "TCP_USER_TIMEOUT"),
            ("IPPROTO_TCP", "TCP_DEFER_ACCEPT"),
            ("IPPROTO_IP", "IP_TOS"),
            ("IPPROTO_IP", "IP_TTL"),
        ):
            level_number = getattr(socket, level)
            number = getattr(socket, name, {"SO_PROTOCOL": 38, "SO_DOMAIN": 39}.get(name))
            t.call(name, s.getsockopt, level_number, number)
            if name in ("SO_KEEPALIVE", "TCP_NODELAY", "TCP_KEEPIDLE", "TCP_KEEPCNT", "TCP_CORK", "SO_OOBINLINE"):
                t.call("set", s.setsockopt, level_number, number, 7)
                t.call("get", s.getsockopt, level_number, number)
        t.call("set NODELAY", s.setsockopt, socket.IPPROTO_TCP, socket.TCP_NODELAY, 0)
        t.call("get NODELAY", s.getsockopt, socket.IPPROTO_TCP, socket.TCP_NODELAY)
        t.call("set SNDBUF", s.setsockopt, socket.SOL_SOCKET, socket.SO_SNDBUF, 100_000)
        t.call("get SNDBUF", s.getsockopt, socket.SOL_SOCKET, socket.SO_SNDBUF)
        t.call("set RCVBUF", s.setsockopt, socket.SOL_SOCKET, socket.SO_RCVBUF, 100_000)
        t.call("get RCVBUF", s.getsockopt, socket.SOL_SOCKET, socket.SO_RCVBUF)
        t.call("linger", s.getsockopt, socket.SOL_SOCKET, socket.SO_LINGER, 8)
        t.call("set linger", s.setsockopt, socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 5))
        t.call("linger", s.getsockopt, socket.SOL_SOCKET, socket.SO_LINGER, 8)
        t.call("set linger off", s.setsockopt, socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 0, 0))
        t.call("TYPE is read-only", s.setsockopt, socket.SOL_SOCKET, socket.SO_TYPE, 1)
        t.call("no such option", s.getsockopt, socket.IPPROTO_TCP, 9999)
        t.call("no such level", s.getsockopt, 9999, 1)
        t.call("short", s.setsockopt, socket.SOL_SOCKET, socket.SO_KEEPALIVE, b"x")
        t.call("congestion", s.getsockopt, socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16)
        t.step()

    return both, both


@pair()
def tcp_info():
    def server(t, s):
        t.log("state", s.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 104)[0])
        t.log("length", len(s.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 104)))
        t.step()
        t.step()
        t.log("state", s.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 104)[0])
        t.step()

    def client(t, s):
        t.log("state", s.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 104)[0])
        t.step()
        s.shutdown(socket.SHUT_WR)
        t.step()
        # FIN-WAIT-1 or, once the FIN is acknowledged, FIN-WAIT-2.
        t.log("state", s.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 104)[0] in (4, 5))
        t.step()

    return server, client


@pair(raw=True)
def options_survive_connect_and_accept():
    def server(t, listener):
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", 7, 0))
        t.step()
        conn, _ = listener.accept()
        t.log("inherited", conn.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE))
        t.log("inherited", conn.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
        t.log("inherited", conn.getsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, 16))
        t.log("inherited", conn.getsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR))
        t.step()

    def client(t, address):
        s = socket.socket()
        s.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        s.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 33)
        s.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", 0, 100_000))
        t.step()
        s.connect(address)
        t.log("kept", s.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE))
        t.log("kept", s.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE))
        t.call("timeout works", s.recv, 10)
        t.step()

    return server, client


@pair()
def bytes_waiting():
    def server(t, s):
        s.send(b"0123456789")
        t.step()
        t.step()
        s.close()

    def client(t, s):
        def count():
            value = array.array("i", [0])
            fcntl.ioctl(s.fileno(), termios.FIONREAD, value)
            return value[0]

        t.step()
        t.call("FIONREAD", count)
        s.recv(4)
        t.call("FIONREAD", count)
        s.recv(100)
        t.call("FIONREAD", count)
        value = array.array("i", [1])
        t.call("FIONBIO", fcntl.ioctl, s.fileno(), 0x5421, value)
        t.call("recv", s.recv, 1)
        t.log("O_NONBLOCK", bool(fcntl.fcntl(s, fcntl.F_GETFL) & os.O_NONBLOCK))
        t.step()

    return server, client


@pair()
def descriptor_looks_like_a_socket():
    def both(t, s):
        import stat

        t.log("S_ISSOCK", stat.S_ISSOCK(os.fstat(s.fileno()).st_mode))
        t.log("link", os.readlink(f"/proc/self/fd/{s.fileno()}").split(":")[0])
        flags = fcntl.fcntl(s, fcntl.F_GETFL)
        t.log("flags", flags & (os.O_ACCMODE | os.O_NONBLOCK | os.O_APPEND))
        fcntl.fcntl(s, fcntl.F_SETFL, flags | os.O_NONBLOCK)
        t.call("nonblocking", s.recv, 1)
        t.log("flags", fcntl.fcntl(s, fcntl.F_GETFL) & (os.O_ACCMODE | os.O_NONBLOCK))
        copy = os.dup(s.fileno())
        t.log("shared by duplicates", bool(fcntl.fcntl(copy, fcntl.F_GETFL) & os.O_NONBLOCK))
        high = fcntl.fcntl(s, fcntl.F_DUPFD_CLOEXEC, 300)
        t.log("F_DUPFD_CLOEXEC", high >= 300, fcntl.fcntl(high, fcntl.F_GETFD))
        os.close(high)
        os.close(copy)
        t.step()

    return both, both


@pair()
def lowest_number_first():
    def both(t, s):
        # Under the other thread's feet numbers would depend on luck.
        if t.together:
            return
        free = os.open("/dev/null", os.O_RDONLY)
        os.close(free)
        a = socket.socket()
        t.log("lowest", a.fileno() == free)
        b = os.dup(s.fileno())
        t.log("next", b == free + 1)
        a.close()
        c = socket.socket()
        t.log("again", c.fileno() == free)

    return both, both


# --- processes -----------------------------------------------------------------


@pair()
def fork_shares_a_connection():
    def server(t, s):
        got = b""
        while len(got) < 33:
            part = s.recv(100)
            if not part:
                break
            got += part
        t.log("lines", sorted(got.split()))
        s.sendall(b"bye")
        t.call("EOF", s.recv, 10)

    def client(t, s):
        pid = os.fork()
        if pid == 0:
            for i in range(3):
                s.send(b"child-%d.. " % i)
            os._exit(0)
        os.waitpid(pid, 0)
        s.send(b"end")
        t.call("recv", s.recv, 3, socket.MSG_WAITALL)
        s.close()

    return server, client


@pair(raw=True)
def fork_after_accept():
    def server(t, listener):
        for _ in range(3):
            conn, _ = listener.accept()
            pid = os.fork()
            if pid == 0:
                listener.close()
                conn.sendall(b"hello from a child")
                conn.sendall(conn.recv(100))
                os._exit(0)
            conn.close()
            os.waitpid(pid, 0)

    def client(t, address):
        for i in range(3):
            s = socket.create_connection(address)
            t.call("greeting", s.recv, 18, socket.MSG_WAITALL)
            s.send(b"%d" % i)
            t.call("echo", read_all, s)

    return server, client


@pair(raw=True)
def prefork_accept():
    def server(t, listener):
        pids = []
        for _ in range(3):
            pid = os.fork()
            if pid == 0:
                conn, _ = listener.accept()
                conn.sendall(b"one of three")
                conn.close()
                os._exit(0)
            pids.append(pid)
        t.step()
        t.log("ended", [os.waitpid(pid, 0)[1] for pid in pids])

    def client(t, address):
        t.step()
        for _ in range(3):
            s = socket.create_connection(address)
            t.call("all", read_all, s)

    return server, client


@pair()
def parent_closes_child_goes_on():
    def server(t, s):
        t.call("first", s.recv, 100)
        s.send(b"answer")
        t.call("second", s.recv, 100)
        t.call("EOF", s.recv, 100)

    def client(t, s):
        r, w = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.read(r, 1)  # until the parent has closed
            s.send(b"from the child")
            answer = s.recv(100)
            s.send(b"got " + answer)
            os._exit(0)
        s.close()
        os.write(w, b"x")
        t.log("status", os.waitpid(pid, 0)[1])

    return server, client


@pair()
def executed_program_inherits():
    def server(t, s):
        s.sendall(b"through cat\n")
        s.shutdown(socket.SHUT_WR)
        t.call("back", read_all, s)

    def client(t, s):
        status = subprocess.run(["/bin/cat"], stdin=s, stdout=s).returncode
        t.log("status", status)
        s.close()

    return server, client


@pair()
def close_on_exec():
    def server(t, s):
        t.call("EOF at once", s.recv, 10)
        t.step()

    def client(t, s):
        child = subprocess.Popen(["/bin/sleep", "20"], close_fds=False)
        s.close()
        t.step()
        child.kill()
        child.wait()

    return server, client


@pair()
def process_end_closes():
    def server(t, s):
        t.call("data", s.recv, 100)
        t.call("EOF", s.recv, 100)

    def client(t, s):
        pid = os.fork()
        if pid == 0:
            s.send(b"last words")
            os._exit(0)
        s.close()
        os.waitpid(pid, 0)

    return server, client


# --- threads ------------------------------------------------------------------


@pair()
def threads_share_a_socket():
    def server(t, s):
        got = read_all(s)
        words = got.split()
        t.log("words", len(words), len(set(words)))

    def client(t, s):
        def send(number):
            for i in range(300):
                s.send(b"%d-%04d " % (number, i))

        threads = [threading.Thread(target=send, args=(n,)) for n in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        s.close()

    return server, client


@pair()
def reader_and_writer_threads():
    def server(t, s):
        while part := s.recv(10000):
            s.sendall(part)
        s.close()

    def client(t, s):
        got = []
        reader = threading.Thread(target=lambda: got.append(read_all(s)))
        reader.start()
        s.sendall(data(2_000_000))
        s.shutdown(socket.SHUT_WR)
        reader.join(15)
        t.log("same", got == [data(2_000_000)])

    return server, client


# --- the machinery --------------------------------------------------------------


def listen_for(case_name):
    _, _, family, _, bind = CASES[case_name]
    listener = socket.socket(family)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind((bind or "127.0.0.1", 0))
    listener.listen(128)
    return listener


def run_server(case_name, t):
    server, _, _, raw, bind = CASES[case_name]
    listener = listen_for(case_name)
    address = listener.getsockname()
    host = {"::": "::1", "0.0.0.0": "127.0.0.1"}.get(address[0], address[0])
    t.tell(json.dumps([host, address[1]]))
    if raw:
        server(t, listener)
    else:
        conn, _ = listener.accept()
        with conn:
            server(t, conn)
    t.log("end")


def run_client(case_name, t):
    _, client, family, raw, _ = CASES[case_name]
    address = tuple(json.loads(t.hear()))
    if raw:
        client(t, address)
    else:
        with socket.socket(family) as s:
            s.connect(address)
            client(t, s)
    t.log("end")


def side(case_name, role, rfd, wfd):
    def out(text):
        sys.stdout.write(text + "\n")
        sys.stdout.flush()

    t = Log(out, rfd, wfd)
    t.together = False
    {"server": run_server, "client": run_client}[role](case_name, t)


def together(case_name):
    c2s, s2c = os.pipe(), os.pipe()
    logs = {"server": [], "client": []}

    def start(role, rfd, wfd):
        t = Log(lambda text: logs[role].append(text), rfd, wfd)
        t.together = True
        try:
            {"server": run_server, "client": run_client}[role](case_name, t)
        except BaseException as error:
            logs[role].append(json.dumps(["FAILED", repr(error)]))

    threads = [
        threading.Thread(target=start, args=("server", c2s[0], s2c[1]), daemon=True),
        threading.Thread(target=start, args=("client", s2c[0], c2s[1]), daemon=True),
    ]
    for thread in threads:
        thread.start()
    end = time.monotonic() + LIMIT - 5
    for thread, role in zip(threads, ("server", "client")):
        thread.join(max(0.1, end - time.monotonic()))
        if thread.is_alive():
            logs[role].append(json.dumps(["HANG", where(thread)]))
    print(json.dumps(logs), flush=True)
    os._exit(0)


def where(thread):
    """Line that a thread is at."""
    frame, lines = sys._current_frames().get(thread.ident), []
    while frame:
        lines.append(f"{frame.f_code.co_name}:{frame.f_lineno}")
        frame = frame.f_back
    return " < ".join(lines[:4])


def environment(which):
    env = {k: v for k, v in os.environ.items() if k not in ("LD_PRELOAD", "FS_PRELOAD")}
    if which == "lib":
        env["LD_PRELOAD"] = os.environ["FS_PRELOAD"]
    return env


def finish(child, limit):
    try:
        out, err = child.communicate(timeout=limit)
    except subprocess.TimeoutExpired:
        os.killpg(child.pid, signal.SIGKILL)
        out, err = child.communicate()
        return out, err, "HANG"
    return out, err, child.returncode


def run_case(name, server, client, both):
    options = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True)
    me = [sys.executable, os.path.abspath(__file__)]
    if both:
        child = subprocess.Popen(me + ["together", name], env=environment(server), **options)
        out, err, status = finish(child, LIMIT + 5)
        result = json.loads(out) if status == 0 and out else {"server": [], "client": []}
        if status != 0:
            result["status"] = f"{status} {err[-300:]}"
        return result
    c2s, s2c = os.pipe(), os.pipe()
    children = {}
    for role, which, rfd, wfd in (("server", server, c2s[0], s2c[1]), ("client", client, s2c[0], c2s[1])):
        children[role] = subprocess.Popen(
            me + ["side", name, role, str(rfd), str(wfd)], env=environment(which), pass_fds=(rfd, wfd), **options
        )
    for fd in (*c2s, *s2c):
        os.close(fd)
    result = {}
    end = time.monotonic() + LIMIT
    for role, child in children.items():
        out, err, status = finish(child, max(1, end - time.monotonic()))
        result[role] = out.splitlines()
        if status != 0:
            result[f"{role} status"] = f"{status} {err[-300:]}"
    return result


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("verb", choices=("list", "run", "compare", "side", "together"))
    parser.add_argument("rest", nargs="*")
    parser.add_argument("--server", default="stock", choices=("lib", "stock"))
    parser.add_argument("--client", default="stock", choices=("lib", "stock"))
    parser.add_argument("--together", action="store_true")
    parser.add_argument("--cases", default="")
    parser.add_argument("--known", default="", help="cases that are known to differ")
    args = parser.parse_args()
    if args.verb == "list":
        print("\n".join(CASES))
    elif args.verb == "side":
        side(args.rest[0], args.rest[1], int(args.rest[2]), int(args.rest[3]))
    elif args.verb == "together":
        together(args.rest[0])
    elif args.verb == "run":
        wanted = [c for c in args.cases.split(",") if c] or list(CASES)
        result = {name: run_case(name, args.server, args.client, args.together) for name in wanted}
        json.dump(result, sys.stdout, indent=1)
    else:
        a, b = (json.load(open(path)) for path in args.rest[:2])
        different = 0
        known = [c for c in args.known.split(",") if c]
        for name in a:
            if a[name] == b.get(name):
                if name in known:
                    different += 1
                    print(f"EQUAL {name}: not a known difference any more, take it off the list")
                continue
            if name in known:
                print(f"KNOWN DIFFERENCE {name}: see docs/limits.md")
                continue
            different += 1
            print(f"DIFFERENT {name}")
            for key in sorted({*a[name], *b.get(name, {})}):
                one, two = a[name].get(key), b.get(name, {}).get(key)
                if one == two:
                    continue
                if isinstance(one, str) or isinstance(two, str):
                    print(f"  {key}: kernel {one!r}, ours {two!r}")
                    continue
                one, two = one or [], two or []
                for i in range(max(len(one), len(two))):
                    x = one[i] if i < len(one) else "(nothing)"
                    y = two[i] if i < len(two) else "(nothing)"
                    if x != y:
                        print(f"  {key} line {i}: kernel {x}, ours {y}")
        print(f"{len(a) - different} of {len(a)} cases equal")
        sys.exit(1 if different else 0)


if __name__ == "__main__":
    main()
