"""A process that listens as an engine core does, and keeps its main thread busy: `python -m … NODE_ID BUSY`."""

import ctypes
import gc
import sys
import time

from connector.liveness import LivenessSocket

SECONDS = 30.0


def hold_the_gil() -> None:
    """Sleep in C code that keeps the interpreter's lock, as a compiler or a driver might."""
    ctypes.PyDLL(None).sleep(int(SECONDS))


def run_python() -> None:
    """Never leave Python code."""
    until = time.monotonic() + SECONDS
    while time.monotonic() < until:
        pass


def collect_garbage() -> None:
    """Collect a large heap again and again; each time is one call."""
    kept = [[number] for number in range(2_000_000)]
    until = time.monotonic() + SECONDS
    while time.monotonic() < until:
        gc.collect()
    kept.clear()


if __name__ == "__main__":
    sockets = [LivenessSocket(sys.argv[1]), LivenessSocket(sys.argv[1])]
    for each in sockets:
        each.open()
    print("listening", flush=True)
    {"gil": hold_the_gil, "python": run_python, "garbage": collect_garbage}[sys.argv[2]]()
