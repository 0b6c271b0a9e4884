"""Requests and tokens of each API key in a minute: token buckets. Times are passed in.

A bucket holds what a key may have in a minute and fills up evenly. Tokens are not known beforehand: a request takes
what its prompt and its answers are expected to have, and the difference when its node has told what they had. So a
bucket can be in debt, and the key's next requests are refused until it is paid. A request that is larger than the
bucket goes when that is full.
"""

import dataclasses
import math

from pdproxy.clock import Clock
from pdproxy.intake.auth import ApiKey
from pdproxy.observe.labels import Rejection
from pdproxy.observe.metrics import Metrics
from pdproxy.orchestration.client_errors import TurnedAway
from pdproxy.planning.shares import KeyLimits
from pdproxy.request import Headers


class TokenBucket:
    """The rest of a number per minute."""

    def __init__(self, per_minute: int, now: float) -> None:
        self.per_minute = per_minute
        self._level = float(per_minute)
        self._at = now

    def level(self, now: float) -> float:
        """The rest at this moment; below 0 for a debt."""
        if now == self._at:
            return self._level
        full = float(self.per_minute)
        self._level = min(full, self._level + (now - self._at) * full / 60)
        self._at = now
        return self._level

    def resize(self, per_minute: int, now: float) -> None:
        """Another number per minute, from now on. What was taken stays so."""
        level = self.level(now) + per_minute - self.per_minute
        self.per_minute, self._level = per_minute, min(level, per_minute)

    def seconds_until(self, wanted: float, now: float) -> float:
        """How long until so much may be taken."""
        lacking = min(wanted, self.per_minute) - self.level(now)
        return max(0.0, lacking * 60 / self.per_minute)

    def spend(self, amount: float, now: float) -> None:
        """A negative amount gives back."""
        self._level = self.level(now) - amount


@dataclasses.dataclass(frozen=True, slots=True, eq=False)  # equal is the same: keys of dicts, hashed by identity
class _RateKind:
    """One of the limits: its field, why requests are refused by it, and what it counts, in the words of OpenAI."""

    field: str
    reason: Rejection
    counts: str
    text: str


REQUESTS = _RateKind("requests_per_minute", Rejection.REQUEST_RATE, "requests", "requests per minute")
INPUT = _RateKind("input_tokens_per_minute", Rejection.INPUT_RATE, "tokens", "input tokens per minute")
OUTPUT = _RateKind("output_tokens_per_minute", Rejection.OUTPUT_RATE, "tokens", "output tokens per minute")
_KINDS = (REQUESTS, INPUT, OUTPUT)

Buckets = dict[_RateKind, TokenBucket]
"""The buckets of one key, for the limits that it has."""


class RateLimits:
    """The buckets of all keys that have such limits."""

    def __init__(self, clock: Clock, metrics: Metrics) -> None:
        self._clock = clock
        self._metrics = metrics
        self._buckets: dict[str, tuple[KeyLimits, Buckets]] = {}
        """By key, with the limits for which they were made."""

    def charge_request(self, api_key: ApiKey) -> "RateCharge | None":
        """A request of a key has come; None where the key has no such limit.

        Raises:
            ClientError: 429: none could go now, however small.
        """
        limits = api_key.limits
        if limits.requests_per_minute is limits.input_tokens_per_minute is limits.output_tokens_per_minute is None:
            return None
        charge = RateCharge(api_key.name, self._of(api_key.name, limits), self._clock, self._metrics)
        charge.charge_request()
        return charge

    def _of(self, name: str, limits: KeyLimits) -> Buckets:
        known, buckets = self._buckets.get(name, (None, {}))
        if known is limits:
            return buckets
        self._buckets[name], now = (limits, buckets), self._clock.now()
        for kind in _KINDS:
            most: int | None = getattr(limits, kind.field)
            if most is None:
                buckets.pop(kind, None)
            elif kind not in buckets:
                buckets[kind] = TokenBucket(most, now)
            elif buckets[kind].per_minute != most:
                buckets[kind].resize(most, now)
        return buckets


