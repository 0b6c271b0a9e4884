"""Accounts: the small collector that every part of the connector adds to, in whichever thread it runs."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

from connector.capacity import Capacity

Group = Literal["attention", "state"]
"""What a KV-cache group holds: attention grows with the sequence, state (mamba, GDN) is O(1) a request."""

COUNTERS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "prompt_tokens": ("source",),
        "blocks": ("group", "kind"),
        "bytes": ("group", "kind"),
        "refused": ("reason",),
        "reads": ("outcome",),
        "leases_ended": ("how",),
        "unused_tickets": (),
        "tickets_returned": ("outcome",),
        "junk": ("where",),
        "side_channel_closed": ("reason",),
        "side_channel_refused": ("reason",),
    }
)
"""Every counter with the names of its labels."""

HISTOGRAMS: tuple[str, ...] = ("verify_seconds", "lease_age_seconds")

GAUGES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "capacity_tokens": (),
        "capacity_sequences": ("limit",),
        "capacity_binding": ("group",),
        "fingerprint": ("part", "value"),
    }
)
"""Every gauge with the names of its labels."""

MAX_OBSERVATIONS = 10_000
"""Observations kept between two drains; more are dropped, so that nobody's memory grows with a stalled reader."""


@dataclass(frozen=True)
class Balance:
    """What came together since the last drain: lists, since they travel as msgpack to the API server.

    `counts` holds `[counter, label values, increment > 0]`, `seconds` holds `[histogram, seconds]`, `levels` holds
    `[gauge, label values, value]`.
    """

    counts: list[tuple[str, list[str], int]]
    seconds: list[tuple[str, float]]
    levels: list[tuple[str, list[str], int]]


class Accounts:
    """Adds up what one process (scheduler, or one worker rank) did, until someone drains it. Safe in any thread.

    An increment of zero or less is left out: a Prometheus counter must never go back, whatever the caller subtracted.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: Counter[tuple[str, tuple[str, ...]]] = Counter()
        self._seconds: list[tuple[str, float]] = []
        self._levels: dict[tuple[str, tuple[str, ...]], int] = {}

    def prompt_tokens(self, *, hit: int = 0, pulled: int = 0, loaded: int = 0, computed: int = 0) -> None:
        """Where a prompt's tokens came from; the four add up to the prompt's length.

        `loaded`: by another connector, where several share the node.
        """
        for source, tokens in (("hit", hit), ("pulled", pulled), ("loaded", loaded), ("computed", computed)):
            self._add("prompt_tokens", (source,), tokens)

    def blocks(self, group: Group, *, hit: int = 0, pulled: int = 0) -> None:
        """Logical blocks of one kind of group that were found locally, and that were pulled."""
        self._add("blocks", (group, "hit"), hit)
        self._add("blocks", (group, "pulled"), pulled)

    def bytes(self, group: Group, *, pulled: int = 0, spared: int = 0) -> None:
        """Bytes that were pulled, and bytes that a local hit spared."""
        self._add("bytes", (group, "pulled"), pulled)
        self._add("bytes", (group, "spared"), spared)

    def refused(self, reason: str) -> None:
        """A ticket or an order that was refused. `reason` must come from a fixed list: it becomes a label."""
        self._add("refused", (reason,), 1)

    def read(self, outcome: str) -> None:
        """One rank's read of one request came to its end. `outcome` must come from a fixed list."""
        self._add("reads", (outcome,), 1)

    def lease_ended(self, how: str) -> None:
        """A prefill node's lease ended. `how` must come from a fixed list."""
        self._add("leases_ended", (how,), 1)

    def ticket_unused(self) -> None:
        """A good ticket left nothing to pull, and its state could not be used."""
        self._add("unused_tickets", (), 1)

    def ticket_returned(self, outcome: str) -> None:
        """One rank's notice without a read is done with. `outcome` must come from a fixed list."""
        self._add("tickets_returned", (outcome,), 1)

    def junk(self, where: str) -> None:
        """Bytes that made no sense arrived at `where` (`side_channel`, `notice`)."""
        self._add("junk", (where,), 1)

    def side_channel_closed(self, reason: str) -> None:
        """The side channel closed a connection. `reason` must come from a fixed list."""
        self._add("side_channel_closed", (reason,), 1)

    def side_channel_refused(self, reason: str) -> None:
        """The side channel answered a question with nothing usable. `reason` must come from a fixed list."""
        self._add("side_channel_refused", (reason,), 1)

    def verify_seconds(self, seconds: float) -> None:
        """From a read's last byte to its verdict."""
        self._observe("verify_seconds", seconds)

    def lease_age_seconds(self, seconds: float) -> None:
        """How old a lease was when it ended."""
        self._observe("lease_age_seconds", seconds)

    def capacity(self, capacity: Capacity) -> None:
        """What this engine's cache holds. `limit="state"` is left out where no group is bounded."""
        with self._lock:
            self._levels["capacity_tokens", ()] = capacity.tokens
            self._levels["capacity_sequences", ("max_model_len",)] = capacity.admitted
            self._levels["capacity_binding", (capacity.binding.value,)] = 1
            if capacity.sequences is not None:
                self._levels["capacity_sequences", ("state",)] = capacity.sequences

    def fingerprint(self, parts: Mapping[str, str]) -> None:
        """What the bytes of this engine's cache depend on, by part; once, when all parts are known."""
        with self._lock:
            for part, value in parts.items():
                self._levels["fingerprint", (part, value)] = 1

    def untold_levels(self) -> bool:
        """Whether gauges wait to be drained: without a request nothing else would send them on."""
        return bool(self._levels)

    def drain(self) -> Balance:
        """What came together since the last call; the accounts start again from zero."""
        with self._lock:
            counts, self._counts = self._counts, Counter()
            seconds, self._seconds = self._seconds, []
            levels, self._levels = self._levels, {}
        return Balance(_rows(counts), seconds, _rows(levels))

    def _add(self, name: str, labels: tuple[str, ...], value: int) -> None:
        if value > 0:
            with self._lock:
                self._counts[name, labels] += value

    def _observe(self, name: str, seconds: float) -> None:
        with self._lock:
            if len(self._seconds) < MAX_OBSERVATIONS:
                self._seconds.append((name, max(0.0, seconds)))


def _rows(values: Mapping[tuple[str, tuple[str, ...]], int]) -> list[tuple[str, list[str], int]]:
    return [(name, list(labels), value) for (name, labels), value in values.items()]
