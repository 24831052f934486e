#!/usr/bin/python3
"""A program limits its address space and connects to itself. There is room for the client's
mapping of a channel, but little or none for the listener's. Prints "ok"."""
import encodings.idna  # noqa: F401 (imported while there is room for it)
import os
import resource
import socket


def size():
    with open("/proc/self/statm") as f:
        return int(f.read().split()[0]) * resource.getpagesize()


def talk(room):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        limit = size() + room
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
        listener.settimeout(20)
        client = socket.create_connection(listener.getsockname(), timeout=20)
        client.sendall(b"there")
        server = listener.accept()[0]
        assert server.recv(100) == b"there"
        server.sendall(b"back")
        assert client.recv(100) == b"back"
        client.close()
        assert server.recv(100) == b""


for room in range(32 << 20, 112 << 20, 2 << 20):
    child = os.fork()
    if child == 0:
        try:
            talk(room)
        except MemoryError:
            pass
        except Exception as e:  # noqa: BLE001
            print(f"with room for {room >> 10} KiB: {e!r}", flush=True)
            os._exit(1)
        os._exit(0)
    if os.waitpid(child, 0)[1] != 0:
        raise SystemExit(1)
print("ok")
