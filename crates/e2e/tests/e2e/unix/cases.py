"""Waiting calls on a Unix connection, and connections whose processes change.

Each case has two functions: `NAME(c)` in the first process and `NAME_peer(s)` in the second one,
which has accepted the connection. Before the case begins, both have exchanged enough messages for
the connection to move to shared memory. Their output is the transcript.

cases.py [CASE...]
"""

import array
import hashlib
import os
import random
import select
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time

WARM = 24
SOON = 0.05


def say(*what):
    print(" ", *what, flush=True)


def tried(f, *a):
    try:
        r = f(*a)
        return r if not isinstance(r, bytes) or len(r) < 60 else (len(r), hashlib.sha256(r).hexdigest()[:16])
    except OSError as e:
        return type(e).__name__, e.errno


def in_thread(f, *a):
    """Begins a call that waits. Returns a function that returns the result of the call."""
    result = []
    t = threading.Thread(target=lambda: result.append(tried(f, *a)))
    t.start()
    time.sleep(SOON)

    def ended():
        t.join(30)
        return result[0] if result else "still waits"

    return ended


def fill(s):
    """Sends until a send would wait. Returns the number of bytes."""
    s.setblocking(False)
    n = 0
    try:
        while True:
            n += s.send(b"f" * 1000)
    except BlockingIOError:
        pass
    s.setblocking(True)
    return n


def read_all(s):
    n = 0
    while True:
        b = s.recv(1 << 16)
        if not b:
            return n
        n += len(b)


def events(n):
    return [name for name in ("POLLIN", "POLLOUT", "POLLERR", "POLLHUP", "POLLRDHUP") if n & getattr(select, name)]


# Receives that wait.


def received(c):
    w = in_thread(c.recv, 100)
    c2 = os.read(0, 0)  # (nothing)
    del c2
    say(w())


def received_peer(s):
    time.sleep(2 * SOON)
    s.sendall(b"now")


def closed(c):
    say(in_thread(c.recv, 100)())
    say(tried(c.recv, 100), tried(c.send, b"x"))


def closed_peer(s):
    time.sleep(2 * SOON)
    s.close()


def closed_with_unread(c):
    c.sendall(b"unread")
    say(in_thread(c.recv, 100)())
    say(tried(c.recv, 100), tried(c.send, b"x"), tried(c.recv, 1))


def closed_with_unread_peer(s):
    time.sleep(2 * SOON)
    s.close()


def shut_for_sending(c):
    say(in_thread(c.recv, 100)())
    say(tried(c.send, b"still"), tried(c.recv, 1))


def shut_for_sending_peer(s):
    time.sleep(2 * SOON)
    s.shutdown(socket.SHUT_WR)
    say("peer", s.recv(100), s.recv(1))


def own_shutdown(c):
    w = in_thread(c.recv, 100)
    c.shutdown(socket.SHUT_RD)
    say(w())


def own_shutdown_peer(s):
    time.sleep(20 * SOON)
    say("peer", tried(s.send, b"x"))


def killed(c):
    say(in_thread(c.recv, 100)())
    say(tried(c.recv, 1), tried(c.send, b"x"))


def killed_peer(s):
    time.sleep(2 * SOON)
    os.kill(os.getpid(), signal.SIGKILL)


def limited(c):
    c.settimeout(None)
    c.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", 0, 100000))
    begin = time.monotonic()
    say(tried(c.recv, 10), time.monotonic() - begin > 0.09)


def limited_peer(s):
    say("peer", s.recv(1))


def whole(c):
    say(in_thread(c.recv, 300000, socket.MSG_WAITALL)())


def whole_peer(s):
    for i in range(100):
        s.sendall(bytes([i]) * 3000)
    say("peer", s.recv(1))


def low_water(c):
    c.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, 10)
    say(in_thread(c.recv, 100)())


def low_water_peer(s):
    time.sleep(2 * SOON)
    s.sendall(b"12345")
    time.sleep(2 * SOON)
    s.sendall(b"678901")
    s.recv(1)


