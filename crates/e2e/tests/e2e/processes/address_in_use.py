#!/usr/bin/python3
"""Prints what `bind` and `connect` return for addresses of live connections."""
import ctypes
import errno
import os
import socket

HERE = "127.0.0.1"


def tried(call, *args):
    try:
        call(*args)
        return "ok"
    except OSError as e:
        return errno.errorcode[e.errno]


def made(*options):
    s = socket.socket()
    for option in options:
        s.setsockopt(socket.SOL_SOCKET, option, 1)
    return s


def listening(address, *options):
    s = made(*options)
    s.bind((address, 0))
    s.listen()
    return s


def connected(listener):
    client = made()
    client.connect((HERE, listener.getsockname()[1]))
    return client, listener.accept()[0]


REUSE = {"none": (), "address": (socket.SO_REUSEADDR,), "port": (socket.SO_REUSEPORT,)}


def bound(to, options):
    """Tries to bind `to`, in this process and in another one."""
    print(" ", tried(made(*options).bind, to), end=" ", flush=True)
    pid = os.fork()
    if pid == 0:
        print(tried(made(*options).bind, to), flush=True)
        os._exit(0)
    os.waitpid(pid, 0)


for first, of_listener in REUSE.items():
    for address in (HERE, ""):
        for then, of_other in REUSE.items():
            listener = listening(address, *of_listener)
            port = listener.getsockname()[1]
            client, server = connected(listener)
            listener.close()
            print(f"a live server's port, {first}, then {then}, {address or 'any'}", flush=True)
            bound((HERE, port), of_other)
            bound(("", port), of_other)
            bound(("127.0.0.2", port), of_other)
            server.sendall(b"x")
            assert client.recv(1) == b"x"
            server.close()
            client.close()

listener = listening(HERE)
client, server = connected(listener)
print("a live client's port", flush=True)
bound(client.getsockname(), REUSE["none"])
bound(client.getsockname(), REUSE["address"])

for way in ("address", "port"):
    one, other = made(*REUSE[way]), made(*REUSE[way])
    one.bind((HERE, 0))
    print("one port for two,", way, tried(other.bind, one.getsockname()), end=": ")
    elsewhere = listening(HERE)
    print(tried(one.connect, listener.getsockname()), tried(other.connect, listener.getsockname()), end=" ")
    print(tried(other.connect, elsewhere.getsockname()), flush=True)

# Families and wildcards, of the socket that has the address and of the one that asks for it.
PEERS = {"v4": (socket.AF_INET, HERE), "v6": (socket.AF_INET6, "::1"), "mapped": (socket.AF_INET6, "::ffff:" + HERE)}
ASKERS = [
    (socket.AF_INET, "0.0.0.0", None),
    (socket.AF_INET, HERE, None),
    (socket.AF_INET6, "::", 0),
    (socket.AF_INET6, "::", 1),
    (socket.AF_INET6, "::ffff:0.0.0.0", 0),
    (socket.AF_INET6, "::ffff:" + HERE, 0),
    (socket.AF_INET6, "::1", 0),
]


def socket_of(family, options, v6only=None):
    s = socket.socket(family)
    if v6only is not None:
        s.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, v6only)
    for option in options:
        s.setsockopt(socket.SOL_SOCKET, option, 1)
    return s


def dual(*options):
    s = socket_of(socket.AF_INET6, options, 0)
    s.bind(("::", 0))
    s.listen()
    return s


def asked(port, options, to):
    """Tries each kind of socket: whether it gets the port, and whether it can listen, or connect
    to the same place."""
    for family, address, v6only in ASKERS:
        s = socket_of(family, options, v6only)
        outcome = tried(s.bind, (address, port))
        if outcome == "ok" and to:
            fits = family == to[0] or to[1].startswith("::ffff:")
            outcome += "," + (tried(s.connect, (to[1], to[2])) if fits and family == to[0] else "-")
        elif outcome == "ok":
            outcome += "," + tried(s.listen)
        print(" ", outcome, end="")
        s.close()
    print(flush=True)


for name, (family, address) in PEERS.items():
    for mine, first in REUSE.items():
        for late in (False, True):
            listener = dual(*(first if not late else ()))
            port = listener.getsockname()[1]
            client = socket_of(family, () if late else first, 0 if family == socket.AF_INET6 else None)
            client.connect((address, port))
            server = listener.accept()[0]
            if late:
                for end in (client, server):
                    for option in first:
                        end.setsockopt(socket.SOL_SOCKET, option, 1)
            own = client.getsockname()[1]
            for theirs, then in REUSE.items():
                print("#", name, "client:", mine, "late" if late else "", theirs, flush=True)
                asked(own, then, (family, address, port))
            listener.close()
            for theirs, then in REUSE.items():
                print("#", name, "server:", mine, "late" if late else "", theirs, flush=True)
                asked(port, then, None)
            client.close()
            server.close()

LIBC = ctypes.CDLL(None, use_errno=True)


def disconnected(s):
    """Disconnects by `connect` to AF_UNSPEC."""
    if LIBC.connect(s.fileno(), bytes(16), 16) != 0:
        return errno.errorcode[ctypes.get_errno()]
    address, port = s.getsockname()[:2]
    return f"{address} {port != 0}"


def disconnect(what, listener, make):
    for side in (0, 1):
        client = make()
        client.connect((HERE, listener.getsockname()[1]))
        ends = client, listener.accept()[0]
        s, other = ends[side], ends[1 - side]
        print("# disconnect", what, side, disconnected(s), tried(other.recv, 1), end=": ")
        print(tried(s.bind, ("", 0)), s.getsockname()[0], tried(s.listen), flush=True)
        for end in ends:
            end.close()


def bound_client(address):
    s = made()
    s.bind((address, 0))
    return s


disconnect("specific", listening(HERE), made)
disconnect("any", listening(""), made)
disconnect("reused", listening("", socket.SO_REUSEADDR), lambda: made(socket.SO_REUSEADDR))
disconnect("bound", listening(HERE), lambda: bound_client(HERE))
print("end")
