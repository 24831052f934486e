"""Long-lived connections that begin in the kernel, because their client is bound in a way that
only the kernel supports. With the library on both sides they move to shared memory after some
calls. Prints what both sides see, which must be the same on stock sockets."""

import asyncio
import hashlib
import os
import random
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
import time

ROUNDS = 300


def echo(c):
    while True:
        b = c.recv(65536)
        if not b:
            return
        c.sendall(b)


def blocking(s):
    c, _ = s.accept()
    echo(c)
    c.sendall(b"bye")
    c.close()


def threads(s):
    """One thread receives, and another one is idle."""
    c, _ = s.accept()
    idle = threading.Thread(target=lambda: time.sleep(0.5))
    t = threading.Thread(target=echo, args=(c,))
    idle.start(), t.start(), t.join(), idle.join()
    c.sendall(b"bye")
    c.close()


def waiting(make):
    def serve(s):
        c, _ = s.accept()
        c.setblocking(False)
        wait = make(c)
        out = b""
        while True:
            wait()
            try:
                b = c.recv(65536)
            except BlockingIOError:
                continue
            if not b:
                break
            out = b
            while out:
                try:
                    out = out[c.send(out):]
                except BlockingIOError:
                    select.select([], [c], [], 5)
        c.setblocking(True)
        c.sendall(b"bye")
        c.close()

    return serve


def poller(c):
    p = select.poll()
    p.register(c, select.POLLIN)
    return lambda: p.poll(20000)


def selecter(c):
    return lambda: select.select([c], [], [], 20)


def epoller(flags):
    def make(c):
        e = select.epoll()
        e.register(c, select.EPOLLIN | flags)

        def wait():
            got = e.poll(20)
            if flags & select.EPOLLONESHOT:
                e.modify(c, select.EPOLLIN | flags)
            return got

        return wait

    return make


def nested(c):
    inner, outer = select.epoll(), select.epoll()
    inner.register(c, select.EPOLLIN)
    outer.register(inner, select.EPOLLIN)
    return lambda: (outer.poll(20), inner.poll(0))


def loop(s):
    async def serve(r, w):
        while True:
            b = await r.read(65536)
            if not b:
                break
            w.write(b)
            await w.drain()
        w.write(b"bye")
        await w.drain()
        w.close()
        done.set()

    async def main():
        global done
        done = asyncio.Event()
        server = await asyncio.start_server(serve, sock=s)
        await done.wait()
        server.close()

    asyncio.run(main())


def connect(port, family=socket.AF_INET):
    c = socket.socket(family)
    c.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    c.bind(("127.0.0.1" if family == socket.AF_INET else "::1", 0))
    c.connect(("127.0.0.1" if family == socket.AF_INET else "::1", port))
    return c


def exchange(c, rounds=ROUNDS):
    h, r = hashlib.sha256(), random.Random(7)
    for i in range(rounds):
        m = r.randbytes(1 + r.randrange(5000))
        c.sendall(m)
        got = b""
        while len(got) < len(m):
            b = c.recv(65536)
            assert b, (i, len(got))
            got += b
        assert got == m, i
        h.update(got)
    return h.hexdigest()[:16]


def session(c):
    """A long exchange, a half-close, the end."""
    names = c.getsockname(), c.getpeername()
    said = exchange(c)
    assert names == (c.getsockname(), c.getpeername())
    c.shutdown(socket.SHUT_WR)
    rest = b""
    while b := c.recv(100):
        rest += b
    c.close()
    return said, rest


def with_server(serve, client, family=socket.AF_INET):
    """Runs `serve` in a process of its own."""
    r, w = os.pipe()
    pid = os.fork()
    if pid == 0:
        s = socket.socket(family)
        s.bind(("127.0.0.1" if family == socket.AF_INET else "::1", 0))
        s.listen(8)
        os.write(w, struct.pack("H", s.getsockname()[1]))
        code = 1
        try:
            serve(s)
            code = 0
        finally:
            os._exit(code)
    (port,) = struct.unpack("H", os.read(r, 2))
    os.close(r), os.close(w)
    try:
        said = client(port, pid)
    finally:
        status = os.waitpid(pid, 0)[1]
    return said, status


def case_servers():
    for name, serve in [
        ("blocking", blocking),
        ("threads", threads),
        ("poll", waiting(poller)),
        ("select", waiting(selecter)),
        ("epoll", waiting(epoller(0))),
        ("epoll, edges", waiting(epoller(select.EPOLLET))),
        ("epoll, one shot", waiting(epoller(select.EPOLLONESHOT))),
        ("epoll, nested", waiting(nested)),
        ("asyncio", loop),
    ]:
        for family in (socket.AF_INET, socket.AF_INET6):
            print(name, family.name, *with_server(serve, lambda port, _: session(connect(port, family)), family))


def case_several_at_once():
    def serve(s):
        ts = [threading.Thread(target=echo, args=(s.accept()[0],)) for _ in range(6)]
        [t.start() for t in ts], [t.join() for t in ts]

    def client(port, _):
        cs, said = [connect(port) for _ in range(6)], [None] * 6

        def one(i):
            said[i] = exchange(cs[i])
            cs[i].close()

        ts = [threading.Thread(target=one, args=(i,)) for i in range(6)]
        [t.start() for t in ts], [t.join() for t in ts]
        return said

    print(*with_server(serve, client))


