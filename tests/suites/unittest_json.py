"""Runs a module's `all()` suite of unittest, and writes one JSON line for each test.

    unittest_json.py RESULTS MODULE
"""

import importlib
import json
import sys
import unittest


class Result(unittest.TextTestResult):
    out = None

    def stopTest(self, test):
        super().stopTest(test)
        bad = any(t is test or getattr(t, "test_case", None) is test for t, _ in self.failures + self.errors)
        skip = any(t is test for t, _ in self.skipped)
        line = {"name": test.id(), "result": "fail" if bad else "skip" if skip else "pass"}
        print(json.dumps(line), file=self.out, flush=True)


def main():
    path, module = sys.argv[1:]
    with open(path, "w") as out:
        Result.out = out
        suite = importlib.import_module(module).all()
        unittest.TextTestRunner(resultclass=Result, verbosity=2).run(suite)


if __name__ == "__main__":
    main()
