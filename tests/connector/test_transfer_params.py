"""Which action `kv_transfer_params` stand for, by role, whatever a client sends."""

from typing import Any

import pytest
from hypothesis import given, settings

from connector.config import Role
from connector.ticket_fields import Refusal, RefusalReason, token_digest
from connector.transfer_params import (
    Action,
    AwaitTicket,
    ComputeLocally,
    DeliverTicket,
    IssueTicket,
    ParamsValidator,
    ReadTicket,
    ReleaseHandOver,
    RequestFacts,
)
from tests.connector.tickets import ANYTHING, EXAMPLES, EXPECTED, PROMPT, good, good_wire, spoiled

ID = "hand-over-0123456789"
PREFILL, DECODE, BOTH = (ParamsValidator(role, EXPECTED) for role in (Role.PREFILL, Role.DECODE, Role.BOTH))


def facts(prompt: list[int] = PROMPT, unsuitable: str | None = None, expected: int | None = 99) -> RequestFacts:
    return RequestFacts(unsuitable, expected, lambda number: token_digest(prompt[:number], [None, None, []]))


def reason(order: Action) -> RefusalReason:
    assert isinstance(order, Refusal)
    return order.reason


@pytest.mark.parametrize("raw", [None, {}, {"do_remote_prefill": False}, {"remote_host": None}, {"unknown": 1}])
def test_nothing_asked_is_nothing_done(raw: Any) -> None:
    assert BOTH.validate(raw, facts()) == ComputeLocally()


@pytest.mark.parametrize("raw", [[], "x", 3, 0, True, ["do_remote_prefill"]])
def test_what_is_no_object_is_refused(raw: Any) -> None:
    assert reason(BOTH.validate(raw, facts())) is RefusalReason.NOT_AN_OBJECT


@pytest.mark.parametrize("flag", [1, 0, "yes", [], {}, 1.0])
def test_a_flag_is_true_false_or_null(flag: Any) -> None:
    assert reason(BOTH.validate({"do_remote_decode": flag}, facts())) is RefusalReason.BAD_FIELD


def test_both_flags_contradict() -> None:
    assert (
        reason(BOTH.validate({"do_remote_decode": True, "do_remote_prefill": True}, facts()))
        is RefusalReason.CONTRADICTORY
    )


def test_a_prefill_leg_is_taken_as_every_proxy_writes_it() -> None:
    raw = {"do_remote_decode": True, "do_remote_prefill": False, "remote_engine_id": None, "remote_block_ids": None}
    assert PREFILL.validate(raw, facts()) == IssueTicket(None, 1)


def test_a_prefill_leg_may_name_a_hand_over_and_readers() -> None:
    raw = {"do_remote_decode": True, "pdproxy_hand_over": ID, "pdproxy_readers": 3}
    assert PREFILL.validate(raw, facts()) == IssueTicket(ID, 3)


@pytest.mark.parametrize(
    ("more", "why"),
    [
        ({"remote_block_ids": [[1], [2]]}, RefusalReason.REMOTE_FIELDS),
        ({"remote_host": "10.0.0.1"}, RefusalReason.REMOTE_FIELDS),
        ({"pdproxy_hand_over": "short"}, RefusalReason.BAD_FIELD),
        ({"pdproxy_hand_over": 7}, RefusalReason.BAD_FIELD),
        ({"pdproxy_readers": 0}, RefusalReason.BAD_FIELD),
        ({"pdproxy_readers": True}, RefusalReason.BAD_FIELD),
        ({"pdproxy_readers": 1 << 40}, RefusalReason.BAD_FIELD),
    ],
)
def test_a_bad_prefill_leg_is_refused(more: dict[str, Any], why: RefusalReason) -> None:
    assert reason(PREFILL.validate({"do_remote_decode": True, **more}, facts())) is why


def test_a_prefill_leg_s_clean_params_carry_nothing_of_the_sender_s() -> None:
    order = PREFILL.validate({"do_remote_decode": True, "_p_side_truncated": True, "x": 1}, facts())
    assert isinstance(order, IssueTicket)
    assert order.params() == {"do_remote_decode": True, "do_remote_prefill": False}


