#!/usr/bin/python3
"""memcached_client.py PORT CONNECTIONS: sets and gets over many connections
from several threads, values compared. Prints "ok OPERATIONS"."""
import random
import socket
import sys
import threading

port, connections = int(sys.argv[1]), int(sys.argv[2])
errors, operations = [], [0]
lock = threading.Lock()


def work(worker):
    rng = random.Random(worker)
    links = []
    for _ in range(connections // 4):
        sock = socket.create_connection(("127.0.0.1", port), timeout=20)
        links.append((sock, sock.makefile("rb")))
    done = 0
    for round_ in range(40):
        for number, (sock, stream) in enumerate(links):
            key = b"key-%d-%d" % (worker, number)
            value = rng.randbytes(rng.choice((1, 100, 1000, 30000)))
            sock.sendall(b"set %s 0 0 %d\r\n%s\r\n" % (key, len(value), value))
            if stream.readline() != b"STORED\r\n":
                raise AssertionError("not stored")
            sock.sendall(b"get %s\r\n" % key)
            head = stream.readline()
            if head != b"VALUE %s 0 %d\r\n" % (key, len(value)):
                raise AssertionError(f"head {head!r}")
            if stream.read(len(value) + 2) != value + b"\r\n" or stream.readline() != b"END\r\n":
                raise AssertionError("value differs")
            done += 2
    for sock, _ in links:
        sock.close()
    with lock:
        operations[0] += done


def guarded(worker):
    try:
        work(worker)
    except Exception as error:
        errors.append(f"worker {worker}: {error!r}")


threads = [threading.Thread(target=guarded, args=(w,)) for w in range(4)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join(60)
if errors or any(t.is_alive() for t in threads):
    raise SystemExit("; ".join(errors) or "hang")
print("ok", operations[0])
