"""Accounts: the small collector that every part of the connector adds to, in whichever thread it runs.

The connector's accounts in vLLM's own pipeline: engine process -> scheduler -> API server -> `/metrics`.

vLLM collects stats in the worker and in the scheduler process, merges them, and sends them to the API server as a
plain dict (`KVConnectorStats.data`); there `KVConnectorPromMetrics.observe` turns it into series. Ours ride along
with NIXL's under three more keys.
"""

from __future__ import annotations

import threading
from collections import Counter as Tally
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal

from prometheus_client import Counter, Gauge, Histogram
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.stats import NixlKVConnectorStats, NixlPromMetrics

from connector.kv_groups import Capacity
from connector.leases import LeaseEnd
from connector.messages import QuestionRefusal
from connector.metadata import ReadOutcome
from connector.tcp_server import CloseReason
from connector.ticket_fields import RefusalReason

if TYPE_CHECKING:
    from vllm.config import VllmConfig


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
class CounterSnapshot:
    """What came together since the last drain: lists, since they travel as msgpack to the API server.

    `counts` holds `[counter, label values, increment > 0]`, `seconds` holds `[histogram, seconds]`, `levels` holds
    `[gauge, label values, value]`.
    """

    counts: list[tuple[str, list[str], int]]
    seconds: list[tuple[str, float]]
    levels: list[tuple[str, list[str], int]]


class Counters:
    """Adds up what one process (scheduler, or one worker rank) did, until someone drains it. Safe in any thread.

    An increment of zero or less is left out: a Prometheus counter must never go back, whatever the caller subtracted.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: Tally[tuple[str, tuple[str, ...]]] = Tally()
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

    def drain(self) -> CounterSnapshot:
        """What came together since the last call; the accounts start again from zero."""
        with self._lock:
            counts, self._counts = self._counts, Tally()
            seconds, self._seconds = self._seconds, []
            levels, self._levels = self._levels, {}
        return CounterSnapshot(_rows(counts), seconds, _rows(levels))

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


PREFIX = "pdproxy_connector_"
COUNTS = "pdproxy_counts"
SECONDS = "pdproxy_seconds"
LEVELS = "pdproxy_levels"
BUCKETS: Mapping[str, tuple[float, ...]] = {
    "verify_seconds": (0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5),
    "lease_age_seconds": (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 30, 60, 120),
}
ABOUT: Mapping[str, str] = {
    "prompt_tokens": "Prompt tokens by source: hit locally, pulled from a prefill node, loaded from a tier, computed.",
    "blocks": "KV-cache blocks of requests with a ticket, by kind of group: hit locally, or pulled.",
    "bytes": "KV-cache bytes by kind of group: pulled, or spared by a local hit.",
    "refused": "Tickets and orders refused, by reason.",
    "reads": "Reads that ended, by outcome, counted on each rank.",
    "leases_ended": "Leases that ended on this prefill node, by how.",
    "unused_tickets": "Good tickets that left nothing to pull.",
    "tickets_returned": "Tickets given back without a read, by how that ended, counted on each rank.",
    "junk": "Messages that made no sense, by where they arrived.",
    "side_channel_closed": "Connections to the side channel that were closed for a reason.",
    "side_channel_refused": "Questions to the side channel that got no usable answer, by reason.",
    "verify_seconds": "From a read's last byte to its verdict.",
    "lease_age_seconds": "Age of a lease at its end.",
    "capacity_tokens": "Tokens that the attention groups of the KV cache hold, were all of it theirs.",
    "capacity_sequences": "Sequences that run together: by the state groups alone, or of max_model_len by all groups.",
    "fingerprint": "What the bytes of this node's KV cache depend on, by part, and their digest (part all). Always 1.",
    "capacity_binding": "What runs out first with sequences of max_model_len. Always 1.",
}
KINDS = ("attention", "state")
READS = (*ReadOutcome, "retried")
RETURNS = ("sent", "not_held", "unreachable")
VALUES: Mapping[str, tuple[tuple[str, ...], ...]] = MappingProxyType(
    {
        "prompt_tokens": (("hit", "pulled", "loaded", "computed"),),
        "blocks": (KINDS, ("hit", "pulled")),
        "bytes": (KINDS, ("pulled", "spared")),
        "refused": (tuple(RefusalReason),),
        "reads": (READS,),
        "leases_ended": (tuple(LeaseEnd),),
        "unused_tickets": (),
        "tickets_returned": (RETURNS,),
        "junk": (("side_channel", "notice"),),
        "side_channel_closed": (tuple(CloseReason),),
        "side_channel_refused": ((QuestionRefusal.UNSIGNED, QuestionRefusal.BAD_SIGNATURE, QuestionRefusal.REPLAYED),),
    }
)
"""Of each counter, what its labels may be. All stand at 0 from the start: `rate()` does not see the first event of a
series that begins with it."""


@dataclass
class ConnectorStats(NixlKVConnectorStats):
    """NIXL's transfer stats plus ours. Both sides of the connector must hand vLLM this very type: it merges by type."""

    def reset(self) -> None:
        super().reset()
        self.data: dict[str, list[Any]] = {**self.data, COUNTS: [], SECONDS: [], LEVELS: []}

    def is_empty(self) -> bool:
        ours = self.data[COUNTS] or self.data[SECONDS] or self.data[LEVELS]
        return not ours and bool(super().is_empty())

    def take(self, accounts: Counters) -> None:
        """Drain `accounts` into these stats."""
        balance = accounts.drain()
        self.data[COUNTS].extend([name, labels, value] for name, labels, value in balance.counts)
        self.data[SECONDS].extend([name, seconds] for name, seconds in balance.seconds)
        self.data[LEVELS].extend([name, labels, value] for name, labels, value in balance.levels)

    def reduce(self) -> dict[str, int | float]:
        """One number a series, for the line that vLLM logs every few seconds."""
        tally: Tally[str] = Tally()
        for name, labels, value in self.data[COUNTS]:
            tally["/".join([name, *labels])] += value
        return {**super().reduce(), **tally}


