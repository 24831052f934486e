#!/usr/bin/env python3
"""One program on one side, inside the namespaces: trial.py MODULE CLASS SIDE OUT."""

import importlib
import json
import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))

from lab import Lab  # noqa: E402
from program import Trial  # noqa: E402


def main():
    module, name, side, out = sys.argv[1:]
    lab = Lab(side, out)
    try:
        program = getattr(importlib.import_module(f"programs.{module}"), name)(lab)
        result = Trial(program).run()
    finally:
        lab.end()
    (pathlib.Path(out) / "trial.json").write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
