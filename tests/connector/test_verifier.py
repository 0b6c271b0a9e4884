"""Every question gets exactly one verdict: the peer's, or none in time; over real sockets, with real junk."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import closing

import pytest
from hypothesis import given
from hypothesis import strategies as st

from connector.counters import Counters
from connector.messages import MOST_QUESTIONS, Question, QuestionBatch, Reply, Verdict, read_request
from connector.side_channel import Listener
from connector.verifier import OpenExchanges, ReadVerdict, Verifier
from deploy.local.ports import free_ports

HOST = "127.0.0.1"
PATIENCE = 30.0
HERE = (HOST, 1)


def question(nonce: str) -> Question:
    return Question("P", "r-" + nonce, nonce)


def number(message: bytes) -> int:
    batch = read_request(message)
    assert isinstance(batch, QuestionBatch)
    return batch.number


def test_an_answer_settles_its_batch_once() -> None:
    exchanges = OpenExchanges(timeout=1, metadata_timeout=9)
    (message,) = exchanges.ask(HERE, [question("a"), question("b")], now=0)
    reply = Reply(number(message), "run", (Verdict.HELD, Verdict.EXPIRED))
    assert exchanges.on_reply(HERE, reply) == [
        ReadVerdict("a", Verdict.HELD, "run"),
        ReadVerdict("b", Verdict.EXPIRED, "run"),
    ]
    assert exchanges.on_reply(HERE, reply) is None
    assert len(exchanges) == 0


def test_an_answer_from_another_address_settles_nothing() -> None:
    exchanges = OpenExchanges(timeout=1, metadata_timeout=9)
    (message,) = exchanges.ask(HERE, [question("a")], now=0)
    assert exchanges.on_reply((HOST, 2), Reply(number(message), "run", (Verdict.HELD,))) is None
    assert len(exchanges) == 1


@pytest.mark.parametrize("body", [(Verdict.HELD,), b"a payload", "unsigned"])
def test_an_answer_that_gives_no_verdict_for_each_counts_as_none(body: tuple[Verdict, ...] | bytes | str) -> None:
    exchanges = OpenExchanges(timeout=1, metadata_timeout=9)
    (message,) = exchanges.ask(HERE, [question("a"), question("b")], now=0)
    assert exchanges.on_reply(HERE, Reply(number(message), "run", body)) == [
        ReadVerdict("a", None),
        ReadVerdict("b", None),
    ]


def test_silence_is_an_answer_when_the_time_is_up() -> None:
    exchanges = OpenExchanges(timeout=2, metadata_timeout=9)
    exchanges.ask(HERE, [question("a")], now=10)
    assert exchanges.next_due() == 12
    assert exchanges.overdue(11.9) == ([], set())
    assert exchanges.overdue(12) == ([ReadVerdict("a", None)], {HERE})
    assert exchanges.next_due() is None


def test_a_lost_peer_answers_all_of_its_questions_with_none() -> None:
    exchanges = OpenExchanges(timeout=1, metadata_timeout=9)
    exchanges.ask(HERE, [question("a")], now=0)
    exchanges.ask((HOST, 2), [question("b")], now=0)
    exchanges.ask(HERE, [question("c")], now=0)
    assert exchanges.on_lost(HERE, "it closed") == [ReadVerdict("a", None), ReadVerdict("c", None)]
    assert len(exchanges) == 1


@given(st.integers(0, 2 * MOST_QUESTIONS + 3))
def test_long_exchanges_are_cut_and_no_question_is_lost(count: int) -> None:
    exchanges = OpenExchanges(timeout=1, metadata_timeout=9)
    messages = exchanges.ask(HERE, [question(str(index)) for index in range(count)], now=0)
    read = [read_request(message) for message in messages]
    asked = [one.nonce for batch in read if isinstance(batch, QuestionBatch) for one in batch.questions]
    assert asked == [str(index) for index in range(count)]
    assert len(exchanges.overdue(1)[0]) == count


def collect(verifier: Verifier, count: int) -> dict[str, Verdict | None]:
    found: list[ReadVerdict] = []
    deadline = time.monotonic() + PATIENCE
    while len(found) < count:
        assert time.monotonic() < deadline, f"only {len(found)} of {count} answers came"
        found += verifier.verdicts()
        time.sleep(0.005)
    assert len(found) == len({one.nonce for one in found}) == count
    return {one.nonce: one.verdict for one in found}


@pytest.fixture
def port() -> Iterator[int]:
    number = free_ports(1)[0]
    listener = Listener(HOST, number, {}, verify, Counters())
    listener.start()
    yield number
    listener.stop()


def verify(engine_id: str, request_id: str, nonce: str) -> Verdict:
    return Verdict.HELD if request_id == "r-" + nonce else Verdict.UNKNOWN


def test_questions_of_several_steps_are_answered(port: int) -> None:
    with closing(Verifier(timeout=PATIENCE)) as verifier:
        verifier.ask({(HOST, port): [question("a"), Question("P", "other", "b")]})
        verifier.ask({})
        verifier.ask({(HOST, port): [question("c")]})
        assert collect(verifier, 3) == {"a": Verdict.HELD, "b": Verdict.UNKNOWN, "c": Verdict.HELD}


def test_verdicts_may_be_waited_for_or_polled(port: int) -> None:
    with closing(Verifier(timeout=PATIENCE)) as verifier:
        assert verifier.verdicts() == []
        assert verifier.verdicts(wait_seconds=0.001) == []
        verifier.ask({(HOST, port): [question("a")]})
        assert [(one.nonce, one.verdict) for one in verifier.verdicts(wait_seconds=PATIENCE)] == [("a", Verdict.HELD)]


def test_a_refused_connection_is_noticed_at_once_delays_no_other_and_is_tried_again_later(port: int) -> None:
    dead = free_ports(1)[0]
    with closing(Verifier(timeout=100 * PATIENCE)) as verifier:
        verifier.ask({(HOST, dead): [question("lost")], (HOST, port): [question("fine")]})
        assert collect(verifier, 2) == {"lost": None, "fine": Verdict.HELD}
        late = Listener(HOST, dead, {}, verify, Counters())
        late.start()
        with closing(Closing(late)):
            answer: Verdict | None = None
            deadline = time.monotonic() + PATIENCE
            while answer is None and time.monotonic() < deadline:
                verifier.ask({(HOST, dead): [question("again")]})
                answer = collect(verifier, 1)["again"]
            assert answer is Verdict.HELD


def test_a_peer_that_dies_with_a_question_open_is_known_at_once() -> None:
    with closing(socket.socket()) as mortal:
        mortal.bind((HOST, 0))
        mortal.listen()
        with closing(Verifier(timeout=100 * PATIENCE)) as verifier:
            verifier.ask({(HOST, int(mortal.getsockname()[1])): [question("a")]})
            caller, _ = mortal.accept()
            caller.close()
            assert collect(verifier, 1) == {"a": None}


def test_a_silent_peer_is_given_up_when_the_time_is_up() -> None:
    with closing(socket.socket()) as silent:
        silent.bind((HOST, 0))
        silent.listen()
        with closing(Verifier(timeout=0.2)) as verifier:
            verifier.ask({(HOST, int(silent.getsockname()[1])): [question("a")]})
            assert collect(verifier, 1) == {"a": None}


def test_an_address_that_cannot_be_dialled_is_silence() -> None:
    with closing(Verifier(timeout=0.2)) as verifier:
        verifier.ask({("not a host name", 1): [question("a")]})
        assert collect(verifier, 1) == {"a": None}


def test_close_ends_the_thread_and_twice_is_fine(port: int) -> None:
    verifier = Verifier(timeout=PATIENCE)
    verifier.ask({(HOST, port): [question("a")]})
    verifier.close()
    verifier.close()
    assert not any(thread.name == "pdproxy_verifier" for thread in threading.enumerate())


class Closing:
    """A listener, with the method that `closing` calls."""

    def __init__(self, listener: Listener) -> None:
        self._listener = listener

    def close(self) -> None:
        self._listener.stop()
