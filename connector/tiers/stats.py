"""Statistics of the choosing connector: every child's own, by its name, and how often each child was asked and chosen.

vLLM merges what workers and scheduler collect and sends it to the API server as a plain dict: child name →
{"connector", "module", "stats"}, and under `SELECTION` the counts of `SelectionCounters`. No child can be named
`SELECTION`. There `ChildrenPromMetrics` turns it into the series of `/metrics`.
"""

from collections import Counter as Totals
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from prometheus_client import Counter, Gauge
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiKVConnectorStats

from ..stats import COUNTS, LEVELS, PREFIX, ConnectorStats
from .children import Source

if TYPE_CHECKING:
    from vllm.config import VllmConfig


SELECTION_COUNTERS: Mapping[str, str] = MappingProxyType(
    {
        "child_queries": "Requests for which a child was asked whether it has their prefix: wins, losses and misses.",
        "child_wins": "Requests whose prefix a child was chosen to load.",
        "child_losses": "Requests for which a child had something, and another child or the local cache had more.",
        "child_misses": "Requests for which a child had nothing, or did not say so in time.",
        "child_tokens_won": "Prompt tokens that a child was chosen to load.",
        "child_failed_loads": "Loads that a child began and could not finish.",
    }
)
"""Every counter, all with the label `child`."""


@dataclass(frozen=True)
class SelectionSnapshot:
    """Since the last drain: `counts` holds `[counter, child, increment > 0]`; `pending` is the present number of
    running loads by child, empty if it has not changed. Lists and dicts, since they travel as msgpack."""

    counts: list[tuple[str, str, int]]
    pending: dict[str, int]


class SelectionCounters:
    """Counts in the scheduler's process. An increment below 1 is left out: a Prometheus counter must never go back."""

    def __init__(self) -> None:
        self._counts: Totals[tuple[str, str]] = Totals()
        self._drained_pending: dict[str, int] = {}

    def add(self, counter: str, child: str, increment: int = 1) -> None:
        """Add to one of `SELECTION_COUNTERS` of one child."""
        if increment > 0:
            self._counts[counter, child] += increment

    def drain(self, pending: Mapping[str, int]) -> SelectionSnapshot:
        """The counts since the last call; they start again from zero."""
        counts, self._counts = self._counts, Totals()
        changed = dict(pending) if pending != self._drained_pending else {}
        self._drained_pending = dict(pending)
        return SelectionSnapshot([(name, child, number) for (name, child), number in counts.items()], changed)


PENDING = "child_pending_loads"
SELECTION = "*selection*"


@dataclass
class SelectionStats(ConnectorStats):
    """The selection's counts and pending loads, under the keys of `ConnectorStats`, each with the label `child`."""

    @classmethod
    def of(cls, snapshot: SelectionSnapshot) -> "SelectionStats":
        """Made from drained counters."""
        stats = cls()
        stats.data[COUNTS] = [[name, [child], number] for name, child, number in snapshot.counts]
        stats.data[LEVELS] = [[PENDING, [child], number] for child, number in snapshot.pending.items()]
        return stats

    def reduce(self) -> dict[str, int | float]:
        """Without NIXL's numbers, which are all zero here."""
        return {name: number for name, number in super().reduce().items() if name.startswith("child_")}


@dataclass
class ChildrenStats(MultiKVConnectorStats):
    """Stats by child; `sources` are needed to make a child's stats again in another process."""

    sources: dict[str, Source] = field(default_factory=dict)

    def add(self, name: str, source: Source, stats: KVConnectorStats) -> None:
        """Add one child's stats."""
        self.data[name], self.sources[name] = stats, source

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        """Merge child by child."""
        if isinstance(other, ChildrenStats):
            self.sources.update(other.sources)
        return super().aggregate(other)

    def to_dict(self) -> dict[str, Any]:
        """The dict that goes to another process."""
        return {
            name: {"connector": connector, "module": module, "stats": self.data[name].to_dict()}
            for name, (connector, module) in self.sources.items()
        }

    @classmethod
    def from_dict(cls, payload: Mapping[str, Any]) -> "ChildrenStats":
        """From `to_dict`. A child whose class makes no stats from its part is left out."""
        found = cls()
        for name, part in payload.items():
            source = (part["connector"], part["module"])
            stats = SelectionStats(part["stats"]) if name == SELECTION else _build_stats(source, part["stats"])
            if stats is not None:
                found.add(name, source, stats)
        return found


def _build_stats(source: Source, data: dict[str, Any]) -> KVConnectorStats | None:
    config = KVTransferConfig(kv_connector=source[0], kv_connector_module_path=source[1], kv_role="kv_both")
    return KVConnectorFactory.get_connector_class(config).build_kv_connector_stats(data)


class ChildrenPromMetrics(KVConnectorPromMetrics):
    """The Prometheus series, in the API server's process. `children`: their own metrics by name, None without any."""

    def __init__(
        self,
        vllm_config: "VllmConfig",
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
        children: Mapping[str, KVConnectorPromMetrics | None],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._children = children
        self._engines = per_engine_labelvalues
        labels = [*labelnames, "child"]
        self._counters = {
            name: metric_types[Counter](PREFIX + name, about, labelnames=labels)
            for name, about in SELECTION_COUNTERS.items()
        }
        self._pending = metric_types[Gauge](
            PREFIX + PENDING,
            "Loads of a child that are on their way.",
            labelnames=labels,
            multiprocess_mode="mostrecent",
        )
        for engine in per_engine_labelvalues.values():
            for child in children:
                self._create_series([*engine, child])

    def _create_series(self, labels: Sequence[object]) -> None:
        """Every series begins with 0, so that a rate over it is right from the first increment on."""
        for counter in self._counters.values():
            counter.labels(*labels)
        self._pending.labels(*labels).set(0)

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Record what `ChildrenStats.to_dict` returned."""
        for name, part in transfer_stats_data.items():
            if name == SELECTION:
                self._observe_selection(part["stats"], self._engines[engine_idx])
            elif (metrics := self._children.get(name)) is not None:
                metrics.observe(part["stats"], engine_idx)

    def _observe_selection(self, stats: Mapping[str, Any], engine: Sequence[object]) -> None:
        for name, labels, number in stats[COUNTS]:
            self._counters[name].labels(*engine, *labels).inc(number)
        for _, labels, number in stats[LEVELS]:
            self._pending.labels(*engine, *labels).set(number)


class SharedMetric:
    """A kind of metric whose series several children share: made at the first call, handed out again at the next.

    Two children of one class register the same names; the label `child` tells their series apart.
    """

    def __init__(self, kind: Any) -> None:
        self._kind = kind
        self._made: dict[str, Any] = {}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        name = str(kwargs["name"] if "name" in kwargs else args[0])
        if name not in self._made:
            self._made[name] = self._kind(*args, **kwargs)
        return self._made[name]
