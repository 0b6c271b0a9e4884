"""The log of a running proxy, whose last lines may be missing.

The proxy writes its lines by a thread, a moment after what they tell of (`pdproxy.observe.logs.LineWriter`). So a test
that has an answer, or sees a state, waits for the line. A node's log needs no wait: vLLM writes each line at once.
"""

import asyncio
import re
import time
from collections.abc import Callable
from pathlib import Path

PATIENCE_S = 60.0
"""Seconds until a line is there. It takes a moment on an idle machine."""
LEG_FAILED = re.compile(r"request (?P<request>\S+): decode leg on (?P<node>\S+): ")
"""About a stream whose node has died."""
MOVED = re.compile(r"request ended\" request_id=(?P<request>\S+) .*\bmoved=(?P<how>\S+) stall_ms=(?P<stall>\S+)")
"""The last line of a stream that was moved."""
ENDED = re.compile(r"request ended\" request_id=(\S+)")
"""The last line of any request."""


def log_when(log: Path, holds: Callable[[str], object]) -> str:
    """The log's whole lines, as soon as this is true of them. Raises AssertionError after PATIENCE_S."""
    limit = time.monotonic() + PATIENCE_S
    while not holds(text := _whole_lines(log)):
        assert time.monotonic() < limit, f"the end of {log}:\n{text[-4000:]}"
        time.sleep(0.05)
    return text


class LogTail:
    """The lines that a log gets from now on."""

    def __init__(self, log: Path) -> None:
        self._log = log
        self._start = len(_whole_lines(log))

    def lost(self, node: str) -> set[str]:
        """The requests whose stream broke on this node."""
        return {found["request"] for found in map(LEG_FAILED.search, self._lines()) if found and found["node"] == node}

    def moved(self) -> dict[str, tuple[str, float]]:
        """How each moved request went on, and its pause in seconds."""
        found = filter(None, map(MOVED.search, self._lines()))
        return {each["request"]: (each["how"], float(each["stall"]) / 1000) for each in found}

    async def tells_the_end_of(self, requests: set[str]) -> None:
        """Wait for the last line of each request."""
        await asyncio.to_thread(log_when, self._log, lambda text: requests <= set(ENDED.findall(text)))

    def _lines(self) -> list[str]:
        return _whole_lines(self._log)[self._start :].splitlines()


def _whole_lines(log: Path) -> str:
    text = log.read_text(encoding="utf-8", errors="replace")
    return text[: text.rfind("\n") + 1]
