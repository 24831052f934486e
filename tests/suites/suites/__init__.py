"""One module a suite; each has NAME, and prepare(cache) -> (version, steps)."""

import dataclasses
import typing


@dataclasses.dataclass
class Step:
    """One command, run stock and ours. `{out}` in an argument is the
    directory that its log and results go to."""

    name: str
    argv: list
    parse: typing.Callable
    cwd: object = None
    env: dict = dataclasses.field(default_factory=dict)
    timeout: int = 900
    user: str | None = None
