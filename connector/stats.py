"""The connector's metrics: counted in the engine's processes, exported on the API server's `/metrics`.

    scheduler process, each worker rank      Counters ──drain──► ConnectorStats
    vLLM: worker → scheduler → API server    merged by type; travels as the plain dict `KVConnectorStats.data`
    API server's process                     ConnectorPromMetrics.observe ──► Prometheus series

Ours travel in that dict beside NIXL's own numbers, under `COUNTS`, `SECONDS` and `LEVELS`. Every metric is named in
`COUNTERS`, `HISTOGRAMS` or `GAUGES`, with its labels; its help text is in `HELP`, and `docs/metrics.md` lists them all.
"""

from __future__ import annotations

from collections import Counter as Totals
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import product
from typing import TYPE_CHECKING, Any

from prometheus_client import Counter, Gauge, Histogram
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.stats import NixlKVConnectorStats, NixlPromMetrics

from .counters import COUNTERS, GAUGES, HISTOGRAMS, Counters

if TYPE_CHECKING:
    from vllm.config import VllmConfig


HELP: Mapping[str, str] = {
    "info": "What a preflight compares before it pairs this node with others. Always 1.",
    "prompt_tokens": "Prompt tokens: vLLM's own hits, pulled from a prefill node, loaded from a tier, computed.",
    "blocks": "KV-cache blocks of requests with a ticket, by kind of group: hit locally (vLLM's own hits), or pulled.",
    "bytes": "KV-cache bytes by kind of group: pulled, or spared by a local hit.",
    "refused": "Tickets and orders refused, by reason.",
    "reads": "Reads that ended, by outcome, counted on each rank.",
    "leases_ended": "Leases that ended on this prefill node, by how.",
    "unused_tickets": "Good tickets that were not read: nothing was left to pull, or there was no room.",
    "own_tickets": "Tickets that this node had issued itself: their prompts came from its own prefix cache.",
    "barred_tickets": "Good tickets not read, as an earlier read from their engine had ended so (reason).",
    "path_probes": "Probes of the paths to barred prefill engines, by outcome.",
    "tickets_returned": "Tickets given back without a read, by how that ended, counted on each rank.",
    "resumed_requests": "Requests that went on after the output tokens of another node.",
    "resumed_tokens": "Output tokens of another node that they went on after.",
    "resumes_refused": "Requests that ended with an error because they could not go on so, by reason.",
    "duplicate_requests": "Requests dropped because their id was that of another running request.",
    "junk": "Messages that made no sense, by where they arrived.",
    "side_channel_closed": "Connections to the side channel that were closed for a reason.",
    "side_channel_refused": "Questions to the side channel that got no usable answer, by reason.",
    "key_file_changes": "Looks into the file of ticket keys that found others (taken), or nothing of use (refused).",
    "keeps_begun": "Keeps for conversations' next turns that began.",
    "keeps_ended": "Keeps that ended, by how.",
    "keeps_refused": "Turns that asked for a keep after which nothing is kept, by reason.",
    "keep_tokens": "Prompt tokens that keeps began with, and that next turns resumed from them.",
    "waiting_holds_ended": "Waiting prompts that no longer keep what they resume from, by how that ended.",
    "keeps": "Keeps for conversations' next turns.",
    "keep_blocks": "Blocks of all keeps together. They are free, and given out last.",
    "verify_seconds": "From a read's last byte to its verdict.",
    "lease_age_seconds": "Age of a lease at its end.",
    "capacity_tokens": "Tokens that the attention groups of the KV cache hold, were all of it theirs.",
    "capacity_sequences": "Sequences that run together: by the state groups alone, or of max_model_len by all groups.",
    "capacity_binding": "What runs out first with sequences of max_model_len. Always 1.",
    "fingerprint": "What the bytes of this node's KV cache depend on, by part, and their digest (part all). Always 1.",
    "hashing": "How the prefix cache hashes prompts: algorithm, tokens per hash and per block, first parent. Always 1.",
    "barred_peers": "Prefill engines whose tickets are not read until a probe passes, and still come.",
}

PREFIX = "pdproxy_connector_"
COUNTS = "pdproxy_counts"
SECONDS = "pdproxy_seconds"
LEVELS = "pdproxy_levels"


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
