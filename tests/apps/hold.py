#!/usr/bin/python3
"""Opens connections and holds them until told to go on, for tests that kill
somebody in the middle.

hold.py PORT: echoes a line, prints "established", then for each line on the
file named CONTROL (argv 2; grows) does what it says:
  echo     one more round trip on the old connection -> "echoed"
  new      a new connection and a round trip         -> "new ok"
  wait     wait for the peer's end                   -> "EOF" or an errno name
  exit     leave                                     -> "bye"
"""
import errno
import socket
import sys
import time

port, control = int(sys.argv[1]), sys.argv[2]


def trip(sock, message):
    sock.sendall(message)
    got = b""
    while len(got) < len(message):
        part = sock.recv(100)
        if not part:
            raise SystemExit("EOF in the middle")
        got += part
    if got != message:
        raise SystemExit("bytes differ")


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
    elif command == "wait":
        try:
            got = sock.recv(100)
            print("EOF" if got == b"" else f"data {got!r}", flush=True)
        except socket.timeout:
            print("TIMEOUT", flush=True)
        except OSError as error:
            print(errno.errorcode[error.errno], flush=True)
    elif command == "exit":
        print("bye", flush=True)
        sys.exit(0)
