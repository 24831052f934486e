#!/usr/bin/python3
"""Clients that send known bytes to an echo server and compare what returns.

echo_client.py KIND PORT [--host H] [--connections N] [--bytes B] [--seed S]
KIND: blocking (a thread per connection, half-close at the end), asyncio,
seq (one connection after the other, one message each).
Prints "ok CONNECTIONS BYTES SHA256" and exits with zero, or says what differed.
"""
import argparse
import asyncio
import hashlib
import random
import socket
import sys
import threading


def payload(seed, size):
    return random.Random(seed).randbytes(size)


def pieces(seed, data):
    """The same data in sends of very different sizes."""
    rng = random.Random(seed)
    pos = 0
    while pos < len(data):
        size = rng.choice((1, 7, 100, 1000, 4096, 16384, 65536, 300000))
        yield data[pos : pos + size]
        pos += size


def compare(what, sent, got):
    if sent != got:
        at = next((i for i, (a, b) in enumerate(zip(sent, got)) if a != b), min(len(sent), len(got)))
        raise SystemExit(f"{what}: sent {len(sent)} bytes, got {len(got)}, first difference at {at}")


def blocking(host, port, seed, data):
    with socket.create_connection((host, port), timeout=30) as sock:
        got = bytearray()

        def receive():
            while part := sock.recv(50000):
                got.extend(part)

        receiver = threading.Thread(target=receive)
        receiver.start()
        for piece in pieces(seed, data):
            sock.sendall(piece)
        sock.shutdown(socket.SHUT_WR)
        receiver.join(60)
        return bytes(got)


def run_blocking(args, datas):
    results = {}

    def one(i):
        try:
            results[i] = blocking(args.host, args.port, args.seed + i, datas[i])
        except OSError as error:
            results[i] = error

    threads = [threading.Thread(target=one, args=(i,)) for i in range(args.connections)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(90)
    return [results.get(i) for i in range(args.connections)]


def run_asyncio(args, datas):
    async def one(i):
        reader, writer = await asyncio.open_connection(args.host, args.port)

        async def send():
            for piece in pieces(args.seed + i, datas[i]):
                writer.write(piece)
                await writer.drain()
            writer.write_eof()

        sender = asyncio.ensure_future(send())
        got = await reader.read()
        await sender
        writer.close()
        await writer.wait_closed()
        return got

    async def main():
        return await asyncio.wait_for(asyncio.gather(*(one(i) for i in range(args.connections))), 90)

    return asyncio.run(main())


def run_seq(args, datas):
    results = []
    for i in range(args.connections):
        with socket.create_connection((args.host, args.port), timeout=30) as sock:
            sock.sendall(datas[i])
            sock.shutdown(socket.SHUT_WR)
            got = bytearray()
            while part := sock.recv(65536):
                got += part
            results.append(bytes(got))
    return results


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("kind", choices=("blocking", "asyncio", "seq"))
    parser.add_argument("port", type=int)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--connections", type=int, default=8)
    parser.add_argument("--bytes", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    datas = [payload(args.seed * 1000 + i, args.bytes) for i in range(args.connections)]
    results = globals()[f"run_{args.kind}"](args, datas)
    digest = hashlib.sha256()
    for i, (data, got) in enumerate(zip(datas, results)):
        if not isinstance(got, bytes):
            raise SystemExit(f"connection {i}: {got!r}")
        compare(f"connection {i}", data, got)
        digest.update(got)
    print("ok", args.connections, args.bytes, digest.hexdigest())
    sys.exit(0)


main()
