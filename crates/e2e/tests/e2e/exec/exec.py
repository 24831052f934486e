"""Programs that replace themselves, or start others, with connections and
listeners open, all of them able to load the library. Prints what they see; the
same lines must come out on stock sockets.

usage: exec.py [CASE...]
       exec.py next WHAT FD...     the program that inherits
"""

import errno
import ctypes
import hashlib
import os
import random
import select
import socket
import subprocess
import sys
import threading

NOISE = random.Random(11).randbytes(300_000)
CASES = {}


def case(f):
    CASES[f.__name__] = f
    return f


def listener():
    l = socket.socket()
    l.bind(("127.0.0.1", 0))
    l.listen(64)
    return l


def read_all(s):
    data = b""
    while piece := s.recv(65536):
        data += piece
    return data


# What the inheriting program does with descriptors ----------------------------


def echo(fd):
    s = socket.socket(fileno=fd)
    while data := s.recv(4096):
        s.sendall(data)


def answer_and_tell(fd):
    s = socket.socket(fileno=fd)
    print("inherited:", s.recv(100), s.getsockname()[0], s.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY),
          s.gettimeout(), os.get_blocking(fd), "FASTSOCKET_SUCCESSOR" in os.environ, flush=True)
    s.sendall(b"from the next program")


def digest(fd):
    s = socket.socket(fileno=fd)
    data = read_all(s)
    s.sendall(hashlib.sha256(data).hexdigest().encode())


def serve_two(fd):
    l = socket.socket(fileno=fd)
    for _ in range(2):
        c, _ = l.accept()
        c.sendall(b"served " + c.recv(100))
        c.close()


def serve_by_epoll(fd):
    l = socket.socket(fileno=fd)
    l.setblocking(False)
    e = select.epoll()
    e.register(l, select.EPOLLIN)
    for _ in range(2):
        e.poll(10)
        c, _ = l.accept()
        c.setblocking(True)
        c.sendall(b"served " + c.recv(100))
        c.close()


def again(fd):
    """Executes the next program once more."""
    os.set_inheritable(int(fd), True)
    os.execv(sys.executable, [sys.executable, __file__, "next", "answer_and_tell", str(fd)])


def same_twice(one, two):
    a, b = socket.socket(fileno=one), socket.socket(fileno=two)
    print("first:", a.recv(3), "second:", b.recv(3), flush=True)
    a.close()
    b.sendall(b"still there")


def nothing(*fds):
    for fd in fds:
        os.close(fd)


def variables(*fds):
    print("beside what was given:", sorted(set(os.environ) - {"PATH", "LC_CTYPE"}), flush=True)


def who_looks_through_all_numbers(fd):
    """Looks for inherited listeners as uwsgi does."""
    def name(n):
        try:
            s = socket.socket(socket.AF_INET, socket.SOCK_STREAM, 0, n)
        except OSError:
            return None
        try:
            return s.getsockname()
        except OSError:
            return None
        finally:
            s.detach()

    def is_open(ask):
        try:
            ask()
        except OSError as e:
            return e.errno != errno.EBADF
        return True

    print("found:", sum(name(n) == name(fd) for n in range(3, 2000)), flush=True)
    for ask in (os.fstat, os.get_inheritable, lambda n: os.write(n, b""), lambda n: os.close(os.dup(n))):
        print("open:", sum(is_open(lambda: ask(n)) for n in range(3, 2000)), flush=True)


NEXT = {f.__name__: f for f in (echo, answer_and_tell, digest, serve_two, serve_by_epoll, again, same_twice, nothing,
                                variables, who_looks_through_all_numbers)}


# Ways to get there -----------------------------------------------------------


def argv(what, *fds):
    return [sys.executable, __file__, "next", what, *map(str, fds)]


def execv(what, *fds):
    os.execv(sys.executable, argv(what, *fds))


def execl(what, *fds):
    libc = ctypes.CDLL(None)
    args = [a.encode() for a in argv(what, *fds)]
    libc.execl(args[0], *args, None)


