"""Puts load on redis and checks it: each value that is read must be the one that was written.

off_load.py PORT CONNECTIONS: writes and reads until SIGTERM, then prints the number of rounds. The
exit status is 1 if anything was wrong. All connections are written to at once, so that bytes are
in flight in both directions.
"""

import os
import random
import signal
import socket
import sys
import threading

sys.path.append(os.path.join(os.path.dirname(__file__), "../../../../../tests/apps"))
from streams import exactly

port, connections = int(sys.argv[1]), int(sys.argv[2])
ends = threading.Event()
signal.signal(signal.SIGTERM, lambda *_: ends.set())
done, wrong = [0] * connections, []


def command(*words):
    return b"*%d\r\n" % len(words) + b"".join(b"$%d\r\n%s\r\n" % (len(w), w) for w in words)


def load(number):
    rng = random.Random(number)
    s = socket.create_connection(("127.0.0.1", port))
    s.settimeout(20)
    key = b"key%d" % number
    try:
        while not ends.is_set():
            values = [rng.randbytes(rng.choice((1, 10, 1000, 30000))) for _ in range(rng.choice((1, 1, 1, 5)))]
            s.sendall(b"".join(command(b"SET", key, v) + command(b"GET", key) for v in values))
            for v in values:
                want = b"+OK\r\n$%d\r\n%s\r\n" % (len(v), v)
                if exactly(s, len(want)) != want:
                    raise ValueError("another value")
            done[number] += 1
    except Exception as e:  # noqa: BLE001
        wrong.append(f"connection {number}: {e!r}")


threads = [threading.Thread(target=load, args=(n,)) for n in range(connections)]
for t in threads:
    t.start()
print("started", flush=True)
while not ends.wait(0.05) and not wrong:
    pass
ends.set()
for t in threads:
    t.join()
print(f"{sum(done)} rounds, {len(wrong)} wrong", *wrong, sep="\n", flush=True)
sys.exit(1 if wrong or not all(done) else 0)
