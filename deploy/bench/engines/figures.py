"""From times to figures with confidence: pure.

Every round gives one value of each figure; a figure is the mean over the rounds, and its interval Student's for 95 %. A
ratio is made within each round, of two targets that were asked one after the other, and then treated alike.
"""

import math
import statistics
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from deploy.bench.engines.guidellm import Answer

STUDENT = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131)
"""Two-sided, 95 %, by degrees of freedom from 1 on; from the last one on it is taken, which makes intervals wider."""
SHARES = (0.5, 0.9, 0.99)
NORMAL = 1.96


class Estimate(NamedTuple):
    """A value and half the width of its interval; not a number where one round says nothing about others."""

    value: float
    spread: float

    def __str__(self) -> str:
        digits = min(2, max(0, 2 - math.floor(math.log10(abs(self.value))))) if self.value else 2
        around = "" if math.isnan(self.spread) else f" ± {self.spread:.{digits}f}"
        return f"{self.value:.{digits}f}{around}"


class Metric(NamedTuple):
    """A figure: its name, its unit, and whether more of it is better."""

    name: str
    unit: str
    more_is_better: bool = False


class Round(NamedTuple):
    """The figures of one run of the load generator."""

    load: str
    target: str
    number: int
    answers: Sequence[Answer]
    reads: float
    """Hand-overs that the decode node counted as verified."""
    requests: int
    """All of the run, those that are in no figure too."""


def percentile(values: Sequence[float], share: float) -> float:
    """With linear interpolation between the two nearest. Raises ValueError where there are no values."""
    if not values:
        raise ValueError("no values")
    ordered, place = sorted(values), share * (len(values) - 1)
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (place - low) * (ordered[high] - ordered[low])


def estimate(values: Sequence[float]) -> Estimate:
    """The summary of one value for each round. Raises ValueError where there are none."""
    if len(values) < 2:
        return Estimate(statistics.fmean(values) if values else percentile(values, 0), math.nan)
    student = STUDENT[min(len(values) - 2, len(STUDENT) - 1)]
    return Estimate(statistics.fmean(values), student * statistics.stdev(values) / math.sqrt(len(values)))


def median_estimate(values: Sequence[float]) -> Estimate:
    """The median, and an interval of 95 % from the values' order alone: outliers do not widen it."""
    reach = NORMAL / (2 * math.sqrt(len(values))) if values else 0.0
    low, high = (percentile(values, min(1.0, max(0.0, 0.5 + sign * reach))) for sign in (-1, 1))
    return Estimate(percentile(values, 0.5), (high - low) / 2)


def figures(answers: Sequence[Answer]) -> dict[Metric, float]:
    """All figures of one run's answers, or of those of one shape."""
    made = dict[Metric, float]()
    for share in SHARES:
        made[Metric(f"first token, p{share * 100:.0f}", "ms")] = percentile(
            [each.first_token for each in answers], share
        )
    for share in SHARES:
        made[Metric(f"between tokens, p{share * 100:.0f}", "ms")] = percentile(
            [each.inter_token for each in answers], share
        )
    seconds = max(each.ended for each in answers) - min(each.began for each in answers)
    made[Metric("throughput", "tokens/s", more_is_better=True)] = sum(each.tokens for each in answers) / seconds
    return made


def right_share(answers: Iterable[Answer]) -> float:
    """The share of answers whose text is right."""
    return statistics.fmean(each.right for each in answers)


def of_rounds(rounds: Iterable[Round], load: str, target: str, shape: str) -> list[dict[Metric, float]]:
    """The figures of each round, in the rounds' order."""
    found = sorted(
        (each for each in rounds if (each.load, each.target) == (load, target)), key=lambda each: each.number
    )
    return [figures([answer for answer in each.answers if answer.shape.name == shape]) for each in found]


def absolute(rounds: Sequence[dict[Metric, float]], metric: Metric) -> Estimate:
    """A figure of one target."""
    return estimate([each[metric] for each in rounds])


def ratio(ours: Sequence[dict[Metric, float]], theirs: Sequence[dict[Metric, float]], metric: Metric) -> Estimate:
    """How many times another target's figure, round by round."""
    return estimate([mine[metric] / other[metric] for mine, other in zip(ours, theirs, strict=True)])
