#!/usr/bin/env python3
"""Changes one operator of the code at a time, and runs tests that should notice it: mutants.py [OPTION...] [SET...]

The code is a copy of the working tree (in target/mutants), with a build directory of its own. A change is one operator
of a line outside tests and comments, drawn by --seed. "caught": the tests fail, or do not end. "not built": the change is
no program. A mutant that survives is printed with its line: it needs a test, or a reason.

Exit status 0: none survived.
"""

import argparse
import os
import pathlib
import random
import re
import shutil
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
COPY = ROOT / "target" / "mutants"
# Files, the tests for them (arguments of cargo), and what is built for the tests to use.
SETS = {
    "ring": (["crates/ring/src"], ["-p", "fsocket-ring", "--lib"], []),
    "switch": (["crates/abi/src/path_switch"], ["-p", "fsocket-abi", "--lib"], []),
    "readiness": (["crates/readiness/src"], ["-p", "fsocket-differential", "--test", "regressions"], ["-p", "fsocket-preload", "-p", "fsocket-monitor", "-p", "fsocket-cli"]),
    "policy": (["crates/monitor/src/policy", "crates/monitor/src/broker/rights.rs"], ["-p", "fsocket-monitor"], []),
}
OPERATORS = [
    (r" == ", " != "), (r" != ", " == "), (r" < ", " <= "), (r" > ", " >= "), (r" <= ", " < "), (r" >= ", " > "),
    (r" && ", " || "), (r" \|\| ", " && "), (r" \+ 1\b", ""), (r" - 1\b", ""), (r"\btrue\b", "false"), (r"\bfalse\b", "true"),
    (r"if !", "if "), (r"\.is_some\(\)", ".is_none()"), (r"\.is_none\(\)", ".is_some()"), (r"\.is_ok\(\)", ".is_err()"),
]  # fmt: skip
# Seconds after which tests do not end.
LIMIT = 200


def places(folders):
    """Every change: file, number of the line, the line afterwards."""
    for folder in folders:
        path = ROOT / folder
        for file in sorted(path.rglob("*.rs")) if path.is_dir() else [path]:
            name = file.relative_to(ROOT)
            if {"model", "tests", "tests.rs", "walk.rs"} & set(name.parts):
                continue
            for number, line in enumerate(file.read_text().splitlines()):
                if line.strip() == "#[cfg(test)]":
                    break
                if re.match(r"\s*(//|#|assert|debug_assert|tracing)", line):
                    continue
                code = line.split(" // ")[0]
                for old, new in OPERATORS:
                    for found in re.finditer(old, code):
                        yield name, number, line[: found.start()] + new + line[found.end() :]


def cargo(*arguments):
    environment = dict(os.environ, CARGO_TARGET_DIR=str(COPY / "target"), FASTSOCKET_ARTIFACTS=str(COPY / "target/quick"))
    command = ["timeout", "-k", "5", str(LIMIT), "cargo", *arguments]
    return subprocess.run(command, cwd=COPY, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)


def copy():
    """Makes the copy like the working tree. (Equal files stay as they are, so that little is built again.)"""
    listed = subprocess.run(["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, check=True, capture_output=True, text=True)
    files = [name for name in listed.stdout.splitlines() if (ROOT / name).is_file()]
    for name in files:
        to = COPY / name
        to.parent.mkdir(parents=True, exist_ok=True)
        if not to.exists() or to.read_bytes() != (ROOT / name).read_bytes():
            shutil.copy(ROOT / name, to)
    here = {COPY / name for name in files}
    for file in COPY.rglob("*"):
        if file.is_file() and file not in here and file.relative_to(COPY).parts[0] != "target":
            file.unlink()


def judge(tests, used):
    """The effect of the change that the copy has."""
    if used and cargo("build", "-q", "--locked", "--profile", "quick", *used).returncode:
        return "not built"
    if cargo("test", "-q", "--locked", "--profile", "quick", "--no-run", *tests).returncode:
        return "not built"
    return "caught" if cargo("test", "-q", "--locked", "--profile", "quick", *tests).returncode else "SURVIVED"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sets", nargs="*", metavar="SET", help=f"{', '.join(SETS)} [default: all]")
    parser.add_argument("--count", type=int, default=10, help="mutants of each set")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    copy()
    survived = 0
    for name in options.sets or SETS:
        folders, *tests = SETS[name]
        before = judge(*tests)
        if before != "SURVIVED":
            sys.exit(f"{name}: the tests fail without a change: {before}")
        every = list(places(folders))
        for file, number, line in random.Random(options.seed).sample(every, min(options.count, len(every))):
            original = (ROOT / file).read_text()
            lines = original.splitlines(keepends=True)
            lines[number] = line + "\n"
            (COPY / file).write_text("".join(lines))
            verdict = judge(*tests)
            (COPY / file).write_text(original)
            survived += verdict == "SURVIVED"
            print(f"{name}: {verdict}: {file}:{number + 1}: {line.strip()}", flush=True)
    print(f"{survived} survived")
    sys.exit(survived > 0)


if __name__ == "__main__":
    main()
