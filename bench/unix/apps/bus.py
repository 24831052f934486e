"""Clients of dbus-daemon: bus.py SOCKET CALLS. Prints a digest of all that was answered.

A service and two clients are processes of their own. Each client makes CALLS calls over the bus, passes a pipe, into
which the service writes, and makes as many calls again. The program implements only the part of D-Bus that it needs.
"""

import hashlib
import os
import socket
import struct
import sys

CALL, RETURN, ERROR, SIGNAL = 1, 2, 3, 4
PATH, INTERFACE, MEMBER, ERROR_NAME, REPLY, DESTINATION, SENDER, SIGNATURE, FDS = range(1, 10)
BUS = "org.freedesktop.DBus"
TYPES = {PATH: "o", INTERFACE: "s", MEMBER: "s", ERROR_NAME: "s", REPLY: "u", DESTINATION: "s", SENDER: "s", SIGNATURE: "g", FDS: "u"}


def padded(data, to):
    return data + b"\0" * (-len(data) % to)


def text(value):
    value = value.encode()
    return struct.pack("<I", len(value)) + value + b"\0"


def value_of(kind, value):
    if kind == "g":
        return struct.pack("<B", len(value)) + value.encode() + b"\0"
    return struct.pack("<I", value) if kind == "u" else text(value)


class Connection:
    def __init__(self, path):
        self.socket = socket.socket(socket.AF_UNIX)
        self.socket.connect(path)
        self.rest, self.fds, self.serial = b"", [], 0
        self.socket.sendall(b"\0AUTH EXTERNAL " + str(os.getuid()).encode().hex().encode() + b"\r\n")
        self.expect(b"OK ")
        self.socket.sendall(b"NEGOTIATE_UNIX_FD\r\n")
        self.expect(b"AGREE_UNIX_FD")
        self.socket.sendall(b"BEGIN\r\n")
        self.name = self.call(BUS, "/org/freedesktop/DBus", BUS, "Hello")[1]

    def expect(self, word):
        line = b""
        while not line.endswith(b"\r\n"):
            line += self.socket.recv(1)
        assert line.startswith(word), line

    def send(self, kind, fields, body=b"", fds=()):
        self.serial += 1
        entries = b""
        for code, value in fields.items():
            entries = padded(entries, 8) + struct.pack("<B", code) + value_of("g", TYPES[code])
            entries = padded(entries, 4 if TYPES[code] != "g" else 1) + value_of(TYPES[code], value)
        head = struct.pack("<cBBBIII", b"l", kind, 0, 1, len(body), self.serial, len(entries))
        message = padded(head + entries, 8) + body
        if fds:
            socket.send_fds(self.socket, [message[:10]], fds)
            message = message[10:]
        self.socket.sendall(message)
        return self.serial

    def more(self, n):
        while len(self.rest) < n:
            data, fds, _, _ = socket.recv_fds(self.socket, 65536, 16)
            assert data, "the bus has closed the connection"
            self.rest += data
            self.fds += fds

    def receive(self):
        """Kind, fields and body of a message."""
        self.more(16)
        _, kind, _, _, length, serial, entries = struct.unpack_from("<cBBBIII", self.rest)
        end = 16 + entries + -entries % 8
        self.more(end + length)
        message, self.rest = self.rest[: end + length], self.rest[end + length :]
        fields, at = {"serial": serial}, 16
        while at < 16 + entries:
            at += -at % 8
            code, n = message[at], message[at + 1]
            t = chr(message[at + 2])
            at += 2 + n + 1
            if t == "g":
                fields[code] = message[at + 1 : at + 1 + message[at]].decode()
                at += 2 + message[at]
            else:
                at += -at % 4
                number = struct.unpack_from("<I", message, at)[0]
                fields[code] = number if t == "u" else message[at + 4 : at + 4 + number].decode()
                at += 4 if t == "u" else 5 + number
        return kind, fields, message[end:]

    def call(self, to, path, interface, member, signature="", body=b"", fds=()):
        fields = {PATH: path, DESTINATION: to, INTERFACE: interface, MEMBER: member}
        fields |= {SIGNATURE: signature} if signature else {}
        fields |= {FDS: len(fds)} if fds else {}
        serial = self.send(CALL, fields, body, fds)
        while True:
            kind, fields, body = self.receive()
            if fields.get(REPLY) == serial:
                said = body[4:-1].decode() if fields.get(SIGNATURE) == "s" else body
                return kind, said


def service(path, ready):
    c = Connection(path)
    c.call(BUS, "/org/freedesktop/DBus", BUS, "RequestName", "su", padded(text("test.Echo"), 4) + struct.pack("<I", 0))
    os.write(ready, b"1")
    ended = 0
    while ended < 2:
        kind, fields, body = c.receive()
        if kind != CALL:
            continue
        word = body[4:-1].decode() if fields.get(SIGNATURE) == "s" else ""
        if fields.get(FDS):
            fd = c.fds.pop(0)
            os.write(fd, b"into the pipe")
            os.close(fd)
        ended += fields[MEMBER] == "End"
        c.send(RETURN, {REPLY: fields["serial"], DESTINATION: fields[SENDER], SIGNATURE: "s"}, text(f"{fields[MEMBER]} {word[::-1]}"))


def client(path, calls, tell):
    c = Connection(path)
    said = hashlib.sha256()
    call = lambda *more: said.update(repr(c.call("test.Echo", "/", "test.Echo", *more)).encode())  # noqa: E731
    for turn in range(2):
        for i in range(calls):
            call("Echo", "s", text(f"{i} " * (i % 200)))
        call("Echo", "s", text("long " * 50000))
        for _ in range(3):
            r, w = os.pipe()
            call("Take", "h", struct.pack("<I", 0), [w])
            os.close(w)
            with os.fdopen(r, "rb") as f:
                said.update(f.read())
    call("End")
    os.write(tell, said.hexdigest().encode())


def main():
    path, calls = sys.argv[1], int(sys.argv[2])
    r, w = os.pipe()
    pids = []

    def child(function, *args):
        pid = os.fork()
        if pid == 0:
            function(path, *args)
            os._exit(0)
        pids.append(pid)

    child(service, w)
    assert os.read(r, 1) == b"1"
    child(client, calls, w)
    child(client, calls, w)
    status = [os.waitpid(pid, 0)[1] for pid in pids]
    os.close(w)
    digests = os.read(r, 1000)
    assert status == [0, 0, 0] and digests[:64] == digests[64:], (status, digests)
    print(digests[:64].decode())


if __name__ == "__main__":
    main()
