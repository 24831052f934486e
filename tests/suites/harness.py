"""Runs one command stock or under the library, in a network and process
namespace of its own, and reads the counters of its own monitor afterwards.

run.py calls it, and it calls itself again as process 1 of the new namespaces.
"""

import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import time

ROOT = pathlib.Path(__file__).resolve().parents[2]
BIN = ROOT / "target" / "release"
TOOLS = {"cli": "fastsocket", "monitor": "fastsocketd", "library": "libfsocket.so"}

# Routes for all addresses, so that a transparent proxy of the machine does not make connections
# succeed that must fail.
NETWORK = """
set -e
ip link set lo up
ip link add d0 type ifb 2>/dev/null || ip link add d0 type dummy
ip address add 192.0.2.2/24 dev d0
ip -6 address add fd00::2/64 dev d0 nodad
ip link set d0 up
ip route add default dev d0
ip -6 route add default dev d0
exec "$@"
"""


def snapshot(where):
    """Copies the binaries under test, so that a build in the meantime changes nothing."""
    where.mkdir(parents=True)
    for name in TOOLS.values():
        if not (BIN / name).exists():
            raise SystemExit(f"suites: {BIN / name} is missing: run `make build` first")
        shutil.copy2(BIN / name, where / name)
    os.environ["SUITES_BIN"] = str(where)


def tool(name):
    return str(pathlib.Path(os.environ["SUITES_BIN"]) / TOOLS[name])


def plain_env(extra=None):
    """The caller's environment without the variables that load or configure the library."""
    env = {k: v for k, v in os.environ.items() if not k.startswith("FASTSOCKET_") and k != "LD_PRELOAD"}
    env.update(extra or {})
    return env


def run(argv, side, out, *, cwd=None, env=None, timeout=900, user=None):
    """`side`: "stock" or "ours". Writes out/log and, for ours, out/stat.json.
    Returns (exit status or None after a timeout, seconds, counters)."""
    out = pathlib.Path(out)
    out.mkdir(parents=True, exist_ok=True)
    for name in ("stat.json", "result.json"):
        (out / name).unlink(missing_ok=True)
    spec = {
        "argv": [str(a) for a in argv],
        "side": side,
        "out": str(out),
        "cwd": str(cwd or out),
        "env": {k: str(v) for k, v in (env or {}).items()},
        "timeout": timeout,
        "user": user,
    }
    began = time.monotonic()
    command = ["unshare", "--net", "--pid", "--fork", "--kill-child", "--mount-proc", "bash", "-c", NETWORK, "network"]
    command += [sys.executable, str(pathlib.Path(__file__).resolve()), json.dumps(spec)]
    with open(out / "log", "wb") as log:
        child = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, env=plain_env(), start_new_session=True
        )
        try:
            child.wait(timeout + 60)
        except subprocess.TimeoutExpired:
            pass
        finally:
            if child.poll() is None:
                os.killpg(child.pid, signal.SIGKILL)
                child.wait()
    seconds = time.monotonic() - began
    try:
        result = json.loads((out / "result.json").read_text())
    except (OSError, ValueError):
        tail = (out / "log").read_text(errors="replace")[-2000:]
        raise RuntimeError(f"the namespaces for {argv[0]} could not be made, or died:\n{tail}") from None
    counters = None
    if side == "ours":
        counters = json.loads((out / "stat.json").read_text())["totals"]
    return result["status"], seconds, counters


def start_monitor(directory):
    directory.mkdir(mode=0o700, exist_ok=True)
    path = directory / "monitor.sock"
    path.unlink(missing_ok=True)
    log = open(directory / "monitor.log", "wb")
    argv = [tool("monitor"), "--private", "--linger", "100000", "--socket", str(path)]
    monitor = subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
    for _ in range(1000):
        if path.exists():
            return path, monitor
        if monitor.poll() is not None:
            break
        time.sleep(0.01)
    raise RuntimeError("the monitor did not start: " + (directory / "monitor.log").read_text(errors="replace"))


def inside(spec):
    """Process 1 of the namespaces. When it ends, all processes in them end."""
    out = pathlib.Path(spec["out"])
    env = plain_env(spec["env"])
    argv = spec["argv"]
    socket = None
    # The socket's path must be short, and every user of the suite must reach it.
    state = pathlib.Path(f"/tmp/fastsocket-suite-{os.urandom(4).hex()}")
    try:
        if spec["side"] == "ours":
            socket, _ = start_monitor(state)
            env["FASTSOCKET_SOCKET"] = str(socket)
            # `run` changes the command instead of the environment here, because a suite may make a
            # new environment.
            argv = [tool("cli"), "run", "--", *argv]
        child = subprocess.Popen(argv, cwd=spec["cwd"], env=env, stdin=subprocess.DEVNULL, start_new_session=True)
        status = reap(child.pid, time.monotonic() + spec["timeout"])
        if status is None:
            print(f"\nsuites: no end after {spec['timeout']} s: killed", flush=True)
            os.killpg(child.pid, signal.SIGKILL)
        if socket:
            text = subprocess.run(
                [tool("cli"), "stat", "--json"],
                env=plain_env({"FASTSOCKET_SOCKET": str(socket)}),
                stdout=subprocess.PIPE,
                timeout=30,
                check=True,
            ).stdout
            (out / "stat.json").write_bytes(text)
        (out / "result.json").write_text(json.dumps({"status": status}))
    finally:
        shutil.rmtree(state, ignore_errors=True)


def reap(main, deadline):
    """Returns the exit status of `main`, or None after the deadline. Reaps orphans of the suite meanwhile."""
    while time.monotonic() < deadline:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid == main:
            return os.waitstatus_to_exitcode(status)
        if pid == 0:
            time.sleep(0.05)
    return None


if __name__ == "__main__":
    inside(json.loads(sys.argv[1]))
