"""What a node's cache holds, as its connector tells it: pure."""

import dataclasses
import enum
import math
from collections.abc import Mapping, Sequence

CAPACITY_METRICS = "pdproxy_connector_capacity_"
"""What the names of the gauges begin with."""

Sample = tuple[str, Mapping[str, str], float]
"""A metric's name, labels and value."""


class Binding(enum.StrEnum):
    """What runs out first with sequences of the greatest length."""

    ATTENTION = "attention"
    STATE = "state"
    NOTHING = "nothing"


@dataclasses.dataclass(frozen=True, slots=True)
class Capacity:
    """Of all engines behind one address together.

    A load of t tokens in n sequences fits while t / tokens + n / sequences <= 1, but for the last block of each.

    Attributes:
        tokens: of attention capacity.
        sequences: that the state groups allow; None where there are none.
        longest: sequences of the greatest length that run together.
        binding: what runs out first with these.
    """

    tokens: int
    sequences: int | None
    longest: int
    binding: Binding


def read_capacity(samples: Sequence[Sample]) -> Capacity | None:
    """Out of the gauges of a node; None where they are missing or make no sense (an engine that has not told yet)."""
    told = [
        (name.removeprefix(CAPACITY_METRICS), labels, int(value))
        for name, labels, value in samples
        if math.isfinite(value)
    ]
    tokens = [value for name, _, value in told if name == "tokens"]
    state, longest = _sequences(told, "state"), _sequences(told, "max_model_len")
    binding = next((labels.get("group") for name, labels, value in told if name == "binding" and value), None)
    if not tokens or not longest or binding not in set(Binding):
        return None
    return Capacity(sum(tokens), sum(state) if state else None, sum(longest), Binding(binding))


def _sequences(told: Sequence[tuple[str, Mapping[str, str], int]], limit: str) -> list[int]:
    return [value for name, labels, value in told if name == "sequences" and labels.get("limit") == limit]
