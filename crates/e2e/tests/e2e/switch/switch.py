"""Connections that must move to the kernel while they are in use: a program inherits them through
exec, they are passed to another process, used for urgent data, or used by parts of libc that make
their own system calls. Prints what a program sees; the output must be the same on stock sockets.

usage: switch.py [CASE...]
"""

import array
import ctypes
import errno
import fcntl
import hashlib
import os
import random
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
import time

BIG = random.Random(7).randbytes(512 * 1024)
SIOCATMARK = 0x8905
CASES = {}


def case(f):
    CASES[f.__name__] = f
    return f


def listener(family=socket.AF_INET, address="127.0.0.1"):
    l = socket.socket(family)
    l.bind((address, 0))
    l.listen(64)
    return l


def pair(l):
    c = socket.create_connection(l.getsockname()[:2])
    s, _ = l.accept()
    return c, s


def pair_with_unread_bytes():
    c, s = pair(listener())
    c.sendall(b"up")
    s.sendall(b"down")
    return c, s


def serve(l, f):
    """Accept one connection in a forked child and run f on it."""
    sys.stdout.flush()
    pid = os.fork()
    if pid == 0:
        try:
            s, _ = l.accept()
            f(s)
            os._exit(0)
        except BaseException as e:
            print("child:", repr(e), flush=True)
            os._exit(1)
    c = socket.create_connection(l.getsockname()[:2])
    return c, pid


def ended(pid):
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def read(s, n):
    parts = []
    while n > 0:
        part = s.recv(n)
        if not part:
            break
        parts.append(part)
        n -= len(part)
    return b"".join(parts)


def become(s, *argv):
    """Executes the program argv with the connection as standard input and output."""
    os.dup2(s.fileno(), 0)
    os.dup2(s.fileno(), 1)
    s.close()
    os.execv(argv[0], argv)


def inetd(l):
    def cat(s):
        s.recv(5)
        become(s, "/bin/cat")

    c, pid = serve(l, cat)
    names = c.getsockname(), c.getpeername()
    c.sendall(b"hello")
    c.sendall(b"more" * 10)
    print(read(c, 40), names == (c.getsockname(), c.getpeername()))

    def send():
        c.sendall(BIG)
        c.shutdown(socket.SHUT_WR)

    t = threading.Thread(target=send)
    t.start()
    print(hashlib.sha256(read(c, len(BIG) + 1)).hexdigest())
    t.join()
    print(ended(pid))


@case
def inetd_ipv4():
    inetd(listener())


@case
def inetd_ipv6():
    inetd(listener(socket.AF_INET6, "::1"))


@case
def inetd_dual_stack():
    l = socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True)

    def names(s):
        os.set_inheritable(s.fileno(), True)
        before = s.getsockname(), s.getpeername()
        os.system("true")
        print(before == (s.getsockname(), s.getpeername()), flush=True)

    sys.stdout.flush()
    pid = os.fork()
    if pid == 0:
        s, _ = l.accept()
        names(s)
        os._exit(0)
    c = socket.create_connection(("127.0.0.1", l.getsockname()[1]))
    print(ended(pid), c.recv(1))


@case
def the_whole_server_is_replaced():
    code = """
import os, socket
l = socket.create_server(("127.0.0.1", 0))
print(l.getsockname()[1], flush=True)
s, _ = l.accept()
for fd in 0, 1:
    os.dup2(s.fileno(), fd)
s.close()
l.close()
os.execv("/bin/cat", ["cat"])
"""
    p = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    c = socket.create_connection(("127.0.0.1", int(p.stdout.readline())))
    time.sleep(0.3)
    c.sendall(b"still there")
    print(c.recv(20))
    c.shutdown(socket.SHUT_WR)
    print(c.recv(1), p.wait())


