"""Tickets from node to node over real sockets: they arrive, and whatever goes wrong is counted and changes nothing."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing

import pytest
from hypothesis import given
from hypothesis import strategies as st

from connector import direct_tickets
from connector.counters import Counters
from connector.direct_tickets import (
    LONGEST_TICKET,
    TicketInbox,
    TicketSender,
    read_address,
    write_address,
)
from connector.messages import Verdict, decode_ticket, encode_ticket
from connector.side_channel import Listener
from connector.ticket import parse, wire
from connector.transfer_params import Waiter
from deploy.local.ports import free_ports
from tests.connector.tickets import EXPECTED, KEY, OLD_KEY, good, good_wire

HOST = "127.0.0.1"
PATIENCE = 30.0
ID = "wait-0123456789abcdef"


class Decode:
    """A decode node's side channel and inbox."""

    def __init__(self, keys: Sequence[bytes] = (KEY,), *, most: int = 8, takes: bool = True) -> None:
        self.counters = Counters()
        self.inbox = TicketInbox(lambda raw: parse(raw, EXPECTED), most)
        take = self.inbox.put if takes else None
        self.listener = Listener(HOST, 0, {}, lambda *_: Verdict.UNKNOWN, self.counters, keys=keys, take_ticket=take)
        self.listener.start()
        self.address = str(write_address(HOST, self.listener.port, keys))

    def close(self) -> None:
        self.listener.stop()


class Prefill:
    """A prefill node's sender."""

    def __init__(self, keys: Sequence[bytes] = (KEY,), hosts: frozenset[str] = frozenset()) -> None:
        self.counters = Counters()
        self.sender = TicketSender(keys, hosts, self.counters)
        self.counted: dict[str, int] = {}

    def send(self, *addresses: str, wait: str = ID, **fields: object) -> None:
        self.sender.send(Waiter(wait, addresses), good_wire(**fields))

    def outcomes(self, number: int) -> dict[str, int]:
        """What came of so many tickets."""
        until(lambda: sum(self._count().values()) >= number)
        return self.counted

    def _count(self) -> dict[str, int]:
        for name, labels, count in self.counters.drain().counts:
            assert name == "tickets_sent"
            self.counted[labels[0]] = self.counted.get(labels[0], 0) + count
        return self.counted

    def close(self) -> None:
        self.sender.close()


def until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline, "the condition did not come true in time"
        time.sleep(0.005)


@pytest.fixture
def decode() -> Iterator[Decode]:
    with closing(Decode()) as node:
        yield node


@pytest.fixture
def prefill() -> Iterator[Prefill]:
    with closing(Prefill()) as node:
        yield node


def test_a_ticket_arrives_as_it_was_made(decode: Decode, prefill: Prefill) -> None:
    prefill.send(decode.address)
    assert prefill.outcomes(1) == {"taken": 1}
    assert list(decode.inbox.take()) == [(ID, good())]
    assert decode.inbox.take() == ()


def test_tickets_go_to_every_rank_and_in_order(decode: Decode, prefill: Prefill) -> None:
    with closing(Decode()) as other:
        for number in range(5):
            prefill.send(decode.address, other.address, request_id=f"cmpl-{number}")
        assert prefill.outcomes(10) == {"taken": 10}
        for node in (decode, other):
            assert [ticket.request_id for _, ticket in node.inbox.take()] == [f"cmpl-{n}" for n in range(5)]


def test_it_travels_without_keys_too() -> None:
    """Then nothing is signed, and the decode node of this test asks for a signed ticket all the same."""
    with closing(Decode(keys=())) as decode, closing(Prefill(keys=())) as prefill:
        prefill.send(decode.address)
        assert prefill.outcomes(1) == {"taken": 1}


def test_what_the_engine_adds_to_its_answer_afterwards_is_not_sent(decode: Decode, prefill: Prefill) -> None:
    ticket = good_wire()
    prefill.sender.send(Waiter(ID, (decode.address,)), ticket)
    ticket["remote_prefill_cached_tokens"] = 1
    assert prefill.outcomes(1) == {"taken": 1}


