"""Addresses and names, connecting, sockets that are not connected."""
import json
import os
import select
import socket

from .kit import epoll_events, events, pair


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


def _to_the_unspecified(targets):
    def server(t, listener):
        for _ in targets:
            conn, address = listener.accept()
            t.log("from", address[0], conn.getsockname()[0])
            conn.send(b"ok")

    def client(t, address):
        for family, target in targets:
            s = socket.socket(family)
            s.connect((target, address[1]))
            t.log("to", s.getpeername()[0], s.getsockname()[0], s.recv(10))
            s.close()

    return server, client


@pair(bind="0.0.0.0", raw=True)
def to_the_unspecified_address():
    return _to_the_unspecified([(socket.AF_INET, "0.0.0.0"), (socket.AF_INET6, "::ffff:0.0.0.0")])


@pair(family=socket.AF_INET6, bind="::", raw=True)
def to_the_unspecified_address_of_six():
    return _to_the_unspecified([(socket.AF_INET6, "::"), (socket.AF_INET, "0.0.0.0")])


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
