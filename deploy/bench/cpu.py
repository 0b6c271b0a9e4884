"""CPU time of a process and everything that it started, from Linux.

Time on a CPU, unlike time on a clock, changes little when the machine has other work to do.
"""

import os
import time
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple


class Stat(NamedTuple):
    """One process: who started it, and the clock ticks, in user and kernel mode, of its children that have ended."""

    pid: int
    parent: int
    ended: int


def read_stat(text: str) -> Stat:
    """The content of ``/proc/PID/stat`` (proc(5)). The command's name, in parentheses, may hold anything."""
    pid, _, rest = text.partition(" (")
    fields = rest.rpartition(") ")[2].split()
    return Stat(int(pid), int(fields[1]), sum(map(int, fields[13:15])))


def tree(stats: Iterable[Stat], root: int) -> list[Stat]:
    """``root`` and its descendants."""
    known = list(stats)
    family, grown = {root}, True
    while grown:
        found = {stat.pid for stat in known if stat.parent in family} | family
        grown, family = len(found) > len(family), found
    return [stat for stat in known if stat.pid in family]


def seconds_of_tree(root: int) -> float:
    """CPU seconds that a process and its descendants have used until now."""
    found = tree(_all(), root)
    return sum(_seconds(stat.pid) for stat in found) + sum(stat.ended for stat in found) / os.sysconf("SC_CLK_TCK")


def processes(root: int) -> list[int]:
    """The ids of a process and its descendants."""
    return [stat.pid for stat in tree(_all(), root)]


def _seconds(pid: int) -> float:
    """CPU time of one process, its ended threads included, in nanoseconds' resolution: the tick of /proc is 10 ms."""
    try:
        return time.clock_gettime((~pid << 3) | 2)  # as clock_getcpuclockid(3) makes the clock's number
    except OSError:
        return 0.0  # it ended meanwhile


def _all() -> Iterable[Stat]:
    for entry in Path("/proc").glob("[0-9]*/stat"):
        try:
            text = entry.read_text(encoding="utf-8", errors="replace")
        except (FileNotFoundError, ProcessLookupError):
            continue  # it ended meanwhile
        yield read_stat(text)
