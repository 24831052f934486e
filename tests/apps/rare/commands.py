"""Commands that are started while a connection is open."""
import ctypes
import fcntl
import os
import stat
import sys

from .kit import case, libc, pair, say


@case
def commands_that_get_a_connection():
    c, s = pair()
    s.sendall(b"unread")
    sys.stdout.flush()
    os.dup2(c.fileno(), 9)  # the shell knows numbers of one digit
    print(os.system("echo from the shell >&9"))
    print(s.recv(100), c.recv(100))
    # popen(3) itself: Python's os.popen does not call it.
    libc.popen.restype = ctypes.c_void_p
    d, t = pair()
    os.dup2(d.fileno(), 8)
    f = libc.popen(b"echo by popen >&8", b"r")
    print(libc.pclose(ctypes.c_void_p(f)), t.recv(100))
    for fd in 8, 9:
        os.close(fd)


@case
def commands_that_get_none():
    """Close-on-exec: nothing has to change."""
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
    """Asked of numbers right after they were closed."""
    c, s = pair()
    for x in (c, s):
        fd = x.fileno()
        print(stat.S_ISSOCK(os.fstat(fd).st_mode))
        x.close()
        say("fstat", os.fstat, fd)
        say("fcntl", fcntl.fcntl, fd, fcntl.F_GETFD)
        say("dup", os.dup, fd)
