#!/usr/bin/python3
"""Echo servers in the styles that Python programs use.

echo_server.py KIND PORT [HOST]; KIND: threaded, select, poll, epoll,
epoll-edge, asyncio, fork. Echoes until the client's EOF, then closes.
Runs until killed.
"""
import asyncio
import os
import select
import signal
import socket
import sys
import threading

CHUNK = 65536


def listener(host, port):
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    sock.bind((host, port))
    sock.listen(512)
    return sock


def serve_blocking(conn):
    with conn:
        try:
            while True:
                data = conn.recv(CHUNK)
                if not data:
                    return
                conn.sendall(data)
        except (ConnectionResetError, BrokenPipeError):
            pass


def threaded(sock):
    while True:
        conn, _ = sock.accept()
        threading.Thread(target=serve_blocking, args=(conn,), daemon=True).start()


def fork(sock):
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    while True:
        conn, _ = sock.accept()
        if os.fork() == 0:
            sock.close()
            serve_blocking(conn)
            os._exit(0)
        conn.close()


class Loop:
    """An event loop over any of the three interfaces."""

    def __init__(self, sock, poller, edge=False):
        self.sock, self.poller, self.edge = sock, poller, edge
        self.conns = {}
        sock.setblocking(False)
        poller.add(sock.fileno(), True, False)

    def run(self):
        while True:
            for fd, readable, writable in self.poller.wait():
                if fd == self.sock.fileno():
                    self.accept()
                    continue
                conn = self.conns.get(fd)
                if conn is None:
                    continue
                if readable:
                    self.read(fd, conn)
                if fd in self.conns and (writable or conn["out"] or conn["eof"]):
                    self.write(fd, conn)

    def accept(self):
        while True:
            try:
                sock, _ = self.sock.accept()
            except BlockingIOError:
                return
            sock.setblocking(False)
            self.conns[sock.fileno()] = {"sock": sock, "out": bytearray(), "eof": False, "paused": False}
            self.poller.add(sock.fileno(), True, self.edge)

    def read(self, fd, conn):
        while not conn["eof"] and len(conn["out"]) < 8 * CHUNK:
            try:
                data = conn["sock"].recv(CHUNK)
            except BlockingIOError:
                return
            except (ConnectionResetError, BrokenPipeError):
                # Kernel TCP, too, returns EPIPE once: for a reset after the peer's FIN.
                self.drop(fd, conn)
                return
            if not data:
                conn["eof"] = True
            conn["out"] += data
            if not self.edge:
                break

    def write(self, fd, conn):
        while True:
            while conn["out"]:
                try:
                    sent = conn["sock"].send(conn["out"])
                except BlockingIOError:
                    if not self.edge:
                        self.poller.change(fd, False, True)
                    return
                except (ConnectionResetError, BrokenPipeError):
                    self.drop(fd, conn)
                    return
                del conn["out"][:sent]
            if conn["eof"]:
                self.drop(fd, conn)
                return
            if not self.edge:
                self.poller.change(fd, True, False)
                return
            # Edge-triggered: bytes that arrived during the write cause no further edge.
            self.read(fd, conn)
            if fd not in self.conns or not (conn["out"] or conn["eof"]):
                return

    def drop(self, fd, conn):
        self.poller.remove(fd)
        del self.conns[fd]
        conn["sock"].close()


class Select:
    def __init__(self):
        self.readers, self.writers = set(), set()

    def add(self, fd, read, write):
        self.change(fd, read, write)

    def change(self, fd, read, write):
        (self.readers.add if read else self.readers.discard)(fd)
        (self.writers.add if write else self.writers.discard)(fd)

    def remove(self, fd):
        self.readers.discard(fd)
        self.writers.discard(fd)

    def wait(self):
        readable, writable, _ = select.select(self.readers, self.writers, [])
        return [(fd, fd in readable, fd in writable) for fd in {*readable, *writable}]


class Poll:
    def __init__(self):
        self.poll = select.poll()

    def add(self, fd, read, write):
        self.poll.register(fd, (read and select.POLLIN) | (write and select.POLLOUT))

    def change(self, fd, read, write):
        self.poll.modify(fd, (read and select.POLLIN) | (write and select.POLLOUT))

    def remove(self, fd):
        self.poll.unregister(fd)

    def wait(self):
        bad = select.POLLHUP | select.POLLERR
        return [(fd, bool(e & (select.POLLIN | bad)), bool(e & select.POLLOUT)) for fd, e in self.poll.poll()]


class Epoll:
    def __init__(self, edge=False):
        self.epoll = select.epoll()
        self.edge = select.EPOLLET if edge else 0

    def add(self, fd, read, write):
        edge = self.edge if write else 0
        self.epoll.register(fd, (read and select.EPOLLIN) | (write and select.EPOLLOUT) | edge)

    def change(self, fd, read, write):
        self.epoll.modify(fd, (read and select.EPOLLIN) | (write and select.EPOLLOUT))

    def remove(self, fd):
        self.epoll.unregister(fd)

    def wait(self):
        bad = select.EPOLLHUP | select.EPOLLERR
        return [(fd, bool(e & (select.EPOLLIN | bad)), bool(e & select.EPOLLOUT)) for fd, e in self.epoll.poll()]


def run_asyncio(sock):
    async def serve(reader, writer):
        try:
            while data := await reader.read(CHUNK):
                writer.write(data)
                await writer.drain()
        except (ConnectionResetError, BrokenPipeError):
            pass
        finally:
            writer.close()

    async def main():
        server = await asyncio.start_server(serve, sock=sock)
        async with server:
            await server.serve_forever()

    asyncio.run(main())


def main():
    kind, port = sys.argv[1], int(sys.argv[2])
    host = sys.argv[3] if len(sys.argv) > 3 else "127.0.0.1"
    sock = listener(host, port)
    print("listening", flush=True)
    {
        "threaded": threaded,
        "fork": fork,
        "select": lambda s: Loop(s, Select()).run(),
        "poll": lambda s: Loop(s, Poll()).run(),
        "epoll": lambda s: Loop(s, Epoll()).run(),
        "epoll-edge": lambda s: Loop(s, Epoll(True), True).run(),
        "asyncio": run_asyncio,
    }[kind](sock)


main()
