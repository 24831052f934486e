"""Client and server on different hosts:

    hosts.py serve PORT HOST | ask PORT HOST WHAT

Each connection begins with 40 short requests, so that it can leave kernel TCP. The client prints what it has seen,
which does not depend on the path. WHAT is

    half     send 3 MB, shut down, read their checksum to the end
    large    send 20 MB in both directions at once
    slow     send while the server sends 8 MB that the client reads slowly
    reset    the server resets the connection while it has more to read
    closed   the server closes; the client goes on sending
    abort    the client closes with a reset; the server reports it on the next connection
"""
import hashlib
import socket
import struct
import sys
import threading
import time

from streams import exactly

SHORT = 40
last = "nothing"
known = threading.Event()


def bytes_of(n, seed):
    block = bytes((i * 7 + seed) & 255 for i in range(65521))
    return (block * (n // len(block) + 1))[:n]


def sum_to_end(sock, n=None, pause=0.0):
    total, sha = 0, hashlib.sha256()
    while n is None or total < n:
        part = sock.recv(65536 if n is None else min(65536, n - total))
        if not part:
            break
        total += len(part)
        sha.update(part)
        if pause:
            time.sleep(pause)
    return f"{total} {sha.hexdigest()[:16]}"


def reset_on_close(sock):
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


def serve(sock):
    global last
    for _ in range(SHORT):
        sock.sendall(exactly(sock, 8))
    what = exactly(sock, 8).strip().decode()
    if what == "half":
        sock.sendall(sum_to_end(sock).encode())
    elif what in ("large", "slow"):
        n = 20_000_000 if what == "large" else 8_000_000
        sender = threading.Thread(target=lambda: sock.sendall(bytes_of(n, 5)))
        sender.start()
        said = sum_to_end(sock, n)
        sender.join()
        sock.sendall(said.encode())
    elif what == "reset":
        exactly(sock, 100)
        time.sleep(0.3)
        reset_on_close(sock)
    elif what == "abort":
        known.clear()
        sock.sendall(b"go")
        try:
            last = "end" if not sock.recv(1) else "data"
        except OSError as e:
            last = e.strerror
        known.set()
    elif what == "last":
        known.wait(60)
        sock.sendall(last.encode())
    sock.close()


def open_one(where, what):
    sock = socket.create_connection(where)
    for n in range(SHORT):
        data = n.to_bytes(8, "big")
        sock.sendall(data)
        assert exactly(sock, 8) == data, "answer"
    sock.sendall(what.encode().ljust(8))
    return sock


def error_of(call):
    try:
        return call()
    except OSError as e:
        return e.strerror


def ask(where, what):
    sock = open_one(where, what)
    if what == "half":
        sock.sendall(bytes_of(3_000_000, 1))
        sock.shutdown(socket.SHUT_WR)
        print(sum_to_end(sock))
    elif what in ("large", "slow"):
        n = 20_000_000 if what == "large" else 8_000_000
        sender = threading.Thread(target=lambda: sock.sendall(bytes_of(n, 3)))
        sender.start()
        print(sum_to_end(sock, n, 0.002 if what == "slow" else 0))
        sender.join()
        print(sum_to_end(sock))
    elif what == "reset":
        sock.sendall(bytes(50_000))
        print(error_of(lambda: sock.recv(1)))
        print(sock.recv(1))
    elif what == "closed":
        print(sock.recv(1))
        print(error_of(lambda: [(sock.sendall(b"x"), time.sleep(0.05)) for _ in range(40)] and "nothing"))
    elif what == "abort":
        assert exactly(sock, 2) == b"go"
        reset_on_close(sock)
        sock.close()
        print(sum_to_end(open_one(where, "last")), flush=True)


what, port, host = sys.argv[1], int(sys.argv[2]), sys.argv[3]
if what == "serve":
    listener = socket.create_server((host, port), backlog=128)
    while True:
        conn, _ = listener.accept()
        threading.Thread(target=serve, args=(conn,), daemon=True).start()
ask((host, port), sys.argv[4])
print("ok", flush=True)
