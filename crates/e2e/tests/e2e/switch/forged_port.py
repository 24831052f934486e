"""A client that speaks the protocol by hand and lies about its port: forged_port.py MONITOR PORT.

Prints the outcome of a connection from a port that was leased to it, and of connections from ports
that were not.
"""

import array
import mmap
import os
import socket
import struct
import sys
import time

HELLO, CONNECT = 1, 7
SYN, ESTABLISHED = 1, 2
RST = 2
# Offsets from crates/abi/src/channel.rs: queue 0 and the slots.
QUEUE, SLOTS, SLOT_SIZE = 4096, 118784, 576
SLOT_GENERATION, SLOT_FAMILY, SLOT_PORT, SLOT_DST, SLOT_DIR = 4, 8, 10, 16, 64
MAPPED = b"\0" * 10 + b"\xff\xff" + bytes([127, 0, 0, 1])

monitor, port = sys.argv[1], int(sys.argv[2])
ctl = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
ctl.connect(monitor)
ctl.settimeout(10)
seq = 0


def request(kind, ident=0, arg0=0, arg1=0, addr=b"", fd=None):
    """Sends a request to the monitor. Returns result, id and address of the answer, and its
    descriptor."""
    global seq
    seq += 1
    msg = struct.pack("=IIHHiQQQQ", kind, seq, 1, 0, 0, ident, arg0, arg1, 0) + addr.ljust(24, b"\0")
    with_fd = [] if fd is None else [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [fd]))]
    ctl.sendmsg([msg], with_fd)
    while True:
        data, fds, _, _ = socket.recv_fds(ctl, 72, 1)
        head = struct.unpack("=IIHHiQQQQ", data[:48])
        if (head[0], head[1]) == (kind, seq):
            return head[4], head[5], data[48:], fds
        for other in fds:
            os.close(other)


def stock():
    """Opens a kernel connection, so that the server checks all its queues."""
    with socket.create_connection(("127.0.0.1", port)) as s:
        s.send(b"x")
        s.recv(1)


# Try all versions, because this script does not know the monitor's.
assert any(request(HELLO, 7 << 16 | 1, os.getpid(), version)[0] == 0 for version in range(1, 200))
address = MAPPED + struct.pack("=HHI", port, socket.AF_INET, 0)
with socket.socket() as s:
    result, channel, answer, fds = request(CONNECT, addr=address, fd=s.fileno())
assert result == 0 and fds, result
leased = struct.unpack("=H", answer[16:18])[0]
memory = mmap.mmap(fds[0], SLOTS + 1024 * SLOT_SIZE)
tail = 0

tries = [("leased", leased + 1), ("another", leased + 64 if leased < 65000 else leased - 64), ("below", leased - 1), ("privileged", 80), ("none", 0)]
for slot, (name, claimed) in enumerate([*tries, ("the server's", port), ("leased", leased + 2)]):
    at = SLOTS + slot * SLOT_SIZE
    struct.pack_into("=I", memory, at + SLOT_GENERATION, 1)
    struct.pack_into("=HH", memory, at + SLOT_FAMILY, socket.AF_INET, claimed)
    memory[at + SLOT_DST:at + SLOT_DST + 16] = MAPPED
    struct.pack_into("=I", memory, at, SYN)
    struct.pack_into("=I", memory, QUEUE + 192 + tail * 4, slot + 1)
    tail += 1
    struct.pack_into("=I", memory, QUEUE, tail)
    until = time.monotonic() + 10
    while struct.unpack_from("=I", memory, at)[0] == SYN and time.monotonic() < until:
        stock()
    time.sleep(0.05)
    state = struct.unpack_from("=I", memory, at)[0]
    status = struct.unpack_from("=I", memory, at + SLOT_DIR + 256)[0]
    print(name, "taken" if state == ESTABLISHED else "waits", "reset" if status & RST else "lives")
print("ok")
