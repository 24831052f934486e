#!/usr/bin/python3
"""A client under a policy: if the kernel refuses a connection, the client must not get it.

policy.py client PORT N: N connections to 127.0.0.1 (or $POLICY_HOST), one after the other, each
                         with an echo; prints a line for each: "ok" or the name of the error.
policy.py watch PORT S:  connects for at most S seconds, and prints a line each time the outcome
                         changes; ends after two changes.
policy.py landlock PORT N [ALLOWED]: as `client`, after it has given up TCP connects by Landlock,
                         except to one port.
policy.py landlock-exec ...: the same in a newly executed program.
policy.py thread PORT N: one thread gives up TCP connects, another one does not; both connect.
policy.py unix-only PORT N: in a newly executed program, with a filter that allows only Unix sockets.
"""
import ctypes
import errno
import os
import platform
import socket
import struct
import sys
import threading
import time

LIBC = ctypes.CDLL(None, use_errno=True)
LIBC.syscall.restype = ctypes.c_long
NO_NEW_PRIVS = 38
HOST = os.environ.get("POLICY_HOST", "127.0.0.1")


def attempt(port):
    try:
        with socket.socket(socket.AF_INET6 if ":" in HOST else socket.AF_INET, socket.SOCK_STREAM) as s:
            s.settimeout(5)
            s.connect((HOST, port))
            s.sendall(b"hello")
            got = s.recv(64)
            return "ok" if got == b"hello" else "other bytes"
    except socket.timeout:
        return "timeout"
    except OSError as e:
        return errno.errorcode.get(e.errno, str(e))


def client(port, n):
    for _ in range(n):
        print(attempt(port))


def watch(port, seconds):
    end, outcomes = time.monotonic() + seconds, []
    while time.monotonic() < end and len(outcomes) < 3:
        now = attempt(port)
        if [now] != outcomes[-1:]:
            print(now, flush=True)
            outcomes.append(now)
        time.sleep(0.01)


def call(number, *args):
    r = LIBC.syscall(ctypes.c_long(number), *args)
    if r < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return r


def landlock(allowed):
    """From linux/landlock.h: handled_access_net = LANDLOCK_ACCESS_NET_CONNECT_TCP."""
    connect_tcp = 2
    attr = ctypes.create_string_buffer(struct.pack("QQ", 0, connect_tcp), 16)
    ruleset = call(444, attr, ctypes.c_size_t(16), ctypes.c_uint(0))
    if allowed:
        rule = ctypes.create_string_buffer(struct.pack("QQ", connect_tcp, allowed), 16)
        call(445, ctypes.c_int(ruleset), ctypes.c_int(2), rule, ctypes.c_uint(0))
    assert LIBC.prctl(NO_NEW_PRIVS, 1, 0, 0, 0) == 0
    call(446, ctypes.c_int(ruleset), ctypes.c_uint(0))
    os.close(ruleset)


def unix_only():
    """A filter under which socket(AF_INET) and socket(AF_INET6) fail with EAFNOSUPPORT."""
    socket_call = {"x86_64": 41, "aarch64": 198}[platform.machine()]
    code = [
        (0x20, 0, 0, 0),  # number of the call
        (0x15, 0, 4, socket_call),
        (0x20, 0, 0, 16),  # its first argument
        (0x15, 1, 0, socket.AF_INET),
        (0x15, 0, 1, socket.AF_INET6),
        (0x06, 0, 0, 0x50000 | errno.EAFNOSUPPORT),
        (0x06, 0, 0, 0x7FFF0000),
    ]
    text = b"".join(struct.pack("HBBI", *line) for line in code)
    program = ctypes.create_string_buffer(text, len(text))
    head = ctypes.create_string_buffer(struct.pack("HxxxxxxQ", len(code), ctypes.addressof(program)), 16)
    assert LIBC.prctl(NO_NEW_PRIVS, 1, 0, 0, 0) == 0
    assert LIBC.prctl(22, 2, head, 0, 0) == 0, os.strerror(ctypes.get_errno())


def thread(port, n):
    client(port, n)
    boxed = threading.Thread(target=lambda: (landlock(None), client(port, n)))
    boxed.start()
    boxed.join()


def main():
    what, port, number = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    allowed = int(sys.argv[4]) if len(sys.argv) > 4 else None
    again = [sys.executable, __file__, "client", str(port), str(number)]
    if what == "landlock":
        landlock(allowed)
    elif what == "landlock-exec":
        landlock(allowed)
        os.execv(sys.executable, again)
    elif what == "unix-only":
        unix_only()
        os.execv(sys.executable, again)
    {"watch": watch, "thread": thread}.get(what, client)(port, number)
    print("end")


main()
