#!/usr/bin/python3
"""Rarely used calls and options, as a transcript: stock sockets and ours must print the same. The
cases are in the package `rare`, by family.

    calls.py [case ...]
"""
import signal
import sys

from rare import CASES


def main():
    signal.alarm(150)
    for name in sys.argv[1:] or CASES:
        print("#", name, flush=True)
        CASES[name]()
    print("ok")


main()