def execle(what, *fds):
    libc = ctypes.CDLL(None)
    args = [a.encode() for a in argv(what, *fds)]
    env = [f"{k}={v}".encode() for k, v in os.environ.items()]
    libc.execle(args[0], *args, None, (ctypes.c_char_p * (len(env) + 1))(*env, None))


def execvp(what, *fds):
    os.environ["PATH"] = "/nowhere:" + os.path.dirname(sys.executable)
    os.execvp(os.path.basename(sys.executable), argv(what, *fds))


def with_many_variables(what, *fds):
    for i in range(600):
        os.environ[f"SOME_VARIABLE_{i}"] = "x" * 50
    execv(what, *fds)


def after_a_failure(what, *fds):
    for name in ("/no/such/program", "/etc/passwd"):
        try:
            os.execv(name, [name])
        except OSError as e:
            print("exec:", e.errno, flush=True)
    execv(what, *fds)


def in_a_cleared_environment(what, *fds):
    keep = {k: v for k, v in os.environ.items() if k == "PATH"}
    os.execve(sys.executable, argv(what, *fds), keep)


def with_threads(what, *fds):
    stop = threading.Event()
    for _ in range(3):
        threading.Thread(target=stop.wait, daemon=True).start()
    execv(what, *fds)


def posix_spawn(what, *fds):
    pid = os.posix_spawn(sys.executable, argv(what, *fds), os.environ)
    for fd in fds:
        os.close(fd)
    os._exit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))


def popen_class(what, *fds):
    """subprocess.Popen: fork, close everything else, exec."""
    child = subprocess.Popen(argv(what, *fds), pass_fds=fds)
    for fd in fds:
        os.close(fd)
    os._exit(child.wait())


WAYS = (execv, execl, execle, execvp, with_many_variables, after_a_failure, in_a_cleared_environment, with_threads,
        posix_spawn, popen_class)


def run(way, what, get):
    """Forks a child, which gets the descriptors from `get()` and executes the next program."""
    sys.stdout.flush()
    pid = os.fork()
    if pid == 0:
        try:
            held = get()
            for s in held:
                s.set_inheritable(True)
            way(what, *[s.fileno() for s in held])
        except BaseException as e:
            print("child:", repr(e), flush=True)
        os._exit(1)
    return pid


def ended(pid):
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


# Cases -----------------------------------------------------------------------


@case
def unread_bytes_and_options():
    for way in WAYS:
        print(way.__name__)
        l = listener()

        def get():
            s, _ = l.accept()
            s.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            s.sendall(b"before it")
            select.select([s], [], [])
            l.close()
            return [s]

        pid = run(way, "answer_and_tell", get)
        c = socket.create_connection(l.getsockname())
        c.sendall(b"not read before")
        print("client:", read_all(c), "ended", ended(pid))


@case
def by_a_file_action():
    """A descriptor that is close-on-exec here is duplicated for the next program, and only that
    program has it open."""
    l = listener()
    for number in (lambda s: s.fileno(), lambda s: 100):
        c = socket.create_connection(l.getsockname())
        s, _ = l.accept()
        c.sendall(b"not read before")
        target = number(s)
        actions = [(os.POSIX_SPAWN_DUP2, s.fileno(), target)]
        pid = os.posix_spawn(sys.executable, argv("answer_and_tell", target), os.environ, file_actions=actions)
        s.close()
        print("client:", read_all(c), "ended", ended(pid))
    first = socket.create_connection(l.getsockname())
    first.sendall(b"who came before")
    actions = [(os.POSIX_SPAWN_DUP2, l.fileno(), 100)]
    pid = os.posix_spawn(sys.executable, argv("serve_two", 100), os.environ, file_actions=actions)
    address = l.getsockname()
    l.close()
    print(read_all(first))
    second = socket.create_connection(address)
    second.sendall(b"who came after")
    print(read_all(second), ended(pid))


@case
def in_both_directions():
    for way in (execv, posix_spawn):
        l = listener()
        pid = run(way, "echo", lambda: [l.accept()[0]])
        c = socket.create_connection(l.getsockname())
        got = hashlib.sha256()
        sender = threading.Thread(target=lambda: (c.sendall(NOISE), c.shutdown(socket.SHUT_WR)))
        sender.start()
        n = 0
        while piece := c.recv(65536):
            got.update(piece)
            n += len(piece)
        sender.join()
        print(way.__name__, n, got.digest() == hashlib.sha256(NOISE).digest(), ended(pid))


