"""The side channel over real sockets: it answers, survives junk, and says so when its port is taken."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from typing import Any

import msgspec
import pytest
import zmq

from connector import tcp_server
from connector.config import SideChannelError
from connector.counters import Counters
from connector.messages import (
    HANDSHAKE,
    LONGEST_QUESTION,
    PROPERTY,
    MetadataQuestion,
    Question,
    QuestionRefusal,
    QuestionSigner,
    Reply,
    Verdict,
    read_reply,
    write_batch,
    write_metadata_question,
    write_returns,
)
from connector.side_channel import NEEDS_KEY, NO_SUCH_RANK, Listener
from connector.zmtp import Zmtp
from deploy.local.ports import free_ports

HOST = "127.0.0.1"
PATIENCE = 30.0
KEYS = (b"first key of sixteen", b"second key of sixteen")


def verify(engine_id: str, request_id: str, nonce: str) -> Verdict:
    if engine_id != "P":
        return Verdict.UNKNOWN
    return Verdict.HELD if request_id == "held" else Verdict.RELEASED_BY_YOU if nonce == "mine" else Verdict.EXPIRED


class Side:
    """A running side channel, and libzmq's sockets to it."""

    def __init__(self, keys: Sequence[bytes] = (), host: str = HOST) -> None:
        self.counters = Counters()
        self.taken_back: list[tuple[str, str, str]] = []
        self.listener = Listener(
            host,
            0,
            {(0, 0): b"zero", (0, 1): b"one"},
            verify,
            self.counters,
            engine_id="P",
            keys=keys,
            take_back=self.take_back,
        )
        self.listener.start()
        self.port = self.listener.port
        self.context: zmq.Context[Any] = zmq.Context()
        self.sockets: list[Any] = []
        self.clients: list[socket.socket] = []

    def take_back(self, engine_id: str, request_id: str, nonce: str) -> Verdict:
        self.taken_back.append((engine_id, request_id, nonce))
        return verify(engine_id, request_id, nonce)

    def socket(self, kind: int) -> Any:
        made = self.context.socket(kind)
        self.sockets.append(made)
        made.linger = 0
        made.rcvtimeo = int(PATIENCE * 1000)
        made.ipv6 = True
        made.connect(f"tcp://[{self.listener.host}]:{self.port}" if ":" in self.listener.host else self.url)
        return made

    @property
    def url(self) -> str:
        return f"tcp://{self.listener.host}:{self.port}"

    def handshake(self, rank: int) -> list[bytes]:
        asking = self.socket(zmq.REQ)
        asking.send(msgspec.msgpack.encode((HANDSHAKE, 0, rank)))
        return list(asking.recv_multipart())

    def counts(self) -> dict[tuple[str, ...], int]:
        return {(name, *labels): value for name, labels, value in self.counters.drain().counts}

    def close(self) -> None:
        self.listener.stop()
        self.context.destroy(linger=0)
        for client in self.clients:
            client.close()


class Client:
    """Our own end of a connection, step by step. `keys` sign."""

    def __init__(self, side: Side, keys: Sequence[bytes] = (), source: str = HOST) -> None:
        self.raw = socket.create_connection((HOST, side.port), PATIENCE, source_address=(source, 0))
        side.clients.append(self.raw)
        self.zmtp = Zmtp(b"DEALER", 1 << 20, {PROPERTY: b"c" * 16})
        while self.zmtp.peer is None:
            self._flush()
            self.zmtp.receive(self.raw.recv(4096))
            assert self.zmtp.next_message() is None
        self._flush()  # greeting and READY may come in one piece: then ours is not sent yet
        self.challenge = self.zmtp.peer.get(PROPERTY, b"")
        self.signer = QuestionSigner(keys, self.challenge, b"c" * 16)

    def send(self, *frames: bytes) -> tuple[bytes, ...]:
        self.zmtp.send([b"", *frames])
        self._flush()
        while (message := self.zmtp.next_message()) is None:
            self._receive()
        return message[1:]

    def ask(self, message: bytes) -> Reply | None:
        answered = self.send(*self.signer.sign(message))
        assert self.signer.genuine(answered)
        return read_reply(answered[0])

    def _receive(self) -> None:
        data = self.raw.recv(65536)
        assert data, "the side channel closed the connection"
        self.zmtp.receive(data)

    def _flush(self) -> None:
        self.raw.sendall(b"".join(self.zmtp.pieces))
        self.zmtp.pieces.clear()


@pytest.fixture
def side() -> Iterator[Side]:
    with closing(Side()) as side:
        yield side


@pytest.fixture
def locked() -> Iterator[Side]:
    """One with ticket keys."""
    with closing(Side(KEYS)) as side:
        yield side


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline, "the condition did not come true in time"
        time.sleep(0.01)


def test_the_stock_handshake_is_answered_as_vllm_does(side: Side) -> None:
    payload, clock = side.handshake(1)
    assert payload == b"one"
    assert isinstance(msgspec.msgpack.decode(clock), float)


