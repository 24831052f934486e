"""Programs whose standard input and output is a connection, and which read and write it by number.

usage: standard.py             the client, and a server of each kind
       standard.py echo        a program that was started with a connection as 0 and 1
"""
import os
import socket
import sys


def echo():
    while data := os.read(0, 65536):
        while data:
            data = data[os.write(1, data) :]


def duplicated(listener):
    c, _ = listener.accept()
    for number in 0, 1:
        os.dup2(c.fileno(), number)
    c.close()
    listener.close()
    echo()


def started(listener):
    c, _ = listener.accept()
    for number in 0, 1:
        os.dup2(c.fileno(), number)
    c.close()
    listener.close()
    os.execv(sys.executable, [sys.executable, __file__, "echo"])


def accepted(listener):
    os.close(0)
    os.close(1)
    c, _ = listener.accept()
    os.dup2(c.detach(), 1)
    listener.close()
    echo()


def ask(address):
    with socket.create_connection(address, timeout=20) as c:
        for i in range(50):
            message = b"%d " % i * (1 + i * 20)
            c.sendall(message)
            got = b""
            while len(got) < len(message) and (part := c.recv(65536)):
                got += part
            if got != message:
                return f"message {i} differs: {got[:40]}"
        c.shutdown(socket.SHUT_WR)
        return f"echoed, and then {c.recv(10)}"


def main():
    for serve in duplicated, started, accepted:
        listener = socket.create_server(("127.0.0.1", 0))
        pid = os.fork()
        if pid == 0:
            serve(listener)
            os._exit(0)
        address = listener.getsockname()
        listener.close()
        print(serve.__name__, ask(address), os.waitpid(pid, 0)[1], flush=True)
    print("ok")


if sys.argv[1:] == ["echo"]:
    echo()
else:
    main()
