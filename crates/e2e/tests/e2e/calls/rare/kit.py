"""Helpers for writing cases."""
import ctypes
import errno
import socket
import struct

# Cases by name, in the order in which they run.
CASES = {}
libc = ctypes.CDLL(None, use_errno=True)


def case(f):
    CASES[f.__name__] = f
    return f


def pair(family=socket.AF_INET, address="127.0.0.1", listener=None, client=None):
    l = listener or socket.create_server((address, 0), family=family)
    c = client or socket.socket(family)
    c.settimeout(10)
    c.connect(l.getsockname())
    c.setblocking(True)
    s, _ = l.accept()
    for x in c, s:
        x.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", 10, 0))
    return c, s


def say(label, f, *args):
    try:
        r = f(*args)
    except OSError as e:
        r = errno.errorcode.get(e.errno, e)
    print(label, r, flush=True)
    return r


def raw(label, function, *args):
    """Calls a function of libc through ctypes."""
    ctypes.set_errno(0)
    r = getattr(libc, function)(*args)
    print(label, r if r >= 0 else errno.errorcode[ctypes.get_errno()], flush=True)
    return r