# Sends that wait.


def room(c):
    say(50000 < fill(c) < 250000)
    w = in_thread(c.sendall, b"g" * 300000)
    say(w())
    c.shutdown(socket.SHUT_WR)
    say(c.recv(1))


def room_peer(s):
    time.sleep(4 * SOON)
    say("peer", read_all(s) > 300000)


def nobody_reads(c):
    fill(c)
    say(in_thread(c.send, b"x" * 1000)())


def nobody_reads_peer(s):
    time.sleep(4 * SOON)
    s.close()


def nobody_will_read(c):
    fill(c)
    say(in_thread(c.send, b"x" * 1000)())
    say(tried(c.send, b"x"), c.recv(7))


def nobody_will_read_peer(s):
    time.sleep(4 * SOON)
    s.shutdown(socket.SHUT_RD)
    say("peer", s.send(b"answers"), read_all(s) > 50000)


def receives_no_more(c):
    say(c.recv(100), c.recv(7))
    say(tried(c.send, b"x"), c.recv(1))


def receives_no_more_peer(s):
    s.shutdown(socket.SHUT_RD)
    s.send(b"still")
    time.sleep(2 * SOON)
    say("peer", s.send(b"answers"), read_all(s))
    s.close()


def limited_send(c):
    fill(c)
    c.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", 0, 100000))
    say(tried(c.send, b"x" * 1000))


def limited_send_peer(s):
    time.sleep(6 * SOON)
    say("peer", read_all(s) > 50000)


# Waits for events.


def hang_up(c):
    for make in (select.poll, select.epoll):
        p = make()
        p.register(c.fileno(), select.POLLIN | select.POLLRDHUP)
        say(make.__name__, [events(e) for _, e in p.poll(0)])
    p = select.poll()
    p.register(c.fileno(), 0)
    c.sendall(b"go")
    say([events(e) for _, e in p.poll(20000)])
    say(tried(c.recv, 1))


def hang_up_peer(s):
    s.recv(2)
    time.sleep(2 * SOON)
    s.close()


def edges(c):
    e = select.epoll()
    e.register(c.fileno(), select.EPOLLIN | select.EPOLLET | select.EPOLLRDHUP)
    say([events(n) for _, n in e.poll(0)])
    for _ in range(3):
        c.sendall(b"next")
        say([events(n) for _, n in e.poll(20)], c.recv(100))
    say([events(n) for _, n in e.poll(0)])


def edges_peer(s):
    for _ in range(3):
        s.sendall(s.recv(4))
    s.recv(1)


# Processes that fork, execute or end.


def forked(c):
    if os.fork() == 0:
        c.sendall(b"child")
        say("child", c.recv(100))
        os._exit(0)
    os.wait()
    c.sendall(b"parent")
    say("parent", c.recv(100))


def forked_peer(s):
    for _ in range(2):
        s.sendall(b"to " + s.recv(100))


def left_to_a_child(c):
    if os.fork() == 0:
        time.sleep(SOON)
        c.sendall(b"child")
        say("child", c.recv(100))
        os._exit(0)
    c.close()
    os.wait()


def left_to_a_child_peer(s):
    s.sendall(b"to " + s.recv(100))
    say("peer", s.recv(1))


def inherited(c):
    c.set_inheritable(True)
    code = "import socket, sys; c = socket.socket(fileno=int(sys.argv[1])); c.sendall(b'next'); print('  next', c.recv(100), c.family.name, c.getpeername()[-2:], flush=True)"
    subprocess.run([sys.executable, "-c", code, str(c.fileno())], close_fds=False, check=True)
    c.sendall(b"again")
    say(c.recv(100))


def inherited_peer(s):
    for _ in range(2):
        s.sendall(b"to " + s.recv(100))


def as_standard_input(c):
    done = subprocess.run(["cat"], stdin=c, stdout=subprocess.PIPE)
    say(len(done.stdout), hashlib.sha256(done.stdout).hexdigest()[:8])


