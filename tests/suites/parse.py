"""Parsers for the output of the suites. Each returns a dictionary from a test's name to its result:
"pass", "fail" or "skip". A name that occurs again gets #2, #3, …"""

import json
import pathlib
import re
import xml.etree.ElementTree as ElementTree


class Results(dict):
    def note(self, name, result):
        key, n = name, 1
        while key in self:
            n += 1
            key = f"{name}#{n}"
        self[key] = result


def _log(out):
    return (pathlib.Path(out) / "log").read_text(errors="replace")


def junit(out):
    """regrtest: the file of --junit-xml; after a crash, the verbose log."""
    path = pathlib.Path(out) / "junit.xml"
    found = Results()
    if not path.exists() or not path.stat().st_size:
        for m in re.finditer(r"^(test\w*) \((\S+?)\)(?:\n.*?)?? \.\.\. (.*)$", _log(out), re.M):
            word = m[3].split(" ")[0]
            found.note(m[2], {"ok": "pass", "skipped": "skip", "expected": "pass"}.get(word, "fail"))
        return found
    for case in ElementTree.parse(path).iter("testcase"):
        bad = case.find("failure") is not None or case.find("error") is not None
        skip = case.find("skipped") is not None or case.get("result") == "skipped"
        found.note(case.get("name"), "fail" if bad else "skip" if skip else "pass")
    return found


def libtest(out):
    """Rust's test harness."""
    found = Results()
    for m in re.finditer(r"^test (\S+)(?: - should panic)? \.\.\. (?:.*\n)??.*?\b(ok|FAILED|ignored)", _log(out), re.M):
        found.note(m[1], {"ok": "pass", "FAILED": "fail", "ignored": "skip"}[m[2]])
    return found


def tap(out):
    """uv_run_tests: "ok 3 - name", "not ok 4 - name"."""
    found = Results()
    for m in re.finditer(r"^(not )?ok \d+ - (\S+)(.*)$", _log(out), re.M):
        found.note(m[2], "fail" if m[1] else "skip" if "# SKIP" in m[3] else "pass")
    return found


def tinytest(out):
    """libevent's regress: "group/name: OK". If a test is tried again, the last result counts."""
    found = Results()
    words = {"OK": "pass", "SKIPPED": "skip", "DISABLED": "skip", "FAILED": "fail"}
    name, last = None, None
    for line in _log(out).splitlines():
        if "[RETRYING " in line and last:
            del found[last]
        # The output of a test comes between its name and its result.
        start = re.match(r"([\w.+-]+/[\w./+-]+): (.*)$", line)
        if start:
            name, line = start[1], start[2].removeprefix("[forking] ")
        end = re.search(r"(?:^|\[)\b(OK|SKIPPED|DISABLED|FAILED)\b", line.strip()) or re.search(
            r"\[([\w.+-]+) FAILED\]", line
        )
        if name and end:
            found.note(name, words.get(end[1], "fail"))
            name, last = None, next(reversed(found))
    if name:
        found.note(name, "fail")
    return found


def redis(out):
    found = Results()
    text = re.sub(r"\x1b\[[0-9;]*m", "", _log(out))
    for m in re.finditer(r"^\[(ok|err|exception|skip|ignore|timeout)\]: (.*)$", text, re.M):
        name = re.sub(r" \(\d+ ms\)$", "", m[2])
        if m[1] == "err":
            name = re.sub(r" in tests/\S+\.tcl.*$", "", name)
        found.note(name.strip(), {"ok": "pass", "skip": "skip", "ignore": "skip"}.get(m[1], "fail"))
    return found


def prove(out):
    found = Results()
    for m in re.finditer(r"^(t[\w-]*/\S+\.t) \.+ (?:.*\r)?(ok|skipped|Failed|Dubious|No subtests)", _log(out), re.M):
        found[m[1]] = {"ok": "pass", "skipped": "skip"}.get(m[2], "fail")
    return found


def curl(out):
    text = _log(out)
    found = Results()
    failed = set()
    for m in re.finditer(r"(?:TESTFAIL: These test cases failed|IGNORED: failed tests?):([ \d]*)", text):
        failed |= {int(n) for n in m[1].split()}
    for m in re.finditer(r"^test (\d+) SKIPPED", text, re.M):
        found[str(int(m[1]))] = "skip"
    for m in re.finditer(r"^test (\d+)\.\.\.\[", text, re.M):
        found[str(int(m[1]))] = "fail" if int(m[1]) in failed else "pass"
    # Without the closing lines it is not known which tests failed.
    if not re.search(r"TESTDONE: ", text):
        for name in found:
            found[name] = "fail" if found[name] == "pass" else found[name]
    return found


def json_lines(out):
    """This repository's own runners: one {"name": …, "result": …} a line."""
    found = Results()
    path = pathlib.Path(out) / "results.jsonl"
    for line in path.read_text().splitlines() if path.exists() else []:
        one = json.loads(line)
        found.note(one["name"], one["result"])
    return found
