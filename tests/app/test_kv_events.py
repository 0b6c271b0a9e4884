"""KV events are read where the policy goes by them."""

import dataclasses

import pytest
from prometheus_client import CollectorRegistry

from pdproxy.app.kv_events import KvEvents, kv_events
from pdproxy.background import Background
from pdproxy.credential import no_headers
from pdproxy.nodes.cache_advice import EventsSeen
from pdproxy.nodes.pool import Pool
from pdproxy.observe.metrics import Metrics
from pdproxy.orchestration.text_prefix_source import TextPrefixSource
from pdproxy.planning.prefix import Place
from pdproxy.settings.load import load
from tests.events.feeds import SCHEME
from tests.fakes.clock import FakeClock
from tests.nodes.fake_pool import FakePoolTransport


def built(**variables: str) -> KvEvents | None:
    settings = load(environment={"PDPROXY_DECODE": "http://d:1", **variables})
    clock = FakeClock()
    pool, metrics = Pool(clock), Metrics(CollectorRegistry())
    texts = TextPrefixSource(pool, clock)
    return kv_events(settings, pool, FakePoolTransport(), clock, metrics, no_headers, texts, Background(clock))


@pytest.mark.parametrize(("routing", "wanted"), [("cache", True), ("session", False), ("least-loaded", False)])
def test_events_are_read_where_the_policy_goes_by_them(routing: str, wanted: bool) -> None:
    events = built(PDPROXY_POLICY_ROUTING=routing)
    assert (events is not None) is wanted


def test_operators_see_how_much_is_known_of_each_rank() -> None:
    events = built()
    assert events is not None
    assert events.statuses("p1") == []
    assert events.seen("p1") is EventsSeen.OFF
    for rank in range(2):
        events.caches.feed_of(Place("p1", rank), rank, SCHEME)
    assert events.seen("p1") is EventsSeen.UNREACHABLE
    events.caches.of_node("p1")[1].nothing_yet()
    assert events.seen("p1") is EventsSeen.UNREACHABLE
    assert events.statuses("p1") == [
        {"rank": 0, "known": "nothing", "seconds": 0.0, "blocks": 0},
        {"rank": 1, "known": "all", "seconds": 0.0, "blocks": 0},
    ]
    events.caches.of_node("p1")[0].nothing_yet()
    assert events.seen("p1") is EventsSeen.READ
    other = dataclasses.replace(SCHEME, unit=8)
    assert events.caches.feed_of(Place("p1", 1), 1, other) is not events.caches.feed_of(Place("p1", 1), 1, SCHEME)
