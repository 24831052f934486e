#!/usr/bin/env python3
"""Builds what the tests need and runs them, several at once: test.py [OPTION...] GROUP...

Groups: unit (unit and integration tests, and the examples in documentation), e2e (real programs), differential (random
programs on both paths), loom (models of the shared memory).

Each end-to-end, integration and differential test is a process in namespaces of its own (network and mounts), so
that tests do not meet. Tests in a module named `alone` need the machine for themselves; they
run at the end, one by one, in the machine's own namespaces. Without root everything runs one by one, in no namespace.

The last line adds up what happened. Exit status 0: everything passed, and nothing was left behind.
"""

import argparse
import copy
import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time

ROOT = pathlib.Path(__file__).resolve().parent.parent
GROUPS = ("unit", "e2e", "differential", "loom")
ARTEFACTS = ("fsocket-preload", "fsocket-monitor", "fsocket-cli", "fsocket-demo", "fsocket-agent",
             "fsocket-bench")
# Seconds after which a test hangs. (No test asserts that it is faster than something.)
HANGS = 600
# A test's own /run, /dev/shm and BPF file system, /proc and /sys of its own namespaces, and a loopback device.
NAMESPACES = """
mount --make-rprivate / &&
mount -t tmpfs none /mnt && mkdir /mnt/cgroup && mount --rbind /sys/fs/cgroup /mnt/cgroup &&
mount -t sysfs none /sys && mount --rbind /mnt/cgroup /sys/fs/cgroup && umount -l /mnt &&
mount -t bpf none /sys/fs/bpf || exit 1
mount -t tracefs none /sys/kernel/tracing 2>/dev/null
for directory in /run/fastsocket /run/fastsocket-private /run/netns /dev/shm; do
    mkdir -p "$directory" && mount -t tmpfs -o mode=0755 none "$directory"
done
chmod 1777 /dev/shm; chmod 0700 /run/fastsocket-private
ip link set lo up
"$@" </dev/null
"""


class Test:
    """A test, or a whole test program, and what came of it."""

    def __init__(self, group, folder, program, name):
        self.group, self.folder, self.program, self.name = group, folder, program, name
        self.alone = name is not None and "alone" in name.split("::")[:-1]
        self.output, self.seconds, self.passed = "", 0.0, False

    def title(self):
        # (The file name of a test program ends with a hash.)
        program = self.program.name.rsplit("-", 1)[0]
        return f"{self.folder} {program}" + (f"::{self.name}" if self.name else "")

    def command(self):
        if self.name is None:
            return [str(self.program), "-q"]
        return [str(self.program), "--exact", self.name, "--nocapture", "--test-threads=1", "--include-ignored"]

    def run(self, isolated, environment):
        command = self.command()
        if isolated:
            command = ["unshare", "--net", "--mount", "bash", "-c", NAMESPACES, "test", *command]
        if self.group == "loom":
            # It takes the CPU time that the others leave.
            command = ["chrt", "--idle", "0", *command]
        began = time.monotonic()
        with tempfile.TemporaryFile() as said:
            child = subprocess.Popen(
                command, cwd=ROOT / self.folder, env=environment, stdin=subprocess.DEVNULL, stdout=said,
                stderr=subprocess.STDOUT, start_new_session=True,
            )
            try:
                code = child.wait(HANGS * (4 if self.name is None else 1))
                hung = ""
            except subprocess.TimeoutExpired:
                os.killpg(child.pid, signal.SIGKILL)
                code, hung = child.wait(), f"\nstill running after {HANGS} s, and killed\n"
            said.seek(0)
            self.output = said.read().decode(errors="replace") + hung
        self.seconds = time.monotonic() - began
        self.passed = code == 0 and (self.name is None or self.counts("passed") == 1)

    def counts(self, what):
        return sum(int(n) for n in re.findall(rf"^test result: .* (\d+) {what}", self.output, re.M))

    def show(self):
        """What a reader wants to know of it: everything after a failure, else what was skipped or counted."""
        verdict = "ok" if self.passed else "FAILED"
        print(f"test {self.title()} ... {verdict} ({self.seconds:.1f} s)")
        if not self.passed:
            print("".join(f"    {line}\n" for line in self.output.splitlines()))
        elif self.group == "differential":
            print("".join(f"    {line}\n" for line in self.output.splitlines() if "programs in" in line or "counters" in line), end="")
        for line in re.findall(r"^SKIPPED:.*", self.output, re.M) if self.passed else ():
            print(f"    {line}")
        sys.stdout.flush()


