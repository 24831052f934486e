"""docs/programs.md, from what was measured."""

import fcntl
import json
import re

STEPS = ("serve", "reload", "restart", "shutdown")


def key(name):
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def short_version(line):
    found = re.search(r"\d+(\.\d+)+[^\s,;)]*", line)
    return found.group(0) if found else line.strip()[:40]


def share(path):
    """Connections opened over shared memory, of all, in words."""
    shm, kernel = path.get("connect_shm", 0), path.get("connect_kernel", 0)
    if shm + kernel == 0:
        return f"kernel {path['tcp_opens']}" if path.get("tcp_opens") else ""
    text = f"shm {shm} of {shm + kernel}"
    return text + (f", {path['path_switch']} switched" if path.get("path_switch") else "")


def cell(step, stock=None):
    if step is None:
        return "not reached"
    if not step["ok"]:
        return "**failed**"
    if step.get("none"):
        return "none"
    if "requests" in step:
        failed = sum(step.get("failed", {}).values())
        part = step["requests"] / stock["requests"] if stock and stock.get("requests") else 1
        below = f" ({part:.2f} of stock)" if part < 0.95 else ""
        return f"{step['requests']} served{below}, {failed} failed"
    return "ok"


def page(records, order):
    lines = [
        "# Real programs, stock and ours",
        "",
        "Written by `make programs` (tests/programs); do not edit. Each program serves a real client (bytes",
        "compared), is reloaded three times and restarted under load (answers compared), and shut down, once on",
        "kernel sockets and once under `fastsocket run`, in namespaces of its own. After the shutdown no process",
        "is left and the monitor holds nothing. While a server restarts, clients are refused or cut off; what is",
        "counted there is that none hangs and no answer is wrong. `path` counts the connections that clients",
        "opened over the whole run, the restart included. Where ours served less than 0.95 of stock it says so; that",
        "is one short run of each, beside other load. Rates are measured by `make bench-programs`;",
        "servers that hand over their sockets once a second are in [performance.md](performance.md).",
        "",
        "| program | version | side | served | reload under load | restart under load | shutdown | path |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    notes = []
    for name in [n for n in order if n in records]:
        r = records[name]
        for side in ("stock", "ours"):
            result = r[side]
            steps = [cell(result["steps"].get(s), r["stock"]["steps"].get(s)) for s in STEPS]
            first = f"| {r['name']} | {r['version']} " if side == "stock" else "| | "
            lines.append(f"{first}| {side} | {' | '.join(steps)} | {share(result['path'])} |")
            for step, what in result["steps"].items():
                if not what["ok"]:
                    notes.append(f"- {r['name']}, {side}, {step}: {what['why']}")
    lines += ["", "## Differences to stock", ""]
    lines += notes or ["None."]
    lines += ["", "## Why the kernel was used", "", "| program | path expected | reasons |", "| --- | --- | --- |"]
    for name in [n for n in order if n in records]:
        r = records[name]
        why = {k.removeprefix("fallback."): v for k, v in r["ours"]["path"].items() if k.startswith("fallback.")}
        text = ", ".join(f"{k} {v}" for k, v in sorted(why.items())) or "never"
        lines.append(f"| {r['name']} | {r['expected']} | {text} |")
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
