#!/usr/bin/env python3
"""Connects from one CPU, and gets source ports in every possible way. Prints the
ports as JSON. usage: slices.py CPU HOST PORT COUNT"""

import json
import os
import socket
import struct
import sys

IP_LOCAL_PORT_RANGE = 51
IP_BIND_ADDRESS_NO_PORT = 24

cpu, host, port, count = int(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
os.sched_setaffinity(0, [cpu])
keep = []


def connect(prepare=lambda s: None, to=(host, port)):
    s = socket.socket()
    keep.append(s)
    prepare(s)
    s.connect(to)
    return s.getsockname()[1]


def own_range(s):
    s.setsockopt(socket.IPPROTO_IP, IP_LOCAL_PORT_RANGE, struct.pack("I", 40050 | 40059 << 16))


def fixed_port(s):
    s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    s.bind(("", 29999))


def late_port(s):
    s.setsockopt(socket.IPPROTO_IP, IP_BIND_ADDRESS_NO_PORT, 1)
    s.bind(("", 0))


def nonblocking():
    s = socket.socket()
    keep.append(s)
    s.setblocking(False)
    s.connect_ex((host, port))
    return s.getsockname()[1]


listener = socket.socket()
listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
listener.bind(("127.0.0.1", 29998))
listener.listen()

print(
    json.dumps(
        {
            "bound": connect(fixed_port),
            "own_range": connect(own_range),
            "late_port": connect(late_port),
            "option": connect(lambda s: s.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)),
            "loopback": connect(to=listener.getsockname()),
            "nonblocking": nonblocking(),
            "plain": [connect() for _ in range(count)],
        }
    )
)