def drained(accounts: Counters) -> ConnectorStats | None:
    """The stats of a side that has no transfers of its own (the scheduler's); None when there is nothing to say."""
    stats = ConnectorStats()
    stats.take(accounts)
    return None if stats.is_empty() else stats


class ConnectorPromMetrics(NixlPromMetrics):
    """The Prometheus side, in the API server's process.

    Args beyond vLLM's own: `info`, what the node tells a preflight (see `node_info`); each key becomes a label.
    """

    def __init__(
        self,
        vllm_config: VllmConfig,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
        info: Mapping[str, str],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._engines = per_engine_labelvalues
        self._counters = {
            name: metric_types[Counter](PREFIX + name, ABOUT[name], labelnames=[*labelnames, *labels])
            for name, labels in COUNTERS.items()
        }
        self._histograms = {
            name: metric_types[Histogram](PREFIX + name, ABOUT[name], labelnames=labelnames, buckets=BUCKETS[name])
            for name in HISTOGRAMS
        }
        self._gauges = {
            name: metric_types[Gauge](
                PREFIX + name, ABOUT[name], labelnames=[*labelnames, *labels], multiprocess_mode="mostrecent"
            )
            for name, labels in GAUGES.items()
        }
        self._tell(metric_types[Gauge], labelnames, info)
        self._begin()

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        super().observe(transfer_stats_data, engine_idx)
        engine = self._engines[engine_idx]
        for name, labels, value in transfer_stats_data.get(COUNTS, ()):
            self._counters[name].labels(*engine, *labels).inc(value)
        for name, seconds in transfer_stats_data.get(SECONDS, ()):
            self._histograms[name].labels(*engine).observe(seconds)
        for name, labels, value in transfer_stats_data.get(LEVELS, ()):
            self._gauges[name].labels(*engine, *labels).set(value)

    def _begin(self) -> None:
        for engine in self._engines.values():
            for name, counter in self._counters.items():
                for labels in product(*VALUES[name]):
                    counter.labels(*engine, *labels)

    def _tell(self, gauge: Any, labelnames: Sequence[str], info: Mapping[str, str]) -> None:
        told = gauge(
            PREFIX + "info",
            "What this node is, for whoever pairs it with others. Always 1.",
            labelnames=[*labelnames, *info],
            multiprocess_mode="mostrecent",
        )
        for engine in self._engines.values():
            told.labels(*engine, *info.values()).set(1)
