"""A pdproxy that tells for how long one callback kept its event loop: `python -m deploy.bench.metered serve …`.

For each SIGUSR1 it prints, as a line of JSON, the CPU time of the longest callback since the one before, in
milliseconds, which callback that was, and how much CPU time all took. It is that of the loop's thread: a busy machine
does not lengthen it. No other thread may do the work, therefore. Pauses of the garbage collector count. The loop is
asyncio's: uvloop cannot be looked into.
"""

import asyncio
import json
import signal
import sys
import time
from types import FrameType

from pdproxy.__main__ import main


class Meter:
    """In the place of `asyncio.Handle._run`."""

    def __init__(self) -> None:
        self._longest = self._total = 0.0
        self._callback = ""
        self._run = asyncio.Handle._run

    def install(self) -> None:
        """From now on every callback is measured."""
        meter = self

        def measured(handle: asyncio.Handle) -> None:
            began = time.thread_time()
            meter._run(handle)
            meter.ran(time.thread_time() - began, handle)

        asyncio.Handle._run = measured  # type: ignore[method-assign,assignment]

    def ran(self, seconds: float, handle: asyncio.Handle) -> None:
        """A callback took so long."""
        self._total += seconds
        if seconds > self._longest:
            self._longest, self._callback = seconds, repr(handle)[:300]

    def report(self, _number: int, _frame: FrameType | None) -> None:
        """Print, and begin anew."""
        told = {"longest": 1000 * self._longest, "total": 1000 * self._total, "callback": self._callback}
        print(json.dumps(told), flush=True)
        self._longest = self._total = 0.0


if __name__ == "__main__":
    sys.modules["uvloop"] = None  # type: ignore[assignment]  # an import of it fails, as where it is not installed
    METER = Meter()
    METER.install()
    signal.signal(signal.SIGUSR1, METER.report)
    sys.exit(main())