@case
def queued_for_a_program_without_the_library():
    """Who has connected, and was not accepted yet, is served by the next program."""
    l = listener()
    l.set_inheritable(True)
    address = l.getsockname()
    early = [socket.create_connection(address) for _ in range(3)]
    early[0].sendall(BIG[:50000])
    early[1].sendall(b"and no more")
    early[1].shutdown(socket.SHUT_WR)
    names = [c.getsockname()[1] for c in early]
    code = f"""
import hashlib, socket
l = socket.socket(fileno={l.fileno()})
for _ in range(4):
    s, a = l.accept()
    s.sendall(str(a[1]).encode() + b" " + hashlib.sha256(s.recv(50000, socket.MSG_WAITALL)).hexdigest().encode())
    s.close()
"""
    sys.stdout.flush()
    r, w = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.read(r, 1)
        os.execv("/usr/bin/env", ["env", "-u", "LD_PRELOAD", sys.executable, "-c", code])
    l.close()
    os.write(w, b"go")
    early[2].shutdown(socket.SHUT_WR)
    late = socket.create_connection(address)
    late.shutdown(socket.SHUT_WR)
    for c, name in zip([*early, late], [*names, late.getsockname()[1]]):
        answer = b""
        while piece := c.recv(1000):
            answer += piece
        port, digest = answer.split()
        print(int(port) == name, digest.decode()[:16])
    print(ended(pid))


@case
def unread_bytes_behind_an_exec():
    def write_and_become(s):
        s.setblocking(False)
        s.send(BIG[:60000])
        become(s, "/bin/echo", "tail")

    c, pid = serve(listener(), write_and_become)
    print(ended(pid))
    ep = select.epoll()
    ep.register(c.fileno(), select.EPOLLIN | select.EPOLLRDHUP)
    got = b""
    while ep.poll(5):
        part = c.recv(10000)
        if not part:
            break
        got += part
    print(len(got), got[:60000] == BIG[:60000], got[60000:])


@case
def passed_with_unread_bytes():
    a, b = socket.socketpair()
    def passer(s):
        s.recv(1)
        socket.send_fds(a, [b"x"], [s.fileno()])

    c, pid = serve(listener(), passer)
    c.sendall(b"1unread")
    _, fds, _, _ = socket.recv_fds(b, 10, 1)
    s = socket.socket(fileno=fds[0])
    print(ended(pid), s.recv(100), s.getpeername() == c.getsockname())
    s.sendall(b"back")
    print(c.recv(10))
    s.close()
    print(c.recv(1))


@case
def passed_one_after_the_other():
    """Both ends, while each has something to read."""
    a, b = socket.socketpair()
    passed = []
    for end in pair_with_unread_bytes():
        socket.send_fds(a, [b"x"], [end.fileno()])
        end.close()
        _, fds, _, _ = socket.recv_fds(b, 10, 1)
        passed.append(socket.socket(fileno=fds[0]))
    for end in passed:
        print(end.recv(100))
    c, s = passed
    c.sendall(b"question")
    print(s.recv(100))
    s.sendall(b"answer")
    print(c.recv(100))


@case
def others_wait_while_one_is_passed():
    a, b = socket.socketpair()
    sys.stdout.flush()
    pid = os.fork()
    if pid == 0:
        try:
            l = listener()
            a.sendall(str(l.getsockname()[1]).encode())
            a.recv(1)
            for i in range(3):
                s, _ = l.accept()
                if i == 0:
                    socket.send_fds(a, [b"x"], [s.fileno()])
                s.sendall(b"served")
                s.close()
            a.recv(1)
            # The next program must also serve later connections.
            l.accept()[0].sendall(b"late")
            os._exit(0)
        except BaseException as e:
            print("child:", repr(e), flush=True)
            os._exit(1)
    address = ("127.0.0.1", int(b.recv(10)))
    waiting = [socket.create_connection(address) for _ in range(3)]
    b.sendall(b"g")
    _, fds, _, _ = socket.recv_fds(b, 10, 1)
    os.close(fds[0])
    for c in waiting:
        c.settimeout(10)
        print(c.recv(100), c.recv(100))
    with socket.create_connection(address) as late:
        b.sendall(b"g")
        print(late.recv(100))
    print(ended(pid))


@case
def bound_before():
    l = listener()
    for address in ("", "127.0.0.1"):
        c = socket.socket()
        c.bind((address, 0))
        port = c.getsockname()[1]
        c.connect(l.getsockname())
        s, peer = l.accept()
        print(peer == c.getsockname() == ("127.0.0.1", port))
        c.send(b"before")
        s.set_inheritable(True)
        print(s.recv(10), subprocess.run(["/bin/echo", "from the child"], stdout=s.fileno(), check=True).returncode)
        print(c.recv(100), peer == c.getsockname() == s.getpeername())
        try:
            socket.socket().bind(("127.0.0.1", port))
        except OSError as e:
            print(e.strerror)


