"""The cost of a load: CPU time, context switches and system calls of all processes of a lab except its monitors."""

import os
import pathlib
import resource
import signal
import subprocess
import time

from lab import Wrong

TICK = os.sysconf("SC_CLK_TCK")


def processes(lab):
    """The processes in this namespace that do not belong to the lab itself."""
    monitors = {m.pid for m in (lab.monitor, lab.world) if m}
    pids = {int(e.name) for e in pathlib.Path("/proc").iterdir() if e.name.isdigit()} - {1, os.getpid()} - monitors
    return [pid for pid in sorted(pids) if parent(pid) not in {None} | monitors]


def parent(pid):
    """The process ID of the parent, or None if the process has ended."""
    try:
        state, number = pathlib.Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[:2]
    except OSError:
        return None
    return None if state == "Z" else int(number)


def of_process(pid):
    """CPU time in seconds (with that of ended children) and context switches. Both are 0 if the process has ended."""
    cpu = switches = 0
    try:
        place = pathlib.Path(f"/proc/{pid}")
        words = (place / "stat").read_text().rsplit(")", 1)[1].split()
        user, system, ended_user, ended_system = (int(w) / TICK for w in words[11:15])
        for task in (place / "task").iterdir():
            cpu += int((task / "schedstat").read_text().split()[0]) / 1e9
            lines = (task / "status").read_text().splitlines()
            switches += sum(int(line.split()[1]) for line in lines if "ctxt_switches" in line)
        # (The ticks include ended threads, but are coarse.)
        cpu = max(cpu, user + system) + ended_user + ended_system
    except OSError:
        pass
    return cpu, switches


def now(lab):
    """CPU time and context switches so far, including those of clients that have ended."""
    ended = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu, switches = ended.ru_utime + ended.ru_stime, ended.ru_nvcsw + ended.ru_nivcsw
    for pid in processes(lab):
        more_cpu, more_switches = of_process(pid)
        cpu, switches = cpu + more_cpu, switches + more_switches
    return cpu, switches


def calls_in(summary):
    """The number of system calls in the summary that `strace -c` has written."""
    lines = [line.split() for line in summary.read_text(errors="replace").splitlines()]
    totals = [int(words[3]) for words in lines if words[-1:] == ["total"]]
    if not totals:
        raise Wrong(f"strace: {summary.read_text(errors='replace')[-300:]}")
    return totals[-1]


def system_calls(program, load, seconds, end):
    """System calls per request at one end, "server" or "client", or None if the client is not a program of its own.
    strace stops each call, so the rate means nothing then."""
    lab, summary = program.lab, program.lab.out / f"calls.{end}"
    summary.unlink(missing_ok=True)
    strace = ["strace", "-c", "-f", "-qq", "-o", str(summary)]
    tracer = None
    # (`env` has no effect. But while a tracer is set, a load by number is shorter, and it must be
    # so here, too.)
    lab.tracer = strace if end == "client" else ["env"]
    try:
        if end == "server":
            attach = [w for pid in processes(lab) for w in ("-p", str(pid))]
            tracer = subprocess.Popen([*strace, *attach], stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
            traced(tracer, attach[1::2])
        program.requests = None
        rate = load(program, seconds)
    finally:
        lab.tracer = []
        if tracer:
            tracer.send_signal(signal.SIGINT)
            tracer.wait(30)
    if end == "client" and not summary.exists():
        return None
    return calls_in(summary) / (program.requests or rate * seconds)


def traced(tracer, pids):
    """Waits until every process is traced."""
    end = time.monotonic() + 30
    while not all("TracerPid:\t0\n" not in pathlib.Path(f"/proc/{pid}/status").read_text() for pid in pids):
        if tracer.poll() is not None or time.monotonic() > end:
            raise Wrong(f"strace does not attach: {tracer.stderr.read() if tracer.poll() is not None else ''}")
        time.sleep(0.02)