def cargo(*arguments, **more):
    return subprocess.run(["cargo", *arguments], cwd=ROOT, check=True, **more)


def built(messages):
    """The test programs among cargo's messages: package, folder, kind, path."""
    for message in map(json.loads, messages.splitlines()):
        if message.get("executable") and message["profile"]["test"]:
            folder = os.path.relpath(os.path.dirname(message["manifest_path"]), ROOT)
            yield folder, message["target"]["kind"][0], pathlib.Path(message["executable"])


def names(program, *more):
    said = subprocess.run([program, "--list", "--format", "terse", *more], check=True, capture_output=True, text=True)
    return [line.removesuffix(": test") for line in said.stdout.splitlines() if line.endswith(": test")]


def group_of(folder):
    return {"crates/e2e": "e2e", "tests/faults": "e2e", "tests/differential": "differential"}.get(folder, "unit")


def build(groups, profile, wants_ignored):
    """Builds the artefacts and the test programs; the tests, or those that are ignored otherwise, and how many are ignored."""
    tests, ignored = [], 0
    if groups & {"e2e", "differential", "unit"}:
        cargo("build", "--locked", "--profile", profile, *(f"--package={name}" for name in ARTEFACTS))
        # (All packages at once: for a part of them dependencies have other features, and are built again.)
        # The test programs themselves are always quick ones.
        arguments = ("--workspace", "--profile", "quick")
        messages = cargo("test", "--locked", "--no-run", "--message-format=json-render-diagnostics", *arguments,
                         stdout=subprocess.PIPE, text=True).stdout
        for folder, kind, program in built(messages):
            group = group_of(folder)
            if group not in groups:
                continue
            special = names(program, "--ignored")
            ignored += 0 if wants_ignored else len(special)
            ours = [None] if kind != "test" else [n for n in names(program) if n not in set(special)]
            ours = special if wants_ignored else ours
            tests += (Test(group, folder, program, name) for name in ours)
    if "loom" in groups:
        # A target directory of its own: the cfg would build everything twice.
        environment = dict(os.environ, RUSTFLAGS="--cfg loom", CARGO_PROFILE_RELEASE_LTO="off",
                           CARGO_TARGET_DIR=str(target() / "loom"))
        messages = cargo("test", "--release", "--locked", "--no-run", "--message-format=json-render-diagnostics",
                         "-p", "fsocket-sync", "-p", "fsocket-ring", "--lib", "--tests",
                         stdout=subprocess.PIPE, text=True, env=environment).stdout
        # (A process for each model: loom maps and unmaps stacks all the time, and threads of one process that do so
        # interrupt each other's CPUs.)
        tests += (Test("loom", folder, program, n) for folder, _, program in built(messages) for n in names(program))
    return tests, ignored


def target():
    return pathlib.Path(os.environ.get("CARGO_TARGET_DIR", ROOT / "target"))


def things():
    """What tests could leave behind on this machine."""
    def listed(path, depth=1):
        return {str(p) for p in pathlib.Path(path).glob("/".join(["*"] * depth))} if os.path.isdir(path) else set()

    def running():
        for entry in pathlib.Path("/proc").glob("[0-9]*"):
            try:
                program = os.readlink(entry / "exe")
            except OSError:
                continue
            if program.startswith(str(target())):
                yield f"process {entry.name}: {program}"

    # (Service managers and others make groups, too.)
    groups = (directory for directory, _, _ in os.walk("/sys/fs/cgroup"))
    cgroups = {group for group in groups if "socket" in group}
    links = listed("/sys/class/net")
    pins = listed("/sys/fs/bpf/fastsocket") | listed("/sys/fs/bpf/fastsocket", 2)
    temporary = {str(p) for p in pathlib.Path(tempfile.gettempdir()).glob("fastsocket*")}
    return cgroups | links | pins | temporary | listed("/dev/shm") | listed("/run/netns") | set(running())


def what_stays(before):
    """What there is now, and was not before. Monitors and kernel threads may take a moment to end."""
    for _ in range(100):
        left = sorted(things() - before)
        if not left:
            break
        time.sleep(0.1)
    return left


