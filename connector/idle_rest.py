"""How long an engine rests after a step that computed nothing, and what ends the rest.

By itself vLLM steps every millisecond while it has requests, also those whose blocks a prefill node keeps until they
are read. That takes a third of a core, which the node that is to read them may need. So the engine's thread rests, and
another thread ends the rest when something arrives.

It rests where this delays no token: no read is under way, none has ended since the last step, and none of the steps
that are under way computes anything.
"""

from __future__ import annotations

import threading
from collections.abc import Sized
from typing import Protocol

LEASES_REST = 0.01
"""Seconds, while blocks are kept to be read. What ends no rest is noticed so late: the end of such a read, a client
that is gone."""
LEFTOVERS_REST = 0.025
"""While only the end of given-up transfers or of probes is awaited, or that prefill nodes take tickets back."""


class Reads(Protocol):
    """`decode_reads.ReadTracker`."""

    @property
    def under_way(self) -> bool:
        """Whether a read is ordered or running."""

    @property
    def has_pending_orders(self) -> bool:
        """Whether a rank has something to do, as to give a ticket back."""


class IdleRest:
    """For one engine's thread; `interrupt` is for any. `batches`: how many steps are under way at most, that whose
    output is processed included."""

    def __init__(self, batches: int, leases: Sized, reads: Reads, quarantine: Sized, paths: Sized) -> None:
        self._batches = batches
        self._leases = leases
        self._reads = reads
        self._quarantine = quarantine
        self._paths = paths
        self._arrived = threading.Event()
        self._idle_steps = 0
        self._was_reading = False

    def interrupt(self) -> None:
        """Something has arrived: the rest ends, or the next one is not taken."""
        self._arrived.set()

    def on_step_planned(self, *, computes: bool) -> None:
        """A step is planned, in which tokens are computed or none."""
        self._idle_steps = 0 if computes else self._idle_steps + 1

    def rest_if_idle(self) -> None:
        """Rest, if this delays nothing; called when a step's output was processed. What has arrived by then is to be
        looked at afterwards."""
        seconds = self._seconds()
        if seconds:
            self._arrived.wait(seconds)
        self._arrived.clear()

    def _seconds(self) -> float:
        was_reading, self._was_reading = self._was_reading, self._reads.under_way
        if self._idle_steps < self._batches or was_reading or self._was_reading:
            return 0.0
        if len(self._leases):
            return LEASES_REST
        leftovers = len(self._quarantine) or len(self._paths) or self._reads.has_pending_orders
        return LEFTOVERS_REST if leftovers else 0.0
