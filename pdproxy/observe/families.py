"""Counters, gauges and histograms: plain numbers, which prometheus_client's registry collects by its public interface.

prometheus_client's own metrics take a lock and check label names at each step, and a request takes some twenty. A
series here is counted by one thread alone: the event loop's, but for spans, which the exporter's thread counts. The
exported page is the same as prometheus_client's own would be.
"""

import abc
import bisect
import itertools
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Generic, TypeVar

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector


class CounterSeries:
    """One counter. ``created``: when counting began, in seconds since 1970."""

    __slots__ = ("created", "value")

    def __init__(self) -> None:
        self.value = 0.0
        self.created = time.time()

    def inc(self, amount: float = 1) -> None:
        """Add an amount.

        Raises:
            ValueError: it is negative.
        """
        if amount < 0:
            raise ValueError("counters only grow")
        self.value += amount


class GaugeSeries:
    """One gauge: a number that is set, or a function that is asked at each scrape."""

    __slots__ = ("_source", "_value")

    def __init__(self) -> None:
        self._value = 0.0
        self._source: Callable[[], float] | None = None

    @property
    def value(self) -> float:
        """The number now."""
        return self._value if self._source is None else self._source()

    def set(self, value: float) -> None:
        """Replace the number."""
        self._value = value

    def set_function(self, source: Callable[[], float]) -> None:
        """Ask this function at each scrape from now on."""
        self._source = source


class HistogramSeries:
    """One histogram. ``counts``: observations by bucket, not added up; the last bucket has no bound."""

    __slots__ = ("_bounds", "counts", "created", "sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0
        self.created = time.time()

    def observe(self, amount: float) -> None:
        """Record one observation."""
        self.sum += amount
        self.counts[bisect.bisect_left(self._bounds, amount)] += 1


SeriesT = TypeVar("SeriesT", CounterSeries, GaugeSeries, HistogramSeries)


class Family(Collector, Generic[SeriesT]):
    """The series of one name, by their label values. A family without labels has one series, from the start.

    Attributes:
        label_names: in the order in which `labels` takes their values.
    """

    def __init__(self, name: str, text: str, label_names: Sequence[str] = (), *, registry: CollectorRegistry) -> None:
        self.label_names = tuple(label_names)
        self._name = name
        self._text = text
        self._series: dict[tuple[str, ...], SeriesT] = {}
        self._to_export: list[tuple[Iterable[str], ...]] = []
        if not label_names:
            self.labels()
        registry.register(self)

    def labels(self, *values: str) -> SeriesT:
        """The series of these label values.

        Raises:
            ValueError: there are more label names, or fewer.
        """
        found = self._series.get(values)
        return self._add(values) if found is None else found

    def export_zeros(self, *axes: Iterable[str]) -> None:
        """Export every combination of these label values from now on, at 0 until something is counted.

        A counter that first appears at 1 has not grown, for Prometheus: the first failure would raise no alert. The
        series are made at the next scrape, for most of hundreds never count.
        """
        self._to_export.append(axes)

    def remove(self, *values: str) -> None:
        """Drop a series, if there is one of these label values."""
        self._series.pop(values, None)

    def describe(self) -> Iterable[Metric]:
        """The family without series, for the registry."""
        yield self._family()

    def collect(self) -> Iterable[Metric]:
        """The family with all its series."""
        begun, self._to_export = self._to_export, []
        for axes in begun:
            for values in itertools.product(*axes):
                self.labels(*values)
        # A copy: another thread may make a series of spans meanwhile.
        yield self._family(tuple(self._series.items()))

    def _add(self, values: tuple[str, ...]) -> SeriesT:
        if len(values) != len(self.label_names):
            raise ValueError(f"{self._name} has the labels {self.label_names}, not {len(values)}")
        # Members of enumerations are exported as the text that they are.
        return self._series.setdefault(tuple(map(str, values)), self._new_series())

    @abc.abstractmethod
    def _new_series(self) -> SeriesT:
        """A series at 0."""

    @abc.abstractmethod
    def _family(self, series: Iterable[tuple[tuple[str, ...], SeriesT]] = ()) -> Metric:
        """The exported family of these series."""


class Counter(Family[CounterSeries]):
    """Counters, whose name ends in ``_total``."""

    def _new_series(self) -> CounterSeries:
        return CounterSeries()

    def _family(self, series: Iterable[tuple[tuple[str, ...], CounterSeries]] = ()) -> Metric:
        family = CounterMetricFamily(self._name, self._text, labels=self.label_names)
        for values, one in series:
            family.add_metric(values, one.value, created=one.created)
        return family


class Gauge(Family[GaugeSeries]):
    """Gauges."""

    def _new_series(self) -> GaugeSeries:
        return GaugeSeries()

    def _family(self, series: Iterable[tuple[tuple[str, ...], GaugeSeries]] = ()) -> Metric:
        family = GaugeMetricFamily(self._name, self._text, labels=self.label_names)
        for values, one in series:
            family.add_metric(values, one.value)
        return family


class Histogram(Family[HistogramSeries]):
    """Histograms. ``buckets``: their upper bounds, ascending and not negative, without infinity."""

    def __init__(
        self,
        name: str,
        text: str,
        label_names: Sequence[str] = (),
        *,
        buckets: Sequence[float],
        registry: CollectorRegistry,
    ) -> None:
        self._bounds = tuple(map(float, buckets))
        self._bound_names = (*map(str, self._bounds), "+Inf")
        super().__init__(name, text, label_names, registry=registry)

    def _new_series(self) -> HistogramSeries:
        return HistogramSeries(self._bounds)

    def _family(self, series: Iterable[tuple[tuple[str, ...], HistogramSeries]] = ()) -> Metric:
        family = HistogramMetricFamily(self._name, self._text, labels=self.label_names)
        for values, one in series:
            added_up = itertools.accumulate(one.counts)
            family.add_metric(values, tuple(zip(self._bound_names, added_up, strict=True)), one.sum)
            labels = dict(zip(self.label_names, values, strict=True))
            family.add_sample(f"{self._name}_created", labels, one.created)
        return family
