"""A master that watches its listener and never accepts; for each connection it starts a
service, another program in an environment of the master's choice, which does not load
the library, and hands it the listener (as dovecot does). Prints what the clients see.

usage: services.py DIR     DIR: a place for the service's binary
"""

import os
import resource
import select
import shutil
import socket
import sys

SERVICE = "import socket, sys; c, _ = socket.socket(fileno=int(sys.argv[1])).accept(); c.sendall(b'served'); c.close()"


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


def master(l, hand_over, binary):
    e = select.epoll()
    for _ in range(2):
        e.register(l, select.EPOLLIN)
        assert e.poll(10), "no connection"
        e.unregister(l)
        pid = os.fork()
        if pid == 0:
            fd = hand_over(l)
            os.execve(binary, ["service", "-c", SERVICE, str(fd)], {"PYTHONHOME": sys.base_prefix})
        assert os.waitpid(pid, 0)[1] == 0, "the service failed"


def ask(port, name):
    with socket.create_connection(("127.0.0.1", port), timeout=10) as c:
        c.settimeout(10)
        print(name, c.recv(100), c.recv(100), flush=True)


def main():
    binary = shutil.copy(os.path.realpath(sys.executable), os.path.join(sys.argv[1], "service"))
    for hand_over in (by_dup2, by_inheritance, under_a_limit):
        # Before the fork: the parent has it, too, and the master could have a zone of its own.
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