@case
def written_before_and_after():
    """The receiver is replaced by another program while the sender sends."""
    l = listener()

    def get():
        s, _ = l.accept()
        print("first:", len(s.recv(1000, socket.MSG_WAITALL)), flush=True)
        return [s]

    pid = run(execv, "digest", get)
    c = socket.create_connection(l.getsockname())
    for at in range(0, len(NOISE), 1000):
        c.sendall(NOISE[at:at + 1000])
    c.shutdown(socket.SHUT_WR)
    print("same:", read_all(c).decode() == hashlib.sha256(NOISE[1000:]).hexdigest(), ended(pid))


@case
def several_programs():
    l = listener()
    pid = run(execv, "again", lambda: [l.accept()[0]])
    c = socket.create_connection(l.getsockname())
    c.sendall(b"through two programs")
    print(read_all(c), ended(pid))


@case
def two_numbers():
    l = listener()

    def get():
        s, _ = l.accept()
        return [s, s.dup()]

    pid = run(execv, "same_twice", get)
    c = socket.create_connection(l.getsockname())
    c.sendall(b"onetwo")
    print(read_all(c), ended(pid))


@case
def a_listener_with_somebody_waiting():
    for what in ("serve_two", "serve_by_epoll"):
        for way in (execv, posix_spawn):
            l = listener()
            first = socket.create_connection(l.getsockname())
            first.sendall(b"who came before")

            def get():
                return [l]

            address = l.getsockname()
            pid = run(way, what, get)
            l.close()
            print(read_all(first))
            second = socket.create_connection(address)
            second.sendall(b"who came after")
            print(read_all(second), ended(pid))


@case
def a_listener_is_there_once():
    """Descriptors that the library keeps for its workers beside the listener must not be visible
    to the program."""
    def get():
        l = listener()
        l.setblocking(False)
        worker = os.fork()
        if worker == 0:
            with select.epoll() as e:
                e.register(l, select.EPOLLIN)
                e.poll(0.1)
            os._exit(0)
        os.waitpid(worker, 0)
        return [l]

    print(ended(run(execv, "who_looks_through_all_numbers", get)))


@case
def what_is_closed_on_the_way():
    l = listener()

    def get():
        s, _ = l.accept()
        hidden, _ = l.accept()
        hidden.set_inheritable(False)
        print("unread:", len(hidden.recv(100, socket.MSG_PEEK)), flush=True)
        globals()["kept"] = hidden
        return [s]

    pid = run(execv, "answer_and_tell", get)
    c = socket.create_connection(l.getsockname())
    d = socket.create_connection(l.getsockname())
    d.sendall(b"never read")
    c.sendall(b"read")
    print(read_all(c), ended(pid))
    try:
        print("close-on-exec:", d.recv(10))
    except OSError as e:
        print("close-on-exec:", e.errno)


@case
def nobody_wants_it():
    l = listener()
    pid = run(execv, "nothing", lambda: [l.accept()[0]])
    c = socket.create_connection(l.getsockname())
    print(read_all(c), ended(pid))


@case
def an_environment_of_its_own():
    """A program that inherits no socket gets exactly the environment variables that the caller has
    chosen."""
    l = listener()
    c = socket.create_connection(l.getsockname())
    s, _ = l.accept()
    print(ended(run(in_a_cleared_environment, "variables", lambda: [])))
    c.sendall(b"goes on")
    print(s.recv(100))


@case
def a_client_that_is_replaced():
    l = listener()
    pid = run(execv, "answer_and_tell", lambda: [socket.create_connection(l.getsockname())])
    s, _ = l.accept()
    s.sendall(b"to a client")
    print(read_all(s), ended(pid))


def main():
    if sys.argv[1:2] == ["next"]:
        NEXT[sys.argv[2]](*map(int, sys.argv[3:]))
        return
    for name in sys.argv[1:] or CASES:
        print("==", name, flush=True)
        CASES[name]()
        sys.stdout.flush()
    print("ok")


main()
