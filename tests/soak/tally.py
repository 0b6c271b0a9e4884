"""Counts of a soak."""

import dataclasses
from collections import Counter

from prometheus_client import CollectorRegistry


@dataclasses.dataclass(slots=True)
class Tally:
    """The ends of requests: complete, broken (cleanly), refused (cleanly), left."""

    ended: Counter[str] = dataclasses.field(default_factory=Counter)
    kills: int = 0
    pauses: int = 0
    """How often a node's engine stood still for a while."""
    registry: CollectorRegistry = dataclasses.field(default_factory=CollectorRegistry, repr=False)
    """The proxy's own counts."""
    objects: list[int] = dataclasses.field(default_factory=list)
    """Blocks of memory that Python's objects had, at equal distances of time."""
    resident: list[float] = dataclasses.field(default_factory=list)
    """MiB that the process had then; what the allocator keeps of freed memory is in it, and grows with scatter."""

    def count(self, name: str, **labels: str) -> float:
        """A metric's value."""
        return self.registry.get_sample_value(f"pdproxy_{name}", labels) or 0.0

    def by(self, name: str) -> dict[str, float]:
        """The values of a metric of one label that are not 0."""
        samples = (each for family in self.registry.collect() for each in family.samples)
        return {"".join(each.labels.values()): each.value for each in samples if each.name == name and each.value}
