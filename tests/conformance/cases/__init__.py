"""The cases, by family. `CASES` has them in the order of the imports."""
from . import transfer, flags, closing, waiting, epoll, connecting, listening, options, processes, threads
from .kit import CASES, Log