def as_standard_input_peer(s):
    for i in range(100):
        s.sendall(bytes([i]) * 1000)
    s.close()


def descriptors(c):
    r, w = os.pipe()
    c.sendall(b"before")
    c.sendmsg([b"with"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [w]))])
    c.sendall(b"after")
    os.close(w)
    say(os.read(r, 100), c.recv(100))


def descriptors_peer(s):
    got, fds = b"", []
    while len(got) < 15:
        data, new, _, _ = socket.recv_fds(s, 100, 4)
        got, fds = got + data, fds + new
    say("peer", got, len(fds))
    os.write(fds[0], b"through")
    s.sendall(b"thanks")


def credentials(c):
    c.sendall(b"plain")
    say(c.recv(10))
    c.sendall(b"with")
    say(c.recv(10))


def credentials_peer(s):
    say("peer", s.recv(10))
    s.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
    s.sendall(b"set")
    data, control, flags, _ = s.recvmsg(100, 100)
    say("peer", data, [(level, kind, struct.unpack("3i", v)[1:]) for level, kind, v in control], flags)
    s.sendall(b"bye")


def passed_on(c):
    a, b = socket.socketpair()
    child = os.fork()
    if child == 0:
        a.close()
        _, fds, _, _ = socket.recv_fds(b, 1, 1)
        n = socket.socket(fileno=fds[0])
        n.sendall(b"from the child")
        say("child", n.recv(100))
        os._exit(0)
    b.close()
    socket.send_fds(a, [b"x"], [c.fileno()])
    c.close()
    os.waitpid(child, 0)


def passed_on_peer(s):
    s.sendall(b"to " + s.recv(100))
    say("peer", s.recv(1))


# One end moves to the kernel, and the other one ends before its next call.


def move(c):
    """If a descriptor is sent over a connection, the connection leaves shared memory."""
    r, w = os.pipe()
    c.sendmsg([b"d"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [w]))])
    os.close(r)
    os.close(w)


def sent_by_one_that_is_killed(c):
    say(c.recv(5, socket.MSG_WAITALL))
    move(c)
    say(c.recv(100, socket.MSG_PEEK), c.recv(3))
    c.shutdown(socket.SHUT_WR)
    time.sleep(6 * SOON)
    say(tried(c.recv, 100), tried(c.recv, 100), tried(c.recv, 100))


def sent_by_one_that_is_killed_peer(s):
    s.sendall(b"firstunread")
    time.sleep(4 * SOON)
    os.kill(os.getpid(), signal.SIGKILL)


def much_sent_by_one_that_is_killed(c):
    time.sleep(2 * SOON)
    move(c)
    time.sleep(6 * SOON)
    say(tried(c.recv, 40000, socket.MSG_WAITALL), tried(c.recv, 1), tried(c.recv, 1))


def much_sent_by_one_that_is_killed_peer(s):
    for i in range(40):
        s.sendall(bytes([i]) * 1000)
    time.sleep(6 * SOON)
    os.kill(os.getpid(), signal.SIGKILL)


def sent_by_one_that_exits(c):
    time.sleep(2 * SOON)
    r, w = os.pipe()
    code = "import os, sys, time; time.sleep(0.4); print('  next', os.read(int(sys.argv[1]), 100), os.read(int(sys.argv[1]), 100))"
    env = {k: v for k, v in os.environ.items() if k != "LD_PRELOAD"}
    subprocess.run([sys.executable, "-c", code, str(c.fileno())], pass_fds=[c.fileno()], env=env, check=True)


def sent_by_one_that_exits_peer(s):
    s.sendall(b"unread")
    time.sleep(5 * SOON)
    os._exit(0)


