"""A master that polls its listener and never accepts, as dovecot's. For each connection it starts
a service and hands it the listener. The service is another program; it runs in an environment that
the master chooses, so it does not load the library. Prints what the clients see.

usage: services.py DIR     DIR: directory for the binary of the service
"""

import ctypes
import os
import resource
import select
import shutil
import socket
import sys

SERVICE = "import socket, sys; c, _ = socket.socket(fileno=int(sys.argv[1])).accept(); c.sendall(b'served'); c.close()"


HAND_ON = "import socket, sys; c = socket.socket(fileno=int(sys.argv[1])); c.sendall(b'got ' + c.recv(2, socket.MSG_WAITALL)); c.close()"
ENVIRONMENT = {"PYTHONHOME": sys.base_prefix}


def by_dup2(l):
    os.dup2(l.fileno(), 100)
    return 100


def by_inheritance(l):
    l.set_inheritable(True)
    return l.fileno()


def under_a_limit(l):
    fd = by_dup2(l)
    resource.setrlimit(resource.RLIMIT_AS, (1 << 30, 1 << 30))
    return fd


def spawned(binary, code, s, number):
    """Hands the socket over by a file action; in this process it stays close-on-exec."""
    actions = [(os.POSIX_SPAWN_DUP2, s.fileno(), number)]
    return os.posix_spawn(binary, ["service", "-c", code, str(number)], ENVIRONMENT, file_actions=actions)


def spawned_alone(code, s):
    """As above, but every other descriptor is closed, also those of the library."""
    libc = ctypes.CDLL(None)
    actions = ctypes.create_string_buffer(256)
    libc.posix_spawn_file_actions_init(actions)
    libc.posix_spawn_file_actions_adddup2(actions, s.fileno(), 3)
    libc.posix_spawn_file_actions_addclosefrom_np(actions, 4)
    argv = [a.encode() for a in (sys.executable, "-c", code, "3")]
    env = [f"{k}={v}".encode() for k, v in os.environ.items()]
    strings = lambda of: (ctypes.c_char_p * (len(of) + 1))(*of, None)  # noqa: E731
    pid = ctypes.c_int()
    assert libc.posix_spawn(ctypes.byref(pid), argv[0], actions, None, strings(argv), strings(env)) == 0
    libc.posix_spawn_file_actions_destroy(actions)
    return pid.value


def started(l, hand_over, binary):
    if hand_over is spawned:
        return spawned(binary, SERVICE, l, 100)
    pid = os.fork()
    if pid == 0:
        fd = hand_over(l)
        os.execve(binary, ["service", "-c", SERVICE, str(fd)], ENVIRONMENT)
    return pid


def master(l, hand_over, binary):
    e = select.epoll()
    for _ in range(2):
        e.register(l, select.EPOLLIN)
        assert e.poll(10), "no connection"
        e.unregister(l)
        pid = started(l, hand_over, binary)
        assert os.waitpid(pid, 0)[1] == 0, "the service failed"


def ask(port, name):
    with socket.create_connection(("127.0.0.1", port), timeout=10) as c:
        c.settimeout(10)
        print(name, c.recv(100), c.recv(100), flush=True)


def connections(binary):
    """Hands over a connection that the master has accepted, and its listener after that."""
    l = socket.create_server(("127.0.0.1", 0))
    ways = (
        lambda s: spawned(binary, HAND_ON, s, 100),
        lambda s: spawned(binary, HAND_ON, s, 0),
        lambda s: spawned(binary, HAND_ON, s, s.fileno()),
        lambda s: spawned_alone(HAND_ON, s),
    )
    for way in ways:
        with socket.create_connection(l.getsockname(), timeout=10) as c:
            s, _ = l.accept()
            c.sendall(b"a")
            pid = way(s)
            s.close()
            c.sendall(b"b")
            print("connection:", c.recv(100), c.recv(100), os.waitpid(pid, 0)[1], flush=True)
    pid = spawned(binary, SERVICE, l, l.fileno())
    ask(l.getsockname()[1], "accepted here before")
    print(os.waitpid(pid, 0)[1], flush=True)


def main():
    binary = shutil.copy(os.path.realpath(sys.executable), os.path.join(sys.argv[1], "service"))
    connections(binary)
    for hand_over in (by_dup2, by_inheritance, under_a_limit, spawned):
        # Made before the fork, the listener exists in the parent, too, and the master could have a
        # zone of its own.
        for made in ("after", "before"):
            ready, tell = os.pipe()
            l = socket.create_server(("127.0.0.1", 0)) if made == "before" else None
            pid = os.fork()
            if pid == 0:
                l = l or socket.create_server(("127.0.0.1", 0))
                os.write(tell, b"%5d" % l.getsockname()[1])
                master(l, hand_over, binary)
                os._exit(0)
            port = int(os.read(ready, 5))
            for _ in range(2):
                ask(port, f"{hand_over.__name__}, {made} the fork")
            print(hand_over.__name__, os.waitpid(pid, 0)[1], flush=True)
            if l:
                l.close()
    print("ok")


main()