def test_each_role_does_only_its_own() -> None:
    assert reason(DECODE.validate({"do_remote_decode": True}, facts())) is RefusalReason.WRONG_ROLE
    assert reason(PREFILL.validate(good_wire(), facts())) is RefusalReason.WRONG_ROLE
    assert reason(DECODE.validate({"pdproxy_release": ID}, facts())) is RefusalReason.WRONG_ROLE


def test_a_good_ticket_for_this_prompt_is_taken() -> None:
    assert DECODE.validate(good_wire(), facts()) == ReadTicket(good())


def test_a_ticket_for_another_prompt_is_refused() -> None:
    assert reason(DECODE.validate(good_wire(), facts(PROMPT[::-1]))) is RefusalReason.DIGEST


def test_a_ticket_for_another_number_of_tokens_is_refused() -> None:
    assert reason(DECODE.validate(good_wire(), facts(expected=98))) is RefusalReason.NUMBER


def test_a_request_that_only_gives_its_ticket_back_needs_no_prompt() -> None:
    assert DECODE.validate(good_wire(), facts([0], expected=None)) == ReadTicket(good())


def test_an_unsuitable_request_is_refused_on_both_sides() -> None:
    embeds = facts(unsuitable="prompt embeddings have no digest")
    assert reason(DECODE.validate(good_wire(), embeds)) is RefusalReason.UNSUITABLE_REQUEST
    assert reason(PREFILL.validate({"do_remote_decode": True}, embeds)) is RefusalReason.UNSUITABLE_REQUEST


def test_a_release_is_recognised() -> None:
    assert PREFILL.validate({"pdproxy_release": ID}, facts()) == ReleaseHandOver(ID)
    assert PREFILL.validate({"pdproxy_release": ID, "do_remote_decode": False}, facts()) == ReleaseHandOver(ID)


@pytest.mark.parametrize("name", [None, "", "short", 7, ["a"], "a" * 200, "with blanks in the name"])
def test_a_bad_release_is_refused(name: Any) -> None:
    assert reason(PREFILL.validate({"pdproxy_release": name}, facts())) is RefusalReason.BAD_FIELD


def test_remote_fields_without_a_flag_are_refused() -> None:
    raw = {**good_wire(), "do_remote_prefill": False}
    assert reason(DECODE.validate(raw, facts())) is RefusalReason.NO_FLAG


def waiting(**changes: Any) -> dict[str, Any]:
    return {"pdproxy_wait": {"id": ID, "seconds": 5, **changes}}


STAND_IN = facts([0], expected=None)


@pytest.mark.parametrize("seconds", [5, 0.25, 10**400])
def test_a_decode_leg_may_wait_for_its_ticket(seconds: float) -> None:
    raw = {**waiting(seconds=seconds), "prompt_token_ids": [1], "do_remote_prefill": False}
    order = DECODE.validate(raw, facts())
    assert order == AwaitTicket(ID, seconds)
    assert isinstance(order, AwaitTicket)
    assert order.params() == {"pdproxy_wait": ID}


BAD_SECONDS: tuple[Any, ...] = (0, -1, None, "5", True, float("nan"), float("inf"), [5])
BAD_IDS: tuple[Any, ...] = (None, "short", 7, "a" * 129, "with blanks in the name")
NO_WAITS: tuple[Any, ...] = (None, ID, [], {}, {"id": ID}, {"seconds": 5})


@pytest.mark.parametrize(
    "raw",
    [
        *(waiting(seconds=bad) for bad in BAD_SECONDS),
        *(waiting(id=bad) for bad in BAD_IDS),
        *({"pdproxy_wait": bad} for bad in NO_WAITS),
    ],
)
def test_a_bad_wait_is_refused(raw: Any) -> None:
    assert reason(DECODE.validate(raw, facts())) is RefusalReason.BAD_FIELD


def test_only_what_can_be_handed_over_to_this_node_waits() -> None:
    unsuitable = RefusalReason.UNSUITABLE_REQUEST
    assert reason(PREFILL.validate(waiting(), facts())) is RefusalReason.WRONG_ROLE
    assert reason(DECODE.validate(waiting(), facts(unsuitable="a session"))) is unsuitable
    assert reason(DECODE.validate(waiting(), STAND_IN)) is unsuitable
    assert reason(DECODE.validate({**waiting(), "remote_host": "10.0.0.1"}, facts())) is RefusalReason.NO_FLAG


