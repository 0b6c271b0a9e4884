"""The decode side's connections: bounded, and a peer that answers is reached whatever the others do."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing

import pytest

from connector.counters import Counters
from connector.messages import Question, Verdict, write_batch
from connector.peers import Peers
from connector.side_channel import Listener

HOST = "127.0.0.1"
PATIENCE = 30.0
PING = write_batch(1, ())


@pytest.fixture
def listener() -> Iterator[Listener]:
    made = Listener(HOST, 0, {}, lambda *_: Verdict.HELD, Counters())
    made.start()
    yield made
    made.stop()


def until(peers: Peers, condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline
        peers.wait(0.01)


def answers(peers: Peers, listener: Listener, number: int) -> None:
    """Send one more message, and wait for its answer."""
    peers.send((HOST, listener.port), write_batch(number, [Question("e", "r", "n")]))
    found: list[int] = []

    def come() -> bool:
        found.extend(answer.number for _, answer in peers.received())
        return bool(found)

    until(peers, come)
    assert found == [number]


def test_one_connection_serves_every_message(listener: Listener) -> None:
    with closing(Peers((), time.monotonic)) as peers:
        for number in range(1, 5):
            answers(peers, listener, number)
        assert len(peers) == 1


def test_for_one_address_more_the_one_that_never_answered_goes_first(listener: Listener) -> None:
    with closing(Peers((), time.monotonic, most=3)) as peers, ExitStack() as stack:
        answers(peers, listener, 1)
        holes = [stack.enter_context(closing(socket.create_server((HOST, 0)))) for _ in range(10)]
        for hole in holes:
            peers.send(hole.getsockname(), PING)
            peers.wait(0)
        assert len(peers) == 3
        assert list(peers.pop_lost()) == [hole.getsockname() for hole in holes[:8]]
        answers(peers, listener, 2)


def test_of_those_that_answered_the_longest_idle_goes() -> None:
    with ExitStack() as stack, closing(Peers((), time.monotonic, most=2)) as peers:
        listeners = [Listener(HOST, 0, {}, lambda *_: Verdict.HELD, Counters()) for _ in range(3)]
        for made in listeners:
            made.start()
            stack.callback(made.stop)
        answers(peers, listeners[0], 1)
        answers(peers, listeners[1], 2)
        answers(peers, listeners[0], 3)
        answers(peers, listeners[2], 4)
        assert list(peers.pop_lost()) == [(HOST, listeners[1].port)]


def test_a_refused_connection_is_lost_with_its_reason() -> None:
    with closing(socket.create_server((HOST, 0))) as gone:
        address = gone.getsockname()
    with closing(Peers((), time.monotonic)) as peers:
        peers.send(address, PING)
        lost: dict[tuple[str, int], str] = {}

        def known() -> bool:
            lost.update(peers.pop_lost())
            return bool(lost)

        until(peers, known)
        assert "refused" in lost[address]
        assert len(peers) == 0


def test_a_name_that_does_not_exist_is_lost() -> None:
    with closing(Peers((), time.monotonic)) as peers:
        peers.send(("not a host name", 1), PING)
        until(peers, lambda: ("not a host name", 1) in peers.pop_lost())


def test_an_unsigned_answer_is_no_answer(listener: Listener) -> None:
    with closing(Peers((b"a key of sixteen bytes",), time.monotonic)) as peers:
        peers.send((HOST, listener.port), PING)
        lost: dict[tuple[str, int], str] = {}

        def known() -> bool:
            lost.update(peers.pop_lost())
            return bool(lost)

        until(peers, known)
        assert "ticket keys" in lost[HOST, listener.port]
        assert peers.received() == []


def test_closing_leaves_no_descriptor(listener: Listener) -> None:
    peers = Peers((), time.monotonic)
    answers(peers, listener, 1)
    peers.close()
    peers.wake()
