"""Tickets: what parses, what is refused and why, and what a signature covers."""

import dataclasses
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from connector.ticket import Expected, GroupKind, GroupShape, Ticket, encode, is_signed, parse, sign, wire
from connector.ticket_fields import Refusal, RefusalReason
from tests.connector.tickets import (
    EXAMPLES,
    EXPECTED,
    KEY,
    MALFORMED,
    OLD_KEY,
    SHAPES,
    UNSIGNED,
    Spoil,
    good,
    good_wire,
    spoiled,
)

ANYONE = Expected(SHAPES)


def over_http(ticket: dict[str, Any]) -> Any:
    return json.loads(json.dumps(ticket))


def test_a_ticket_survives_the_way_over_http() -> None:
    assert parse(over_http(good_wire()), EXPECTED) == good()


def test_what_the_scheduler_adds_later_does_not_break_the_signature() -> None:
    assert parse({**good_wire(), "remote_prefill_cached_tokens": 64}, EXPECTED) == good()


@pytest.mark.parametrize(("spoil", "reason"), [case[1:] for case in MALFORMED], ids=[case[0] for case in MALFORMED])
def test_a_malformed_ticket_is_refused(spoil: Spoil, reason: RefusalReason) -> None:
    refused = parse(spoil(good_wire()), ANYONE)
    assert isinstance(refused, Refusal)
    assert refused.reason is reason


@pytest.mark.parametrize(("spoil", "reason"), [case[1:] for case in UNSIGNED], ids=[case[0] for case in UNSIGNED])
def test_an_altered_ticket_is_refused_where_there_is_a_key(spoil: Spoil, reason: RefusalReason) -> None:
    refused = parse(spoil(good_wire()), EXPECTED)
    assert isinstance(refused, Refusal)
    assert refused.reason is reason


def test_every_field_is_signed() -> None:
    named = {name for name, _ in good().signed_fields()}
    assert named == {field.name for field in dataclasses.fields(Ticket)}


def test_without_a_key_an_unsigned_ticket_works() -> None:
    assert parse(wire(good(), ()), ANYONE) == good()


def test_without_a_key_a_signed_ticket_works() -> None:
    assert parse(good_wire(), ANYONE) == good()


def test_an_old_key_still_verifies_and_the_first_signs() -> None:
    rotated = Expected(SHAPES, (KEY, OLD_KEY))
    assert parse(wire(good(), (OLD_KEY,)), rotated) == good()
    assert sign(good(), (KEY, OLD_KEY)) == sign(good(), (KEY,))


def test_a_removed_key_no_longer_verifies() -> None:
    assert not is_signed(good(), str(sign(good(), (OLD_KEY,))), (KEY,))


def test_only_listed_hosts_are_dialled() -> None:
    assert parse(good_wire(), Expected(SHAPES, (KEY,), frozenset({"10.0.0.1"}))) == good()
    refused = parse(good_wire(), Expected(SHAPES, (KEY,), frozenset({"10.0.0.2"})))
    assert isinstance(refused, Refusal)
    assert refused.reason is RefusalReason.HOST


@pytest.mark.parametrize(
    "host", ["localhost", "node-3.cluster.local", "10.1.2.3", "fd00::17", "fe80::1%eth0", "::1", "fd00::"]
)
def test_usual_hosts_are_taken(host: str) -> None:
    assert parse(good_wire(host=host), EXPECTED) == good(host=host)


def test_the_other_node_may_have_larger_blocks() -> None:
    larger = {"block_sizes": (32, 16), "block_ids": ((1, 2, 3, 4), (9,))}
    assert parse(good_wire(**larger), EXPECTED) == good(**larger)


def test_a_window_may_hold_fewer_blocks_and_null_ones() -> None:
    window = Expected((GroupShape(GroupKind.WINDOW, 16), SHAPES[1]), (KEY,))
    assert isinstance(parse(good_wire(block_ids=((0, 0, 3), (9,))), window), Ticket)
    assert isinstance(parse(good_wire(block_ids=((), (9,))), window), Refusal)


def test_context_parallel_blocks_are_bounded_not_counted() -> None:
    fewer = {"dcp_size": 2, "block_ids": ((1, 2, 3, 4), (9,))}
    assert parse(good_wire(**fewer), EXPECTED) == good(**fewer)


def test_a_refusal_repeats_nothing_of_what_was_sent() -> None:
    for _, spoil, _ in MALFORMED:
        refused = parse(spoil(good_wire(host="evil.example")), ANYONE)
        assert isinstance(refused, Refusal)
        assert "evil" not in refused.detail


@settings(max_examples=EXAMPLES, deadline=None)
@given(spoiled())
def test_whatever_comes_is_a_genuine_ticket_or_a_refusal(raw: Any) -> None:
    taken = parse(raw, EXPECTED)
    assert isinstance(taken, Refusal) or taken == good()


@settings(max_examples=EXAMPLES, deadline=None)
@given(spoiled())
def test_without_keys_what_parses_fits_the_engine(raw: Any) -> None:
    taken = parse(raw, ANYONE)
    if isinstance(taken, Ticket):
        assert len(taken.block_ids) == len(SHAPES)
        assert parse(over_http(wire(taken, ())), ANYONE) == taken


@settings(max_examples=EXAMPLES, deadline=None)
@given(st.integers(1, 1 << 20), st.integers(1, 65535), st.from_regex(r"[a-z0-9-]{1,40}", fullmatch=True))
def test_different_tickets_have_different_bytes(tokens: int, port: int, name: str) -> None:
    one, other = good(num_tokens=tokens, port=port, request_id=name), good()
    assert (encode(one) == encode(other)) == (one == other)
