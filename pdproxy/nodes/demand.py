"""How many prefill and decode nodes the last hour needed, from what was measured. Pure: times are given.

- **Prefill**: each prompt takes a node some seconds, which are counted in the minute in which the prompt arrived,
  however late it was computed: of an overloaded pool that shows all that was asked of it, not what it managed.
- **Decode**: streams at once, those that waited for room included, divided by what one node is seen to carry: of its
  cache, and of streams whose tokens still come as quickly as wanted.

What counts is the busiest `WINDOW` of the hour, for nodes are there for that.
"""

import dataclasses
import enum
import math
from collections.abc import Iterable, Mapping

MINUTE = 60.0
KEPT, WINDOW = 60, 5
"""Minutes that are kept, and that the busiest time is long."""
KEPT_OF_PACE = 0.95
"""Weight that each further sample of as many streams leaves of a sample: the last twenty count."""
LEAST_TOKENS = 8
"""The shortest answer, in tokens, that tells how quickly its tokens came."""


@dataclasses.dataclass(frozen=True, slots=True)
class Wanted:
    """The operator's aims, by which nodes are counted.

    Attributes:
        prefill_busy: part of its time for which a prefill node may compute; more lets prompts wait for each other.
        cache_fill: part of its cache that a decode node may fill.
        token_seconds: between the tokens of a stream, at most.
    """

    prefill_busy: float = 0.7
    cache_fill: float = 0.8
    token_seconds: float = 0.05


class Limit(enum.StrEnum):
    """The resource that decode nodes run out of first."""

    CACHE = "cache"
    SPEED = "speed"
    NOTHING = "nothing"
    """Neither was seen to run out: one node may carry it all, as far as was measured."""


@dataclasses.dataclass(frozen=True, slots=True)
class Advice:
    """Nodes that the last hour needed, unrounded: several proxies add theirs up, and round the sum up.

    Attributes:
        prefill, decode: in the busiest `WINDOW` minutes of the hour.
        limit: by which decode nodes were counted.
        streams_each: streams that a decode node carries as quickly as wanted; None where no limit was seen.
        minutes: that were watched, at most `KEPT`.
    """

    prefill: float = 0.0
    decode: float = 0.0
    limit: Limit = Limit.NOTHING
    streams_each: int | None = None
    minutes: int = 0


@dataclasses.dataclass(slots=True)
class _Minute:
    """``prefill_seconds``: of prompts that arrived; sums of ``samples``: streams, and caches that they filled."""

    prefill_seconds: float = 0.0
    samples: int = 0
    streams: float = 0.0
    caches: float = 0.0


class Demand:
    """The work that was asked of nodes during the last hour."""

    def __init__(self) -> None:
        self._minutes: dict[int, _Minute] = {}
        self._pace: dict[int, float] = {}
        """Seconds between tokens, by the number of streams on the node, rounded up to a power of two."""

    def prefilled(self, arrived: float, seconds: float, now: float) -> None:
        """A prompt kept a prefill node busy for so long; it came to the proxy at that monotonic second."""
        self._minute(arrived, now).prefill_seconds += seconds

    def decoded(self, streams: int, tokens: int, seconds: float) -> None:
        """A stream ended, of so many tokens that came in so many seconds; so many streams, with itself, ran on its node
        then."""
        if tokens >= LEAST_TOKENS and streams > 0:
            size, pace = 1 << (streams - 1).bit_length(), seconds / tokens
            known = self._pace.get(size, pace)
            self._pace[size] = known * KEPT_OF_PACE + pace * (1 - KEPT_OF_PACE)

    def observed(self, now: float, streams: int, waiting: int, caches: float) -> None:
        """Note what decode nodes do at this moment.

        Args:
            streams: that run on all of them.
            waiting: prompts that wait for room; each is taken to be like those that run.
            caches: of one node each, that the streams fill.
        """
        minute = self._minute(now, now)
        minute.samples += 1
        minute.streams += streams + waiting
        minute.caches += caches * (streams + waiting) / streams if streams else caches

    def advice(self, now: float, wanted: Wanted) -> Advice:
        """As of now."""
        newest = math.floor(now / MINUTE)
        kept = {number: minute for number, minute in self._minutes.items() if newest - KEPT < number <= newest}
        if not kept:
            return Advice()
        numbers = range(min(kept), newest + 1)
        prefill = [kept.get(n, _Minute()).prefill_seconds / MINUTE / wanted.prefill_busy for n in numbers]
        each = streams_each(self._pace, wanted.token_seconds)
        by_cache = [_mean(kept.get(n), "caches") / wanted.cache_fill for n in numbers]
        by_speed = [_mean(kept.get(n), "streams") / each if each else 0.0 for n in numbers]
        cache, speed = _busiest(by_cache), _busiest(by_speed)
        limit = Limit.SPEED if speed > cache else Limit.CACHE if cache > 0 else Limit.NOTHING
        return Advice(
            prefill=_busiest(prefill),
            decode=max(cache, speed),
            limit=limit,
            streams_each=each,
            minutes=len(numbers),
        )

    def _minute(self, when: float, now: float) -> _Minute:
        number = math.floor(when / MINUTE)
        minute = self._minutes.get(number)
        if minute is None:
            oldest = math.floor(now / MINUTE) - KEPT
            self._minutes = {n: minute for n, minute in self._minutes.items() if n > oldest}
            minute = self._minutes[number] = _Minute()
        return minute


def streams_each(pace: Mapping[int, float], token_seconds: float) -> int | None:
    """Streams that one node carries with at most so long between tokens; None where no number was seen to be too many.

    Args:
        pace: seconds between tokens, by the number of streams on the node, as they were seen.

    A node that is too slow with the fewest streams that were seen tells nothing: more nodes would not make it quicker.
    """
    quick = [streams for streams, seconds in pace.items() if seconds <= token_seconds]
    slow = [streams for streams, seconds in pace.items() if seconds > token_seconds]
    most = max((streams for streams in quick if all(streams < each for each in slow)), default=None)
    return most if slow else None


def _mean(minute: _Minute | None, what: str) -> float:
    return getattr(minute, what) / minute.samples if minute is not None and minute.samples else 0.0


def _busiest(minutes: Iterable[float]) -> float:
    """The highest mean over `WINDOW` minutes; of fewer, over those there are."""
    values = list(minutes)
    windows = range(max(1, len(values) - WINDOW + 1))
    return max(sum(values[at : at + WINDOW]) / len(values[at : at + WINDOW]) for at in windows)
