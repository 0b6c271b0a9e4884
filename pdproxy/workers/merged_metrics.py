"""The metrics of all workers as one proxy's: counters and histograms summed, gauges by what each means.

prometheus_client's own multiprocess mode is of no use here: it knows no gauges that are asked for their value when they
are scraped, which ours of running and waiting requests are, and no metrics of processes.
"""

import dataclasses
from collections.abc import Iterable, Mapping

from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

SUMMED = frozenset(
    {
        "pdproxy_requests_active",
        "pdproxy_requests_queued",
        "pdproxy_body_bytes",
        "pdproxy_prefill_pending_tokens_estimate",
        "pdproxy_node_active",
        "pdproxy_nodes_needed",
        "pdproxy_key_requests_active",
        "pdproxy_key_requests_queued",
        "process_virtual_memory_bytes",
        "process_resident_memory_bytes",
        "process_open_fds",
    }
)
"""Gauges of what each worker has of its own."""
LARGEST = frozenset(
    {
        "pdproxy_node_up",
        "pdproxy_cohort_nodes",
        "pdproxy_pair_barred",
        "pdproxy_file_unusable",
        "pdproxy_prefix_index_blocks",
        "pdproxy_prefix_index_places",
        "python_info",
        "pdproxy_workers",
    }
)
"""Gauges of what all workers look at: 1 where at least one sees it so; of the index, the one that knows most."""
SMALLEST = frozenset({"process_start_time_seconds", "process_max_fds"})
"""Gauges of which the least counts; also the times at which series began (``…_created``)."""

Series = tuple[str, tuple[tuple[str, str], ...]]
"""A sample's name and labels."""


@dataclasses.dataclass(slots=True)
class _Family:
    """A metric of one source; ``values`` by series."""

    kind: str
    text: str
    values: dict[Series, float]


_Families = dict[str, _Family]


class MergedMetrics(Collector):
    """What was last known of each source. Of a worker that has ended, its counts stay: a sum must not go down.

    ``own``: the supervisor's own metrics.
    """

    def __init__(self, own: Collector) -> None:
        self._own = own
        self._latest: dict[int, _Families] = {}
        self._ended: _Families = {}

    def update(self, worker: int, text: str) -> None:
        """Take in what a worker shows, in Prometheus' text format."""
        self._latest[worker] = _families(text_string_to_metric_families(text))

    def retire(self, worker: int) -> None:
        """A worker's process has ended: what it counted stays, what it measured goes."""
        for name, family in self._latest.pop(worker, {}).items():
            if _adds_up(name, family.kind):
                _merge(self._ended, name, family)

    def collect(self) -> Iterable[Metric]:
        """All metrics, merged."""
        merged: _Families = {}
        for families in (_families(self._own.collect()), self._ended, *tuple(self._latest.values())):
            for name, family in families.items():
                _merge(merged, name, family)
        for name, family in merged.items():
            metric = Metric(name, family.text, family.kind)
            metric.samples = [Sample(series, dict(labels), value) for (series, labels), value in family.values.items()]
            yield metric


def _families(metrics: Iterable[Metric]) -> _Families:
    return {metric.name: _Family(metric.type, metric.documentation, _values(metric.samples)) for metric in metrics}


def _values(samples: Iterable[Sample]) -> dict[Series, float]:
    return {(sample.name, tuple(sample.labels.items())): sample.value for sample in samples}


def _merge(into: _Families, name: str, family: _Family) -> None:
    known = into.setdefault(name, _Family(family.kind, family.text, {})).values
    _merge_values(name, family.kind, known, family.values)


def _merge_values(name: str, kind: str, known: dict[Series, float], more: Mapping[Series, float]) -> None:
    for series, value in more.items():
        if series not in known:
            known[series] = value
        elif name in SMALLEST or series[0].endswith("_created"):
            known[series] = min(known[series], value)
        elif kind == "gauge" and name not in SUMMED:
            known[series] = max(known[series], value)
        else:
            known[series] += value


def _adds_up(name: str, kind: str) -> bool:
    return kind in ("counter", "histogram") and not name.endswith("_created")
