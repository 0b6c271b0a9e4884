"""Metrics of the nodes' KV events and of the prompts' token ids, on an injected registry."""

import time
from collections.abc import Callable, Mapping
from functools import partial

from prometheus_client import CollectorRegistry

from pdproxy.observe.families import Counter, Gauge, Histogram
from pdproxy.observe.labels import BatchOutcome, CacheEventKind, Forgotten, IdsOutcome, Known, LookUp, Replay

LAG = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 5, 30)
"""Upper bounds of the buckets, in seconds; an alert picks one of them."""
_FETCH = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1)


class EventMetrics:
    """The series of `pdproxy.events`. ``wall``: seconds since 1970."""

    def __init__(self, registry: CollectorRegistry, wall: Callable[[], float] = time.time) -> None:
        counter, histogram = partial(Counter, registry=registry), partial(Histogram, registry=registry)
        self._wall = wall
        self._batches = counter("pdproxy_kv_event_batches_total", "Batches of KV events received.", ["outcome"])
        self._events = counter("pdproxy_kv_events_total", "KV events applied, or not used.", ["kind"])
        self._gaps = counter("pdproxy_kv_event_gaps_total", "Gaps found in the numbers of batches.")
        self._replays = counter("pdproxy_kv_event_replays_total", "Replays asked of publishers.", ["outcome"])
        self._forgotten = counter(
            "pdproxy_kv_places_forgotten_total", "Times that all that is known of a place was forgotten.", ["reason"]
        )
        self._lag = histogram(
            "pdproxy_kv_event_lag_seconds",
            "From a batch's publication until it was taken in, by two clocks.",
            buckets=LAG,
        )
        self._blocks = Gauge(
            "pdproxy_prefix_index_blocks", "Attention blocks that places are known to have cached.", registry=registry
        )
        self._places = Gauge(
            "pdproxy_prefix_index_places", "Places, by how much is known of them.", ["known"], registry=registry
        )
        self._lookups = counter(
            "pdproxy_prompt_lookups_total", "Prompts looked up in what KV events say, by what of them.", ["by"]
        )
        self._ids = counter("pdproxy_token_ids_total", "Prompts whose token ids nodes were asked for.", ["outcome"])
        self._ids_seconds = histogram(
            "pdproxy_token_ids_seconds", "Time that a node took for a prompt's token ids.", buckets=_FETCH
        )
        for family, words in (
            (self._batches, BatchOutcome), (self._events, CacheEventKind), (self._replays, Replay),
            (self._forgotten, Forgotten), (self._places, Known), (self._lookups, LookUp), (self._ids, IdsOutcome),
        ):  # fmt: skip
            family.export_zeros(words)

    def watch_index(self, blocks: Callable[[], int], places: Callable[[Known], int]) -> None:
        """Ask for the number of known blocks, and of places, whenever metrics are scraped."""
        self._blocks.labels().set_function(blocks)
        for known in Known:
            self._places.labels(known).set_function(partial(places, known))

    def batch(self, outcome: BatchOutcome) -> None:
        """Count a batch."""
        self._batches.labels(outcome).inc()

    def events(self, counts: Mapping[CacheEventKind, int]) -> None:
        """Count the events of a batch."""
        for kind, number in counts.items():
            if number:
                self._events.labels(kind).inc(number)

    def published(self, at: float) -> None:
        """Record a batch's age, by this clock; the node's clock may be ahead: never negative."""
        self._lag.labels().observe(max(0.0, self._wall() - at))

    def gap(self) -> None:
        """Count a gap."""
        self._gaps.labels().inc()

    def replayed(self, outcome: Replay) -> None:
        """Count a replay."""
        self._replays.labels(outcome).inc()

    def forgotten(self, reason: Forgotten) -> None:
        """Count that a place was forgotten."""
        self._forgotten.labels(reason).inc()

    def looked_up(self, by: LookUp) -> None:
        """Count a prompt that was looked up."""
        self._lookups.labels(by).inc()

    def token_ids(self, outcome: IdsOutcome) -> None:
        """Count what came of asking a node for a prompt's token ids."""
        self._ids.labels(outcome).inc()

    def token_ids_took(self, seconds: float) -> None:
        """Record how long a node took for them."""
        self._ids_seconds.labels().observe(seconds)
