"""Log lines of what strangers can cause: never more of them than an operator reads, and none is lost uncounted."""

import asyncio
import logging

from pdproxy.clock import Clock

MOST_LINES, WINDOW_SECONDS = 200, 10.0
PERIOD = 60.0


class LineBudget:
    """`MOST_LINES` in `WINDOW_SECONDS`; further ones are counted, and the next line that is written tells of them."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._window = float("-inf")
        self._written = self._unwritten = 0

    def next_line(self) -> int | None:
        """How many lines were left out since the last one, where one may be written now; else None."""
        now = self._clock.now()
        if now - self._window >= WINDOW_SECONDS:
            self._window, self._written = now, 0
        if self._written >= MOST_LINES:
            self._unwritten += 1
            return None
        self._written += 1
        unwritten, self._unwritten = self._unwritten, 0
        return unwritten


class RareLine:
    """A warning at once, and then one each `PERIOD` with the number of further times, until there were none.

    Used on an event loop. ``text``: what happened.
    """

    def __init__(self, log: logging.Logger, text: str) -> None:
        self._log = log
        self._text = text
        self._detail = ""
        self._times = 0
        self._timer: asyncio.TimerHandle | None = None

    def happened(self, detail: str) -> None:
        """Once more."""
        self._times += 1
        self._detail = detail
        if self._timer is None:
            self._tell()

    def _tell(self) -> None:
        """Again after a while, if it goes on."""
        self._timer = None
        if self._times:
            extra = {"times": self._times, "detail": self._detail}
            self._log.warning("%s", self._text, extra=extra)
            self._times = 0
            self._timer = asyncio.get_running_loop().call_later(PERIOD, self._tell)
