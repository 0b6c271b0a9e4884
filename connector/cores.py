"""The CPU cores of a worker on a machine with no accelerator."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def own_cores() -> Iterator[None]:
    """Put the calling thread back on the cores that it had, whatever happens inside.

    vLLM's NIXL worker reserves the last core of each NUMA node for transfers (`NixlBaseConnectorWorker.__init__`),
    but pins the thread that runs the model there, too. Threads started inside, NIXL's spinning progress thread
    among them, stay pinned. Does nothing where the system has no affinity.
    """
    if not hasattr(os, "sched_setaffinity"):
        yield
        return
    cores = os.sched_getaffinity(0)
    try:
        yield
    finally:
        os.sched_setaffinity(0, cores)
