"""A service that gets its socket as descriptor 3, and answers each request with the file `page`. On SIGTERM it serves
the connections that it has accepted, and exits without closing the socket."""

import pathlib
import selectors
import signal
import socket

listener = socket.socket(fileno=3)
listener.setblocking(False)
page = pathlib.Path("page").read_bytes()
answer = b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: %d\r\n\r\n%s" % (len(page), page)
ending = []
signal.signal(signal.SIGTERM, lambda *_: ending.append(True))
ready = selectors.DefaultSelector()
ready.register(listener, selectors.EVENT_READ)
asked = {}
while not ending or asked:
    if ending and listener.fileno() in ready.get_map():
        ready.unregister(listener)
    for key, _ in ready.select(0.1):
        c = key.fileobj
        if c is listener:
            try:
                c, _ = listener.accept()
            except BlockingIOError:
                continue
            ready.register(c, selectors.EVENT_READ)
            asked[c] = b""
            continue
        asked[c] += (more := c.recv(65536))
        if not more or asked[c].endswith(b"\r\n\r\n"):
            if more:
                c.setblocking(True)
                c.sendall(answer)
            ready.unregister(c)
            c.close()
            del asked[c]
