"""Counters, gauges and histograms of prometheus_client that count in half the time.

Its own ask at each step whether the series has its labels, and look for a histogram's bucket one by one; a request
takes some twenty such steps. What is exported is the same. A series without its labels cannot count: AttributeError.
"""

import bisect

import prometheus_client


class Counter(prometheus_client.Counter):
    """A counter."""

    def inc(self, amount: float = 1, exemplar: dict[str, str] | None = None) -> None:
        if amount < 0 or exemplar:
            super().inc(amount, exemplar)
        else:
            self._value.inc(amount)


class Gauge(prometheus_client.Gauge):
    """A gauge."""

    def inc(self, amount: float = 1) -> None:
        self._value.inc(amount)

    def dec(self, amount: float = 1) -> None:
        self._value.inc(-amount)

    def set(self, value: float) -> None:
        self._value.set(float(value))


class Histogram(prometheus_client.Histogram):
    """A histogram."""

    def observe(self, amount: float, exemplar: dict[str, str] | None = None) -> None:
        if exemplar:
            super().observe(amount, exemplar)
            return
        self._sum.inc(amount)
        self._buckets[bisect.bisect_left(self._upper_bounds, amount)].inc(1)
