"""Node's test-net-*, test-dgram-*, test-cluster-*, test-http-* of Debian's source, on the node that is installed."""

import pathlib
import shutil
import subprocess
import sys

import parse
from suites import Step

NAME = "node"
GROUPS = ["net", "cluster", "dgram"]


def prepare(cache):
    tree, version = cache.debian_source("nodejs")
    node = shutil.which("node")
    if not node:
        raise RuntimeError("node is not installed")
    installed = subprocess.run([node, "--version"], stdout=subprocess.PIPE, text=True, check=True).stdout.strip()
    script = pathlib.Path(__file__).resolve().parents[1] / "node_files.py"
    argv = [sys.executable, script, "{out}/results.jsonl", node]
    steps = []
    for group in GROUPS:
        files = sorted((tree / "test" / "parallel").glob(f"test-{group}-*.js"))
        steps.append(Step(group, [*argv, *files], parse.json_lines, cwd=tree / "test", timeout=1500))
    return f"{version} on node {installed}", steps
