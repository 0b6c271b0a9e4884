"""The side channel over real sockets: it answers, survives junk, and says so when its port is taken."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any

import msgspec
import pytest
import zmq

from connector.accounts import Accounts
from connector.errors import SideChannelError
from connector.lease import Verdict
from connector.question import HANDSHAKE, LONGEST_MESSAGE, Question, read_answer, write_batch
from connector.side_channel import Listener, ensure_free, ping, tcp

HOST = "127.0.0.1"
PATIENCE = 30.0


def free_port() -> int:
    with closing(socket.socket()) as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])


def judge(engine_id: str, request_id: str, nonce: str) -> Verdict:
    if engine_id != "P":
        return Verdict.UNKNOWN
    return Verdict.HELD if request_id == "held" else Verdict.RELEASED_BY_YOU if nonce == "mine" else Verdict.EXPIRED


class Side:
    """A running side channel, and a client's socket to it."""

    def __init__(self) -> None:
        self.accounts = Accounts()
        self.port = free_port()
        self.listener = Listener(HOST, self.port, {(0, 0): b"zero", (0, 1): b"one"}, judge, self.accounts)
        self.context: zmq.Context[Any] = zmq.Context()
        self.sockets: list[Any] = []

    def socket(self, kind: int) -> Any:
        made = self.context.socket(kind)
        made.linger = 0
        made.rcvtimeo = int(PATIENCE * 1000)
        made.connect(tcp(HOST, self.port))
        self.sockets.append(made)
        return made

    def handshake(self, rank: int) -> list[bytes]:
        asking = self.socket(zmq.REQ)
        asking.send(msgspec.msgpack.encode((HANDSHAKE, 0, rank)))
        return list(asking.recv_multipart())

    def junk(self) -> int:
        return sum(value for name, labels, value in self.accounts.drain().counts if labels == ["side_channel"])


@pytest.fixture
def side() -> Iterator[Side]:
    side = Side()
    side.listener.start()
    yield side
    side.listener.stop()
    side.context.destroy(linger=0)


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline, "the condition did not come true in time"
        time.sleep(0.01)


def test_the_stock_handshake_is_answered_as_vllm_does(side: Side) -> None:
    payload, clock = side.handshake(1)
    assert payload == b"one"
    assert isinstance(msgspec.msgpack.decode(clock), float)


def test_a_batch_of_questions_gets_its_verdicts_in_order(side: Side) -> None:
    asking = side.socket(zmq.DEALER)
    questions = [Question("P", "held", "n"), Question("P", "gone", "mine"), Question("P", "gone", "n")]
    asking.send_multipart([b"", write_batch(7, [*questions, Question("Q", "held", "n")])])
    answer = read_answer(asking.recv_multipart()[-1])
    assert answer == (7, [Verdict.HELD, Verdict.RELEASED_BY_YOU, Verdict.EXPIRED, Verdict.UNKNOWN])


def test_junk_is_counted_and_ends_nothing(side: Side) -> None:
    junk = side.socket(zmq.DEALER)
    messages = [
        [b"\xc1"],
        [b"", b"\xc1"],
        [b"", b""],
        [b"x", write_batch(1, [])],
        [b"", b"a", b"b"],
        [b"", msgspec.msgpack.encode((HANDSHAKE, 0, 99))],
        [b"", msgspec.msgpack.encode((HANDSHAKE, {}, []))],
    ]
    for message in messages:
        junk.send_multipart(message)
    counted = 0

    def all_counted() -> bool:
        nonlocal counted
        counted += side.junk()
        return counted == len(messages)

    until(all_counted)
    assert side.handshake(0)[0] == b"zero"


def test_bytes_that_are_not_zmq_and_a_huge_message_end_nothing(side: Side) -> None:
    with closing(socket.create_connection((HOST, side.port), PATIENCE)) as raw:
        raw.sendall(b"GET / HTTP/1.1\r\n\r\n" * 10)
    huge = side.socket(zmq.DEALER)
    huge.send_multipart([b"", b"\x00" * (LONGEST_MESSAGE + 1)])
    assert side.handshake(0)[0] == b"zero"


def test_a_port_in_use_fails_at_once_with_a_sentence(side: Side) -> None:
    second = Listener(HOST, side.port, {}, judge, Accounts())
    with pytest.raises(SideChannelError, match=f"{HOST}:{side.port}.*VLLM_NIXL_SIDE_CHANNEL_PORT"):
        second.start()
    with pytest.raises(SideChannelError):
        ensure_free(HOST, side.port)
    second.stop()


def test_stop_gives_the_port_back(side: Side) -> None:
    side.listener.stop()
    side.listener.stop()
    ensure_free(HOST, side.port)


def test_ping_finds_a_living_side_channel(side: Side) -> None:
    ping(HOST, side.port, PATIENCE)


def test_ping_is_refused_by_a_port_nobody_listens_on() -> None:
    with pytest.raises(ConnectionError, match="nobody listens"):
        ping(HOST, free_port(), PATIENCE)


def test_ping_gives_up_on_a_peer_that_accepts_and_never_answers() -> None:
    with closing(socket.socket()) as silent:
        silent.bind((HOST, 0))
        silent.listen()
        with pytest.raises(ConnectionError, match="did not answer"):
            ping(HOST, int(silent.getsockname()[1]), 0.2)
