"""Client and server in different containers:

    containers.py serve PORT HOST [NAME] | proxy PORT HOST TO_PORT TO_HOST | ask PORT HOST REQUESTS CONNECTIONS [MORE]

Client and server compare every byte. A server with a NAME sends the name when a client connects, and when the client
asks for it. The client keeps its connections open and prints "ok". MORE is

    wait         afterwards wait for the end of the first connection; print how long that took and how it ended
    stay         afterwards print "asked", send requests again five seconds later, and print "stayed"
    unread       afterwards send requests, print "asked", and read the answers five seconds later
    pass         afterwards pass each connection through a Unix socket while answers wait to be read, and continue with
                 the descriptor that comes out
    greeted      the server has a name, which must stay the same; print it for each connection
    nonblocking  connect, send and receive without blocking
    in-turn      open one connection after the other, with requests of 12 bytes
    small        send no request of more than 100 bytes
    late=PID     stop that process after two requests, for longer than any peer waits for it
"""
import os
import select
import signal
import socket
import sys
import threading
import time

from streams import exactly

SIZES = [1, 8, 100, 4096, 65536]
WHO = b"\xff" * 4
# The bytes 0 to 255, repeated.
PATTERN = bytes(range(256)) * (max(SIZES) // 256 + 1)


def small(sock):
    """Sets TCP_NODELAY, as servers and Docker's proxy do. Otherwise the last part of each message waits for an
    acknowledgement, which takes 40 milliseconds on a busy machine."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return sock


def payload(n):
    begin = n * 31 & 255
    return PATTERN[begin:begin + SIZES[n % len(SIZES)]]


def serve(sock, name):
    n = 0
    if name:
        sock.sendall(name)
    while True:
        try:
            head = exactly(sock, 4)
            if head == WHO:
                sock.sendall(name)
                continue
            want = payload(int.from_bytes(head, "big"))
            assert exactly(sock, len(want)) == want, "request"
            sock.sendall(head + want)
            n += 1
        except (EOFError, OSError):
            sock.close()
            return


def address(host, port):
    return (socket.AF_INET6 if ":" in host else socket.AF_INET), (host, port)


def proxied(sock, to):
    def forward(a, b):
        try:
            while data := a.recv(65536):
                b.sendall(data)
            b.shutdown(socket.SHUT_WR)
        except OSError:
            pass

    other = small(socket.create_connection(to))
    back = threading.Thread(target=forward, args=(other, sock), daemon=True)
    back.start()
    forward(sock, other)
    back.join()
    other.close()
    sock.close()


def main():
    what, port, host = sys.argv[1], int(sys.argv[2]), sys.argv[3]
    family, where = address(host, port)
    if what in ("serve", "proxy"):
        served = proxied if what == "proxy" else serve
        more = (sys.argv[5], int(sys.argv[4])) if what == "proxy" else "".join(sys.argv[4:]).encode()
        listener = socket.create_server(where, family=family, backlog=128)
        while True:
            conn, _ = listener.accept()
            threading.Thread(target=served, args=(small(conn), more), daemon=True).start()
    requests, number = int(sys.argv[4]), int(sys.argv[5])
    more = sys.argv[6:]
    timeout = 20 if "nonblocking" in more else None
    if "in-turn" in more:
        data = (1).to_bytes(4, "big") + payload(1)
        for _ in range(number):
            with socket.create_connection(where) as c:
                for _ in range(requests):
                    c.sendall(data)
                    assert exactly(c, len(data)) == data, "answer"
        print("ok")
        return
    conns = [small(socket.create_connection(where, timeout=timeout)) for _ in range(number)]
    greeters = [exactly(c, 1).decode() for c in conns if "greeted" in more]
    names = [(c.getsockname(), c.getpeername()) for c in conns]
    n_of = (lambda n: n // 3 * 5 + n % 3) if "small" in more else (lambda n: n)
    late = [int(m[5:]) for m in more if m.startswith("late=")]
    for n in range(requests):
        if late and n == 2:
            os.kill(late[0], signal.SIGSTOP)
            threading.Timer(1.5, os.kill, (late[0], signal.SIGCONT)).start()
        if late and n == 10:
            time.sleep(2)
        for c in conns:
            data = n_of(n).to_bytes(4, "big") + payload(n_of(n))
            c.sendall(data)
            assert exactly(c, len(data)) == data, "answer"
    # A change of the path must not change the names.
    assert names == [(c.getsockname(), c.getpeername()) for c in conns], "names"
    assert all(n[1][:2] == where for n in names), names
    if "greeted" in more:
        for c, name in zip(conns, greeters):
            c.sendall(WHO)
            assert exactly(c, 1).decode() == name, "another server"
        print("by", "".join(greeters))
    if "pass" in more:
        for n, c in enumerate(conns):
            data = n.to_bytes(4, "big") + payload(n)
            c.sendall(data + data)
            # The answers arrive before the client reads them.
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
    if "unread" in more:
        data = (4).to_bytes(4, "big") + payload(4)
        for c in conns:
            c.sendall(data)
        print("asked", flush=True)
        time.sleep(5)
        for c in conns:
            assert exactly(c, len(data)) == data, "answer"
            c.sendall(data)
            assert exactly(c, len(data)) == data, "answer behind that"
    if "stay" in more:
        print("asked", flush=True)
        poll = select.poll()
        poll.register(conns[0], select.POLLIN)
        assert not poll.poll(5000), "it is still"
        data = bytes(4) + payload(0)
        conns[0].sendall(data)
        assert exactly(conns[0], len(data)) == data, "answer"
        print("stayed", flush=True)
    if "wait" in more:
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
