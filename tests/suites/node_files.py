"""Runs test files of Node one after the other, and writes one JSON line for each.

    node_files.py RESULTS NODE FILE…
"""

import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import tempfile

LIMIT = 60


def one(node, path, number):
    flags = re.findall(r"^// Flags: (.*)$", path.read_text(), re.M)
    argv = [node, *" ".join(flags).split(), str(path)]
    env = {**os.environ, "TEST_THREAD_ID": str(number), "NODE_TEST_DIR": tempfile.gettempdir()}
    print(f"==== {path.name}", flush=True)
    child = subprocess.Popen(
        argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=env, start_new_session=True
    )
    try:
        text = child.communicate(timeout=LIMIT)[0].decode(errors="replace")
    except subprocess.TimeoutExpired:
        os.killpg(child.pid, signal.SIGKILL)
        text = child.communicate()[0].decode(errors="replace") + f"\nno end after {LIMIT} s"
    print(text, flush=True)
    if child.returncode != 0:
        return "fail"
    return "skip" if "# Skipped" in text or "1..0 #" in text else "pass"


def main():
    out, node, *files = sys.argv[1:]
    with open(out, "w") as f:
        for number, file in enumerate(files):
            result = one(node, pathlib.Path(file), number)
            print(json.dumps({"name": pathlib.Path(file).name, "result": result}), file=f, flush=True)


if __name__ == "__main__":
    main()
