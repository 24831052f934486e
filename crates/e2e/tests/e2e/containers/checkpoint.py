"""A connection that is taken down in one container and comes up in another, as CRIU does it
(TCP_REPAIR):

    checkpoint.py client PORT HOST BYTES | serve PORT HOST STATE | dump PID FD STATE | restore STATE

The client makes requests until the connection may have moved to shared memory. Then it sends
BYTES, which the server sends back. It prints "over", and reads nothing until SIGUSR1. Then it
compares all bytes, makes more requests, and prints "ok".

The server sends back what it receives. On SIGUSR1 it writes the bytes that it has received but not
sent to the file STATE, and does nothing any more. `dump` adds the kernel's part from outside, and
ends the server. `restore` continues from that state. From before `dump` until `restore` prints
"restored", packets of the connection must be dropped.
"""
import fcntl
import json
import os
import signal
import socket
import struct
import sys
import threading

sys.path.append(os.path.join(os.path.dirname(__file__), "../../../../../tests/apps"))
from streams import exactly

PIECE = 65536
REPAIR, QUEUE, QUEUE_SEQ, REPAIR_OPTIONS, TIMESTAMP, WINDOW = 19, 20, 21, 22, 24, 29
RECEIVED, SENT = 1, 2
SIOCINQ, SIOCOUTQ, SIOCOUTQNSD = 0x541B, 0x5411, 0x894B
PIDFD_GETFD = 438
PATTERN = bytes(n * n % 251 for n in range(1 << 16)) * 2


def pattern(begin, length):
    """`length` bytes, at most 64 KiB, of an endless pattern."""
    at = begin % (1 << 16)
    return PATTERN[at:at + length]


def get(sock, name):
    return sock.getsockopt(socket.IPPROTO_TCP, name)


def put(sock, name, value):
    sock.setsockopt(socket.IPPROTO_TCP, name, value)


def client(port, host, length):
    go = threading.Event()
    signal.signal(signal.SIGUSR1, lambda *_: go.set())
    sock = socket.create_connection((host, port))

    def ask():
        for _ in range(100):
            sock.sendall(b"ask")
            assert exactly(sock, 3) == b"ask"

    def send():
        for begin in range(0, length, PIECE):
            sock.sendall(pattern(begin, min(PIECE, length - begin)))

    ask()
    sender = threading.Thread(target=send, daemon=True)
    sender.start()
    print("over", flush=True)
    go.wait()
    for begin in range(0, length, PIECE):
        piece = pattern(begin, min(PIECE, length - begin))
        assert exactly(sock, len(piece)) == piece, f"bytes from {begin} on"
    sender.join()
    ask()
    print("ok", flush=True)


def echo(sock, pending, stop):
    """Echoes until `stop` returns true. Returns the bytes that were received but not sent."""
    sock.settimeout(0.05)
    while not stop():
        try:
            if not pending:
                pending = sock.recv(PIECE)
                if not pending:
                    return b""
            pending = pending[sock.send(pending):]
        except TimeoutError:
            pass
    return pending


def serve(port, host, state):
    stopped = []
    signal.signal(signal.SIGUSR1, lambda *_: stopped.append(True))
    listener = socket.create_server((host, port))
    sock, _ = listener.accept()
    print("fd", sock.fileno(), flush=True)
    pending = echo(sock, b"", lambda: stopped)
    with open(state, "w") as file:
        json.dump({"pending": pending.hex()}, file)
    print("stopped", flush=True)
    while True:
        signal.pause()


def waiting(sock, what):
    return struct.unpack("i", fcntl.ioctl(sock, what, bytes(4)))[0]


def queue(sock, which, length):
    """Sequence number of the end of a queue, and the bytes in the queue."""
    put(sock, QUEUE, which)
    end = get(sock, QUEUE_SEQ) & 0xFFFFFFFF
    data = b""
    if length:
        data = sock.recv(length, socket.MSG_PEEK | socket.MSG_DONTWAIT)
    assert len(data) == length, (len(data), length)
    return end, data.hex()


