"""A program with a connection waits for all its children, as supervisors do (or Ruby's
Process.waitall). Prints how many children there were.

usage: waits_for_all.py
       waits_for_all.py subreaper PROGRAM...     adopts all orphans, and executes PROGRAM
"""

import ctypes
import os
import socket
import sys

PR_SET_CHILD_SUBREAPER = 36


def main():
    l = socket.socket()
    l.bind(("127.0.0.1", 0))
    l.listen()
    c = socket.create_connection(l.getsockname())
    s, _ = l.accept()
    c.send(b"x")
    s.recv(1)
    for i in range(3):
        if os.fork() == 0:
            os._exit(i)
    reaped = 0
    try:
        while True:
            os.wait()
            reaped += 1
    except ChildProcessError:
        print("reaped", reaped, "as 1" if os.getpid() == 1 else "as another", flush=True)


if __name__ == "__main__":
    if sys.argv[1:2] == ["subreaper"]:
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        os.execvp(sys.argv[2], sys.argv[2:])
    main()
