"""One module for each suite, which has NAME, and prepare(cache) -> (version, steps)."""

import dataclasses
import typing


@dataclasses.dataclass
class Step:
    """One command, which runs on stock sockets and under the library. `{out}` in an
    argument is the directory for its log and results."""

    name: str
    argv: list
    parse: typing.Callable
    cwd: object = None
    env: dict = dataclasses.field(default_factory=dict)
    timeout: int = 900
    user: str | None = None