def dump(pid, fd, state):
    import ctypes
    number = ctypes.CDLL(None).syscall(PIDFD_GETFD, os.pidfd_open(pid), fd, 0)
    sock = socket.socket(fileno=number)
    put(sock, REPAIR, 1)
    info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 8)
    with open(state) as file:
        saved = json.load(file)
    saved |= {
        "names": [sock.getsockname(), sock.getpeername()],
        "mss": get(sock, socket.TCP_MAXSEG),
        "options": info[5],
        "scale": info[6],
        "timestamp": get(sock, TIMESTAMP),
        "window": sock.getsockopt(socket.IPPROTO_TCP, WINDOW, 20).hex(),
        "unsent": waiting(sock, SIOCOUTQNSD),
        "sent": queue(sock, SENT, waiting(sock, SIOCOUTQ)),
        "received": queue(sock, RECEIVED, waiting(sock, SIOCINQ)),
    }
    with open(state, "w") as file:
        json.dump(saved, file)
    os.kill(pid, signal.SIGKILL)
    # This closes the last descriptor. In repair mode the kernel sends nothing then.
    sock.close()
    sizes = {name: len(saved[name][1]) // 2 for name in ("sent", "received")}
    print("dumped", sizes["received"], "received", sizes["sent"], "sent", saved["unsent"], "not yet", flush=True)


def give(sock, data):
    while data:
        data = data[sock.send(data[:PIECE]):]


def restore(state):
    with open(state) as file:
        saved = json.load(file)
    (sent_end, sent), (received_end, received) = saved["sent"], saved["received"]
    sent, received = bytes.fromhex(sent), bytes.fromhex(received)
    own, peer = map(tuple, saved["names"])
    sock = socket.socket()
    for name in (32, 33):  # SO_SNDBUFFORCE, SO_RCVBUFFORCE
        sock.setsockopt(socket.SOL_SOCKET, name, 16 << 20)
    put(sock, REPAIR, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    for which, end, data in ((SENT, sent_end, sent), (RECEIVED, received_end, received)):
        put(sock, QUEUE, which)
        sock.setsockopt(socket.IPPROTO_TCP, QUEUE_SEQ, struct.pack("I", (end - len(data)) & 0xFFFFFFFF))
    sock.bind(own)
    sock.connect(peer)
    scale = saved["scale"]
    options = [(2, saved["mss"])]
    if saved["options"] & 4:
        options.append((3, (scale & 15) | (scale >> 4) << 16))
    if saved["options"] & 2:
        options.append((4, 0))
    if saved["options"] & 1:
        options.append((8, 0))
    sock.setsockopt(socket.IPPROTO_TCP, REPAIR_OPTIONS, b"".join(struct.pack("II", *o) for o in options))
    sock.setsockopt(socket.IPPROTO_TCP, TIMESTAMP, struct.pack("I", saved["timestamp"] & 0xFFFFFFFF))
    put(sock, QUEUE, RECEIVED)
    give(sock, received)
    put(sock, QUEUE, SENT)
    unsent = saved["unsent"]
    give(sock, sent[:len(sent) - unsent])
    sock.setsockopt(socket.IPPROTO_TCP, WINDOW, bytes.fromhex(saved["window"]))
    put(sock, REPAIR, 0)
    give(sock, sent[len(sent) - unsent:])
    print("restored", flush=True)
    echo(sock, bytes.fromhex(saved["pending"]), lambda: False)


what, rest = sys.argv[1], sys.argv[2:]
if what == "client":
    client(int(rest[0]), rest[1], int(rest[2]))
elif what == "serve":
    serve(int(rest[0]), rest[1], rest[2])
elif what == "dump":
    dump(int(rest[0]), int(rest[1]), rest[2])
else:
    restore(rest[0])
