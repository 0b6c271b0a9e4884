"""A metadata request is settled exactly once: by its last answer, a refusal, a lost connection, or the clock."""

from __future__ import annotations

import pytest

from connector.messages import MetadataQuestion, QuestionRefusal, Reply, Verdict, read_request
from connector.peer_engines import EngineMetadata, EngineUnreachable, MetadataRequest
from connector.verifier import MOST_BYTES, OpenExchanges, ReadVerdict

HERE = ("10.0.0.1", 5600)
TWO = MetadataRequest("P", HERE, ((0, 0), (0, 1)))


def numbers(messages: list[bytes]) -> list[int]:
    asked = [read_request(message) for message in messages]
    assert [(one.engine_id, one.pp_rank, one.tp_rank) for one in asked if isinstance(one, MetadataQuestion)] == [
        ("P", 0, 0),
        ("P", 0, 1),
    ]
    return [one.number for one in asked if isinstance(one, MetadataQuestion)]


def test_every_rank_must_answer() -> None:
    exchanges = OpenExchanges(timeout=1, metadata_timeout=5)
    first, second = numbers(exchanges.fetch_metadata(TWO, 0))
    assert exchanges.fetch_metadata(TWO, 1) == []
    assert exchanges.on_reply(("10.0.0.9", 5600), Reply(first, "run", b"forged")) is None
    assert exchanges.on_reply(HERE, Reply(second, "run", b"one")) == []
    assert exchanges.on_reply(HERE, Reply(second, "run", b"again")) is None
    settled = exchanges.on_reply(HERE, Reply(first, "run", b"zero"))
    assert settled == [(TWO, EngineMetadata("run", {(0, 0): b"zero", (0, 1): b"one"}))]
    assert (len(exchanges), exchanges.next_due()) == (0, None)


@pytest.mark.parametrize(
    ("body", "why"),
    [
        (QuestionRefusal.UNSIGNED.value, "ticket keys"),
        (QuestionRefusal.BAD_SIGNATURE.value, "ticket keys"),
        (QuestionRefusal.ANOTHER_ENGINE.value, "another engine"),
        (QuestionRefusal.NO_SUCH_RANK.value, "fewer ranks"),
        ("something new", "something new"),
        ((Verdict.HELD,), "refused"),
    ],
)
def test_a_refusal_settles_it_with_a_sentence(body: tuple[Verdict, ...] | str, why: str) -> None:
    exchanges = OpenExchanges(timeout=1, metadata_timeout=5)
    first, second = numbers(exchanges.fetch_metadata(TWO, 0))
    settled = exchanges.on_reply(HERE, Reply(first, "run", body))
    assert settled is not None
    (result,) = settled
    assert not isinstance(result, ReadVerdict)
    request, how = result
    assert request == TWO
    assert isinstance(how, EngineUnreachable)
    assert why in how.why
    assert exchanges.on_reply(HERE, Reply(second, "run", b"late")) == []
    assert exchanges.on_reply(HERE, Reply(second, "run", b"later")) is None
    assert len(exchanges) == 0


def test_a_node_that_restarts_between_two_answers_is_not_mixed() -> None:
    exchanges = OpenExchanges(timeout=1, metadata_timeout=5)
    first, second = numbers(exchanges.fetch_metadata(TWO, 0))
    exchanges.on_reply(HERE, Reply(first, "run", b"zero"))
    assert exchanges.on_reply(HERE, Reply(second, "another", b"one")) == [
        (TWO, EngineUnreachable("it restarted meanwhile"))
    ]


def test_metadata_without_end_is_refused() -> None:
    exchanges = OpenExchanges(timeout=1, metadata_timeout=5)
    first, _ = numbers(exchanges.fetch_metadata(TWO, 0))
    assert exchanges.on_reply(HERE, Reply(first, "run", bytes(MOST_BYTES + 1))) == [
        (TWO, EngineUnreachable("its metadata is too long"))
    ]


def test_time_is_up() -> None:
    exchanges = OpenExchanges(timeout=1, metadata_timeout=5)
    exchanges.fetch_metadata(TWO, 10)
    assert exchanges.next_due() == 15
    assert exchanges.overdue(14.9) == ([], set())
    assert exchanges.overdue(15) == ([(TWO, EngineUnreachable("no answer within 5 s"))], {HERE})
    assert exchanges.overdue(16) == ([], set())


def test_a_lost_connection_settles_what_was_asked_there() -> None:
    exchanges = OpenExchanges(timeout=1, metadata_timeout=5)
    elsewhere = MetadataRequest("P", ("10.0.0.2", 5600), ((0, 0),))
    exchanges.fetch_metadata(TWO, 0)
    exchanges.fetch_metadata(elsewhere, 0)
    assert exchanges.on_lost(HERE, "it closed") == [(TWO, EngineUnreachable("it closed"))]
    assert len(exchanges) == 1
    assert len(exchanges._by_number) == 1
