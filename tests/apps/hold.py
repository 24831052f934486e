#!/usr/bin/python3
"""Opens connections and holds them until told to go on, for tests that kill a process in the middle.

hold.py PORT CONTROL

Sends a line to an echo server at PORT, prints "established", then does what each line of the growing file CONTROL says:
  echo     one more round trip on the old connection -> "echoed"
  new      a new connection and a round trip         -> "new ok"
  wait     wait for the peer's end                   -> "EOF" or an errno name
  sleep    the same without a time limit
  signal   a blocked recv, then a signal whose       -> "restarted", or an errno name
           handler restarts calls, then data
  stdin    make the connection standard input, by    -> "stdin", or the errno names; the connection goes on
           dup2 and by dup
  exit     exit                                      -> "bye"
"""
import ctypes
import errno
import os
import signal
import socket
import sys
import threading
import time

from streams import trip

port, control = int(sys.argv[1]), sys.argv[2]


def as_stdin():
    said = []
    before = os.fstat(0)
    for make in (lambda: os.dup2(sock.fileno(), 0), lambda: (os.closerange(0, 1), os.dup(sock.fileno()))):
        try:
            make()
        except OSError as error:
            said.append(errno.errorcode[error.errno])
            if error.errno == errno.EBUSY and not os.path.samestat(before, os.fstat(0)):
                said.append("and 0 is another file")
    trip(sock, b"still here\n")
    return " ".join(said) or "stdin"


def signalled():
    """Calls the C library's recv, because Python's own recv starts again after EINTR."""
    for number in (signal.SIGINT, signal.SIGUSR1):
        signal.signal(number, lambda *_: None)
        signal.siginterrupt(number, False)
    sock.settimeout(None)
    me = threading.get_ident()
    timers = [threading.Timer(0.3, signal.pthread_kill, (me, signal.SIGUSR1)),
              threading.Timer(0.6, sock.sendall, (b"data",))]
    [t.start() for t in timers]
    buf = ctypes.create_string_buffer(100)
    libc = ctypes.CDLL(None, use_errno=True)
    n = libc.recv(sock.fileno(), buf, 100, 0)
    answer = "restarted" if buf.raw[:n] == b"data" else errno.errorcode[ctypes.get_errno()]
    [t.join() for t in timers]
    return answer


sock = socket.create_connection(("127.0.0.1", port), timeout=20)
trip(sock, b"hello\n")
print("established", flush=True)
done = 0
while True:
    lines = open(control).read().split("\n")[:-1]
    if len(lines) == done:
        time.sleep(0.01)
        continue
    command = lines[done]
    done += 1
    if command == "echo":
        for i in range(100):
            trip(sock, b"echo %d\n" % i)
        print("echoed", flush=True)
    elif command == "new":
        with socket.create_connection(("127.0.0.1", port), timeout=20) as other:
            trip(other, b"new\n")
        print("new ok", flush=True)
    elif command in ("wait", "sleep"):
        # Without a timeout, Python sleeps in the C library's recv.
        sock.settimeout(None if command == "sleep" else 20)
        try:
            got = sock.recv(100)
            print("EOF" if got == b"" else f"data {got!r}", flush=True)
        except socket.timeout:
            print("TIMEOUT", flush=True)
        except OSError as error:
            print(errno.errorcode[error.errno], flush=True)
    elif command == "signal":
        print(signalled(), flush=True)
    elif command == "stdin":
        print(as_stdin(), flush=True)
    elif command == "exit":
        print("bye", flush=True)
        sys.exit(0)