def reset_is_inherited(c):
    c.sendall(b"unread")
    say(c.recv(100))
    time.sleep(4 * SOON)
    code = "import select, socket; s = socket.socket(fileno=0); p = select.poll(); p.register(0, 0); print('  next', p.poll(0))\nfor _ in range(2):\n  try: print('  next', s.recv(10))\n  except OSError as e: print('  next', e.errno)"
    env = {k: v for k, v in os.environ.items() if k != "LD_PRELOAD"}
    subprocess.run([sys.executable, "-c", code], stdin=c, env=env, check=True)


def reset_is_inherited_peer(s):
    s.sendall(b"last")
    time.sleep(2 * SOON)
    s.close()


def reset_that_was_told_is_not_inherited(c):
    c.sendall(b"unread")
    time.sleep(4 * SOON)
    say(tried(c.recv, 100))
    code = "import os; print('  next', os.read(0, 10))"
    env = {k: v for k, v in os.environ.items() if k != "LD_PRELOAD"}
    subprocess.run([sys.executable, "-c", code], stdin=c, env=env, check=True)


def reset_that_was_told_is_not_inherited_peer(s):
    time.sleep(2 * SOON)
    s.close()


def mover_ends_with_unread(c):
    time.sleep(2 * SOON)
    move(c)
    c.close()


def mover_ends_with_unread_peer(s):
    s.sendall(b"unread")
    time.sleep(5 * SOON)
    say("peer", tried(s.recv, 100), tried(s.recv, 100), tried(s.recv, 100), tried(s.send, b"x"))


def who(c):
    say(struct.unpack("3i", c.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))[1:], c.getsockname(), c.getpeername()[-2:])


def who_peer(s):
    pid, uid, gid = struct.unpack("3i", s.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    say("peer", pid == os.getppid(), uid, gid, repr(s.getpeername()), s.getsockname()[-2:])


# Large transfers while the path changes.


def much(c):
    r, sent = random.Random(1), hashlib.sha256()

    def send():
        for i in range(3000):
            b = r.randbytes(r.choice([1, 8, 100, 5000, 40000]))
            sent.update(b)
            c.sendall(b)
        c.shutdown(socket.SHUT_WR)

    t = threading.Thread(target=send)
    t.start()
    got, n = hashlib.sha256(), 0
    while True:
        b = c.recv(70000)
        if not b:
            break
        got.update(b)
        n += len(b)
    t.join()
    say(n > 1000000, got.hexdigest() == sent.hexdigest())


def much_peer(s):
    while True:
        b = s.recv(30000)
        if not b:
            break
        s.sendall(b)
    s.close()


def much_and_switched(c):
    much(c)


def much_and_switched_peer(s):
    n = 0
    while True:
        b = s.recv(30000)
        if not b:
            break
        s.sendall(b)
        n += 1
        if n == 300:
            s.setsockopt(socket.SOL_SOCKET, 42, -1)  # SO_PEEK_OFF, which only the kernel supports
    s.close()


CASES = [n[:-5] for n in list(globals()) if n.endswith("_peer")]


def peer(path):
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(path)
    listener.listen()
    print("listening", flush=True)
    s, _ = listener.accept()
    listener.close()
    for _ in range(WARM):
        s.sendall(s.recv(100))
    s.recv(2, socket.MSG_WAITALL)
    globals()[sys.argv[3] + "_peer"](s)


def main():
    for case in sys.argv[1:] or CASES:
        print("#", case, flush=True)
        with tempfile.TemporaryDirectory() as place:
            path = os.path.join(place, "s")
            other = subprocess.Popen([sys.executable, __file__, "peer", path, case], stdout=subprocess.PIPE, text=True)
            other.stdout.readline()
            c = socket.socket(socket.AF_UNIX)
            c.connect(path)
            for _ in range(WARM):
                c.sendall(b"warm")
                assert c.recv(100) == b"warm"
            c.sendall(b"go")
            globals()[case](c)
            c.close()
            print(other.stdout.read(), end="", flush=True)
            other.wait()
    print("ok")


if len(sys.argv) > 1 and sys.argv[1] == "peer":
    peer(sys.argv[2])
else:
    main()
