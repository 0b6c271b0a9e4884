"""CPU time of a process and everything that it started, from Linux's /proc.

Time on a CPU, unlike time on a clock, changes little when the machine has other work to do.
"""

import os
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple


class Stat(NamedTuple):
    """One process: who started it, and its time in clock ticks, in user and kernel mode, ended children's included."""

    pid: int
    parent: int
    ticks: int


def read_stat(text: str) -> Stat:
    """The content of ``/proc/PID/stat`` (proc(5)). The command's name, in parentheses, may hold anything."""
    pid, _, rest = text.partition(" (")
    fields = rest.rpartition(") ")[2].split()
    return Stat(int(pid), int(fields[1]), sum(map(int, fields[11:15])))


def ticks_of_tree(stats: Iterable[Stat], root: int) -> int:
    """Ticks of ``root`` and its descendants."""
    known = list(stats)
    family, grown = {root}, True
    while grown:
        found = {stat.pid for stat in known if stat.parent in family} | family
        grown, family = len(found) > len(family), found
    return sum(stat.ticks for stat in known if stat.pid in family)


def seconds_of_tree(root: int) -> float:
    """CPU seconds that a process and its descendants have used until now."""
    return ticks_of_tree(_all(), root) / os.sysconf("SC_CLK_TCK")


def _all() -> Iterable[Stat]:
    for entry in Path("/proc").glob("[0-9]*/stat"):
        try:
            text = entry.read_text(encoding="utf-8", errors="replace")
        except (FileNotFoundError, ProcessLookupError):
            continue  # it ended meanwhile
        yield read_stat(text)
