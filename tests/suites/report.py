"""Compares two sides by test name, and makes the page about them."""

import collections
import fcntl
import fnmatch
import json
import tomllib

SHM = ("connect_shm", "accept_shm", "connect_kernel", "accept_kernel", "path_switch")


def load_known(path):
    known = tomllib.loads(path.read_text()).get("known", [])
    for k in known:
        if set(k) != {"suite", "test", "kind", "reason"} or k["kind"] not in ("limit", "flaky") or not k["reason"]:
            raise SystemExit(f"suites: {path.name}: malformed entry: {k}")
    return known


def counts(results):
    c = collections.Counter(results.values())
    return {k: c[k] for k in ("pass", "fail", "skip")}


def matching(known, suite, name):
    step_free = name.split("/", 1)[1]
    for k in known:
        if k["suite"] == suite and (fnmatch.fnmatchcase(name, k["test"]) or fnmatch.fnmatchcase(step_free, k["test"])):
            return k
    return None


def compare(suite, stock, ours, known):
    """stock, ours: "STEP/NAME" -> result. Returns the differences, and what is wrong."""
    differences, wrong = [], []
    for name, was in sorted(stock.items()):
        now = ours.get(name, "missing")
        entry = matching(known, suite, name)
        if was == "pass" and now == "pass":
            if entry and entry["kind"] == "limit":
                wrong.append(f"{name}: passes, but is listed as known: {entry['reason']}")
            continue
        if was == now or was != "pass":
            if was != now and now != "skip":
                differences.append({"test": name, "stock": was, "ours": now, "reason": entry["reason"] if entry else ""})
            continue
        reason = entry["reason"] if entry else ""
        differences.append({"test": name, "stock": was, "ours": now, "reason": reason})
        if not entry:
            wrong.append(f"{name}: {was} on stock, {now} on ours")
    return differences, wrong


def record(suite, stock, ours, counters, known):
    """The record of one step that ran on both sides."""
    differences, wrong = compare(suite, stock, ours, known)
    shown = {k: v for k, v in counters.items() if v and (k in SHM or k.startswith("fallback."))}
    return {
        "stock": counts(stock),
        "ours": counts(ours),
        "differences": differences,
        "wrong": wrong,
        "counters": shown,
    }


def total(steps):
    """The sum of several steps."""
    sums = {key: collections.Counter() for key in ("stock", "ours", "counters")}
    for step in steps:
        for key, value in sums.items():
            value.update(step[key])
    return {key: dict(value) for key, value in sums.items()}


def reasons(counters):
    """The reasons for which kernel TCP was used, with their counts."""
    why = {k.removeprefix("fallback."): v for k, v in counters.items() if k.startswith("fallback.")}
    return ", ".join(f"{k} {v}" for k, v in sorted(why.items())) or "none"


def page(records):
    lines = [
        "# Published suites, stock and ours",
        "",
        "Written by `make suites` (tests/suites); do not edit. Each suite runs once on kernel sockets and once",
        "under the library, and a test that passes on stock has to pass on ours. `shm` counts connections opened+accepted",
        "over shared memory, `kernel` those over kernel TCP, `switched` those that moved to kernel TCP.",
        "",
        "| suite | version | stock: pass/fail/skip | ours | shm | kernel | switched | why the kernel was used |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    sums = {name: total(r["steps"].values()) for name, r in sorted(records.items())}
    for name, r in sums.items():
        c = r["counters"]
        get = lambda *names: "+".join(str(c.get(n, 0)) for n in names)  # noqa: E731
        side = lambda s: f"{s['pass']}/{s['fail']}/{s['skip']}"  # noqa: E731
        lines.append(
            f"| {name} | {records[name]['version']} | {side(r['stock'])} | {side(r['ours'])} "
            f"| {get('connect_shm', 'accept_shm')} | {get('connect_kernel', 'accept_kernel')} | {get('path_switch')} | {reasons(c)} |"
        )
    lines += ["", "## Differences", ""]
    rows = [(n, d) for n, r in sorted(records.items()) for s in r["steps"].values() for d in s["differences"]]
    if rows:
        lines += ["| suite | test | stock | ours | reason |", "| --- | --- | --- | --- | --- |"]
        lines += [
            f"| {n} | `{d['test']}` | {d['stock']} | {d['ours']} | {d['reason'] or 'unexplained'} |"
            if d["stock"] == "pass"
            else f"| {n} | `{d['test']}` | {d['stock']} | {d['ours']} | {d['reason'] or 'not judged: it fails on stock'} |"
            for n, d in rows
        ]
    else:
        lines.append("None.")
    return "\n".join(lines) + "\n"


def keep(docs, suite, version, step, record, all_steps):
    """Puts a step's record into conformance.json, and makes the page again."""
    path = docs / "conformance.json"
    with open(path, "a+") as file:
        # Several suites may run at once.
        fcntl.flock(file, fcntl.LOCK_EX)
        file.seek(0)
        records = json.loads(file.read() or "{}")
        mine = records.setdefault(suite, {"version": version, "steps": {}})
        if mine["version"] != version:
            mine["steps"] = {}
        mine["version"] = version
        mine["steps"][step] = {k: v for k, v in record.items() if k != "wrong"}
        if all_steps is not None:
            mine["steps"] = {name: r for name, r in mine["steps"].items() if name in all_steps}
        file.truncate(0)
        file.write(json.dumps(records, indent=1, sort_keys=True) + "\n")
        file.flush()
        (docs / "conformance.md").write_text(page(records))