# ---- it is lost


def test_a_node_that_is_gone_costs_nothing_and_is_left_alone_for_a_while(decode: Decode, prefill: Prefill) -> None:
    gone = str(write_address(HOST, free_ports(1)[0], (KEY,)))
    prefill.send(gone, decode.address)
    assert prefill.outcomes(2) == {"unreachable": 1, "taken": 1}
    prefill.send(gone)
    assert prefill.outcomes(3) == {"unreachable": 1, "taken": 1, "not_sent": 1}


def test_a_node_that_restarts_is_met_anew(prefill: Prefill) -> None:
    first = Decode()
    prefill.send(first.address)
    assert prefill.outcomes(1) == {"taken": 1}
    port = first.listener.port
    first.close()
    counters, inbox = Counters(), TicketInbox(lambda raw: parse(raw, EXPECTED), 8)
    again = Listener(HOST, port, {}, lambda *_: Verdict.UNKNOWN, counters, keys=(KEY,), take_ticket=inbox.put)
    again.start()
    try:
        until(lambda: not prefill.sender._peers or not len(prefill.sender._peers))
        prefill.send(first.address)
        assert prefill.outcomes(2) == {"taken": 2}
    finally:
        again.stop()


def test_a_node_that_does_not_answer_is_given_up(prefill: Prefill, monkeypatch: pytest.MonkeyPatch) -> None:
    """As one whose connector does not know of tickets: it counts junk, and says nothing."""
    monkeypatch.setattr(direct_tickets, "REPLY_SECONDS", 0.1)
    with closing(socket.socket()) as silent:
        silent.bind((HOST, 0))
        silent.listen()
        prefill.send(str(write_address(HOST, silent.getsockname()[1], (KEY,))))
        assert prefill.outcomes(1) == {"unreachable": 1}


