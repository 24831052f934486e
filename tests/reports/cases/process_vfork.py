"""
report: subprocesses of a program with a large heap take 200 ms instead of 1: vfork has become fork
kind: processes of bystanders
stock: page tables copied: False
path: shm
"""
import resource
import socket
import subprocess

heap = bytearray(256 << 20)
for page in range(0, len(heap), 4096):
    heap[page] = 1


def faults_of_a_start():
    """Pages that the program has to copy again after it has started a child (fork makes all of them read-only)."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(4):
        subprocess.run(["/bin/true"], check=True)
        for page in range(0, len(heap), 4096 * 64):
            heap[page] = 2
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


listener = socket.socket()
listener.bind(("127.0.0.1", 0))
listener.listen()
client = socket.create_connection(listener.getsockname())
server, _ = listener.accept()
client.send(b"a")
server.recv(1)
print("page tables copied:", faults_of_a_start() > 2000)
client.send(b"b")
print("still connected:", server.recv(1))
