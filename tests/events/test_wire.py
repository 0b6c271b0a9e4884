"""The used parts of vLLM's events; all else is passed over."""

import msgspec
import pytest

from pdproxy.events.sources import MOST_RANKS, EventSource, read_sources
from pdproxy.events.wire import BatchDecoder, InvalidBatch, NumberedBatch, numbered, replay_request
from pdproxy.observe.labels import CacheEventKind
from pdproxy.planning.cache_events import BlocksRemoved, BlocksStored, CacheCleared, GroupKind
from pdproxy.planning.prefix_index import PrefixIndex
from tests.events.feeds import PLACE, SCHEME
from tests.events.publisher import Event, removed, stored

decode = BatchDecoder()
NOTHING = dict.fromkeys(CacheEventKind, 0)


def batch(*events: Event) -> bytes:
    return msgspec.msgpack.encode([1.5, events, 3])


def test_events_become_those_of_the_index() -> None:
    read = decode(batch(stored(1, 2, group=3), removed(1, group=3), {"type": "AllBlocksCleared"}))
    assert (read.time, read.rank) == (1.5, 3)
    assert read.events == [BlocksStored(3, GroupKind.ATTENTION, (1, 2), 16), BlocksRemoved(3, (1,)), CacheCleared()]


def test_removals_that_follow_each_other_in_a_group_are_one_and_are_counted_as_they_came() -> None:
    """A block that is evicted is an event of its own."""
    read = decode(batch(removed(1, group=3), removed(2, group=3), removed(1, group=0), stored(4), removed(3, group=0)))
    assert read.events == [
        BlocksRemoved(3, (1, 2)),
        BlocksRemoved(0, (1,)),
        BlocksStored(0, GroupKind.ATTENTION, (4,), 16),
        BlocksRemoved(0, (3,)),
    ]
    assert read.counts == {**NOTHING, CacheEventKind.REMOVED: 4, CacheEventKind.STORED: 1}


def test_a_state_group_without_a_state_is_a_group_all_the_same() -> None:
    assert decode(batch(stored(kind="mamba", group=1))).events == [BlocksStored(1, GroupKind.STATE, (), 16)]


def test_whole_hashes_are_shortened() -> None:
    event = {**stored(), "block_hashes": [bytes(24) + (77).to_bytes(8)]}
    assert decode(batch(event)).events == [BlocksStored(0, GroupKind.ATTENTION, (77,), 16)]


def test_a_signed_hash_is_taken_as_its_64_bits() -> None:
    index = PrefixIndex(SCHEME)
    for event in decode(batch(stored(-1, 2**64 - 2), removed(-2))).events:
        index.apply(PLACE, event)
    assert index.blocks(PLACE, GroupKind.ATTENTION) == 1


def test_what_is_not_known_is_passed_over_and_counted() -> None:
    unknown = {"type": "BlockMoved", "block_hashes": [1], "to": {"deep": [1, 2]}}
    offloaded = [{**stored(5), "medium": "CPU"}, {**removed(5), "medium": "STORAGE"}]
    newer = {**stored(6), "color": "blue", "extra_keys": [["salt"]]}
    read = decode(batch(unknown, *offloaded, newer, {**removed(7), "medium": None}))
    assert read.events == [BlocksStored(0, GroupKind.ATTENTION, (6,), 16), BlocksRemoved(0, (7,))]
    assert read.counts[CacheEventKind.IGNORED] == 3


def test_a_batch_may_leave_its_rank_out_and_have_more_at_its_end() -> None:
    assert decode(msgspec.msgpack.encode([1.0, []])).rank is None
    assert decode(msgspec.msgpack.encode([1.0, [], 2, "more"])).rank == 2


@pytest.mark.parametrize("event", [{}, {"type": 3}, {"type": "BlockStored", "block_hashes": 3}, 7, None])
def test_an_event_of_another_form_is_refused(event: object) -> None:
    with pytest.raises(InvalidBatch, match="cannot be read"):
        decode(msgspec.msgpack.encode([1.0, [event], 0]))


