"""Blocking, time limits, signals, readiness by `poll` and `select`."""
import errno
import os
import select
import signal
import socket
import struct
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
