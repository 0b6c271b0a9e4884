"""Nodes of which anything is known by their KV events: plans ask for all nodes at once."""

import msgspec
import pytest

from pdproxy.events.places import PlaceFeed
from pdproxy.events.wire import NumberedBatch
from pdproxy.observe.labels import Known
from pdproxy.planning.prefix import Place
from tests.events.feeds import SCHEME, Caches
from tests.events.publisher import stored


def batch(sequence: int, time: float, payload: bytes | None = None) -> NumberedBatch:
    """A batch of one block."""
    return NumberedBatch(
        sequence, msgspec.msgpack.encode([time, [stored(sequence)], 0]) if payload is None else payload
    )


def known(feed: PlaceFeed) -> bool:
    return feed.known is not Known.NOTHING


@pytest.mark.parametrize(
    "forget", [PlaceFeed.restarted, PlaceFeed.unreachable, lambda feed: feed.apply_next(batch(4, 9.0, b"no batch"))]
)
def test_a_node_is_known_while_anything_is_known_of_one_of_its_places(forget: object) -> None:
    caches, nodes = Caches(), [Place("p1"), Place("p1", 1), Place("p2")]
    first, second, other = (caches.feed_of(place, 0, SCHEME) for place in nodes)
    assert not caches.known
    second.apply_after_gap(batch(3, 1.0))
    assert [*caches.known] == ["p1"]
    other.nothing_yet()
    first.apply_next(batch(0, 1.0))
    assert {*caches.known} == {"p1", "p2"}
    for feed in (first, second):
        forget(feed)  # type: ignore[operator]
        assert ("p1" in caches.known) is (known(first) or known(second))
    caches.leave("p2")
    assert "p2" not in caches.known
