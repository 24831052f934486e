#!/usr/bin/python3
"""A listener is closed without the library's knowledge, and another service then gets its port.

secret_close.py PORT: connects four times while the first one listens, and three times after the
                      second one has begun; prints a line for each: which one has answered, or
                      the name of the error.
"""
import ctypes
import errno
import mmap
import os
import platform
import socket
import subprocess
import sys

CLOSE = {
    # mov eax, 3; syscall; ret
    "x86_64": bytes.fromhex("b8030000000f05c3"),
    # mov x8, 57; svc 0; ret
    "aarch64": bytes.fromhex("280780d2010000d4c0035fd6"),
}


def close_in_secret(fd):
    """Closes by a syscall instruction of its own, not by a function of libc."""
    page = mmap.mmap(-1, mmap.PAGESIZE, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
    page.write(CLOSE[platform.machine()])
    at = ctypes.addressof(ctypes.c_char.from_buffer(page))
    call = ctypes.CFUNCTYPE(ctypes.c_long, ctypes.c_int)(at)
    assert call(fd) == 0


def serve(port, name, count):
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind(("127.0.0.1", port))
    listener.listen()
    print("listens", flush=True)
    for _ in range(count):
        connection, _ = listener.accept()
        connection.sendall(name.encode())
        connection.close()
    sys.stdin.readline()
    close_in_secret(listener.detach())
    print("closed", flush=True)
    sys.stdin.readline()


def attempt(port):
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as s:
            s.settimeout(2)
            s.connect(("127.0.0.1", port))
            return s.recv(64).decode()
    except socket.timeout:
        return "timeout"
    except OSError as e:
        return errno.errorcode.get(e.errno, str(e))


def start(port, name, count, env):
    command = [sys.executable, __file__, str(port), name, str(count)]
    server = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env)
    assert server.stdout.readline() == "listens\n"
    return server


def main(port):
    first = start(port, "first", 4, None)
    for _ in range(4):
        print(attempt(port), flush=True)
    first.stdin.write("\n")
    first.stdin.flush()
    assert first.stdout.readline() == "closed\n"
    print(attempt(port), flush=True)
    stock = {k: v for k, v in os.environ.items() if k != "LD_PRELOAD"}
    second = start(port, "second", 3, stock)
    for _ in range(3):
        print(attempt(port), flush=True)
    for server in (first, second):
        server.kill()
        server.wait()
    print("end")


if len(sys.argv) > 2:
    serve(int(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
else:
    main(int(sys.argv[1]))
