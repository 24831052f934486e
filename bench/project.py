#!/usr/bin/env python3
"""Prints the directory of a C project that is ready for make: Tcl from Debian's sources, about two minutes of CPU time.

`make bench-paper` builds the project beside a web server (Affinity-Accept, section 6.5). The sources are fetched and
configured once, in target/project.
"""

import pathlib
import sys

ROOT = pathlib.Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests" / "suites"))

import sources  # noqa: E402


def main():
    cache = sources.Cache(ROOT / "target" / "project")
    tree, _ = cache.debian_source("tcl8.6")
    if not cache.done("configured"):
        cache.sh(["./configure"], cwd=tree / "unix")
        # The benchmark builds a copy of the whole tree, from its top.
        (tree / "Makefile").write_text("all clean:\n\t$(MAKE) -C unix $@\n.PHONY: all clean\n")
        cache.mark("configured")
    print(tree)


main()