def test_one_stock_socket_may_shake_hands_with_many_ranks(side: Side) -> None:
    asking = side.socket(zmq.REQ)
    for rank, payload in ((0, b"zero"), (1, b"one"), (0, b"zero")):
        asking.send(msgspec.msgpack.encode((HANDSHAKE, 0, rank)))
        assert asking.recv_multipart()[0] == payload


def test_a_rank_that_is_not_there_is_refused_at_once(side: Side) -> None:
    payload, _ = side.handshake(99)
    assert msgspec.msgpack.decode(payload)["compatibility_hash"] == NO_SUCH_RANK


def test_a_batch_of_questions_gets_its_verdicts_in_order(side: Side) -> None:
    asking = side.socket(zmq.DEALER)
    questions = [Question("P", "held", "n"), Question("P", "gone", "mine"), Question("P", "gone", "n")]
    asking.send_multipart([b"", write_batch(7, [*questions, Question("Q", "held", "n")])])
    answer = read_reply(asking.recv_multipart()[-1])
    verdicts = (Verdict.HELD, Verdict.RELEASED_BY_YOU, Verdict.EXPIRED, Verdict.UNKNOWN)
    assert answer == Reply(7, side.listener.incarnation, verdicts)


def test_a_batch_of_tickets_that_go_back_gets_its_verdicts_in_order(side: Side) -> None:
    asking = side.socket(zmq.DEALER)
    tickets = [Question("P", "held", "n"), Question("P", "gone", "mine"), Question("Q", "held", "n")]
    asking.send_multipart([b"", write_returns(7, tickets)])
    answer = read_reply(asking.recv_multipart()[-1])
    verdicts = (Verdict.HELD, Verdict.RELEASED_BY_YOU, Verdict.UNKNOWN)
    assert answer == Reply(7, side.listener.incarnation, verdicts)
    assert side.taken_back == [("P", "held", "n"), ("P", "gone", "mine"), ("Q", "held", "n")]


@pytest.mark.parametrize(
    ("asked", "body"),
    [
        (MetadataQuestion(3, "P", 0, 1), b"one"),
        (MetadataQuestion(3, "P", 1, 0), QuestionRefusal.NO_SUCH_RANK.value),
        (MetadataQuestion(3, "Q", 0, 0), QuestionRefusal.ANOTHER_ENGINE.value),
    ],
)
def test_a_metadata_question_gets_the_metadata_of_the_engine_it_names(
    side: Side, asked: MetadataQuestion, body: bytes | str
) -> None:
    assert Client(side).ask(write_metadata_question(asked)) == Reply(3, side.listener.incarnation, body)


def test_junk_is_counted_and_ends_nothing(side: Side) -> None:
    junk = side.socket(zmq.DEALER)
    messages = [
        [b"\xc1"],
        [b"", b"\xc1"],
        [b"", b""],
        [b"x", write_batch(1, [])],
        [b"", b"a", b"b"],
        [b"", b"a", b"b", b"c"],
        [b"", msgspec.msgpack.encode((HANDSHAKE, {}, []))],
    ]
    for message in messages:
        junk.send_multipart(message)
    counted = 0

    def all_counted() -> bool:
        nonlocal counted
        counted += side.counts().get(("junk", "side_channel"), 0)
        return counted == len(messages)

    until(all_counted)
    assert side.handshake(0)[0] == b"zero"


def test_bytes_that_are_not_zmq_and_a_huge_message_end_nothing(side: Side) -> None:
    with closing(socket.create_connection((HOST, side.port), PATIENCE)) as raw:
        raw.sendall(b"GET / HTTP/1.1\r\n\r\n" * 10)
    huge = side.socket(zmq.DEALER)
    huge.send_multipart([b"", b"\x00" * (LONGEST_QUESTION + 1)])
    seen: dict[tuple[str, ...], int] = {}

    def both_closed() -> bool:
        seen.update(side.counts())
        return {("side_channel_closed", "not_zmtp"), ("side_channel_closed", "too_long")} <= seen.keys()

    until(both_closed)
    assert side.handshake(0)[0] == b"zero"


def test_a_node_with_keys_answers_a_node_that_has_one(locked: Side) -> None:
    for key in KEYS:
        client = Client(locked, (key,))
        answer = client.ask(write_batch(1, [Question("P", "held", "n")]))
        assert answer == Reply(1, locked.listener.incarnation, (Verdict.HELD,))
        answer = client.ask(write_metadata_question(MetadataQuestion(2, "P", 0, 0)))
        assert answer == Reply(2, locked.listener.incarnation, b"zero")
    assert locked.counts() == {}


def refusal(answered: tuple[bytes, ...]) -> str | None:
    answer = read_reply(answered[0])
    return answer.body if answer is not None and isinstance(answer.body, str) else None


ASKED = {
    "question": write_batch(5, [Question("P", "held", "n")]),
    "metadata question": write_metadata_question(MetadataQuestion(5, "P", 0, 0)),
    "ticket that goes back": write_returns(5, [Question("P", "held", "n")]),
}


