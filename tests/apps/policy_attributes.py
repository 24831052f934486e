#!/usr/bin/python3
"""Firewall rules that match attributes of a socket or of the process that made it. Sockets that a rule does not match
(`plain`) are allowed; sockets that it matches (`meant`) are refused.

policy_attributes.py PORT prints a line for each kind of rule, "KIND plain [...] meant [...] plain [...]", and then
"end". It runs in a network namespace of its own; the script makes the base chain.
"""
import ctypes
import errno
import os
import pathlib
import socket
import subprocess
import sys
import threading
import time

PORT = int(sys.argv[1])
LIBC = ctypes.CDLL(None, use_errno=True)
NOBODY = 65534
SO_MARK, SO_PRIORITY, IPV6_UNICAST_HOPS = 36, 12, 16
SETRESUID = {"x86_64": 117, "aarch64": 147}[os.uname().machine]


def attempt(host, options=(), bound=None):
    try:
        with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as s:
            s.settimeout(5)
            for option in options:
                s.setsockopt(*option)
            if bound:
                s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                s.bind(bound)
            s.connect((host, PORT))
            s.sendall(b"hello")
            return "ok" if s.recv(64) == b"hello" else "other bytes"
    except OSError as e:
        return errno.errorcode.get(e.errno, str(e))


def nft(*rules):
    subprocess.run(["nft", "; ".join(rules)], check=True)


def as_other(become, back):
    """Returns a function that makes three attempts under another identity and returns their outcomes."""

    def attempts(host):
        become()
        try:
            return [attempt(host) for _ in range(3)]
        finally:
            back()

    return attempts


def in_thread(host):
    """Attempts with another user ID in one thread only, which a raw system call sets."""
    seen = []

    def run():
        LIBC.syscall(SETRESUID, -1, NOBODY, -1)
        seen.extend(attempt(host) for _ in range(3))
        LIBC.syscall(SETRESUID, -1, 0, -1)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return seen


def odd(options=(), bound=None):
    return lambda host: [attempt(host, options, bound) for _ in range(3)]


V4, V6 = "127.0.0.1", "::1"
KINDS = [
    ("mark", V4, "meta mark 7", odd([(socket.SOL_SOCKET, SO_MARK, 7)])),
    ("priority", V4, "meta priority 0:6", odd([(socket.SOL_SOCKET, SO_PRIORITY, 6)])),
    ("tos", V4, "ip dscp 0x04", odd([(socket.IPPROTO_IP, socket.IP_TOS, 0x10)])),
    ("ttl", V4, "ip ttl 9", odd([(socket.IPPROTO_IP, socket.IP_TTL, 9)])),
    ("tclass", V6, "ip6 dscp 0x04", odd([(socket.IPPROTO_IPV6, socket.IPV6_TCLASS, 0x10)])),
    ("hops", V6, "ip6 hoplimit 9", odd([(socket.IPPROTO_IPV6, IPV6_UNICAST_HOPS, 9)])),
    ("source address", V4, "ip saddr 127.0.0.2", odd(bound=("127.0.0.2", 0))),
    ("source port", V4, "tcp sport 1025-9999", odd(bound=("127.0.0.1", 9876))),
    ("user", V4, "meta skuid 65534", as_other(lambda: os.seteuid(NOBODY), lambda: os.seteuid(0))),
    ("group", V4, "meta skgid 65534", as_other(lambda: os.setegid(NOBODY), lambda: os.setegid(0))),
    ("user for files", V4, "meta skuid 65534", as_other(lambda: LIBC.setfsuid(NOBODY), lambda: LIBC.setfsuid(0))),
    ("group for files", V6, "meta skgid 65534", as_other(lambda: LIBC.setfsgid(NOBODY), lambda: LIBC.setfsgid(0))),
    ("user of a thread", V6, "meta skuid 65534", in_thread),
]


def serve():
    echo = pathlib.Path(__file__).with_name("echo_server.py")
    server = subprocess.Popen([sys.executable, str(echo), "threaded", str(PORT), "::"], stdout=subprocess.DEVNULL)
    # Once the server has answered, its thread is in `accept`. The warm-up client runs without the
    # library and uses kernel TCP, so that this process meets no policy.
    warm = "import socket,sys; s=socket.create_connection(('::1',int(sys.argv[1]))); s.sendall(b'x'); s.recv(1)"
    stock = {k: v for k, v in os.environ.items() if k != "LD_PRELOAD"}
    while subprocess.run([sys.executable, "-c", warm, str(PORT)], env=stock, stderr=subprocess.DEVNULL).returncode:
        time.sleep(0.05)
    return server


server = serve()
# Without a policy, these attempts make sockets as root, which the library recycles later.
print("before", [attempt(V4) for _ in range(4)], flush=True)
nft("add table inet attributes", "add chain inet attributes out { type filter hook output priority 0; }")
RULE = "add rule inet attributes out tcp dport %d %s reject with tcp reset"
for name, host, rule, meant in KINDS:
    nft("flush chain inet attributes out", RULE % (PORT, rule))
    print(name, "plain", [attempt(host) for _ in range(4)], "meant", meant(host), "plain", attempt(host), flush=True)
server.kill()
print("end")
