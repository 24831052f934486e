"""Makes docs/programs.md from the measurements."""

import fcntl
import json
import re


def key(name):
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def short_version(line):
    found = re.search(r"\d+(\.\d+)+[^\s,;)]*", line)
    return found.group(0) if found else line.strip()[:40]


def share(path):
    """The number of connections opened over shared memory, and of all connections, as text."""
    shm, kernel = path.get("connect_shm", 0), path.get("connect_kernel", 0)
    if shm + kernel == 0:
        return f"0 of {path['tcp_opens']}" if path.get("tcp_opens") else ""
    text = f"{shm} of {shm + kernel}"
    return text + (f", {path['path_switch']} switched" if path.get("path_switch") else "")


def counts(step):
    """The number of requests that were answered and, after a slash, of those that failed."""
    if step is None:
        return "not reached"
    if not step["ok"]:
        return "**failed**"
    if step.get("none") or "requests" not in step:
        return "none"
    return f"{step['requests']}/{sum(step.get('failed', {}).values())}"


def cell(result, name):
    """The text for a step on stock sockets and under the library."""
    stock, ours = (result[side]["steps"].get(name) for side in ("stock", "ours"))
    texts = counts(stock), counts(ours)
    if texts == ("none", "none"):
        return "none"
    both = stock and ours and stock.get("requests") and ours.get("requests")
    part = ours["requests"] / stock["requests"] if both else 1
    return ", ".join(texts) + (f" ({part:.2f})" if part < 0.95 else "")


def page(records, order):
    lines = [
        "# Real programs, stock and ours",
        "",
        "Written by `make programs` (tests/programs); do not edit. Each program runs once on kernel sockets and once under",
        "`fastsocket run`. It serves a real client, whose bytes are compared. Under load it is reloaded three times and",
        "restarted once, and the answers are compared. Then it is shut down, and no process may be left. A client that",
        "hangs and a wrong answer are failures.",
        "",
        "A cell has requests answered/failed, for stock and then for ours. Requests fail during a restart, because nobody",
        "listens. A third figure says which part of stock's number ours answered, if below 0.95. These are short runs",
        "beside other load; [performance](performance.md) has rates. `over shared memory` counts clients' connections.",
        "",
        "| program | reload | restart | over shared memory | why the kernel was used |",
        "| --- | --- | --- | --- | --- |",
    ]
    notes, expected = [], []
    for r in [records[n] for n in order if n in records]:
        name = f"{r['name']} {r['version']}"
        path = r["ours"]["path"]
        why = {k.removeprefix("fallback."): v for k, v in path.items() if k.startswith("fallback.")}
        reasons = ", ".join(f"{k} {v}" for k, v in sorted(why.items())) or "none"
        lines.append(f"| {name} | {cell(r, 'reload')} | {cell(r, 'restart')} | {share(path)} | {reasons} |")
        if "; kernel: " in r["expected"]:
            expected.append(f"- Expected on kernel TCP, {r['name']}: {r['expected'].split('; kernel: ')[1]}.")
        for side in ("stock", "ours"):
            bad = [(step, what["why"]) for step, what in r[side]["steps"].items() if not what["ok"]]
            notes += [f"- {r['name']}, {side}, {step}: {why}" for step, why in bad]
    lines += ["", *expected, "", "## Differences to stock", ""]
    lines += notes or ["None."]
    return "\n".join(lines) + "\n"


def keep(docs, cls, version, results, order):
    path = docs / "programs.json"
    with open(path, "a+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.seek(0)
        records = json.loads(file.read() or "{}")
        expected = cls.path + (f"; kernel: {cls.kernel_too}" if cls.kernel_too else "")
        records[cls.__name__] = {"name": cls.name, "version": version, "expected": expected, **results}
        file.truncate(0)
        file.write(json.dumps(records, indent=1, sort_keys=True) + "\n")
        file.flush()
        (docs / "programs.md").write_text(page(records, order))
