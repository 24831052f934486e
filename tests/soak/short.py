#!/usr/bin/env python3
"""Short programs under the library, none of which may hang.

    tests/soak/short.py LIBRARY MONITOR [N] [SECONDS] [BUSY]

N programs (300), two at a time: shell loops of pipelines, subshells, background jobs and signals in each installed
shell, and parents that fork children with a connection each. A program that takes longer than SECONDS (10) hangs: the
stacks of all its processes are written (by gdb, otherwise what /proc shows), and the exit status is 1. BUSY (0)
processes that only compute run at the same time. LIBRARY may be "-" (stock).
"""

import os
import pathlib
import shutil
import signal
import subprocess
import sys
import tempfile
import time

LOOPS = [
    "for i in 1 2 3; do ls / | sort > /dev/null; done; sleep 0.01",
    # Subshells, substitutions, and a pipeline whose reader ends first.
    "x=$(ls / | (sort; echo end) | tail -1); [ $x = end ] || exit 1; yes | head -2 > /dev/null",
    # Background jobs, and waiting for them.
    "for i in 1 2 3; do (sleep 0.00$i; ls / > /dev/null) & done; wait; (exit 3) & wait $!; [ $? = 3 ]",
    # Signals: one that the shell catches while it waits, and one that ends a job.
    "exec 2> /dev/null; trap 'n=1' USR1; (sleep 0.01; kill -USR1 $$) & wait $!; wait; sleep 5 & kill $!; wait $!; [ $? = 143 ] && [ $n = 1 ]",
    # An exec at the end, and a here-document.
    "cat << X | sort | exec cat > /dev/null\nb\na\nX\nexec ls / > /dev/null",
    "i=0; while [ $i -lt 10 ]; do i=$((i + 1)); /bin/true; done",
]
SHELLS = [shell for shell in ("dash", "bash", "zsh", "mksh") if shutil.which(shell)]
FORKS = """
import os, socket
s = socket.create_server(("127.0.0.1", 0))
for _ in range(4):
    if os.fork() == 0:
        c = socket.create_connection(s.getsockname())
        c.sendall(b"x" * 10)
        os._exit(0)
    a, _ = s.accept()
    assert a.recv(10, socket.MSG_WAITALL) == b"x" * 10
    os.wait()
"""
PROGRAMS = [[shell, "-c", loop] for loop in LOOPS for shell in SHELLS]
PROGRAMS += [[sys.executable, "-S", "-c", FORKS]] * 3


def processes(group):
    """All processes of a group."""
    for stat in pathlib.Path("/proc").glob("[0-9]*/stat"):
        try:
            if int(stat.read_text().rpartition(")")[2].split()[2]) == group:
                yield int(stat.parent.name)
        except OSError:
            pass


def stacks(pid):
    print(f"--- {pid}", pathlib.Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(), flush=True)
    if shutil.which("gdb"):
        command = ["gdb", "-p", str(pid), "-batch", "-ex", "thread apply all bt"]
        subprocess.run(command, timeout=60, stdout=sys.stdout, stderr=subprocess.DEVNULL)
        return
    for task in pathlib.Path(f"/proc/{pid}/task").iterdir():
        print(task.name, (task / "wchan").read_text(), (task / "syscall").read_text())


def main():
    monitor = os.path.abspath(sys.argv[2])
    count, limit, busy = (int((sys.argv[3:] + ["300", "10", "0"][len(sys.argv) - 3 :])[i]) for i in range(3))
    directory = tempfile.mkdtemp()
    env = dict(os.environ, FASTSOCKET_SOCKET=f"{directory}/monitor")
    if sys.argv[1] != "-":
        env["LD_PRELOAD"] = os.path.abspath(sys.argv[1])
    beside = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(busy)]
    served = subprocess.Popen([monitor, "--private", "--socket", env["FASTSOCKET_SOCKET"]])
    running, started, slowest, wrong = [], 0, 0.0, 0
    try:
        while not os.path.exists(env["FASTSOCKET_SOCKET"]):
            time.sleep(0.01)
        while started < count or running:
            while started < count and len(running) < 2:
                program = subprocess.Popen(PROGRAMS[started % len(PROGRAMS)], env=env, start_new_session=True)
                running.append((program, time.monotonic()))
                started += 1
            for one in list(running):
                program, since = one
                took = time.monotonic() - since
                if program.poll() is None and took < limit:
                    continue
                running.remove(one)
                slowest = max(slowest, took)
                if program.returncode is None:
                    print(f"hangs: {program.args}")
                    for pid in list(processes(program.pid)):
                        stacks(pid)
                    os.killpg(program.pid, signal.SIGKILL)
                    program.wait()
                if program.returncode != 0:
                    wrong += 1
                    print(f"status {program.returncode}: {program.args}", flush=True)
            time.sleep(0.002)
    finally:
        for one in beside:
            one.kill()
            one.wait()
        for program, _ in running:
            os.killpg(program.pid, signal.SIGKILL)
        served.terminate()
        served.wait()
        shutil.rmtree(directory)
    print(f"{started} programs, {wrong} wrong, the slowest took {slowest:.2f} s")
    return 1 if wrong else 0


sys.exit(main())
