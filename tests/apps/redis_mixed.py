#!/usr/bin/python3
"""A pipeline of mixed redis commands over a raw socket, the same each time.

redis_mixed.py PORT [bgsave]: prints every reply's digest, so that two runs can
be compared. With "bgsave" the server forks a child in the middle.
"""
import hashlib
import random
import socket
import sys
import time

port = int(sys.argv[1])
sock = socket.create_connection(("127.0.0.1", port), timeout=20)
stream = sock.makefile("rb", buffering=1 << 16)


def encode(*parts):
    parts = [p if isinstance(p, bytes) else str(p).encode() for p in parts]
    return b"*%d\r\n" % len(parts) + b"".join(b"$%d\r\n%s\r\n" % (len(p), p) for p in parts)


def reply():
    line = stream.readline()
    if not line.endswith(b"\r\n"):
        raise SystemExit(f"connection ended: {line!r}")
    kind, rest = line[:1], line[1:-2]
    if kind in b"+-:":
        return line[:-2]
    if kind == b"$":
        size = int(rest)
        if size < 0:
            return None
        return stream.read(size + 2)[:-2]
    if kind == b"*":
        return [reply() for _ in range(int(rest))] if int(rest) >= 0 else None
    raise SystemExit(f"bad reply {line!r}")


def call(*parts):
    sock.sendall(encode(*parts))
    return reply()


rng = random.Random(7)
digest = hashlib.sha256()


def pipeline(commands):
    sock.sendall(b"".join(encode(*c) for c in commands))
    for command in commands:
        answer = repr(reply()).encode()
        digest.update(answer)
        print(command[0], hashlib.sha256(answer).hexdigest()[:16])


assert call("FLUSHALL") == b"+OK"
for round_ in range(20):
    commands = []
    for _ in range(100):
        key = f"k{rng.randrange(50)}"
        commands.append(
            rng.choice(
                (
                    ("SET", key, rng.randbytes(rng.choice((3, 100, 5000, 70000)))),
                    ("GET", key),
                    ("STRLEN", key),
                    ("APPEND", key, "x" * rng.randrange(100)),
                    ("DEL", key),
                    ("INCR", f"n{rng.randrange(5)}"),
                    ("RPUSH", f"l{rng.randrange(5)}", "a", "b", rng.randrange(1000)),
                    ("LRANGE", f"l{rng.randrange(5)}", 0, -1),
                    ("HSET", "h", f"f{rng.randrange(100)}", rng.randrange(1000)),
                    ("HMGET", "h", "f1", "f2", "f3"),
                    ("ZADD", "z", rng.randrange(1000), f"m{rng.randrange(100)}"),
                    ("ZRANGE", "z", 0, -1, "WITHSCORES"),
                    ("NOSUCHCOMMAND", key),
                    ("PING",),
                )
            )
        )
    pipeline(commands)

if len(sys.argv) > 2 and sys.argv[2] == "bgsave":
    last = call("LASTSAVE")
    time.sleep(1.1)  # LASTSAVE counts seconds
    assert call("BGSAVE").startswith(b"+Background saving started"), "BGSAVE"
    end = time.monotonic() + 20
    pings = 0
    while call("LASTSAVE") == last:
        assert call("PING") == b"+PONG"
        pings += 1
        if time.monotonic() > end:
            raise SystemExit("BGSAVE did not end")
        time.sleep(0.01)
    pipeline([("PING",), ("GET", "k1"), ("STRLEN", "k2")])
    # The child has exited. Its exit must not have closed the connection.
    print("saved", flush=True)

print("ok", digest.hexdigest())
