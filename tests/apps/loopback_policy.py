#!/usr/bin/python3
"""Policies at the loopback device: if the kernel refuses a connection there, the library must refuse it, too.

loopback_policy.py PORT prints a line for each kind of policy, "KIND plain [...] meant [...] plain OUTCOME", and then
"end". It runs in a network namespace of its own.
"""
import errno
import os
import pathlib
import signal
import socket
import subprocess
import sys
import time

PORT = int(sys.argv[1])
STOCK = {k: v for k, v in os.environ.items() if k != "LD_PRELOAD"}
HERE = pathlib.Path(__file__).parent
V4, V6 = "127.0.0.1", "::1"
RULES = "ip rule add pref 100 lookup local; ip rule del pref 0; "
#: Name, address, command that makes the policy, command that removes it (None: a BPF program).
#: If the policy drops packets, `connect` times out.
KINDS = [
    ("xfrm block", V6, f"ip xfrm policy add dir out dst ::1 proto tcp dport {PORT} action block", "ip xfrm policy flush"),
    ("xfrm block, from outside", V4, f"ip xfrm policy add dir in dst 127.0.0.1 proto tcp dport {PORT} action block",
     "ip xfrm policy flush"),
    ("down", V6, "ip link set lo down", "ip link set lo up"),
    ("tc drop", V4, f"tc qdisc add dev lo clsact; tc filter add dev lo egress protocol ip matchall action drop",
     "tc qdisc del dev lo clsact"),
    ("rule", V4, RULES + f"ip rule add pref 50 ipproto tcp dport {PORT} prohibit", "ip rule del pref 50"),
    ("rule for a user", V4, "ip rule add pref 50 uidrange 0-0 prohibit", "ip rule del pref 50"),
    ("xdp drop", V4, "xdp-drop", None),
]


def attempt(host, seconds=0.5):
    try:
        with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as s:
            s.settimeout(seconds)
            s.connect((host, PORT))
            s.sendall(b"hello")
            return "ok" if s.recv(64) == b"hello" else "other bytes"
    except TimeoutError:
        return "timeout"
    except OSError as e:
        return errno.errorcode.get(e.errno, str(e))


def allowed(host):
    """Retries until an attempt succeeds. After a policy, the monitor may demand the kernel's proof for two seconds."""
    end = time.monotonic() + 30
    while (said := attempt(host, 5)) != "ok" and time.monotonic() < end:
        time.sleep(0.05)
    return said


def shell(script):
    return subprocess.run(["sh", "-ec", script], env=STOCK, stderr=subprocess.DEVNULL).returncode == 0


server = subprocess.Popen([sys.executable, str(HERE / "echo_server.py"), "threaded", str(PORT), "::"],
                          stdout=subprocess.DEVNULL)
assert allowed(V4) == "ok"
for name, host, policy, undo in KINDS:
    plain = [allowed(host) for _ in range(4)]
    program = None
    if undo is None:
        program = subprocess.Popen([sys.executable, str(HERE / "bpf_policy.py"), policy, str(PORT)], env=STOCK,
                                   stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        is_there = program.stdout.readline().strip() == "attached"
    else:
        is_there = shell(policy)
    # The kernel announces most policies, but not BPF programs. After one of these, an earlier
    # answer of the monitor remains valid for two seconds.
    time.sleep(2.5 if program else 0.3)
    meant = [attempt(host) for _ in range(3)] if is_there else ["no such policy here"]
    if program:
        program.send_signal(signal.SIGKILL)
        program.wait()
    elif is_there:
        assert shell(undo), undo
    print(name, "plain", plain, "meant", meant, "plain", allowed(host), flush=True)
server.kill()
print("end")