@pytest.mark.parametrize("time", [float("nan"), float("inf"), float("-inf")])
def test_a_batch_of_no_time_is_refused(time: float) -> None:
    with pytest.raises(InvalidBatch, match="of the time"):
        decode(msgspec.msgpack.encode([time, [], 0]))


def test_a_message_has_its_number_before_its_batch() -> None:
    sequence, payload = (258).to_bytes(8), b"payload"
    assert numbered((b"topic", sequence, payload)) == NumberedBatch(258, payload)
    assert numbered((b"", b"topic", sequence, payload)) == NumberedBatch(258, payload)
    assert numbered((b"", b"", b"\xff" * 8, b"")).sequence == -1
    assert replay_request(258) == (b"", sequence)


@pytest.mark.parametrize("frames", [(), (b"a",), (b"a", b"b", b"c"), (b"", bytes(8)), (b"",) * 5])
def test_other_messages_are_refused(frames: tuple[bytes, ...]) -> None:
    with pytest.raises(InvalidBatch):
        numbered(frames)


def answer(**ranks: object) -> bytes:
    return msgspec.json.encode({name.removeprefix("r"): fields for name, fields in ranks.items()})


def at(port: int, replay: int | None = None, host: str = "10.0.0.7", **more: object) -> dict[str, object]:
    replay_endpoint = None if replay is None else f"tcp://{host}:{replay}"
    return {"publisher": "zmq", "endpoint": f"tcp://{host}:{port}", "replay_endpoint": replay_endpoint, **more}


def test_ranks_are_found_on_the_nodes_own_host() -> None:
    body = answer(r1=at(5558, 5658, host="*"), r0=at(5557, 5657, topic="kv"))
    assert read_sources(body, "http://node-1.svc:8000").usable == (
        EventSource(0, 0, "node-1.svc", 5557, 5657, b"kv"),
        EventSource(1, 1, "node-1.svc", 5558, 5658, b""),
    )


@pytest.mark.parametrize("host", ["169.254.169.254", "localhost", "*", "[::]", "::", "user@evil", ""])
def test_a_node_can_name_ports_of_its_own_host_alone(host: str) -> None:
    [source] = read_sources(answer(r0=at(5557, host=host)), "http://[fd00::7]:8000").usable
    assert (source.host, source.port, source.replay_port) == ("fd00::7", 5557, None)


def test_a_lone_publisher_is_rank_0_whatever_it_calls_itself() -> None:
    """A node of one rank gets no header that names one."""
    [source] = read_sources(answer(r7=at(5557)), "http://n:1").usable
    assert (source.rank, source.publisher) == (0, 7)


def test_ranks_of_a_later_host_are_counted_as_its_server_counts_them() -> None:
    """An engine of 16 ranks over two hosts: the second host's server takes the header values 0 to 7."""
    body = answer(r9=at(5566, 5666), r8=at(5565, 5665))
    assert [(source.rank, source.publisher) for source in read_sources(body, "http://n:1").usable] == [(0, 8), (1, 9)]


@pytest.mark.parametrize("endpoint", ["ipc:///tmp/x", "inproc://x", "tcp://h", "tcp://h:0", "tcp://h:70000", "", None])
def test_what_is_no_tcp_address_is_named(endpoint: object) -> None:
    found = read_sources(answer(r2={"publisher": "zmq", "endpoint": endpoint}), "http://n:1")
    assert found.usable == ()
    assert found.unusable[0].startswith("rank 2 publishes at ")


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"[]", b"{}", b'{"0": 3}', b'{"x": {}}', b'{"0": {"publisher": "null", "endpoint": "tcp://h:1"}}'],
)
def test_answers_without_publishers_give_none(body: bytes) -> None:
    assert read_sources(body, "http://n:1") == read_sources(b"{}", "http://n:1")


def test_no_node_has_more_ranks_than_there_may_be() -> None:
    many = {f"r{rank}": at(1000 + rank) for rank in range(MOST_RANKS + 9)}
    assert len(read_sources(answer(**many), "http://n:1").usable) == MOST_RANKS
