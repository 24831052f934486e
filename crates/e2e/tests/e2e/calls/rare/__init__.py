"""The cases of calls.py, by family. `CASES` has them in the order of the imports."""
from . import options, signals, transfers, commands
from .kit import CASES
