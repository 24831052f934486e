"""Listeners: accept, readiness, their queue, their port."""
import fcntl
import os
import select
import socket

from .kit import data, epoll_events, events, pair, read_all


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
