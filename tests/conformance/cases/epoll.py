"""Readiness by `epoll`."""
import contextlib
import ctypes
import os
import select
import socket
import threading
import time

from .kit import epoll_events, events, pair


@pair()
def epoll_array_is_left_alone():
    """A wait writes only the events that it reports, and leaves the rest of the caller's array alone."""

    class Event(ctypes.Structure):
        _pack_ = 1
        _fields_ = [("events", ctypes.c_uint32), ("data", ctypes.c_uint64)]

    def server(t, s):
        t.step()
        time.sleep(0.1)
        s.send(b"x")
        t.step()
        s.send(b"yz")
        t.step()

    def client(t, s):
        # With fewer bytes than SO_RCVLOWAT no event is reported, whichever threads the bytes wake.
        s.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, 3)
        libc = ctypes.CDLL(None, use_errno=True)
        ep = libc.epoll_create1(0)
        t.log("add", libc.epoll_ctl(ep, 1, s.fileno(), ctypes.byref(Event(select.EPOLLIN, 7))))
        for size in (1, 8, 1000):
            array = (Event * size)(*[(0xAAAA, 0x1234)] * size)
            if size == 1:
                t.step()
            n = libc.epoll_wait(ep, array, size, 300)
            t.log(size, n, "touched", any((e.events, e.data) != (0xAAAA, 0x1234) for e in array[:128]))
        t.step()
        array = (Event * 8)(*[(0xAAAA, 0x1234)] * 8)
        n = libc.epoll_wait(ep, array, 8, 5000)
        t.log(n, array[0].data, "touched", any((e.events, e.data) != (0xAAAA, 0x1234) for e in array[1:]))
        os.close(ep)
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


@pair(raw=True)
def epoll_oneshot_listener_with_two_clients():
    """One client may come over shared memory and the other one over kernel TCP."""

    def server(t, listener):
        own = socket.create_connection(listener.getsockname())
        late = select.epoll()
        late.register(listener, select.EPOLLIN | select.EPOLLONESHOT)
        t.step()
        t.step()
        t.log("both wait", epoll_events(late), epoll_events(late))
        late.modify(listener, select.EPOLLIN | select.EPOLLONESHOT)
        t.log("armed", epoll_events(late, 5), epoll_events(late))
        a, b = listener.accept()[0], listener.accept()[0]
        late.modify(listener, select.EPOLLIN | select.EPOLLONESHOT | select.EPOLLET)
        t.log("nobody", epoll_events(late))
        t.step()
        t.step()
        t.log("by the client", epoll_events(late, 5))
        own.close()
        own = socket.create_connection(listener.getsockname())
        t.log("not armed", epoll_events(late, 0.05))
        late.modify(listener, select.EPOLLIN | select.EPOLLONESHOT)
        t.log("armed", epoll_events(late, 5), epoll_events(late, 0.05))
        for s in (a, b, own, listener.accept()[0], listener.accept()[0]):
            s.close()
        t.step()

    def client(t, address):
        t.step()
        first = socket.create_connection(address)
        t.step()
        t.step()
        second = socket.create_connection(address)
        t.step()
        t.step()
        first.close()
        second.close()

    return server, client


@pair(raw=True)
def epoll_tells_an_outer_instance_of_what_is_gone():
    """An arrival is an edge for an outer instance. This holds even if the connection is accepted before the outer
    instance looks, and something else is ready."""

    def server(t, listener):
        r, w = os.pipe()
        os.write(w, b"x")
        for how in (select.EPOLLIN, select.EPOLLIN | select.EPOLLET, select.EPOLLIN | select.EPOLLONESHOT):
            inner, outer = select.epoll(), select.epoll()
            inner.register(r, select.EPOLLIN)
            inner.register(listener, how)
            outer.register(inner.fileno(), select.EPOLLIN | select.EPOLLET)
            t.log("at first", epoll_events(outer), epoll_events(outer))
            t.step()
            t.step()
            conn, _ = listener.accept()
            t.log("accepted", epoll_events(outer), epoll_events(outer))
            conn.close()
            t.step()
            t.step()
            t.log("reported inside", epoll_events(inner))
            t.log("and outside", epoll_events(outer), epoll_events(outer))
            listener.accept()[0].close()
            t.log("nothing new", epoll_events(outer))

    def client(t, address):
        for _ in range(3):
            t.step()
            first = socket.create_connection(address)
            t.step()
            t.step()
            second = socket.create_connection(address)
            t.step()
            first.close()
            second.close()

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


def by_message(e):
    """The same instance under a descriptor that a message carried."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        socket.send_fds(ours, [b"x"], [e.fileno()])
        return select.epoll.fromfd(socket.recv_fds(theirs, 1, 1)[1][0])


@pair()
def epoll_instance_that_came_by_message():
    def server(t, s):
        t.step()
        s.send(b"12345")
        t.step()
        s.close()
        t.step()

    def client(t, s):
        with select.epoll() as made:
            e = by_message(made)
        e.register(s, select.EPOLLIN | select.EPOLLRDHUP)
        t.log("idle", epoll_events(e))
        t.step()
        t.log("data", epoll_events(e, 5))
        t.log("read", len(s.recv(10)))
        t.log("empty", epoll_events(e))
        t.step()
        t.step()
        t.log("closed", epoll_events(e, 5))

    return server, client


@pair()
def epoll_instance_inside_one_that_came_by_message():
    def server(t, s):
        t.step()
        s.send(b"12345")
        t.step()

    def client(t, s):
        with select.epoll() as made:
            outer = by_message(made)
        inner = select.epoll()
        outer.register(inner, select.EPOLLIN)
        inner.register(s, select.EPOLLIN)
        t.log("idle", epoll_events(outer))
        t.step()
        t.log("data", epoll_events(outer, 5), epoll_events(inner))
        t.log("read", len(s.recv(10)))
        t.log("empty", epoll_events(outer))
        t.step()

    return server, client
