"""
report: TCP_USER_TIMEOUT has no effect: a reader that never reads is waited for without end
kind: options that act
stock: ended: ETIMEDOUT
path: shm
run: poll before
run: send before
run: poll after
"""
import errno
import os
import select
import socket
import sys
import time

TCP_USER_TIMEOUT = 18
how, when = sys.argv[1:]
listener = socket.socket()
listener.bind(("127.0.0.1", 0))
listener.listen()
pid = os.fork()
if pid == 0:
    stuck, _ = listener.accept()
    time.sleep(100)
    os._exit(0)
client = socket.socket()
if when == "before":
    client.setsockopt(socket.IPPROTO_TCP, TCP_USER_TIMEOUT, 1500)
client.connect(listener.getsockname())
if when == "after":
    client.setsockopt(socket.IPPROTO_TCP, TCP_USER_TIMEOUT, 1500)
client.setblocking(how == "send")
poll = select.poll()
poll.register(client, select.POLLOUT)
end = time.monotonic() + 30
why = "nothing in 30 s"
while time.monotonic() < end:
    try:
        client.send(b"x" * 65536)
    except BlockingIOError:
        ready = poll.poll(500)
        if ready and ready[0][1] & select.POLLERR:
            why = errno.errorcode.get(client.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR))
            break
    except OSError as error:
        why = errno.errorcode[error.errno]
        break
print("ended:", why)
os.kill(pid, 9)
os.waitpid(pid, 0)
