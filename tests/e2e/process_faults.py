"""Kill, stop and resume a node's processes."""

import enum
import signal
import time
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path

from deploy.local.supervise import Part
from deploy.local.watchdog import descendants, send

GONE_WITHIN_S = 60.0
STILL = frozenset("TtZX")
"""States of a thread that does nothing: stopped, traced, ended."""


class ProcessFault(enum.Enum):
    """How a node fails; the value is the signal to all its processes: server, engine core, workers."""

    KILLED = signal.SIGKILL
    STOPPED = signal.SIGSTOP


def strike(part: Part, fate: ProcessFault) -> None:
    """Send the signal. Returns when a stopped node does nothing more, and a killed one is gone."""
    inject(descendants(part.process.pid), fate)
    if fate is ProcessFault.KILLED:
        part.process.wait(GONE_WITHIN_S)


def inject(pids: Collection[int], fate: ProcessFault) -> None:
    """Send the signal to these processes, and wait until it has taken effect.

    A signal takes effect when its thread next gets a core. Until then the other threads go on, and a prefill node that
    is to be stopped may answer one more question.
    """
    send(set(pids), fate.value)
    limit = time.monotonic() + GONE_WITHIN_S
    while going := [pid for pid in pids if not states(pid) <= STILL]:
        assert time.monotonic() < limit, f"{fate.name} did not befall {going} within {GONE_WITHIN_S:.0f} s"
        time.sleep(0.001)


def states(pid: int) -> set[str]:
    """The states of all threads of a process, as in /proc; empty for a process that is gone."""
    found = set()
    for stat in _stats(pid):
        with suppress(FileNotFoundError, ProcessLookupError):
            found.add(stat.read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()[0])
    return found


def _stats(pid: int) -> list[Path]:
    with suppress(FileNotFoundError):  # the process may end while its threads are listed
        return list(Path(f"/proc/{pid}/task").glob("*/stat"))
    return []


def go_on(part: Part) -> None:
    """Resume a stopped node; does nothing to others."""
    send(descendants(part.process.pid), signal.SIGCONT)
