"""Instructions of running processes, counted by Linux's `perf` where that is there and allowed.

They repeat to 1 %, where CPU time moves by a tenth. Virtual machines often have no counters: then there is no figure,
and `python -m deploy.bench.instructions` counts those of our own proxy under valgrind.
"""

import shutil
import signal
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

EVENT = "instructions:u"


class InstructionCount:
    """``value``: instructions in user mode while the count ran; None while it runs, and where there is no counter."""

    value: float | None = None


def counted(output: str, event: str = EVENT) -> float | None:
    """The count in what ``perf stat -x,`` prints; None for "<not supported>" and for "<not counted>"."""
    for line in output.splitlines():
        fields = line.split(",")
        if len(fields) > 2 and fields[2] == event and fields[0].replace(".", "", 1).isdigit():
            return float(fields[0])
    return None


def is_allowed(event: str = EVENT) -> bool:
    """Whether there is a counter, and we may read it."""
    if shutil.which("perf") is None:
        return False
    done = subprocess.run(["perf", "stat", "-x,", "-e", event, "true"], capture_output=True, text=True, check=False)
    return counted(done.stderr, event) is not None


@contextmanager
def counting(processes: Sequence[int], event: str = EVENT) -> Iterator[InstructionCount]:
    """Count what processes do while inside, with the threads that they start meanwhile."""
    ids = ",".join(map(str, processes))
    command = ["perf", "stat", "-x,", "-e", event, "-p", ids]
    found = InstructionCount()
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as perf:
        try:
            yield found
        finally:
            perf.send_signal(signal.SIGINT)
            _, output = perf.communicate(timeout=10)
    found.value = counted(output, event)
