"""What PromQL computes otherwise than Python, after Prometheus' promql/functions.go and quantile.go."""

import itertools
import math
from collections.abc import Mapping, Sequence

from tests.deploy.prometheus.storage import Labels

NEAR = 1.1
"""A window's edge within so many times the mean distance of samples counts as reached by the series."""


def divided(left: float, right: float) -> float:
    """As IEEE 754 has it; Python would raise."""
    if right:
        return left / right
    return math.copysign(math.inf, left) if left and not math.isnan(left) else math.nan


def counted(samples: Sequence[tuple[float, float]], begin: float, end: float) -> float | None:
    """By how much a counter grew in a window, extrapolated to its edges; None with fewer than two samples."""
    if len(samples) < 2:
        return None
    (first, least), (last, _) = samples[0], samples[-1]
    grown = sum(after - before if after >= before else after for (_, before), (_, after) in itertools.pairwise(samples))
    covered = last - first
    mean = covered / (len(samples) - 1)
    before, after = (gap if gap < mean * NEAR else mean / 2 for gap in (first - begin, end - last))
    if grown > 0:
        before = min(before, covered * least / grown)  # a counter begins at zero
    return grown * (covered + before + after) / covered


def quantile(share: float, buckets: Mapping[Labels, float]) -> dict[Labels, float]:
    """The quantile of each histogram, from buckets that differ in ``le``; one that saw nothing has none (NaN)."""
    histograms: dict[Labels, list[tuple[float, float]]] = {}
    for labels, count in buckets.items():
        rest = frozenset(pair for pair in labels if pair[0] not in ("le", "__name__"))
        if "le" in dict(labels):
            histograms.setdefault(rest, []).append((float(dict(labels)["le"]), count))
    return {labels: _within(share, sorted(bounds)) for labels, bounds in histograms.items()}


def _within(share: float, bounds: list[tuple[float, float]]) -> float:
    total = bounds[-1][1]
    if len(bounds) < 2 or bounds[-1][0] != math.inf or not total:
        return math.nan
    place = next(index for index, (_, count) in enumerate(bounds) if count >= share * total)
    if place == len(bounds) - 1:
        return bounds[-2][0]
    low, below = bounds[place - 1] if place else (0.0, 0.0)
    high, count = bounds[place]
    return low + (high - low) * (share * total - below) / (count - below) if count > below else low
