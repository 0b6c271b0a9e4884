"""What nodes and the proxy count, read from their `/metrics`."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import httpx
from prometheus_client.parser import text_string_to_metric_families

TIMEOUT_S = 30.0
POLL_S = 0.2

Labels = frozenset[tuple[str, str]]


@dataclass(frozen=True)
class Snapshot:
    """All samples of one exposition."""

    text: str
    samples: Mapping[tuple[str, Labels], float]

    def total(self, name: str, **labels: str) -> float:
        """The sum of a metric's samples that have these labels; 0 where there are none."""
        wanted = labels.items()
        return sum(value for (each, has), value in self.samples.items() if each == name and wanted <= set(has))

    def has(self, name: str, **labels: str) -> bool:
        """Whether there is such a sample."""
        return any(each == name and labels.items() <= set(has) for each, has in self.samples)


def parse(text: str) -> Snapshot:
    """Read a text exposition."""
    samples = {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }
    return Snapshot(text, samples)


def read(url: str) -> Snapshot:
    """Ask a node, or the proxy's operators' port. Raises httpx.HTTPError."""
    answer = httpx.get(f"{url}/metrics", timeout=TIMEOUT_S, trust_env=False)
    return parse(answer.raise_for_status().text)


@dataclass(frozen=True)
class Watch:
    """A counter from one moment on."""

    url: str
    name: str
    labels: Mapping[str, str]
    start: float

    def grown(self) -> float:
        """What was added so far."""
        return read(self.url).total(self.name, **self.labels) - self.start

    def reaches(self, amount: float, within: float) -> bool:
        """Whether so much is added in time; a node tells of a request a moment after it answered."""
        return holds(lambda: self.grown() >= amount, within)


def watch(url: str, name: str, **labels: str) -> Watch:
    """Begin to watch `pdproxy_connector_<name>_total`."""
    full = f"pdproxy_connector_{name}_total"
    return Watch(url, full, labels, read(url).total(full, **labels))


def holds(condition: Callable[[], bool], within: float) -> bool:
    """Whether it becomes true within so many seconds."""
    limit = time.monotonic() + within
    while not condition():
        if time.monotonic() > limit:
            return False
        time.sleep(POLL_S)
    return True
