"""Tests which monitors a privileged program trusts. Without "nobody": a set-user-ID program that has the library by
/etc/ld.so.preload; does it contact the socket that its user names as the monitor? With "nobody": root of a user
namespace, with and without a mapping for nobody; does it contact a socket of nobody? Needs root, and changes /etc in
a mount namespace.

usage: unshare -m secure.py LIBRARY
       unshare -m secure.py nobody LIBRARY
       secure.py attack SOCKET PYTHON      as a user: starts PYTHON, which is set-user-ID
"""

import ctypes
import os
import shutil
import socket
import stat
import subprocess
import sys
import tempfile

USER = 65533
VICTIM = "import socket, os; socket.socket(); print('socket as', os.geteuid(), flush=True); os.read(0, 1)"


def heard(listener, given):
    """Has a message come to either socket of the user? Returns (to `given`, to `listener`)."""
    listener.settimeout(0.5)
    given.settimeout(0.5)
    try:
        greeted = bool(given.recv(4096))
    except TimeoutError:
        greeted = False
    try:
        listener.accept()
        return greeted, True
    except TimeoutError:
        return greeted, False


def attack(path, python):
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(path)
    listener.listen()
    left, own = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    nonce = 0x0123456789ABCDEF
    left.bind(b"\0fastsocket-next/" + nonce.to_bytes(8, sys.byteorder) + b"\0")
    os.set_inheritable(left.fileno(), True)
    for how in ["FASTSOCKET_SUCCESSOR=%d:%x" % (left.fileno(), nonce), "FASTSOCKET_SOCKET=" + path]:
        name, _, value = how.partition("=")
        env = {name: value, "PATH": os.environ["PATH"]}
        victim = subprocess.Popen([python, "-c", VICTIM], env=env, close_fds=False, text=True, stdin=subprocess.PIPE,
                                  stdout=subprocess.PIPE)
        print(name, victim.stdout.readline().strip(), *heard(listener, own), flush=True)
        victim.communicate("x")
    print("ok")


def as_root_of(users, args, env):
    """Starts a program in a new user namespace. The program ends when its standard input is closed."""
    ready, say_ready = os.pipe()
    mapped, say_mapped = os.pipe()
    stdin, end = os.pipe()
    child = os.fork()
    if child == 0:
        assert ctypes.CDLL(None).unshare(0x10000000) == 0
        os.write(say_ready, b"x")
        os.read(mapped, 1)
        os.dup2(stdin, 0)
        os.close(end)
        os.execve(args[0], args, env)
    os.read(ready, 1)
    with open("/proc/%d/uid_map" % child, "w") as f:
        f.write(users)
    os.write(say_mapped, b"x")
    return child, end


def nobody(library):
    place = tempfile.mkdtemp()
    os.chmod(place, 0o755)
    os.mkdir(place + "/nobody")
    os.chown(place + "/nobody", 65534, 65534)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    path = place + "/nobody/monitor"
    listener.bind(path)
    child = os.fork()
    if child == 0:
        # SO_PEERCRED of a listener gives the credentials of the process that called listen.
        os.setresuid(65534, 65534, 65534)
        listener.listen()
        os._exit(0)
    os.waitpid(child, 0)
    env = dict(os.environ, LD_PRELOAD=library, FASTSOCKET_SOCKET=path)
    for users, what in [("0 0 1\n65534 65534 1\n", "a number"), ("0 0 1\n", "none")]:
        victim, end = as_root_of(users, [sys.executable, "-c", VICTIM], env)
        listener.settimeout(1)
        try:
            print(what, bool(listener.accept()[0].recv(4096)), flush=True)
        except TimeoutError:
            print(what, False, flush=True)
        os.close(end)
        os.waitpid(victim, 0)
    print("ok")


def main(library):
    place = tempfile.mkdtemp()
    subprocess.run(["mount", "-t", "tmpfs", "none", place], check=True)
    shutil.copytree("/etc", place + "/etc", symlinks=True)
    python = place + "/python"
    shutil.copy(os.path.realpath(sys.executable), python)
    os.chmod(python, 0o4755 | stat.S_IRUSR)
    shutil.copy(library, place + "/libfsocket.so")
    with open(place + "/etc/ld.so.preload", "w") as f:
        f.write(place + "/libfsocket.so\n")
    for path in [place, place + "/libfsocket.so"]:
        os.chmod(path, 0o755)
    subprocess.run(["mount", "--bind", place + "/etc", "/etc"], check=True)
    os.mkdir(place + "/user")
    os.chown(place + "/user", USER, USER)
    script = place + "/secure.py"
    shutil.copy(__file__, script)
    return subprocess.run(["setpriv", "--reuid", str(USER), "--regid", str(USER), "--clear-groups", sys.executable, script,
                           "attack", place + "/user/monitor", python], check=False).returncode


if __name__ == "__main__":
    ways = {"attack": attack, "nobody": nobody}
    sys.exit(ways[sys.argv[1]](*sys.argv[2:]) if sys.argv[1] in ways else main(sys.argv[1]))
