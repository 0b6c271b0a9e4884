"""A publisher's batches reach the index in order and once, whatever is lost, comes twice, or is restarted meanwhile."""

import asyncio
import dataclasses
import time

import pytest

from pdproxy.errors import Fault, NodeFault
from pdproxy.events.subscription import SubscriptionTimeouts
from pdproxy.observe.labels import Known
from tests.events.feeds import PLACE, QUICK, Caches, feed_of, subscribed
from tests.events.publisher import kept_ports, publishing, removed, stored, until

PATIENT = SubscriptionTimeouts(connect=2.0, replay=2.0, first_check=60.0, check=60.0)
"""Silence is never taken for a loss."""


def known(caches: Caches) -> Known:
    """How much is known of the place."""
    return caches.of_node(PLACE.node)[0].known


async def test_what_is_published_is_known_as_soon_as_it_comes() -> None:
    async with publishing() as publisher:
        caches = Caches()
        async with subscribed(caches, publisher.source, PATIENT):
            assert known(caches) is Known.ALL  # nothing was ever cached there
            await until(lambda: publisher.subscribers == 1)
            publisher.publish(stored(1, 2, 3))
            publisher.publish(removed(3), stored(7))
            await until(lambda: caches.count("kv_event_batches_total", outcome="applied") == 2)
            assert (caches.blocks(), known(caches)) == (3, Known.ALL)
        assert caches.count("kv_events_total", kind="stored") == 2
        assert caches.count("kv_events_total", kind="removed") == 1
        assert caches.count("kv_event_gaps_total") == 0


async def test_what_was_published_before_is_asked_for() -> None:
    async with publishing() as publisher:
        publisher.publish(stored(1, 2))
        publisher.publish(stored(3))
        caches = Caches()
        async with subscribed(caches, publisher.source, PATIENT):
            assert (caches.blocks(), known(caches), publisher.questions) == (3, Known.ALL, [0])


async def test_a_proxy_that_comes_too_late_for_the_first_batch_knows_a_part() -> None:
    async with publishing() as publisher:
        publisher.publish(stored(1), kept=False)
        publisher.publish(stored(2))
        caches = Caches()
        async with subscribed(caches, publisher.source, PATIENT):
            assert (caches.blocks(), known(caches)) == (1, Known.PART)


async def test_batches_that_are_lost_on_the_way_are_replayed_and_none_is_applied_twice() -> None:
    async with publishing() as publisher:
        caches = Caches()
        async with subscribed(caches, publisher.source, PATIENT):
            await until(lambda: publisher.subscribers == 1)
            publisher.publish(stored(1))
            await until(lambda: caches.blocks() == 1)
            publisher.publish(stored(2), lost=True)
            publisher.publish(removed(1), lost=True)
            publisher.publish(stored(3))
            await until(lambda: caches.blocks() == 2)
            assert known(caches) is Known.ALL
            assert publisher.questions == [0, 0]  # the last one that was taken, and what follows it
            assert caches.count("kv_event_batches_total", outcome="applied") == 4
            assert caches.count("kv_event_gaps_total") == 1


async def test_a_batch_that_is_lost_before_a_silence_is_found_missing() -> None:
    async with publishing() as publisher:
        caches = Caches()
        async with subscribed(caches, publisher.source, QUICK):
            publisher.publish(stored(1), lost=True)
            await until(lambda: caches.blocks() == 1)


async def test_after_a_loss_for_good_only_what_comes_later_is_known() -> None:
    async with publishing() as publisher:
        caches = Caches()
        async with subscribed(caches, publisher.source, PATIENT):
            await until(lambda: publisher.subscribers == 1)
            publisher.publish(stored(1, 2), kept=False)
            await until(lambda: caches.blocks() == 2)
            publisher.publish(removed(1), lost=True, kept=False)
            publisher.publish(stored(3))
            await until(lambda: caches.count("kv_places_forgotten_total", reason="gap") == 1)
            await until(lambda: caches.blocks() == 1)
            assert known(caches) is Known.PART


async def test_without_a_replay_endpoint_a_gap_is_a_loss_for_good() -> None:
    async with publishing() as publisher:
        caches, source = Caches(), dataclasses.replace(publisher.source, replay_port=None)
        async with subscribed(caches, source, QUICK):
            assert known(caches) is Known.NOTHING
            await until(lambda: publisher.subscribers == 1)
            publisher.publish(stored(1))
            await until(lambda: caches.blocks() == 1)
            assert known(caches) is Known.ALL
            publisher.publish(stored(2), lost=True)
            publisher.publish(stored(3, 4))
            await until(lambda: caches.blocks() == 2)
            assert known(caches) is Known.PART
        assert publisher.questions == []


