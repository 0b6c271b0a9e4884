"""The connector's accounts in vLLM's own pipeline: engine process -> scheduler -> API server -> `/metrics`.

vLLM collects stats in the worker and in the scheduler process, merges them, and sends them to the API server as a
plain dict (`KVConnectorStats.data`); there `KVConnectorPromMetrics.observe` turns it into series. Ours ride along
with NIXL's under three more keys.
"""

from __future__ import annotations

from collections import Counter as Tally
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from prometheus_client import Counter, Gauge, Histogram
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.stats import NixlKVConnectorStats, NixlPromMetrics

from connector.accounts import COUNTERS, GAUGES, HISTOGRAMS, Accounts
from connector.fields import Reason
from connector.lease import Ending
from connector.metadata import ReadOutcome
from connector.question import Refused
from connector.tcp_server import Closed

if TYPE_CHECKING:
    from vllm.config import VllmConfig

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
        "refused": (tuple(Reason),),
        "reads": (READS,),
        "leases_ended": (tuple(Ending),),
        "unused_tickets": (),
        "tickets_returned": (RETURNS,),
        "junk": (("side_channel", "notice"),),
        "side_channel_closed": (tuple(Closed),),
        "side_channel_refused": ((Refused.UNSIGNED, Refused.BAD_SIGNATURE, Refused.REPLAYED),),
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

    def take(self, accounts: Accounts) -> None:
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


def drained(accounts: Accounts) -> ConnectorStats | None:
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
