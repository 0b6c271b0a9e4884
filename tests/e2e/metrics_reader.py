"""What nodes count, watched from one moment on."""

import time
from dataclasses import dataclass

import httpx
from prometheus_client.parser import text_string_to_metric_families

PATIENCE_S = 60.0
"""A node tells of a request a moment after it answered; a loaded machine stretches the moment."""


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


@dataclass(frozen=True)
class Watch:
    """A counter of the connector, from the moment of `watch` on."""

    url: str
    name: str
    labels: dict[str, str]
    start: float

    def grown(self) -> float:
        """What was added so far."""
        return read(self.url, self.name, **self.labels) - self.start

    def reaches(self, amount: float) -> None:
        """Wait until at least so much was added; AssertionError when it is not within PATIENCE_S."""
        limit = time.monotonic() + PATIENCE_S
        while (grown := self.grown()) < amount:
            assert time.monotonic() < limit, f"{self.name}{self.labels} grew by {grown:g}, not {amount:g}"
            time.sleep(0.05)


def watch(url: str, name: str, **labels: str) -> Watch:
    """Begin to watch `pdproxy_connector_<name>_total`."""
    full = f"pdproxy_connector_{name}_total"
    return Watch(url, full, labels, read(url, full, **labels))