async def test_a_batch_that_comes_twice_counts_once() -> None:
    async with publishing() as publisher:
        caches = Caches()
        async with subscribed(caches, publisher.source, PATIENT):
            await until(lambda: publisher.subscribers == 1)
            publisher.publish(stored(1))
            publisher.publish(removed(1))
            publisher.send_again(0)
            publisher.publish(stored(5))
            await until(lambda: caches.count("kv_event_batches_total", outcome="applied") == 3)
            assert caches.blocks() == 1
            assert caches.count("kv_event_batches_total", outcome="duplicate") == 1


@pytest.mark.parametrize("as_many", [False, True])
async def test_an_engine_that_was_restarted_at_the_same_port_has_nothing_of_what_the_old_one_had(as_many: bool) -> None:
    """Even if it has published as many batches by now: the last one is not the one that was taken last. And even if the
    clock of its host was set back."""
    caches = Caches()
    async with publishing(kept_ports()) as old, subscribed(caches, old.source, PATIENT) as running:
        await until(lambda: old.subscribers == 1)
        old.publish(stored(1, 2, 3))
        old.publish(stored(4))
        await until(lambda: caches.blocks() == 4)
    async with publishing(old.ports) as new:
        new.publish(stored(9))
        if as_many:
            new.later(60)
            new.publish(stored(10))
            new.publish(stored(11))
        async with subscribed(caches, new.source, PATIENT):
            assert caches.blocks() == (3 if as_many else 1)
            assert known(caches) is Known.ALL
    assert running.done()
    assert caches.count("kv_places_forgotten_total", reason="restart") == 1


async def test_a_connection_that_broke_is_taken_up_where_it_was() -> None:
    async with publishing() as publisher:
        caches = Caches()
        async with subscribed(caches, publisher.source, PATIENT):
            await until(lambda: publisher.subscribers == 1)
            publisher.publish(stored(1))
            await until(lambda: caches.blocks() == 1)
        publisher.publish(stored(2))
        async with subscribed(caches, publisher.source, PATIENT):
            assert (caches.blocks(), known(caches), publisher.questions) == (2, Known.ALL, [0, 0])
        assert caches.count("kv_event_batches_total", outcome="applied") == 2
        assert caches.count("kv_places_forgotten_total", reason="restart") == 0


async def test_without_a_replay_endpoint_a_broken_connection_is_a_loss() -> None:
    async with publishing() as publisher:
        caches, source = Caches(), dataclasses.replace(publisher.source, replay_port=None)
        async with subscribed(caches, source, PATIENT):
            await until(lambda: publisher.subscribers == 1)
            publisher.publish(stored(1))
            await until(lambda: caches.blocks() == 1)
        await until(lambda: publisher.subscribers == 0)
        async with subscribed(caches, source, PATIENT):
            assert known(caches) is Known.NOTHING
            await until(lambda: publisher.subscribers == 1)
            publisher.publish(stored(2))
            await until(lambda: caches.blocks() == 1)
            assert known(caches) is Known.PART


async def test_a_restart_is_noticed_by_a_batch_of_a_later_time() -> None:
    """Where nothing but the sequence numbers shows it."""
    async with publishing() as publisher:
        caches, source = Caches(), dataclasses.replace(publisher.source, replay_port=None)
        async with subscribed(caches, source, PATIENT):
            await until(lambda: publisher.subscribers == 1)
            publisher.publish(stored(1, 2))
            publisher.publish(stored(3))
            await until(lambda: caches.blocks() == 3)
            publisher.send(b"", (0).to_bytes(8), publisher.batch(stored(9)))
            await until(lambda: caches.blocks() == 1)
            assert known(caches) is Known.ALL