@case
def waiting_for_it():
    l = listener()
    for how in ("recv", "timeout", "poll", "select", "epoll", "epoll-edge", "epoll-oneshot"):
        def late(s):
            time.sleep(0.1)
            become(s, "/bin/echo", "late")

        c, pid = serve(l, late)
        if how == "timeout":
            c.settimeout(10)
        elif how == "poll":
            p = select.poll()
            p.register(c, select.POLLIN)
            print([e for _, e in p.poll(10000)])
        elif how == "select":
            print([len(x) for x in select.select([c], [], [], 10)])
        elif how.startswith("epoll"):
            mode = {"epoll": 0, "epoll-edge": select.EPOLLET, "epoll-oneshot": select.EPOLLONESHOT}[how]
            ep = select.epoll()
            ep.register(c, select.EPOLLIN | mode)
            print([e & select.EPOLLIN for _, e in ep.poll(10)])
        print(how, read(c, 6), ended(pid))


@case
def a_server_that_runs_a_command():
    c, s = pair(listener())
    for x in c, s:
        x.set_inheritable(True)
    c.sendall(b"in flight")
    s.sendall(b"the other way")
    print(os.system("true"), s.recv(20), c.recv(20))
    c.sendall(b"again")
    print(s.recv(10))
    c.close()
    print(s.recv(1))


@case
def parent_and_child_after_it():
    c, s = pair(listener())
    subprocess.run(["/bin/echo", "from the child"], stdout=s.fileno(), check=True)
    print(c.recv(20))
    s.sendall(b"from the parent")
    print(c.recv(20))
    c.sendall(b"to the parent")
    print(s.recv(20))
    s.close()
    print(c.recv(1))


@case
def urgent_data():
    c, s = pair(listener())
    s.send(b"before")
    s.send(b"!", socket.MSG_OOB)
    s.send(b"behind")
    time.sleep(0.05)
    print(c.recv(1, socket.MSG_OOB), c.recv(20), c.recv(20))
    print([len(x) for x in select.select([], [], [c], 0)])


@case
def urgent_data_of_a_telnet():
    """Interrupt and synch of telnet (RFC 854): the receiver drops what comes before the urgent
    mark. Done three times, but the path is switched only once."""
    c, s = pair(listener())
    for inline in (False, True, False):
        s.setsockopt(socket.SOL_SOCKET, socket.SO_OOBINLINE, inline)
        c.sendall(b"old " * 10)
        c.send(b"\xff\xf4\xff", socket.MSG_OOB)
        c.send(b"\xf2ABOR\r\n")
        c.send(b"\xff\xf2", socket.MSG_OOB)
        time.sleep(0.05)
        print([len(x) for x in select.select([], [], [s], 5)])
        seen = b""
        while not struct.unpack("i", fcntl.ioctl(s, SIOCATMARK, b"\0\0\0\0"))[0]:
            seen += s.recv(16)
        print(seen, s.recv(1) if inline else s.recv(1, socket.MSG_OOB))
    c.close()
    print(s.recv(1))


@case
def urgent_data_by_a_signal():
    got = []
    signal.signal(signal.SIGURG, lambda *_: got.append(s.recv(1, socket.MSG_OOB)))
    c, s = pair(listener())
    fcntl.fcntl(s, fcntl.F_SETOWN, os.getpid())
    for _ in range(3):
        c.send(b"go on")
        c.send(b"!", socket.MSG_OOB)
        time.sleep(0.05)
        print(s.recv(20), got)
    signal.signal(signal.SIGURG, signal.SIG_DFL)


def close_range(fd):
    os.closerange(fd, fd + 1)


@case
def it_ends_with_its_last_number():
    """Bytes are read from the ring before the end closes. Nothing may stay open."""
    ways = [lambda s: s.close(), lambda s: os.dup2(2, s.detach()), lambda s: close_range(s.detach())]
    for way, forks in [(way, forks) for way in ways for forks in (False, True)]:
        c, s = pair(listener())
        c.send(b"in the ring")
        c.send(b"urgent", socket.MSG_OOB)
        s.send(b"")
        got = s.recv(100), s.recv(1, socket.MSG_OOB)
        pid = os.fork() if forks else 0
        if forks and pid == 0:
            s.close()
            time.sleep(5)
            os._exit(0)
        way(s)
        c.settimeout(2)
        try:
            print(got, c.recv(1))
        except OSError as e:
            print(got, e)
        if forks:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