def case_one_way():
    def serve(s):
        c, _ = s.accept()
        for i in range(ROUNDS):
            c.sendall(b"%06d" % i)
            time.sleep(0.001)
        c.close()

    def client(port, _):
        c, h, n = connect(port), hashlib.sha256(), 0
        while b := c.recv(4096):
            h.update(b)
            n += len(b)
        return n, h.hexdigest()[:16]

    print(*with_server(serve, client))


def case_non_blocking_client():
    def client(port, _):
        c = connect(port)
        c.setblocking(False)
        e = select.epoll()
        e.register(c, select.EPOLLIN)
        for i in range(ROUNDS):
            m = b"%d" % i * (i % 50 + 1)
            c.sendall(m)
            got = b""
            while len(got) < len(m):
                assert e.poll(20)
                got += c.recv(65536)
            assert got == m
        try:
            c.recv(1)
        except BlockingIOError as x:
            said = x.errno
        c.close()
        return said

    print(*with_server(waiting(epoller(0)), client))


def case_ends():
    def closing(how):
        def client(port, pid):
            c = connect(port)
            said = [exchange(c)]
            c.sendall(how)
            try:
                said.append(c.recv(100))
                said.append(c.recv(100))
            except OSError as e:
                said.append(e.errno)
            return said

        def serve(s):
            c, _ = s.accept()
            for _ in iter(int, 1):
                b = c.recv(65536)
                if b == b"end":
                    c.close()
                elif b == b"linger":
                    c.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                    c.close()
                elif b == b"kill":
                    os.kill(os.getpid(), signal.SIGKILL)
                elif b == b"unread":
                    c.close()
                else:
                    c.sendall(b)
                    continue
                return

        return with_server(serve, client)

    for how in (b"end", b"linger", b"kill"):
        print(how, *closing(how))


def case_time_limit():
    def client(port, _):
        c = connect(port)
        said = [exchange(c)]
        c.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", 0, 100000))
        t = time.monotonic()
        try:
            c.recv(1)
        except BlockingIOError as e:
            said.append(e.errno)
        said.append(0.05 < time.monotonic() - t)
        c.close()
        return said

    print(*with_server(blocking_quietly, client))


def blocking_quietly(s):
    c, _ = s.accept()
    echo(c)


def case_signal_in_a_receive():
    def serve(s):
        c, _ = s.accept()
        hits = []

        class Stop(Exception):
            pass

        def handler(*_):
            hits.append(1)
            raise Stop

        signal.signal(signal.SIGUSR1, handler)
        signal.siginterrupt(signal.SIGUSR1, True)
        while True:
            try:
                b = c.recv(65536)
            except Stop:
                c.sendall(b"%d" % len(hits))
                continue
            if not b:
                return
            c.sendall(b)

    def client(port, pid):
        c = connect(port)
        said = []
        for rounds in (20, ROUNDS):
            said.append(exchange(c, rounds))
            time.sleep(0.05)
            os.kill(pid, signal.SIGUSR1)
            said.append(c.recv(10))
        c.close()
        return said

    print(*with_server(serve, client))


def case_forked_afterwards():
    def serve(s):
        c, _ = s.accept()
        for _ in range(100):
            c.sendall(c.recv(65536))
        if os.fork() == 0:
            c.close()
            os._exit(0)
        os.wait()
        pid = os.fork()
        if pid == 0:
            echo(c)
            os._exit(0)
        c.close()
        os.waitpid(pid, 0)

    def client(port, _):
        c = connect(port)
        for i in range(100):
            c.sendall(b"x")
            assert c.recv(1) == b"x"
        said = exchange(c)
        c.close()
        return said

    print(*with_server(serve, client))


def case_forked_before():
    """Two processes use the connection, so it stays in the kernel."""

    def serve(s):
        c, _ = s.accept()
        pid = os.fork()
        if pid == 0:
            echo(c)
            os._exit(0)
        c.close()
        os.waitpid(pid, 0)

    def client(port, _):
        c = connect(port)
        said = exchange(c)
        c.close()
        return said

    print(*with_server(serve, client))


def case_given_to_another_program():
    def serve(s):
        c, _ = s.accept()
        for _ in range(150):
            c.sendall(c.recv(65536))
        env = {k: v for k, v in os.environ.items() if not k.startswith(("LD_PRELOAD", "FASTSOCKET"))}
        subprocess.run(["/bin/cat"], stdin=c, stdout=c, env=env, check=True)

    def client(port, _):
        c = connect(port)
        for i in range(150):
            c.sendall(b"%d" % i)
            assert c.recv(100) == b"%d" % i
        said = exchange(c)
        c.shutdown(socket.SHUT_WR)
        assert c.recv(1) == b""
        c.close()
        return said

    print(*with_server(serve, client))


def case_large():
    def client(port, _):
        c = connect(port)
        said = [exchange(c)]
        m = random.Random(3).randbytes(6_000_000)
        t = threading.Thread(target=c.sendall, args=(m,))
        t.start()
        got = bytearray()
        while len(got) < len(m):
            got += c.recv(1 << 20)
        t.join()
        said.append(got == m)
        c.close()
        return said

    print(*with_server(blocking_quietly, client))


if __name__ == "__main__":
    signal.alarm(110)
    wanted = sys.argv[1:]
    for name, case in list(globals().items()):
        if name.startswith("case_") and (not wanted or name[5:] in wanted):
            print("==", name[5:], flush=True)
            case()
    print("ok")
