"""A connection whose accepting side is closed ends at that moment: here, with a byte unread, by a
reset. It begins in the kernel (its client is bound in a way that is the kernel's alone), and its
second end has just been offered to go over."""

import select
import socket

ROUNDS = 300

s = socket.socket()
s.bind(("127.0.0.1", 0))
s.listen(8)
late = 0
for _ in range(ROUNDS):
    c = socket.socket()
    c.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    c.bind(("127.0.0.1", 0))
    c.connect(s.getsockname())
    a, _ = s.accept()
    c.send(b"unread")
    a.send(b"x")
    a.close()
    p = select.poll()
    p.register(c, select.POLLIN)
    events = dict(p.poll(0)).get(c.fileno(), 0)
    late += not events & select.POLLHUP
    c.close()
print("late", late)
print("ok")
