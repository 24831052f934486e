"""What programs here do with a stream."""


def exactly(sock, n):
    """`n` bytes; EOFError where the stream ends before."""
    got = b""
    while len(got) < n:
        part = sock.recv(n - len(got))
        if not part:
            raise EOFError(f"the end after {len(got)} of {n} bytes")
        got += part
    return got


def trip(sock, message):
    """A message to an echo server and back."""
    sock.sendall(message)
    if exactly(sock, len(message)) != message:
        raise SystemExit("bytes differ")