class RateCharge:
    """The charge of one request to its key's buckets. `settle` it, on every exit."""

    def __init__(self, key: str, buckets: Buckets, clock: Clock, metrics: Metrics) -> None:
        self._key = key
        self._buckets = buckets
        self._clock = clock
        self._metrics = metrics
        self._expected = {INPUT: 0, OUTPUT: 0}
        self._used = {INPUT: 0, OUTPUT: 0}
        self._answered = self._told = False

    def charge_request(self) -> None:
        """The request has come: charge one request. Raises as `RateLimits.charge_request`."""
        now = self._clock.now()
        self._require({REQUESTS: 1, INPUT: 1, OUTPUT: 1}, now)
        self._take({REQUESTS: 1}, now)

    def expect(self, prompt: int, answers: int) -> None:
        """The request will have about so many tokens.

        Raises:
            ClientError: 429: they are not left.
        """
        now, expected = self._clock.now(), {INPUT: prompt, OUTPUT: answers}
        self._require(expected, now)
        self._expected = expected
        self._take(expected, now)

    def confirm(self) -> None:
        """The request is being answered: it has cost what was expected, unless a node tells otherwise."""
        self._answered = True

    def used(self, prompt: int, answers: int) -> None:
        """A node has told the tokens of one of its prompts and of the answers."""
        self._told = True
        self._used[INPUT] += prompt
        self._used[OUTPUT] += answers

    def settle(self) -> None:
        """The request has ended: charge what it cost in place of what was expected; nothing if it was not answered."""
        if self._told or not self._answered:
            used, expected = self._used, self._expected
            more = {INPUT: used[INPUT] - expected[INPUT], OUTPUT: used[OUTPUT] - expected[OUTPUT]}
            self._take(more, self._clock.now())

    def headers(self) -> Headers:
        """The rest of each limit, as OpenAI's API says it; for tokens, the limit with the smallest rest."""
        now, requests, tightest, least = self._clock.now(), None, None, math.inf
        for kind, bucket in self._buckets.items():
            if kind is REQUESTS:
                requests = bucket
            elif (part := bucket.level(now) / bucket.per_minute) < least:
                tightest, least = bucket, part
        told = () if requests is None else _headers("requests", requests, now)
        return told if tightest is None else (*told, *_headers("tokens", tightest, now))

    def _require(self, wanted: dict[_RateKind, int], now: float) -> None:
        longest, lacking, buckets = 0.0, None, self._buckets
        for kind, amount in wanted.items():
            if kind in buckets and (seconds := buckets[kind].seconds_until(amount, now)) > longest:
                longest, lacking = seconds, kind
        if lacking is not None:
            raise self._refused(lacking, wanted[lacking], longest)

    def _refused(self, kind: _RateKind, wanted: int, seconds: float) -> TurnedAway:
        self._metrics.rejected(kind.reason, self._key)
        bucket = self._buckets[kind]
        left, wait = max(0, math.floor(bucket.level(self._clock.now()))), math.ceil(seconds)
        text = f"Rate limit of this API key reached on {kind.text}: limit {bucket.per_minute}, left {left}, "
        text += f"wanted {wanted}. Try again in {wait} s."
        headers = (("retry-after", str(wait)), *self.headers())
        code = "rate_limit_exceeded"
        return TurnedAway(429, text, kind=kind.counts, code=code, headers=headers, limit=kind.reason)

    def _take(self, amounts: dict[_RateKind, int], now: float) -> None:
        for kind, amount in amounts.items():
            if kind in self._buckets:
                self._buckets[kind].spend(amount, now)


def _headers(counts: str, bucket: TokenBucket, now: float) -> Headers:
    return (
        (f"x-ratelimit-limit-{counts}", str(bucket.per_minute)),
        (f"x-ratelimit-remaining-{counts}", str(max(0, math.floor(bucket.level(now))))),
        (f"x-ratelimit-reset-{counts}", duration(bucket.seconds_until(math.inf, now))),
    )


def duration(seconds: float) -> str:
    """As OpenAI's API writes it: 12ms, 6.5s, 1m30s."""
    if seconds < 1:
        return f"{math.ceil(seconds * 1000)}ms"
    minutes, rest = divmod(seconds, 60)
    return (f"{minutes:.0f}m" if minutes else "") + f"{math.floor(rest * 1000) / 1000:g}s"
