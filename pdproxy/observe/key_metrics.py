"""What each API key uses, by its name: never by the key itself."""

import enum
from collections.abc import Callable
from functools import cache, partial

from prometheus_client import CollectorRegistry, Counter, Gauge

from pdproxy.observe.labels import Outcome, Rejection, Tokens

MOST_KEYS = 1000
"""Names with series of their own; those that come later are counted together."""
OTHER_KEYS = "(other)"
"""Their label: no name in a file of keys can be so, for a client cannot choose names, and an operator will not."""


class KeyMetrics:
    """Series by the names of API keys."""

    def __init__(self, registry: CollectorRegistry) -> None:
        counter, gauge = partial(Counter, registry=registry), partial(Gauge, registry=registry)
        self._requests = counter("pdproxy_key_requests_total", "Requests of a key that ended.", ["key", "outcome"])
        self._tokens = counter("pdproxy_key_tokens_total", "Tokens of a key, as nodes report them.", ["key", "kind"])
        self._waited = counter("pdproxy_key_queue_seconds_total", "Time that prompts of a key waited.", ["key"])
        self._rejected = counter(
            "pdproxy_key_rejected_total", "Requests of a key that were refused.", ["key", "reason"]
        )
        self._active = gauge("pdproxy_key_requests_active", "Prompts of a key that run now.", ["key"])
        self._queued = gauge("pdproxy_key_requests_queued", "Prompts of a key that wait now.", ["key"])
        self._labels: dict[str, str] = {}
        self._running: Callable[[str], int] = lambda _: 0
        self._waiting: Callable[[str], int] = lambda _: 0
        # Finding a series by its labels costs more than counting: those of the hot path are found once.
        self._request = cache(self._requests.labels)
        self._token = cache(self._tokens.labels)

    def watch(self, running: Callable[[str], int], waiting: Callable[[str], int]) -> None:
        """Ask for the numbers of a key's running and waiting prompts whenever metrics are scraped."""
        self._running, self._waiting = running, waiting

    def known(self, key: str) -> None:
        """Requests of a key may come: its series are there from now on, at 0."""
        self._label(key)

    def request_ended(self, key: str, outcome: Outcome) -> None:
        """Count a request that ended."""
        self._request(self._label(key), outcome).inc()

    def tokens(self, key: str, kind: Tokens, count: int) -> None:
        """Add tokens; counts that are not positive add nothing."""
        if count > 0:
            self._token(self._label(key), kind).inc(count)

    def waited(self, key: str, seconds: float) -> None:
        """A prompt has left the queue, to run or refused."""
        self._waited.labels(self._label(key)).inc(max(0.0, seconds))

    def rejected(self, key: str, reason: enum.StrEnum) -> None:
        """Count a request that was turned away."""
        self._rejected.labels(self._label(key), reason).inc()

    def _label(self, key: str) -> str:
        label = self._labels.get(key)
        return self._begin(key) if label is None else label

    def _begin(self, key: str) -> str:
        """A counter that first appears at 1 has not grown, for Prometheus."""
        if len(self._labels) >= MOST_KEYS:
            return OTHER_KEYS
        self._labels[key] = key
        for outcome in Outcome:
            self._requests.labels(key, outcome)
        for kind in Tokens:
            self._tokens.labels(key, kind)
        for reason in Rejection:
            self._rejected.labels(key, reason)
        self._waited.labels(key)
        self._active.labels(key).set_function(lambda: self._running(key))
        self._queued.labels(key).set_function(lambda: self._waiting(key))
        return key