@pytest.mark.parametrize("message", ASKED.values(), ids=ASKED)
def test_a_node_with_keys_answers_no_other(locked: Side, message: bytes) -> None:
    client = Client(locked)
    assert refusal(client.send(message)) == QuestionRefusal.UNSIGNED
    stranger = QuestionSigner([b"another key of sixteen"], client.challenge, b"c" * 16)
    assert refusal(client.send(*stranger.sign(message))) == QuestionRefusal.BAD_SIGNATURE
    assert refusal(client.send(message, b"")) == QuestionRefusal.BAD_SIGNATURE
    assert locked.counts() == {
        ("side_channel_refused", "unsigned"): 1,
        ("side_channel_refused", "bad_signature"): 2,
    }
    assert locked.taken_back == []


@pytest.mark.parametrize("message", ASKED.values(), ids=ASKED)
def test_a_captured_question_is_worth_nothing(locked: Side, message: bytes) -> None:
    client = Client(locked, KEYS[:1])
    captured = client.signer.sign(message)
    assert refusal(client.send(*captured)) is None
    assert refusal(client.send(*captured)) == QuestionRefusal.REPLAYED
    earlier = client.signer.sign(write_batch(4, []))
    assert refusal(client.send(*earlier)) == QuestionRefusal.REPLAYED
    assert refusal(Client(locked).send(*captured)) == QuestionRefusal.BAD_SIGNATURE


def test_an_answer_sent_back_is_no_question(locked: Side) -> None:
    client = Client(locked, KEYS[:1])
    answered = client.send(*client.signer.sign(write_batch(1, [])))
    assert not QuestionSigner(KEYS, client.challenge, b"d" * 16).genuine(answered)
    client.zmtp.send([b"", *answered])
    assert refusal(client.send(*client.signer.sign(write_batch(2, [])))) is None
    assert locked.counts() == {("junk", "side_channel"): 1}


def test_a_node_with_keys_refuses_vllms_own_handshake_with_a_sentence(locked: Side) -> None:
    payload, clock = locked.handshake(0)
    assert msgspec.msgpack.decode(payload)["compatibility_hash"] == NEEDS_KEY
    assert isinstance(msgspec.msgpack.decode(clock), float)
    assert locked.counts() == {("side_channel_refused", "unsigned"): 1}


def test_a_node_without_keys_does_not_look_at_macs(side: Side) -> None:
    client = Client(side)
    answered = client.send(write_batch(5, []), b"anything")
    assert read_reply(answered[0]) == Reply(5, side.listener.incarnation, ())
    assert len(answered) == 1


def test_a_peer_that_makes_too_much_work_waits_for_the_next_window(side: Side, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tcp_server, "SHARE", 0.001)
    busy, other = Client(side), Client(side, source="127.0.0.2")
    begun = time.monotonic()
    for number in range(20):
        assert busy.ask(write_batch(number, [])) is not None
    assert time.monotonic() - begun > 5 * tcp_server.WINDOW
    begun = time.monotonic()
    assert other.ask(write_batch(1, [])) is not None
    assert time.monotonic() - begun < 5 * tcp_server.WINDOW


def test_a_peer_that_has_authenticated_itself_is_not_limited(locked: Side, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tcp_server, "SHARE", 0.001)
    client = Client(locked, KEYS[:1])
    client.ask(write_batch(1, []))
    begun = time.monotonic()
    for number in range(2, 60):
        assert client.ask(write_batch(number, [])) is not None
    assert time.monotonic() - begun < 20 * tcp_server.WINDOW


def test_a_port_in_use_fails_at_once_with_a_sentence(side: Side) -> None:
    second = Listener(HOST, side.port, {}, verify, Counters())
    with pytest.raises(SideChannelError, match=f"{HOST}:{side.port}.*VLLM_NIXL_SIDE_CHANNEL_PORT"):
        second.start()
    second.stop()


def test_a_host_that_is_not_here_fails_with_a_sentence() -> None:
    with pytest.raises(SideChannelError, match="cannot listen"):
        Listener("192.0.2.1", free_ports(1)[0], {}, verify, Counters()).start()


def test_stop_gives_the_port_back(side: Side) -> None:
    assert side.handshake(0)[0] == b"zero"
    side.listener.stop()
    side.listener.stop()
    again = Listener(HOST, side.port, {}, verify, Counters())
    again.start()
    again.stop()


def has_ipv6() -> bool:
    try:
        with closing(socket.create_server(("::1", 0), family=socket.AF_INET6)):
            return True
    except OSError:
        return False


@pytest.mark.skipif(not has_ipv6(), reason="this host has no IPv6")
@pytest.mark.parametrize("host", ["::1", "::"])
def test_ipv6(host: str) -> None:
    with closing(Side(host=host)) as side:
        side.listener.host = "::1"
        assert side.handshake(0)[0] == b"zero"


@pytest.mark.parametrize("host", ["localhost", "0.0.0.0"])
def test_names_and_wildcards(host: str) -> None:
    with closing(Side(host=host)) as side:
        side.listener.host = HOST
        assert side.handshake(0)[0] == b"zero"
