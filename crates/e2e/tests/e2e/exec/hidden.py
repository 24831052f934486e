"""Starts programs where the file of the library cannot be opened: in another root, under another
mount, as another user. Prints their output, also on standard error; it must be the same on stock
sockets. Needs root.

usage: hidden.py
"""

import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile


def make_root():
    root = tempfile.mkdtemp()
    env = {"PATH": os.environ["PATH"]}  # Without this, ldd would also list the library.
    for program in ["/bin/cat", "/bin/sh"]:
        listed = subprocess.run(["ldd", program], env=env, stdout=subprocess.PIPE, text=True, check=True).stdout
        for path in [program, *re.findall(r"(/\S+) \(", listed)]:
            os.makedirs(root + os.path.dirname(path), exist_ok=True)
            shutil.copy(path, root + path)
    with open(root + "/f", "w") as f:
        f.write("in the other root\n")
    return root


def say(what, **how):
    r = subprocess.run(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, timeout=60, **how)
    print(what, r.returncode, repr(r.stdout), repr(r.stderr), flush=True)


def forked(what, f):
    """Runs `f` in a child, and shows the child's output."""
    rx, tx = os.pipe()
    child = os.fork()
    if child == 0:
        os.dup2(tx, 1)
        os.dup2(tx, 2)
        try:
            f()
        finally:
            os._exit(9)
    os.close(tx)
    with os.fdopen(rx) as out:
        print(what, repr(out.read()), os.waitpid(child, 0)[1], flush=True)


def library_directory():
    words = os.environ.get("LD_PRELOAD", "").replace(":", " ").split()
    ours = [w for w in words if w.endswith("/libfsocket.so")]
    return os.path.dirname(ours[0]) if ours else tempfile.mkdtemp()


def in_root(root):
    os.chroot(root)
    os.chdir("/")


def every_start(root, when):
    say(when + " shell", args=["sh", "-c", "chroot '%s' /bin/cat /f" % root])
    say(when + " child", args=["/bin/cat", "/f"], preexec_fn=lambda: in_root(root))
    env = dict(os.environ, MARK="kept")
    say(when + " environment", args=["/bin/sh", "-c", "echo $MARK"], preexec_fn=lambda: in_root(root), env=env)
    # This file does not exist, so the loader must complain of it (but not of the library).
    bare = {"LD_PRELOAD": (os.environ.get("LD_PRELOAD", "") + " /no/such.so").strip()}
    say(when + " another entry", args=["/bin/cat", "/f"], preexec_fn=lambda: in_root(root), env=bare)

    def spawned():
        in_root(root)
        pid = os.posix_spawn("/bin/cat", ["cat", "/f"], dict(os.environ))
        os._exit(os.waitpid(pid, 0)[1])

    def by_descriptor():
        program = os.open(root + "/bin/cat", os.O_RDONLY)
        in_root(root)
        os.execve(program, ["cat", "/f"], dict(os.environ))

    forked(when + " posix_spawn", spawned)
    forked(when + " fexecve", by_descriptor)
    mount = "mount -t tmpfs none '%s' && /bin/echo hidden && echo `/bin/echo twice`" % library_directory()
    say(when + " mount", args=["unshare", "-m", "sh", "-c", mount])


def pair():
    l = socket.socket()
    l.bind(("127.0.0.1", 0))
    l.listen()
    c = socket.create_connection(l.getsockname())
    s, _ = l.accept()
    l.close()
    c.sendall(b"x")
    s.recv(1)
    return c, s


def main():
    root = make_root()
    every_start(root, "asleep")
    c, s = pair()
    every_start(root, "awake")
    # The standard input of the program in the other root is a connection.
    c.sendall(b"bytes of a connection\n")
    c.shutdown(socket.SHUT_WR)
    say("inherited", args=["/bin/cat"], preexec_fn=lambda: in_root(root), stdin=s)
    shutil.rmtree(root)
    print("ok")


if __name__ == "__main__":
    sys.exit(main())