def test_a_ticket_that_is_too_long_is_left_to_the_proxy(decode: Decode, prefill: Prefill) -> None:
    prefill.send(decode.address, block_ids=(tuple(range(1 << 16, (1 << 16) + LONGEST_TICKET // 4)), (9,)))
    assert prefill.outcomes(1) == {"not_sent": 1}


# ---- it is not to be believed


@pytest.mark.parametrize("spoiled", [{"digest": "0" * 64}, {"port": 1}, {"block_ids": ((1,) * 7, (9,))}])
def test_a_forged_ticket_is_refused(decode: Decode, prefill: Prefill, spoiled: dict[str, object]) -> None:
    forged = {**good_wire(**spoiled), "pdproxy": good_wire()["pdproxy"]}
    forged["remote_port"] = 99
    prefill.sender.send(Waiter(ID, (decode.address,)), forged)
    assert prefill.outcomes(1) == {"refused": 1}
    assert decode.inbox.take() == ()


@pytest.mark.parametrize("keys", [(), (OLD_KEY,)])
def test_a_sender_without_our_key_is_refused(decode: Decode, keys: Sequence[bytes]) -> None:
    with closing(Prefill(keys)) as stranger:
        address = str(write_address(HOST, decode.listener.port, keys))
        stranger.sender.send(Waiter(ID, (address,)), good_wire())
        assert set(stranger.outcomes(1)) <= {"refused", "unreachable"}
    assert decode.inbox.take() == ()


def test_an_id_that_no_wait_has_is_refused(decode: Decode, prefill: Prefill) -> None:
    prefill.send(decode.address, wait="short")
    assert prefill.outcomes(1) == {"refused": 1}


def test_a_node_that_takes_none_says_so_and_is_left_alone(prefill: Prefill) -> None:
    with closing(Decode(takes=False)) as node:
        prefill.send(node.address)
        assert prefill.outcomes(1) == {"refused": 1}
        prefill.send(node.address)
        assert prefill.outcomes(2) == {"refused": 1, "not_sent": 1}


def test_no_connection_is_made_to_where_nobody_with_our_key_said_to(prefill: Prefill) -> None:
    with closing(socket.socket()) as anywhere:
        anywhere.bind((HOST, 0))
        anywhere.listen()
        anywhere.settimeout(0.3)
        port = anywhere.getsockname()[1]
        prefill.send(f"{port} {HOST}", str(write_address(HOST, port, (OLD_KEY,))), f"{port} {HOST} {'0' * 64}")
        assert prefill.outcomes(3) == {"bad_address": 3}
        with pytest.raises(TimeoutError):
            anywhere.accept()


# ---- addresses


def test_an_address_is_read_as_it_was_written() -> None:
    for host in ("10.0.0.2", "fd00::2", "decode-0.nodes"):
        written = str(write_address(host, 5600, (KEY,)))
        assert read_address(written, (OLD_KEY, KEY), frozenset()) == (host, 5600)
        assert read_address(written, (OLD_KEY,), frozenset()) is None
        assert read_address(written.replace("5600", "5601"), (KEY,), frozenset()) is None
        assert read_address(written, (KEY,), frozenset({"10.0.0.3"})) is None
        assert read_address(written, (KEY,), frozenset({host})) == (host, 5600)
        assert read_address(str(write_address(host, 5600, ())), (), frozenset()) == (host, 5600)


@pytest.mark.parametrize("host", ["", "localhost", "0.0.0.0", "::"])
def test_a_node_that_does_not_know_its_own_address_says_nothing(host: str) -> None:
    assert write_address(host, 5600, (KEY,)) is None


@given(st.text(max_size=80))
def test_nothing_that_is_said_of_an_address_raises(text: str) -> None:
    read_address(text, (), frozenset())
    assert read_address(text, (KEY,), frozenset()) is None


# ---- the inbox


def test_the_inbox_is_bounded_by_number_and_by_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    encoded = encode_ticket(good_wire())
    few = TicketInbox(lambda raw: parse(raw, EXPECTED), 2)
    assert [few.put(ID, encoded) for _ in range(3)] == [True, True, False]
    assert len(few.take()) == 2
    assert few.put(ID, encoded)
    monkeypatch.setattr(direct_tickets, "MOST_INBOX_BLOCKS", 20)
    many = TicketInbox(lambda raw: parse(raw, EXPECTED), 9)
    assert [many.put(ID, encoded) for _ in range(3)] == [True, True, False], "each has eight blocks"
    many.take()
    assert many.put(ID, encoded)


def test_who_is_to_take_a_ticket_is_told_when_it_is_there() -> None:
    arrived: list[int] = []
    inbox = TicketInbox(lambda raw: parse(raw, EXPECTED), 1, lambda: arrived.append(len(inbox.take())))
    assert inbox.put(ID, encode_ticket(good_wire()))
    assert not inbox.put(ID, b"no ticket")
    assert arrived == [1]


@given(st.binary(max_size=200))
def test_no_bytes_raise(data: bytes) -> None:
    inbox = TicketInbox(lambda raw: parse(raw, EXPECTED), 2)
    assert not inbox.put(ID, data)
    assert decode_ticket(data) is None or isinstance(decode_ticket(data), dict)


def test_what_is_nested_too_deep_is_no_ticket() -> None:
    assert decode_ticket(b"\x81\xa1x" + b"\x91" * 100_000 + b"\x00") is None


def test_the_way_over_the_wire_changes_nothing() -> None:
    assert parse(decode_ticket(encode_ticket(wire(good(), (KEY,)))), EXPECTED) == good()


def test_close_ends_the_thread_and_twice_is_fine(decode: Decode, prefill: Prefill) -> None:
    prefill.send(decode.address)
    prefill.outcomes(1)
    prefill.close()
    prefill.close()
    assert not any(thread.name == "pdproxy_ticket_sender" for thread in threading.enumerate())
