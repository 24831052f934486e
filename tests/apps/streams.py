"""Helpers of these programs for streams."""


def exactly(sock, n):
    """Reads `n` bytes. Raises EOFError if the stream ends before."""
    got = b""
    while len(got) < n:
        part = sock.recv(n - len(got))
        if not part:
            raise EOFError(f"the end after {len(got)} of {n} bytes")
        got += part
    return got


def trip(sock, message):
    """Sends a message to an echo server and compares the answer."""
    sock.sendall(message)
    if exactly(sock, len(message)) != message:
        raise SystemExit("bytes differ")
