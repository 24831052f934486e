"""Readiness by `epoll`."""
import contextlib
import os
import select
import threading
import time

from .kit import epoll_events, events, pair


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
