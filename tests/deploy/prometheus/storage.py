"""Samples over time, as Prometheus keeps them."""

import bisect
from collections.abc import Iterator, Mapping
from typing import TypeAlias

from prometheus_client.parser import text_string_to_metric_families

from tests.deploy.prometheus.tree import Selector

Labels: TypeAlias = frozenset[tuple[str, str]]
"""Names and values; the metric's own name is under NAME."""
NAME = "__name__"
LOOKBACK = 300.0
"""Seconds that a sample stands for the present."""


class Storage:
    """Times in seconds; the samples of a series must come in order."""

    def __init__(self) -> None:
        self._times: dict[Labels, list[float]] = {}
        self._values: dict[Labels, list[float]] = {}

    def add(self, labels: Labels, at: float, value: float) -> None:
        """One sample."""
        self._times.setdefault(labels, []).append(at)
        self._values.setdefault(labels, []).append(value)

    def scraped(self, page: str, at: float, target: Mapping[str, str] | None = None) -> None:
        """Everything that a `/metrics` page tells, as it was at one moment, with the labels of the target."""
        for family in text_string_to_metric_families(page):
            for sample in family.samples:
                self.add(frozenset({NAME: sample.name, **sample.labels, **(target or {})}.items()), at, sample.value)

    def forget(self, name: str) -> None:
        """All samples of a metric."""
        for labels in [labels for labels in self._times if (NAME, name) in labels]:
            del self._times[labels], self._values[labels]

    def now(self, wanted: Selector, at: float) -> dict[Labels, float]:
        """The last sample of each series that is not too old."""
        return {labels: samples[-1][1] for labels, samples in self.within(wanted, at, LOOKBACK)}

    def within(self, wanted: Selector, at: float, seconds: float) -> Iterator[tuple[Labels, list[tuple[float, float]]]]:
        """The samples of the last ``seconds``, for each series that has any; one that is exactly so old is out."""
        for labels in self._matching(wanted):
            times = self._times[labels]
            begin, end = bisect.bisect_right(times, at - seconds), bisect.bisect_right(times, at)
            if begin < end:
                yield labels, list(zip(times[begin:end], self._values[labels][begin:end], strict=True))

    def _matching(self, wanted: Selector) -> list[Labels]:
        return [
            labels
            for labels in self._times
            if (NAME, wanted.name) in labels and all(each.holds(dict(labels)) for each in wanted.matchers)
        ]
