"""listeners.py N: opens N listeners in turn, each for one connection and one byte. Prints "ok"."""
import socket
import sys

for _ in range(int(sys.argv[1])):
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.create_connection(listener.getsockname()) as client:
        server, _ = listener.accept()
        with server:
            client.sendall(b"a")
            assert server.recv(1) == b"a"
print("ok")
