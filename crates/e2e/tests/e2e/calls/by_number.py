"""Makes system calls by number (`syscall`) that take descriptors: messages that carry a
connection, epoll_ctl, io_submit. Also makes every call of the kernel's list with the number of a
descriptor that was just closed. The output must be the same on stock sockets."""

import array
import ctypes
import errno
import fcntl
import glob
import os
import re
import select
import socket
import struct
import tempfile

libc = ctypes.CDLL(None, use_errno=True)
SENDMSG, RECVMSG, SENDMMSG, RECVMMSG, EPOLL_CTL, TEE = 46, 47, 307, 299, 233, 276
IO_SETUP, IO_GETEVENTS, IO_SUBMIT, FSTAT, FCHMOD, SHUTDOWN = 206, 208, 209, 5, 91, 48
MSG_FASTOPEN, SO_COOKIE, F_DUPFD = 0x20000000, 57, 0
listener = socket.socket()
listener.bind(("127.0.0.1", 0))
listener.listen(64)


def syscall(number, *arguments):
    ctypes.set_errno(0)
    r = libc.syscall(ctypes.c_long(number), *[ctypes.c_long(a) if isinstance(a, int) else a for a in arguments])
    return r if r >= 0 else errno.errorcode[ctypes.get_errno()]


def pair():
    client = socket.create_connection(listener.getsockname())
    return client, listener.accept()[0]


class Message(ctypes.Structure):
    _fields_ = [
        ("name", ctypes.c_void_p), ("namelen", ctypes.c_uint), ("iov", ctypes.c_void_p), ("iovlen", ctypes.c_size_t),
        ("control", ctypes.c_void_p), ("controllen", ctypes.c_size_t), ("flags", ctypes.c_int), ("len", ctypes.c_uint),
    ]


def message(data, control):
    iov = (ctypes.c_size_t * 2)(ctypes.addressof(data), len(data))
    m = Message(None, 0, ctypes.addressof(iov), 1, ctypes.addressof(control), len(control), 0, 0)
    m.keep = (data, control, iov)
    return m


def passed(send, receive):
    """The number that a connection has after a message by number has carried it."""
    left, right = socket.socketpair()
    client, server = pair()
    rights = struct.pack("Niiixxxx", 20, socket.SOL_SOCKET, socket.SCM_RIGHTS, client.fileno())
    there = message(ctypes.create_string_buffer(b"m", 1), ctypes.create_string_buffer(rights, 24))
    here = message(ctypes.create_string_buffer(1), ctypes.create_string_buffer(24))
    print("sent", send(left.fileno(), there), "received", receive(right.fileno(), here))
    (number,) = struct.unpack_from("i", here.keep[1].raw, 16)
    client.close()
    got = socket.socket(fileno=number)
    got.sendall(b"over there")
    server.settimeout(20)
    print("the server has", server.recv(99))
    server.sendall(b"and back")
    print("the receiver has", got.recv(99))


# The memory after the message header has room for the count that sendmmsg writes there.
passed(lambda fd, m: syscall(SENDMSG, fd, ctypes.byref(m), 0), lambda fd, m: syscall(RECVMSG, fd, ctypes.byref(m), 0))
passed(
    lambda fd, m: syscall(SENDMMSG, fd, ctypes.byref(m), 1, 0), lambda fd, m: syscall(RECVMMSG, fd, ctypes.byref(m), 1, 0, None)
)

client, server = pair()
poller = select.epoll()
event = struct.pack("=IQ", select.EPOLLIN, 77)
print("add", syscall(EPOLL_CTL, poller.fileno(), 1, server.fileno(), event), poller.poll(0))
client.send(b"x")
print("ready", poller.poll(20))
print("delete", syscall(EPOLL_CTL, poller.fileno(), 2, server.fileno(), None), poller.poll(0))

context, block = ctypes.c_ulong(0), ctypes.create_string_buffer(64)
print("io_setup", syscall(IO_SETUP, 4, ctypes.byref(context)))
data = ctypes.create_string_buffer(9)
struct.pack_into("QIIHhIQQq", block, 0, 5, 0, 0, 0, 0, server.fileno(), ctypes.addressof(data), 9, 0)
pointers = (ctypes.c_void_p * 1)(ctypes.addressof(block))
print("io_submit", syscall(IO_SUBMIT, context.value, 1, pointers))
done = ctypes.create_string_buffer(32)
print("io_getevents", syscall(IO_GETEVENTS, context.value, 1, 1, done, None), struct.unpack("QQqq", done.raw)[2:], data.raw)

