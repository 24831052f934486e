"""Socket options, and the attributes of a descriptor."""
import array
import fcntl
import os
import socket
import struct
import termios
import time

from .kit import pair


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
        # If both sides share a process, the other thread takes numbers meanwhile.
        if t.together:
            return
        # Descriptors inherited at the start may leave gaps.
        free, second = (os.open("/dev/null", os.O_RDONLY) for _ in range(2))
        os.close(free)
        os.close(second)
        a = socket.socket()
        t.log("lowest", a.fileno() == free)
        b = os.dup(s.fileno())
        t.log("next", b == second)
        a.close()
        c = socket.socket()
        t.log("again", c.fileno() == free)

    return both, both


@pair()
def what_is_left_beside_a_message():
    inq = (socket.IPPROTO_TCP, 36)

    def server(t, s):
        s.sendall(b"x" * 100)
        t.step()
        t.step()
        s.sendall(b"y" * 5)
        s.close()
        t.step()

    def client(t, s):
        t.step()
        for value in (2, -1, 1):
            t.call(f"set {value}", s.setsockopt, *inq, value)
        t.log("get", s.getsockopt(*inq))
        # If a control message does not fit, Python reports only that it does not.
        for room in (0, 8, 16, 18, 20, 24, 200):
            for flags in (socket.MSG_PEEK, 0):
                t.call(f"room {room}", s.recvmsg, 7, room, flags)
        t.call("all", s.recvmsg, 100, 64)
        t.call("none", s.recvmsg, 100, 64, socket.MSG_DONTWAIT)
        t.step()
        t.step()
        time.sleep(0.05)
        t.call("rest", s.recvmsg, 2, 64)
        t.call("rest", s.recvmsg, 100, 64)
        t.call("end", s.recvmsg, 100, 64)
        s.setsockopt(*inq, 0)
        t.call("off", s.recvmsg, 100, 64)

    return server, client
