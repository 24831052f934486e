#!/usr/bin/python3
"""Addresses that live connections have: what the kernel says to `bind` and `connect`."""
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
    """Also by another process."""
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
print("end")
