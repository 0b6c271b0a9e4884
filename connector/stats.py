"""The connector's metrics: counted in the engine's processes, exported on the API server's `/metrics`.

    scheduler process, each worker rank      Counters ──drain──► ConnectorStats
    vLLM: worker → scheduler → API server    merged by type; travels as the plain dict `KVConnectorStats.data`
    API server's process                     ConnectorPromMetrics.observe ──► Prometheus series

Ours travel in that dict beside NIXL's own numbers, under `COUNTS`, `SECONDS` and `LEVELS`. Every metric is named in
`COUNTERS`, `HISTOGRAMS` or `GAUGES`, with its labels; its help text is in `HELP`, and `docs/metrics.md` lists them all.
"""

from __future__ import annotations

import threading
from collections import Counter as Totals
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import product
from typing import TYPE_CHECKING, Any

from prometheus_client import Counter, Gauge, Histogram
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.stats import NixlKVConnectorStats, NixlPromMetrics

from connector.kv_groups import Capacity, Group
from connector.leases import LeaseEnd
from connector.messages import QuestionRefusal
from connector.metadata import ReadOutcome
from connector.tcp_server import CloseReason
from connector.ticket_fields import RefusalReason

if TYPE_CHECKING:
    from vllm.config import VllmConfig


_GROUPS = ("attention", "state")
_UNSIGNED = (QuestionRefusal.UNSIGNED, QuestionRefusal.BAD_SIGNATURE, QuestionRefusal.REPLAYED)

COUNTERS: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "prompt_tokens": {"source": ("hit", "pulled", "loaded", "computed")},
    "blocks": {"group": _GROUPS, "kind": ("hit", "pulled")},
    "bytes": {"group": _GROUPS, "kind": ("pulled", "spared")},
    "refused": {"reason": tuple(RefusalReason)},
    "reads": {"outcome": (*ReadOutcome, "retried")},
    "leases_ended": {"how": tuple(LeaseEnd)},
    "unused_tickets": {},
    "tickets_returned": {"outcome": ("sent", "not_held", "unreachable")},
    "duplicate_requests": {},
    "junk": {"where": ("side_channel", "notice")},
    "side_channel_closed": {"reason": tuple(CloseReason)},
    "side_channel_refused": {"reason": _UNSIGNED},
}
"""Every counter: its labels, and every value that a label may have. All series stand at 0 from the start: `rate()` does
not see the first event of a series that begins with it."""

HISTOGRAMS: Mapping[str, tuple[float, ...]] = {
    "verify_seconds": (0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5),
    "lease_age_seconds": (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 30, 60, 120),
}
"""Every histogram with its buckets, in seconds."""

GAUGES: Mapping[str, tuple[str, ...]] = {
    "capacity_tokens": (),
    "capacity_sequences": ("limit",),
    "capacity_binding": ("group",),
    "fingerprint": ("part", "value"),
}
"""Every gauge with the names of its labels."""

HELP: Mapping[str, str] = {
    "info": "What a preflight compares before it pairs this node with others. Always 1.",
    "prompt_tokens": "Prompt tokens by source: hit locally, pulled from a prefill node, loaded from a tier, computed.",
    "blocks": "KV-cache blocks of requests with a ticket, by kind of group: hit locally, or pulled.",
    "bytes": "KV-cache bytes by kind of group: pulled, or spared by a local hit.",
    "refused": "Tickets and orders refused, by reason.",
    "reads": "Reads that ended, by outcome, counted on each rank.",
    "leases_ended": "Leases that ended on this prefill node, by how.",
    "unused_tickets": "Good tickets that left nothing to pull.",
    "tickets_returned": "Tickets given back without a read, by how that ended, counted on each rank.",
    "duplicate_requests": "Requests dropped because their id was that of another running request.",
    "junk": "Messages that made no sense, by where they arrived.",
    "side_channel_closed": "Connections to the side channel that were closed for a reason.",
    "side_channel_refused": "Questions to the side channel that got no usable answer, by reason.",
    "verify_seconds": "From a read's last byte to its verdict.",
    "lease_age_seconds": "Age of a lease at its end.",
    "capacity_tokens": "Tokens that the attention groups of the KV cache hold, were all of it theirs.",
    "capacity_sequences": "Sequences that run together: by the state groups alone, or of max_model_len by all groups.",
    "capacity_binding": "What runs out first with sequences of max_model_len. Always 1.",
    "fingerprint": "What the bytes of this node's KV cache depend on, by part, and their digest (part all). Always 1.",
}

MAX_OBSERVATIONS = 10_000
"""Observations kept between two drains; further ones are dropped, so that memory is bounded if draining stops."""
PREFIX = "pdproxy_connector_"
COUNTS = "pdproxy_counts"
SECONDS = "pdproxy_seconds"
LEVELS = "pdproxy_levels"


@dataclass(frozen=True)
class CounterSnapshot:
    """Everything recorded since the last drain, in lists, since it travels as msgpack to the API server.

    `counts` holds `[counter, label values, increment > 0]`, `seconds` holds `[histogram, seconds]`, `gauges` holds
    `[gauge, label values, value]`.
    """

    counts: list[tuple[str, list[str], int]]
    seconds: list[tuple[str, float]]
    gauges: list[tuple[str, list[str], int]]