client, server = pair()
reader, writer = os.pipe()
print("tee", syscall(TEE, server.fileno(), writer, 1, 0))

# Inode and cookie identify a socket, so a new socket must not show those of an older one.
for look in (lambda s: os.fstat(s.fileno()).st_ino, lambda s: s.getsockopt(socket.SOL_SOCKET, SO_COOKIE, 8)):
    seen = set()
    for _ in range(20):
        client, server = pair()
        seen |= {look(client), look(server)}
        client.close()
        server.close()
    print(len(seen), "sockets")


def inode(fd):
    there = ctypes.create_string_buffer(144)
    return struct.unpack_from("Q", there.raw, 8)[0] if syscall(FSTAT, fd, there) == 0 else None


seen = set()
for _ in range(20):
    client, server = pair()
    seen |= {inode(client.fileno()), inode(server.fileno())}
    client.close()
    server.close()
print(len(seen), "sockets by number")

# Flags that the kernel stores, and flags that it refuses.
client, server = pair()
for flags in (os.O_APPEND, os.O_APPEND | os.O_NONBLOCK, os.O_NONBLOCK, 0, os.O_DIRECT, os.O_NOATIME):
    try:
        fcntl.fcntl(client, fcntl.F_SETFL, flags)
    except OSError as error:
        print("refused", error.errno)
    print(f"flags {flags:x}: {fcntl.fcntl(client, fcntl.F_GETFL):x}")

# Open a connection by TCP Fast Open.
client, server = pair()
peer = struct.pack("=HH4s8x", socket.AF_INET, 0, socket.inet_aton("127.0.0.1"))
nowhere = bytes(16)
for name, length in ((peer, 16), (nowhere, 16), (nowhere, 2), (nowhere, 1), (nowhere, 0), (peer, 1), (peer, 8), (None, 0)):
    ctypes.set_errno(0)
    r = libc.sendto(client.fileno(), b"x", 1, MSG_FASTOPEN, name, length)
    print("fast open", name, length, r if r >= 0 else errno.errorcode[ctypes.get_errno()])


def closed():
    """Returns a number that belonged to a connection a moment ago."""
    client, server = pair()
    number = client.fileno()
    client.close()
    server.close()
    return number


ctypes.set_errno(0)
print("fchmod", libc.fchmod(closed(), 0o600), errno.errorcode[ctypes.get_errno()])
ctypes.set_errno(0)
print("fchown", libc.fchown(closed(), 0, 0), errno.errorcode[ctypes.get_errno()])

# All system calls that have an argument with the name of a descriptor.
NAMES = "fd dfd fildes oldfd newfd epfd fd_in fd_out in_fd out_fd olddfd newdfd fdin fdout ufd pidfd ruleset_fd fs_fd from_dfd to_dfd mountdirfd fanotify_fd group_fd".split()
# Left out: calls that change this process or need something else, and those whose second number
# may be closed.
LEFT_OUT = {"close", "close_range", "setns", "landlock_restrict_self", "execveat"}


def list_of_the_kernel():
    with tempfile.TemporaryDirectory() as there:
        if libc.mount(b"t", there.encode(), b"tracefs", 0, None) != 0:
            return {}
        calls = {}
        for path in glob.glob(f"{there}/events/syscalls/sys_enter_*/format"):
            fields = re.findall(r"field:([^;]*);", open(path).read())[5:]
            taken = [i for i, f in enumerate(fields) if "*" not in f and f.split()[-1] in NAMES]
            calls[path.split("sys_enter_")[1].split("/")[0]] = taken
        libc.umount2(there.encode(), 2)
        return calls


numbers = {"newfstat": 5, "sendfile64": 40}
for line in open("/usr/include/x86_64-linux-gnu/asm/unistd_64.h"):
    if match := re.match(r"#define __NR_(\w+)\s+(\d+)", line):
        numbers[match[1]] = int(match[2])
calls = list_of_the_kernel() if os.path.exists("/sys/kernel/tracing") else {}
print(len(calls), "calls")
for call, taken in sorted(calls.items()):
    if call in LEFT_OUT or call not in numbers:
        continue
    for i in taken:
        if (call, i) in (("dup2", 1), ("dup3", 1), ("pidfd_getfd", 1)):
            continue
        arguments = [0] * 6
        arguments[i] = closed()
        print(call, i, syscall(numbers[call], *arguments))
print("ok")
