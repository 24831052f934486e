"""tornado's own tests."""

import pathlib

import parse
from suites import Step

NAME = "tornado"
VERSION = "6.4.2"


def prepare(cache):
    python = cache.venv("tornado", [f"tornado=={VERSION}"])
    script = pathlib.Path(__file__).resolve().parents[1] / "unittest_json.py"
    argv = [python, script, "{out}/results.jsonl", "tornado.test.runtests"]
    return VERSION, [Step("runtests", argv, parse.json_lines, timeout=600)]
