"""Commands that are started while a connection is open."""
import ctypes
import errno
import fcntl
import os
import select
import socket
import stat
import sys
import termios

from .kit import case, libc, pair, say


@case
def commands_that_get_a_connection():
    # A shell knows only descriptors of one digit. Occupy these numbers, so that the sockets get
    # others.
    low = [os.dup(0)]
    while low[-1] < 9:
        low.append(os.dup(0))
    c, s = pair()
    s.sendall(b"unread")
    sys.stdout.flush()
    os.dup2(c.fileno(), 9)
    print(os.system("echo from the shell >&9"))
    print(s.recv(100), c.recv(100))
    # Call popen(3) itself, because Python's os.popen does not use it.
    libc.popen.restype = ctypes.c_void_p
    d, t = pair()
    os.dup2(d.fileno(), 8)
    os.set_inheritable(8, True)  # dup2 of a number to itself leaves it close-on-exec
    f = libc.popen(b"echo by popen >&8", b"r")
    print(libc.pclose(ctypes.c_void_p(f)), t.recv(100))
    for fd in {8, 9}.union(low):
        os.close(fd)


@case
def commands_that_get_none():
    """Close-on-exec descriptors: nothing has to change its path."""
    c, s = pair()
    s.sendall(b"unread")
    print(os.system("true"))
    libc.popen.restype = ctypes.c_void_p
    f = libc.popen(b"true", b"r")
    print(libc.pclose(ctypes.c_void_p(f)))
    print(c.recv(10))
    c.sendall(b"on")
    print(s.recv(10))


@case
def is_it_still_open():
    """Queries on numbers right after they were closed."""
    c, s = pair()
    for x in (c, s):
        fd = x.fileno()
        print(stat.S_ISSOCK(os.fstat(fd).st_mode))
        x.close()
        say("fstat", os.fstat, fd)
        say("fcntl", fcntl.fcntl, fd, fcntl.F_GETFD)
        say("dup", os.dup, fd)


@case
def numbers_that_are_closed():
    """Prints the result of every call on a number right after it was closed."""
    buf = ctypes.create_string_buffer(64)
    length = ctypes.c_uint32(64)
    where, out = os.pipe()
    calls = {
        "getsockname": lambda fd: libc.getsockname(fd, buf, ctypes.byref(length)),
        "getpeername": lambda fd: libc.getpeername(fd, buf, ctypes.byref(length)),
        "bind": lambda fd: libc.bind(fd, b"\2\0" + bytes(14), 16),
        "listen": lambda fd: libc.listen(fd, 1),
        "accept": lambda fd: libc.accept(fd, None, None),
        "connect": lambda fd: libc.connect(fd, b"\2\0\0\1\x7f\0\0\1" + bytes(8), 16),
        "shutdown": lambda fd: libc.shutdown(fd, socket.SHUT_RDWR),
        "setsockopt": lambda fd: libc.setsockopt(fd, socket.SOL_SOCKET, socket.SO_KEEPALIVE, b"\1\0\0\0", 4),
        "getsockopt": lambda fd: libc.getsockopt(fd, socket.SOL_SOCKET, socket.SO_KEEPALIVE, buf, ctypes.byref(length)),
        "read": lambda fd: libc.read(fd, buf, 8),
        "write": lambda fd: libc.write(fd, b"x", 1),
        "recv": lambda fd: libc.recv(fd, buf, 8, 0),
        "send": lambda fd: libc.send(fd, b"x", 1, 0),
        "sendfile": lambda fd: libc.sendfile(fd, own.fileno(), None, 8),
        "splice": lambda fd: libc.splice(fd, None, out, None, 8, 0),
        "splice to": lambda fd: libc.splice(where, None, fd, None, 8, 0),
        "FIONREAD": lambda fd: libc.ioctl(fd, termios.FIONREAD, buf),
        "sockatmark": libc.sockatmark,
        "dup2": lambda fd: libc.dup2(fd, 100),
        "close": libc.close,
    }
    with open(__file__, "rb") as own:
        for name, call in calls.items():
            for x in pair():
                fd = x.fileno()
                x.close()
                ctypes.set_errno(0)
                print(name, call(fd), errno.errorcode.get(ctypes.get_errno()), flush=True)
    os.close(where)
    os.close(out)


@case
def waits_for_numbers_that_are_closed():
    """`poll` returns POLLNVAL and `select` fails with EBADF, also if an open connection is waited
    for as well."""
    for beside in (None, pair()):
        for x in pair():
            fd = x.fileno()
            p = select.poll()
            p.register(fd, select.POLLIN | select.POLLOUT)
            others = [beside[0].fileno()] if beside else []
            for o in others:
                p.register(o, select.POLLOUT)
            x.close()
            print(sorted(e for n, e in p.poll(1000)), flush=True)
        for x in pair():
            fd = x.fileno()
            x.close()
            say("select", select.select, [fd], others, [], 1)
        with select.epoll() as e:
            for x in pair():
                fd = x.fileno()
                x.close()
                say("epoll_ctl", e.register, fd)