@pytest.mark.parametrize(
    "junk", [b"", b"\x93\xcb", b"\x81\xa1a\x01", b"\x93\xc0\x90\x00", b"\x93\x01\x91\x81\xa4type\x01\x00"]
)
async def test_a_batch_that_makes_no_sense_is_counted_and_what_it_may_have_said_is_not_known(junk: bytes) -> None:
    async with publishing() as publisher:
        caches = Caches()
        async with subscribed(caches, publisher.source, PATIENT) as running:
            await until(lambda: publisher.subscribers == 1)
            publisher.publish(stored(1, 2))
            publisher.publish(payload=junk)
            publisher.publish(stored(3))
            await until(lambda: caches.count("kv_event_batches_total", outcome="applied") == 2)
            assert (caches.blocks(), known(caches)) == (1, Known.PART)
            assert caches.count("kv_event_batches_total", outcome="junk") == 1
            assert caches.count("kv_event_gaps_total") == 0
            assert not running.done()


async def test_messages_of_other_frames_end_nothing(caplog: pytest.LogCaptureFixture) -> None:
    async with publishing() as publisher:
        caches = Caches()
        async with subscribed(caches, publisher.source, PATIENT):
            await until(lambda: publisher.subscribers == 1)
            for _ in range(5):
                publisher.send(b"topic alone")
            publisher.send(b"", b"short", b"")
            publisher.send(b"", (-7).to_bytes(8, signed=True), b"")
            publisher.publish(stored(1))
            await until(lambda: caches.blocks() == 1)
        assert caches.count("kv_event_batches_total", outcome="junk") == 7
    lines = [record.getMessage() for record in caplog.records if "so far" in record.getMessage()]
    assert len(lines) == 3  # the 1st, 2nd and 4th
    assert "node p1, rank 0" in lines[0]


async def test_the_batches_of_another_rank_are_junk() -> None:
    async with publishing(rank=1) as publisher:
        caches, source = Caches(), dataclasses.replace(publisher.source, publisher=0)
        async with subscribed(caches, source, PATIENT):
            await until(lambda: publisher.subscribers == 1)
            publisher.publish(stored(1))
            await until(lambda: caches.count("kv_event_batches_total", outcome="junk") == 1)
            assert caches.blocks() == 0


async def test_a_publisher_that_ends_ends_the_subscription() -> None:
    caches = Caches()
    async with publishing() as publisher:
        source = publisher.source
        subscription = subscribed(caches, source, PATIENT)
        running = await subscription.__aenter__()
    await asyncio.wait((running,), timeout=10)
    with pytest.raises(NodeFault) as ended:
        running.result()
    assert ended.value.fault is Fault.RESET
    await subscription.__aexit__(None, None, None)
    async with subscribed(caches, source, PATIENT) as running:
        with pytest.raises(NodeFault) as refused:
            running.result()
        assert refused.value.fault is Fault.REFUSED


async def test_a_replay_without_an_end_is_given_up() -> None:
    async with publishing() as publisher:
        publisher.mute, caches = True, Caches()
        async with subscribed(caches, publisher.source, dataclasses.replace(PATIENT, replay=0.05)) as running:
            with pytest.raises(NodeFault) as fault:
                await asyncio.wait_for(running, 5)
            assert fault.value.fault is Fault.STALL
        assert caches.count("kv_event_replays_total", outcome="unanswered") == 1


async def test_a_feed_is_kept_while_its_place_hashes_the_same_way() -> None:
    async with publishing() as publisher:
        caches = Caches()
        assert feed_of(caches, publisher.source) is feed_of(caches, publisher.source)
        caches.leave(PLACE.node)
        assert caches.of_node(PLACE.node) == ()
        assert not caches.has(PLACE)


async def test_a_publisher_is_asked_once_in_each_while_of_silence() -> None:
    waits = SubscriptionTimeouts(connect=2.0, replay=2.0, first_check=0.1, check=0.4)
    async with publishing() as publisher:
        began = time.monotonic()
        async with subscribed(Caches(), publisher.source, waits):
            await asyncio.sleep(1.5)
        longer_ones = (time.monotonic() - began) / waits.check
        assert 2 <= len(publisher.questions) <= 2 + longer_ones, "at the start, and after the first, shorter while"


async def test_a_publisher_that_is_never_silent_is_not_asked() -> None:
    waits = SubscriptionTimeouts(connect=2.0, replay=2.0, first_check=1.5, check=1.5)
    async with publishing() as publisher:
        caches = Caches()
        async with subscribed(caches, publisher.source, waits):
            await until(lambda: publisher.subscribers == 1)
            for number in range(20):
                publisher.publish(stored(number))
                await asyncio.sleep(0.1)
            assert len(publisher.questions) == 1
            await until(lambda: caches.count("kv_event_batches_total", outcome="applied") == 20)
