"""Connections that stay in the kernel, compared with stock: what is compared, and when a result is below stock."""

import statistics

#: The compared ways, all over the kernel. The last one is stock again, and shows how much two equal
#: runs differ.
WAYS = ("kernel", "client", "worlds", "control")
#: Programs that are also measured with both ends in different worlds.
IN_WORLDS = ("postgresql",)
#: With fewer rounds than this, no result is called below stock.
FEWEST = 3
HEADS = {"kernel": "library at server", "client": "library at client", "worlds": "both, two worlds", "control": "stock again"}


def ways_of(name):
    return [w for w in WAYS if w != "worlds" or name in IN_WORLDS]


def check(way, path):
    """Returns why the connections of a turn were not those of this way, or None if they were."""
    if way not in ("kernel", "client", "worlds"):
        return None
    shared = {n: path[n] for n in ("connect_shm", "accept_shm", "path_upgrade") if path.get(n)}
    if shared:
        return f"not all in the kernel: {shared}"
    counted = {"kernel": ["accept_kernel"], "client": ["connect_kernel"], "worlds": ["accept_kernel", "connect_kernel"]}[way]
    missing = [n for n in counted if not path.get(n)]
    return f"{', '.join(missing)} counted nothing: {path}" if missing else None


def ratios(turns, way, of):
    """The ratios to stock: of the medians, and the lowest and the highest of the rounds."""
    each = [of(t[way]) / of(t["stock"]) for t in turns if of(t["stock"])]
    stock = statistics.median(of(t["stock"]) for t in turns)
    if not each or not stock:
        return None
    return {"median": statistics.median(of(t[way]) for t in turns) / stock, "low": min(each), "high": max(each)}


QUANTITIES = {
    "rate": lambda t: t["rate"],
    "cpu": lambda t: t["used"] / t["requests"],
    "switches": lambda t: t["switches"] / t["requests"],
}


def measured(label, turns, calls):
    """The results of one row. `calls` maps each way to the system calls per request at each end."""
    present = [w for w in WAYS if w in turns[0]]
    stock = {q: statistics.median(of(t["stock"]) for t in turns) for q, of in QUANTITIES.items()}
    rows = {w: {q: ratios(turns, w, of) for q, of in QUANTITIES.items()} for w in present}
    for way in present:
        rows[way]["path"] = {}
        for turn in turns:
            for name, n in turn[way]["path"].items():
                rows[way]["path"][name] = rows[way]["path"].get(name, 0) + n
    return {"row": label, "stock": stock, "ways": rows, "calls": calls, "below": below(rows) if len(turns) >= FEWEST else []}


def below(rows):
    """Quantities that are worse than stock in every round, and by the medians worse than every round of the control."""
    found, control = [], rows["control"]
    for way, of in rows.items():
        if way == "control":
            continue
        if of["rate"]["high"] < 1 and of["rate"]["median"] < control["rate"]["low"]:
            found.append(f"{way} rate")
        if of["cpu"]["low"] > 1 and of["cpu"]["median"] > control["cpu"]["high"]:
            found.append(f"{way} cpu")
    return found


def ratio(r):
    return f"{r['median']:.3f} ({r['low']:.2f}-{r['high']:.2f})" if r else "-"


def calls_text(calls, way):
    """System calls per request of stock and of the way, at each end that has the library."""
    ends = {"kernel": ["server"], "client": ["client"], "worlds": ["server", "client"]}.get(way, [])
    parts = [f"{calls['stock'][end]:.2f} {calls[way][end]:.2f}" for end in ends if end in calls.get(way, {}) and end in calls.get("stock", {})]
    return ", ".join(parts) or "-"


def table(rows):
    """The lines of the small table at the end of the output."""
    lines = ["", "In the kernel, to stock: median of the rounds (lowest-highest). Switches and system calls are of a request: stock's, this way's.",
             f"{'':48} {'way':18} {'rate':>20} {'CPU a request':>20} {'switches':>14} {'system calls':>14}"]  # fmt: skip
    for row in rows:
        for i, (way, of) in enumerate(row["ways"].items()):
            switches = "-"
            if of["switches"]:
                switches = f"{row['stock']['switches']:.2f} {row['stock']['switches'] * of['switches']['median']:.2f}"
            marks = [b.split()[1] for b in row["below"] if b.split()[0] == way]
            mark = f"  BELOW STOCK: {' '.join(marks)}" if marks else ""
            lines.append(
                f"{row['row'] if i == 0 else '':48} {HEADS[way]:18} {ratio(of['rate']):>20} {ratio(of['cpu']):>20} {switches:>14}"
                f" {calls_text(row['calls'], way):>14}{mark}"
            )
    return lines
