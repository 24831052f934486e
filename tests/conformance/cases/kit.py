"""Helpers of the cases: the transcript of a side, and small readers of sockets."""
import errno
import hashlib
import json
import os
import random
import select
import socket

# By name, in the order in which they run: (server, client, family, raw, address to bind).
CASES = {}


class Log:
    """One side of a case: its transcript, and how it keeps in step with the other side."""

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