def everything(tests, jobs, isolated, environment):
    """Runs the tests, those that need the machine for themselves at the end."""
    lock, times = threading.Lock(), target() / "test-times.json"
    known = json.loads(times.read_text()) if times.exists() else {}
    # Long ones first, so that none of them is the last.
    queue = sorted((t for t in tests if not t.alone), key=lambda t: known.get(t.title(), 30.0), reverse=True)
    models, queue = [t for t in queue if t.group == "loom"], [t for t in queue if t.group != "loom"]

    def worker(mine):
        while True:
            with lock:
                if not mine:
                    return
                test = mine.pop(0)
            test.run(isolated and not test.alone, environment)
            with lock:
                test.show()

    workers = [threading.Thread(target=worker, args=(mine,)) for mine in os.cpu_count() * [models] + jobs * [queue]]
    for thread in workers:
        thread.start()
    for thread in workers:
        thread.join()
    worker([t for t in tests if t.alone])
    known.update({t.title(): round(t.seconds, 1) for t in tests})
    times.write_text(json.dumps(known, indent=0, sort_keys=True))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("groups", nargs="+", choices=GROUPS, metavar="GROUP")
    parser.add_argument("--only", default="", metavar="REGEX", help="only tests whose name matches")
    parser.add_argument("--ignored", action="store_true", help="only tests that are ignored otherwise")
    parser.add_argument("--profile", default="quick", help="how library, monitor and commands are built: quick (default) or release")
    parser.add_argument("--jobs", type=int, default=3 * len(os.sched_getaffinity(0)), help="how many run at once: most of them wait")
    parser.add_argument("--busy", type=int, default=0, metavar="N", help="beside so many busy processes")
    parser.add_argument("--repeat", type=int, default=1, metavar="N", help="each test so many times")
    options = parser.parse_args()
    began = time.monotonic()
    # On a busy machine the monitor answers late. What is tested is not which programs then do without it.
    environment = dict(os.environ, RUST_BACKTRACE="1", FASTSOCKET_PATIENCE="20000", FASTSOCKET_TEST_FRESH="1")
    environment.setdefault("FASTSOCKET_ARTIFACTS", str(target() / options.profile))
    try:
        tests, ignored = build(set(options.groups), options.profile, options.ignored)
    except subprocess.CalledProcessError as error:
        sys.exit(f"fastsocket test result: FAILED. not built: {error}")
    tests = [copy.copy(t) for t in tests if re.search(options.only, t.title()) for _ in range(options.repeat)]
    isolated = os.geteuid() == 0
    if not isolated:
        print("not root: one test at a time, in no namespace of its own")
    print(f"built in {time.monotonic() - began:.0f} s; {len(tests)} tests and test programs", flush=True)
    before = things()
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(options.busy)]
    try:
        everything(tests, options.jobs if isolated else 1, isolated, environment)
    finally:
        for process in busy:
            process.kill()
            process.wait()
    examples = 0
    if "unit" in options.groups and not options.only:
        said = subprocess.run(["cargo", "test", "--workspace", "--profile", "quick", "--locked", "--no-fail-fast", "--doc", "-q"],
                              cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        examples = sum(int(n) for n in re.findall(r"(\d+) passed", said.stdout))
        if said.returncode != 0:
            failed_examples = Test("unit", ".", pathlib.Path("examples-of-documentation"), None)
            failed_examples.output = said.stdout
            failed_examples.show()
            tests.append(failed_examples)
    left = what_stays(before)
    failed = [t for t in tests if not t.passed]
    passed = sum(max(t.counts("passed"), 0) for t in tests) + examples
    skipped = sum(len(re.findall(r"^SKIPPED:", t.output, re.M)) for t in tests)
    unasserted = sum(t.output.count("PATH NOT ASSERTED") for t in tests)
    print()
    for test in failed:
        print(f"test {test.title()} ... FAILED")
    for thing in left:
        print(f"left behind: {thing}")
    if unasserted:
        print(f"PATH NOT ASSERTED {unasserted} times (stock mode)")
    # (What CI lacks would never be tested.)
    strict = "FASTSOCKET_TEST_STRICT" in os.environ
    wrong = bool(failed or left or passed == 0 or (strict and skipped))
    print(f"fastsocket test result: {'FAILED' if wrong else 'ok'}. {passed} passed; {len(failed)} failed; {ignored} ignored; "
          f"{skipped} skipped; finished in {time.monotonic() - began:.0f} s")
    sys.exit(wrong)


if __name__ == "__main__":
    main()