@case
def answered_by_a_reset():
    """One side has shut down both directions, and the other side has answered what it received."""
    for told in (False, True):
        for hand_over in ("c", "s"):
            c, s = pair(listener())
            c.send(b"unread")
            s.shutdown(socket.SHUT_RDWR)
            c.send(b"x")
            if told:
                print([x.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) for x in (c, s)])
            (c if hand_over == "c" else s).set_inheritable(True)
            os.system("true")
            p = select.poll()
            p.register(c), p.register(s)
            events = dict(p.poll(0))
            print(hand_over, [events.get(x.fileno()) for x in (c, s)])
            print([x.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) for x in (c, s)])


@case
def libc_writes_to_it():
    libc = ctypes.CDLL(None)
    c, s = pair(listener())
    print(libc.dprintf(s.fileno(), b"%d %s %f\n", 7, b"seven", ctypes.c_double(7.5)), c.recv(40))
    libc.execl  # resolved like any program's


@case
def shut_down_before():
    c, s = pair(listener())
    s.set_inheritable(True)
    s.sendall(b"last")
    s.shutdown(socket.SHUT_WR)
    os.system("true")
    print(c.recv(10), c.recv(1))
    c.sendall(b"still open")
    print(s.recv(20))
    c.close()
    print(s.recv(1))


@case
def closed_before():
    c, s = pair(listener())
    s.set_inheritable(True)
    c.sendall(b"bye")
    c.close()
    os.system("true")
    print(s.recv(10), s.recv(1))


@case
def reset_before():
    c, s = pair(listener())
    s.set_inheritable(True)
    c.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, array.array("i", [1, 0]).tobytes())
    c.close()
    os.system("true")
    try:
        print(s.recv(1))
    except OSError as e:
        print(e.errno)


@case
def options_survive():
    c, s = pair(listener())
    s.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    s.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    s.settimeout(0.2)
    s.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, array.array("q", [1, 500000]).tobytes())
    s.set_inheritable(True)
    copy = s.dup()
    print(os.get_inheritable(s.fileno()), os.get_inheritable(copy.fileno()), os.get_blocking(copy.fileno()))
    os.system("true")
    print(os.get_inheritable(s.fileno()), os.get_inheritable(copy.fileno()), os.get_blocking(copy.fileno()))
    print(s.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY), s.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE))
    print(array.array("q", s.getsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, 16)).tolist())
    try:
        copy.recv(1)
    except OSError as e:
        print(e.errno)


@case
def in_full_flow():
    """The path is switched while both directions are busy. Prints how many streams arrive
    complete: of those that one end switches, and of those that both ends switch at once."""
    l = listener()
    rng = random.Random(11)
    good = [0, 0]
    for turn in range(40):
        up, down = rng.randbytes(rng.randrange(1, 1 << 20)), rng.randbytes(rng.randrange(1, 1 << 20))
        c, s = pair(l)
        s.set_inheritable(True)
        results = {}

        def writer(sock, data, seed):
            r = random.Random(seed)
            at = 0
            while at < len(data):
                n = r.choice((1, 10, 1000, 5000, 40000, 100000))
                at += sock.send(data[at : at + n])
            sock.shutdown(socket.SHUT_WR)

        def reader(sock, name):
            h = hashlib.sha256()
            while part := sock.recv(65536):
                h.update(part)
            results[name] = h.digest()

        work = [(writer, c, up, turn), (writer, s, down, turn + 1), (reader, c, "down"), (reader, s, "up")]
        threads = [threading.Thread(target=f, args=args) for f, *args in work]
        for t in threads:
            t.start()
        time.sleep(rng.random() * 0.003)
        if turn % 4 == 3:
            c.set_inheritable(True)  # both ends at once
        os.system("true")
        for t in threads:
            t.join(30)
        good[turn % 4 == 3] += results == {"up": hashlib.sha256(up).digest(), "down": hashlib.sha256(down).digest()}
        c.close()
        s.close()
    print(*good)


left_out = {name[1:] for name in sys.argv[1:] if name.startswith("-")}
for name in [n for n in sys.argv[1:] if n in CASES] or [n for n in CASES if n not in left_out]:
    print(f"# {name}", flush=True)
    CASES[name]()
print("ok")
