#!/usr/bin/python3
"""A hostile peer that manipulates the futex words on which a server sleeps.

second_word.py serve PORT HOW      accepts a connection and sleeps on it: HOW is recv, send (until there is room) or
                                   poll. Prints "sleeps", and "ended" when the connection has ended.
second_word.py move PORT PID       connects, moves all sleepers of process PID from the connection's words to another
                                   word, prints how many there were, and is killed.
second_word.py tease PORT PID      connects, changes the words for one second of its CPU time, and prints how long that
                                   took.
"""
import ctypes
import os
import select
import signal
import socket
import sys
import time

FUTEX, CMP_REQUEUE, WAKE = 202, 4, 1
# The layout of crates/abi/src/channel.rs.
SLOTS, SLOT, SLOT_OFF, ESTABLISHED = 1024, 576, 118784, 2
WANTS = [64 + 256 * direction + of for direction in (0, 1) for of in (128, 192)]


def serve(port, how):
    listener = socket.create_server(("127.0.0.1", port))
    conn, _ = listener.accept()
    print("sleeps", flush=True)
    try:
        if how == "recv":
            assert conn.recv(10) == b""
        elif how == "send":
            while True:
                conn.send(bytes(1 << 20))
        else:
            poll = select.poll()
            poll.register(conn, select.POLLIN)
            assert poll.poll()
    except ConnectionError:
        pass
    print("ended", flush=True)


def channel():
    with open("/proc/self/maps") as maps:
        for line in maps:
            if "memfd:fastsocket-channel" in line and int(line.split()[2], 16) == 0:
                return int(line.split("-")[0], 16)
    raise SystemExit("no channel")


def words():
    """Returns the addresses of all futex words of the connection, and of a word that no process uses."""
    base = channel() + SLOT_OFF
    state = [ctypes.c_uint32.from_address(base + i * SLOT).value for i in range(SLOTS)]
    slot = base + state.index(ESTABLISHED) * SLOT
    return [slot + want + 8 for want in WANTS], base + (SLOTS - 1) * SLOT + 64 + 128 + 8


def sleeps(pid):
    """Is the process blocked in a system call?"""
    with open(f"/proc/{pid}/syscall") as at:
        return at.read().split()[0] not in ("running", "-1")


def connected(port, pid):
    conn = socket.create_connection(("127.0.0.1", port))
    time.sleep(0.7)
    while not sleeps(pid):
        time.sleep(0.01)
    return conn


def move(port, pid):
    libc = ctypes.CDLL(None, use_errno=True)
    conn = connected(port, pid)
    own, other = words()
    moved = 0
    for word in own:
        value = ctypes.c_uint32.from_address(word).value
        args = [ctypes.c_ulong(n) for n in (word, CMP_REQUEUE, 0, 2**31 - 1, other, value)]
        moved += max(libc.syscall(FUTEX, *args), 0)
    print("moved", moved, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
    del conn


def tease(port, pid):
    libc = ctypes.CDLL(None, use_errno=True)
    conn = connected(port, pid)
    own = [ctypes.c_uint32.from_address(word) for word in words()[0]]
    began, spent = time.monotonic(), time.process_time()
    while time.process_time() - spent < 1:
        for word in own:
            libc.syscall(FUTEX, ctypes.c_ulong(ctypes.addressof(word)), WAKE, 2**31 - 1, 0, 0, 0)
        for _ in range(1000):
            for word in own:
                word.value += 1
    print(f"seconds {time.monotonic() - began:.1f}", flush=True)
    conn.close()


{"serve": serve, "move": lambda port, pid: move(port, int(pid)), "tease": lambda port, pid: tease(port, int(pid))}[
    sys.argv[1]
](int(sys.argv[2]), sys.argv[3])
