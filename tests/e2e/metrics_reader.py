"""Read the metrics of nodes, and wait for counters to grow."""

import time
from collections.abc import Callable
from dataclasses import dataclass

import httpx
from prometheus_client.parser import text_string_to_metric_families

PATIENCE_S = 60.0
"""Seconds until a metric has followed an answer. It takes a moment on an idle machine."""


def read(url: str, name: str, **labels: str) -> float:
    """The sum of a metric's samples with these labels; 0 where there are none yet. Raises httpx.HTTPError."""
    exposition = httpx.get(f"{url}/metrics", timeout=PATIENCE_S, trust_env=False).raise_for_status().text
    lines = [line for line in exposition.splitlines() if line.startswith(name)]
    return sum(
        sample.value
        for family in text_string_to_metric_families("".join(f"{line}\n" for line in lines))
        for sample in family.samples
        if sample.name == name and labels.items() <= sample.labels.items()
    )


def becomes_true(condition: Callable[[], bool], within: float = PATIENCE_S) -> bool:
    """Whether it does within so many seconds."""
    limit = time.monotonic() + within
    while not condition():
        if time.monotonic() > limit:
            return False
        time.sleep(0.05)
    return True


@dataclass(frozen=True)
class Watch:
    """How much a counter of the connector has grown since `watch`."""

    url: str
    name: str
    labels: dict[str, str]
    start: float

    def grown(self) -> float:
        """The growth so far."""
        return read(self.url, self.name, **self.labels) - self.start

    def reaches(self, amount: float) -> None:
        """Wait for this growth. Raises AssertionError after PATIENCE_S."""
        reached = becomes_true(lambda: self.grown() >= amount)
        assert reached, f"{self.name}{self.labels} grew by {self.grown():g}, not {amount:g}"


def watch(url: str, name: str, **labels: str) -> Watch:
    """Watch `pdproxy_connector_<name>_total` from now on."""
    full = f"pdproxy_connector_{name}_total"
    return Watch(url, full, labels, read(url, full, **labels))
