"""The cases, by family. `CASES` lists them in the order of the imports."""
from . import transfer, flags, closing, waiting, epoll, connecting, listening, options, processes, splice, threads
from .kit import CASES, Log
