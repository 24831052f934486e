"""Client and server in different containers: containers.py serve PORT HOST | ask PORT HOST REQUESTS CONNECTIONS

Both compare every byte. The client keeps its connections and prints "ok". With "wait" as a fifth argument it then waits
for the end of the first one and prints how long that took and what it was; with "pass" it passes each through a Unix
socket while answers wait to be read, and goes on with what comes out.
"""
import os
import select
import socket
import sys
import threading
import time

from streams import exactly

SIZES = [1, 8, 100, 4096, 65536]


def payload(n):
    return bytes((n * 31 + i) & 255 for i in range(SIZES[n % len(SIZES)]))


def serve(sock):
    n = 0
    while True:
        try:
            head = exactly(sock, 4)
            want = payload(int.from_bytes(head, "big"))
            assert exactly(sock, len(want)) == want, "request"
            sock.sendall(head + want)
            n += 1
        except (EOFError, OSError):
            sock.close()
            return


def address(host, port):
    return (socket.AF_INET6 if ":" in host else socket.AF_INET), (host, port)


def main():
    what, port, host = sys.argv[1], int(sys.argv[2]), sys.argv[3]
    family, where = address(host, port)
    if what == "serve":
        listener = socket.create_server(where, family=family, backlog=128)
        while True:
            conn, _ = listener.accept()
            threading.Thread(target=serve, args=(conn,), daemon=True).start()
    requests, number = int(sys.argv[4]), int(sys.argv[5])
    conns = [socket.create_connection(where, timeout=None) for _ in range(number)]
    names = [(c.getsockname(), c.getpeername()) for c in conns]
    for n in range(requests):
        for c in conns:
            data = n.to_bytes(4, "big") + payload(n)
            c.sendall(data)
            assert exactly(c, len(data)) == data, "answer"
    # A change of the path is no change of names.
    assert names == [(c.getsockname(), c.getpeername()) for c in conns], "names"
    assert all(n[1][:2] == where for n in names), names
    more = sys.argv[6] if len(sys.argv) > 6 else ""
    if more == "pass":
        for n, c in enumerate(conns):
            data = n.to_bytes(4, "big") + payload(n)
            c.sendall(data + data)
            # The answers come while nobody reads.
            assert exactly(c, 1) == data[:1]
            time.sleep(0.05)
            ours, theirs = socket.socketpair()
            socket.send_fds(ours, [b"x"], [c.fileno()])
            other = socket.socket(fileno=socket.recv_fds(theirs, 1, 1)[1][0])
            assert exactly(other, 2 * len(data) - 1) == (data + data)[1:], "answers behind the change"
            for s in (other, c):
                s.sendall(data)
                assert exactly(other, len(data)) == data, "answer in the kernel"
            other.close()
    if more == "wait":
        print("asked", flush=True)
        begin = time.monotonic()
        poll = select.poll()
        poll.register(conns[0], select.POLLIN)
        happened = poll.poll(30000)
        try:
            end = "end" if happened and not conns[0].recv(1) else "nothing"
        except OSError as e:
            end = e.strerror
        print(f"after {time.monotonic() - begin:.1f} s: {end}", flush=True)
    print("ok", flush=True)


main()