def test_a_request_that_has_its_ticket_does_not_wait() -> None:
    assert DECODE.validate({**good_wire(), **waiting()}, facts()) == ReadTicket(good())


def delivery(ticket: Any, wait: Any = ID) -> dict[str, Any]:
    return {"pdproxy_deliver": {"id": wait, "ticket": ticket}}


def test_a_delivery_has_a_ticket_whose_form_is_checked_or_none() -> None:
    assert DECODE.validate(delivery(good_wire()), STAND_IN) == DeliverTicket(ID, good())
    assert DECODE.validate(delivery(None), STAND_IN) == DeliverTicket(ID, None)


@pytest.mark.parametrize(
    ("ticket", "why"),
    [
        ([], RefusalReason.NOT_AN_OBJECT),
        ({}, RefusalReason.NO_FLAG),
        ({**good_wire(), "do_remote_prefill": 1}, RefusalReason.NO_FLAG),
        ({**good_wire(), "do_remote_decode": True}, RefusalReason.NO_FLAG),
        ({**good_wire(), "remote_port": 1}, RefusalReason.BAD_SIGNATURE),
    ],
)
def test_a_bad_ticket_is_delivered_as_a_refusal(ticket: Any, why: RefusalReason) -> None:
    order = DECODE.validate(delivery(ticket), STAND_IN)
    assert isinstance(order, DeliverTicket)
    assert isinstance(order.ticket, Refusal)
    assert order.ticket.reason is why


def test_only_the_node_s_own_stand_in_delivers() -> None:
    assert reason(DECODE.validate(delivery(None), facts())) is RefusalReason.UNSUITABLE_REQUEST
    assert reason(PREFILL.validate(delivery(None), STAND_IN)) is RefusalReason.WRONG_ROLE
    rejected = {**delivery(None), "do_remote_prefill": True}
    assert isinstance(DECODE.validate(rejected, STAND_IN), Refusal)


@pytest.mark.parametrize("wait", [None, "short", 7, ["a"]])
def test_a_delivery_without_an_id_is_refused(wait: Any) -> None:
    assert reason(DECODE.validate(delivery(None, wait), STAND_IN)) is RefusalReason.BAD_FIELD
    assert reason(DECODE.validate({"pdproxy_deliver": wait}, STAND_IN)) is RefusalReason.BAD_FIELD


def test_a_delivered_ticket_is_judged_by_the_request_that_waits() -> None:
    assert DECODE.fit(good(), facts()) == ReadTicket(good())
    assert reason(DECODE.fit(good(), facts(PROMPT[::-1]))) is RefusalReason.DIGEST
    assert reason(DECODE.fit(good(), facts(expected=98))) is RefusalReason.NUMBER


@settings(max_examples=EXAMPLES, deadline=None)
@given(ANYTHING)
def test_whatever_is_delivered_or_waited_for_has_an_action(raw: Any) -> None:
    assert isinstance(DECODE.validate({"pdproxy_deliver": raw}, STAND_IN), Refusal | DeliverTicket)
    assert isinstance(DECODE.validate(delivery(raw), STAND_IN), DeliverTicket)
    assert isinstance(DECODE.validate({"pdproxy_wait": raw}, facts()), Refusal | AwaitTicket)


@settings(max_examples=EXAMPLES, deadline=None)
@given(spoiled() | ANYTHING)
def test_whatever_comes_to_a_decode_node_has_an_action(raw: Any) -> None:
    order = DECODE.validate(raw, facts())
    assert isinstance(order, ComputeLocally | Refusal) or order == ReadTicket(good())


@settings(max_examples=EXAMPLES, deadline=None)
@given(spoiled() | ANYTHING)
def test_whatever_comes_to_a_prefill_node_has_an_action(raw: Any) -> None:
    assert isinstance(PREFILL.validate(raw, facts()), ComputeLocally | Refusal | IssueTicket | ReleaseHandOver)