class Counters:
    """Counts what one process (scheduler, or one worker rank) did since the last drain. Safe from any thread.

    An increment of zero or less is left out: a Prometheus counter must never go back, whatever the caller subtracted.
    Label values come from the closed lists of `COUNTERS`.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: Totals[tuple[str, tuple[str, ...]]] = Totals()
        self._seconds: list[tuple[str, float]] = []
        self._gauges: dict[tuple[str, tuple[str, ...]], int] = {}

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
        """Refused `kv_transfer_params`."""
        self._add("refused", (reason,), 1)

    def read(self, outcome: str) -> None:
        """One rank's read of one request ended, or is retried."""
        self._add("reads", (outcome,), 1)

    def lease_ended(self, how: str, age: float) -> None:
        """A lease of this prefill node ended, `age` seconds after it was opened."""
        self._add("leases_ended", (how,), 1)
        self._observe("lease_age_seconds", age)

    def ticket_unused(self) -> None:
        """A valid ticket was not read: the local cache held everything that it covers."""
        self._add("unused_tickets", (), 1)

    def ticket_returned(self, outcome: str) -> None:
        """One rank gave a ticket back without a read, or failed to."""
        self._add("tickets_returned", (outcome,), 1)

    def duplicate_request(self) -> None:
        """A request was dropped because its id was that of another running request."""
        self._add("duplicate_requests", (), 1)

    def junk(self, where: str) -> None:
        """A message that cannot be parsed arrived at `where` (`side_channel`, `notice`)."""
        self._add("junk", (where,), 1)

    def side_channel_closed(self, reason: str) -> None:
        """The side channel closed a connection."""
        self._add("side_channel_closed", (reason,), 1)

    def side_channel_refused(self, reason: str) -> None:
        """The side channel refused to answer a question."""
        self._add("side_channel_refused", (reason,), 1)

    def verify_seconds(self, seconds: float) -> None:
        """From a read's last byte to its verdict."""
        self._observe("verify_seconds", seconds)

    def capacity(self, capacity: Capacity) -> None:
        """What this engine's cache holds. `limit="state"` is left out where no group is bounded."""
        with self._lock:
            self._gauges["capacity_tokens", ()] = capacity.tokens
            self._gauges["capacity_sequences", ("max_model_len",)] = capacity.admitted
            self._gauges["capacity_binding", (capacity.binding.value,)] = 1
            if capacity.sequences is not None:
                self._gauges["capacity_sequences", ("state",)] = capacity.sequences

    def fingerprint(self, parts: Mapping[str, str]) -> None:
        """What the bytes of this engine's cache depend on, by part; once, when all parts are known."""
        with self._lock:
            for part, value in parts.items():
                self._gauges["fingerprint", (part, value)] = 1

    def has_undrained_gauges(self) -> bool:
        """Whether a gauge was set since the last drain. An idle engine must step once more to export it."""
        return bool(self._gauges)

    def drain(self) -> CounterSnapshot:
        """Everything recorded since the last call; all counts start again from zero."""
        with self._lock:
            counts, self._counts = self._counts, Totals()
            seconds, self._seconds = self._seconds, []
            gauges, self._gauges = self._gauges, {}
        return CounterSnapshot(_rows(counts), seconds, _rows(gauges))

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


@dataclass
class ConnectorStats(NixlKVConnectorStats):
    """NIXL's transfer stats plus ours. Scheduler and workers must both return this type: vLLM merges stats by type."""

    def reset(self) -> None:
        super().reset()
        self.data: dict[str, list[Any]] = {**self.data, COUNTS: [], SECONDS: [], LEVELS: []}

    def is_empty(self) -> bool:
        ours = self.data[COUNTS] or self.data[SECONDS] or self.data[LEVELS]
        return not ours and bool(super().is_empty())

    def drain_from(self, counters: Counters) -> None:
        """Move everything that `counters` recorded into these stats."""
        snapshot = counters.drain()
        self.data[COUNTS].extend(map(list, snapshot.counts))
        self.data[SECONDS].extend(map(list, snapshot.seconds))
        self.data[LEVELS].extend(map(list, snapshot.gauges))

    def reduce(self) -> dict[str, int | float]:
        """One number for each series, for the line that vLLM logs every few seconds."""
        totals: Totals[str] = Totals()
        for name, labels, value in self.data[COUNTS]:
            totals["/".join([name, *labels])] += value
        return {**super().reduce(), **totals}


def drained(counters: Counters) -> ConnectorStats | None:
    """The stats of a process without transfers of its own (the scheduler's); None when nothing was recorded."""
    stats = ConnectorStats()
    stats.drain_from(counters)
    return None if stats.is_empty() else stats


class ConnectorPromMetrics(NixlPromMetrics):
    """The Prometheus series, in the API server's process. `info`: the labels of the info gauge and their values."""

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

        def make(kind: Any, name: str, labels: Iterable[str], **options: Any) -> Any:
            return metric_types[kind](PREFIX + name, HELP[name], labelnames=[*labelnames, *labels], **options)

        latest = {"multiprocess_mode": "mostrecent"}
        self._counters = {name: make(Counter, name, labels) for name, labels in COUNTERS.items()}
        self._histograms = {name: make(Histogram, name, (), buckets=each) for name, each in HISTOGRAMS.items()}
        self._gauges = {name: make(Gauge, name, labels, **latest) for name, labels in GAUGES.items()}
        info_gauge = make(Gauge, "info", info, **latest)
        for engine in self._engines.values():
            info_gauge.labels(*engine, *info.values()).set(1)
            for name, labels in COUNTERS.items():
                for values in product(*labels.values()):
                    self._counters[name].labels(*engine, *values)

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        super().observe(transfer_stats_data, engine_idx)
        engine = self._engines[engine_idx]
        for name, labels, value in transfer_stats_data.get(COUNTS, ()):
            self._counters[name].labels(*engine, *labels).inc(value)
        for name, seconds in transfer_stats_data.get(SECONDS, ()):
            self._histograms[name].labels(*engine).observe(seconds)
        for name, labels, value in transfer_stats_data.get(LEVELS, ()):
            self._gauges[name].labels(*engine, *labels).set(value)
