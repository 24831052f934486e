"""Clients for the zone benchmarks: one connection a request, every end told apart.

Several processes, each with its own connections in flight; a request is
connect, GET, read to the end. Results are counted by kind of end.
"""
import collections
import errno
import multiprocessing
import os
import select
import socket
import time

ENDS = ("ok", "refused", "reset", "empty", "short", "timeout")


class Request:
    def __init__(self, address, size):
        self.sock = socket.socket(socket.AF_INET6 if ":" in address[0] else socket.AF_INET)
        self.sock.setblocking(False)
        self.begun = time.monotonic()
        self.got = b""
        self.size = size
        self.sent = False
        error = self.sock.connect_ex(address)
        self.failed = None if error in (0, errno.EINPROGRESS) else error

    def step(self, events):
        """None while it goes on, else how it ended."""
        try:
            if not self.sent:
                error = self.sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
                if error:
                    raise OSError(error, os.strerror(error))
                self.sock.send(b"GET /64 HTTP/1.0\r\n\r\n")
                self.sent = True
                return None
            data = self.sock.recv(65536)
            if data:
                self.got += data
                return None
        except BlockingIOError:
            return None
        except OSError as e:
            return "refused" if e.errno == errno.ECONNREFUSED else "reset"
        if not self.got:
            return "empty"
        body = self.got.split(b"\r\n\r\n", 1)[-1]
        return "ok" if len(body) == self.size else "short"


def client(address, width, until, size, patience, cpu, out):
    if cpu is not None:
        os.sched_setaffinity(0, {cpu})
    poll = select.epoll()
    open_, ends = {}, collections.Counter()
    slowest = 0.0
    swept = time.monotonic()
    while True:
        now = time.monotonic()
        if now >= until and not open_:
            break
        while len(open_) < width and now < until:
            r = Request(address, size)
            if r.failed is not None:
                ends["refused" if r.failed == errno.ECONNREFUSED else "reset"] += 1
                r.sock.close()
                time.sleep(0.001)
                break
            open_[r.sock.fileno()] = r
            poll.register(r.sock, select.EPOLLOUT)
        for fd, events in poll.poll(0.05):
            r = open_.get(fd)
            if r is None:
                continue
            sent = r.sent
            end = r.step(events)
            if end is None:
                if r.sent and not sent:
                    poll.modify(fd, select.EPOLLIN)
                continue
            slowest = max(slowest, time.monotonic() - r.begun)
            ends[end] += 1
            poll.unregister(fd)
            r.sock.close()
            del open_[fd]
        if now - swept > 0.25:
            swept = now
            for fd, r in [x for x in open_.items() if now - x[1].begun > patience]:
                ends["timeout"] += 1
                poll.unregister(fd)
                r.sock.close()
                del open_[fd]
    out.put((dict(ends), slowest))


class Load:
    """Runs for `seconds` in the background; `result()` waits for it."""

    def __init__(self, address, seconds, processes=2, width=16, size=64, patience=10.0, pin=True):
        self.out = multiprocessing.Queue()
        self.until = time.monotonic() + seconds
        cpus = sorted(os.sched_getaffinity(0))
        self.all = [
            multiprocessing.Process(
                target=client,
                args=(address, width, self.until, size, patience, cpus[i % len(cpus)] if pin else None, self.out),
                daemon=True,
            )
            for i in range(processes)
        ]
        self.begun = time.monotonic()
        for p in self.all:
            p.start()

    def running(self):
        return time.monotonic() < self.until

    def result(self):
        ends, slowest = collections.Counter(), 0.0
        for _ in self.all:
            e, s = self.out.get(timeout=60)
            ends.update(e)
            slowest = max(slowest, s)
        for p in self.all:
            p.join(10)
        total = {k: ends.get(k, 0) for k in ENDS}
        total["failed"] = sum(v for k, v in total.items() if k != "ok")
        total["per_second"] = round(total["ok"] / (self.until - self.begun))
        total["slowest_ms"] = round(slowest * 1000, 1)
        return total
